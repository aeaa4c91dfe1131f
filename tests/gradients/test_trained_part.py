"""Only the trained part of a model is copied, kept, saved and resumed; the frozen part is shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import coterie
from coterie.errors import CheckpointError
from coterie.gradients.parameters import copied, frozen_digest, load_trained_state, trained_state

WIDE = 600


class Adapted(nn.Module):
    """A wide frozen layer with a thin trained one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(4, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 4))
        self.base.requires_grad_(requires_grad=False)
        self.norm = nn.BatchNorm1d(4, momentum=0.1)
        self.last = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(inputs + self.base(inputs)))
        return out


FROZEN = 4 * (WIDE * WIDE + 10 * WIDE + 4)
"""Bytes."""


def some_users() -> list[coterie.User]:
    torch.manual_seed(0)
    x = torch.randn(70, 4)
    y = x.sum(1, keepdim=True)
    held = (x[60:], y[60:])
    return [
        coterie.User(
            name, x[20 * k : 20 * k + 20], y[20 * k : 20 * k + 20], validation=None if k else held
        )
        for k, name in enumerate(("me", "a", "b"))
    ]


@pytest.mark.parametrize(
    "rule", [coterie.WeightedAveraging(0.5), coterie.AdaptiveAveraging(linear=False)]
)
@pytest.mark.parametrize("guard", ["off", "held-out"])
def test_a_run_holds_the_frozen_part_once(rule: Any, guard: Any, tmp_path: Path) -> None:
    me, *peers = some_users()
    model = Adapted()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run = coterie.train(
        model, mse_loss, me, peers, rule, steps=20, guard=guard, out=tmp_path, trackers=()
    )
    frozen: Any = model.base[1].weight
    held = {part.data_ptr() for part in run.model.parameters() if part.shape == frozen.shape}
    assert held == {frozen.data_ptr()}  # also where many models are mixed
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    largest = max(path.stat().st_size for path in (tmp_path / "checkpoints").iterdir())
    assert largest < FROZEN / 4  # candidates are in it, of a few numbers each
    # adaptive averaging divides its steps, and goes on with as many only
    steps = 20 if isinstance(rule, coterie.AdaptiveAveraging) else 30
    again = coterie.train(
        model,
        mse_loss,
        me,
        peers,
        rule,
        steps=steps,
        guard=guard,
        out=tmp_path,
        trackers=(),
        resume=True,
    )
    assert again.step == steps


def test_a_run_allocates_no_copy_of_the_frozen_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that is cloned while a run goes on, as `copy.deepcopy` does too, has the size of the frozen layer."""
    me, *peers = some_users()
    made: list[int] = []
    clone = Tensor.clone

    def counted(tensor: Tensor, *more: Any, **named: Any) -> Tensor:
        made.append(tensor.numel())
        return clone(tensor, *more, **named)

    monkeypatch.setattr(Tensor, "clone", counted)
    coterie.train(Adapted(), mse_loss, me, peers, steps=20, guard="held-out")
    assert max(made) < WIDE * WIDE


def test_another_frozen_part_is_refused(tmp_path: Path) -> None:
    me, *peers = some_users()
    model, rule = Adapted(), coterie.WeightedAveraging(0.5)
    coterie.train(model, mse_loss, me, peers, rule, steps=10, out=tmp_path, trackers=())
    with torch.no_grad():
        model.base[0].weight[0, 0] += 1  # type: ignore[index, operator]
    with pytest.raises(CheckpointError, match="`frozen` was"):
        coterie.train(
            model, mse_loss, me, peers, rule, steps=20, out=tmp_path, trackers=(), resume=True
        )


def test_a_copy_that_moves_leaves_the_model_where_it_is() -> None:
    model = Adapted()
    other = copied(model).double()
    assert model.base[0].weight.dtype == torch.float32
    assert other.base[0].weight.dtype == torch.float64
    tied = nn.ModuleList([nn.Linear(2, 2, bias=False).requires_grad_(requires_grad=False)] * 2)
    first, second = copied(tied).parameters(), copied(tied)
    assert len(list(first)) == 1
    assert second[0] is second[1]


def test_the_state_of_another_model_is_refused() -> None:
    model = Adapted()
    state = trained_state(model)
    assert "base.0.weight" not in state
    assert {"norm.running_mean", "last.weight"} <= state.keys()
    state["last.weight"] = torch.full_like(state["last.weight"], 7.0)
    load_trained_state(model, state)
    assert bool((model.last.weight == 7).all())
    with pytest.raises(RuntimeError, match=r"these do not fit: last\.weight"):
        load_trained_state(
            model, {name: value for name, value in state.items() if name != "last.weight"}
        )
    with pytest.raises(RuntimeError, match="these do not fit: other"):
        load_trained_state(model, {**state, "other": torch.zeros(1)})


def test_a_digest_is_of_names_and_bytes() -> None:
    layer = nn.Linear(2, 2).requires_grad_(requires_grad=False)
    assert frozen_digest(layer) == frozen_digest(copied(layer))
    assert frozen_digest(layer) != frozen_digest(
        nn.Linear(2, 2).requires_grad_(requires_grad=False)
    )
