"""Runs as one program compared with the same runs by themselves."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as f

import coterie
from coterie import Alone, BiasCorrection, Run, RunSpec, User, WeightedAveraging, train_many

SETTINGS: dict[str, Any] = {"steps": 12, "batch_size": 4, "evaluate_every": 5}


def network(seed: int = 1) -> nn.Module:
    """Return a small network for users of three inputs and three classes."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.ReLU(), nn.Linear(5, 3)).double()


def falling(step: int) -> float:
    """Return a knob that falls with the step."""
    return 1 / (step + 2)


RULES: list[coterie.Rule] = [
    Alone(),
    WeightedAveraging(0.3),
    WeightedAveraging(falling),
    WeightedAveraging(0.0),
    WeightedAveraging(1.0, {"peer 1": 0.25, "peer 3": 0.75}),
    BiasCorrection(0.7, 0.1),
    BiasCorrection(falling, falling, {"peer 2": 1.0}, correction=0.5, start="zero"),
    BiasCorrection(0.6, 0.2, warm_up=False),
    BiasCorrection(0.6, 0.2, correction=0.0, start="zero", warm_up=False),
]


def run_of(
    users: Sequence[User], rule: Any = None, model: nn.Module | None = None, **changed: Any
) -> RunSpec:
    """Return a short run of user 0 with the others."""
    settings = SETTINGS | {"loss": f.cross_entropy, "lr": 0.05} | changed
    return RunSpec(model or network(), me=users[0], peers=users[1:], rule=rule, **settings)


def by_itself(spec: RunSpec) -> Run:
    """Return the run that `train` gives."""
    asked = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return coterie.train(**(asked | {"progress": False, "guard": "off", "measure": False}))


def compared(specs: Iterable[RunSpec]) -> list[Run]:
    """Return the runs once each is the one that `train` gives."""
    specs = list(specs)
    before = copy.deepcopy([spec.model.state_dict() for spec in specs])
    runs = train_many(specs, progress=False)
    assert len(runs) == len(specs)
    for run, spec in zip(runs, specs, strict=True):
        assert_same(run, by_itself(spec))
    for spec, state in zip(specs, before, strict=True):
        assert all(
            torch.equal(value, state[name]) for name, value in spec.model.state_dict().items()
        )
    return runs


def assert_same(run: Run, expected: Run, tolerance: float = 1e-9) -> None:
    """Compare all that a run holds, but for how long it took."""
    close: dict[str, Any] = {"rel": tolerance, "abs": tolerance}
    assert (run.step, run.best_step, run.stopped) == (
        expected.step,
        expected.best_step,
        expected.stopped,
    )
    assert run.test == pytest.approx(expected.test, **close)
    for a, b in zip(run.record.points, expected.record.points, strict=True):
        assert a.to_plain() == pytest.approx(b.to_plain(), **close)
    end, other = (
        {k: v for k, v in each.record.end.to_plain().items() if k != "seconds"}
        for each in (run, expected)
    )
    for part in ("validation", "test"):
        assert end.pop(part, {}) == pytest.approx(other.pop(part, {}), **close)
    assert end == other
    for name, value in expected.model.state_dict().items():
        torch.testing.assert_close(
            run.model.state_dict()[name], value, rtol=tolerance, atol=tolerance
        )
    assert run.state.keys() == expected.state.keys()
    for name, value in expected.state.items():
        if isinstance(value, Tensor | float):
            torch.testing.assert_close(run.state[name], value, rtol=tolerance, atol=tolerance)
        else:
            assert run.state[name] == value
    configs = [replace(each.record.configuration, runs="", capture="") for each in (run, expected)]
    assert configs[0] == configs[1]


def together(runs: Sequence[Run]) -> list[bool]:
    """Say of each run whether it was taken with others as one program."""
    return [run.record.configuration.runs.startswith("one program") for run in runs]


def from_disk(user: User) -> User:
    """Return a user whose examples are read when needed, not held in memory."""
    held = torch.utils.data.TensorDataset(*user.examples.take(torch.arange(len(user))))
    data: torch.utils.data.Dataset[Any] = torch.utils.data.ConcatDataset([held])
    return User.from_dataset(user.name, data)


def my_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss that is not known to be a mean over examples."""
    return f.cross_entropy(output, target).sqrt()
