"""Copies that follow the own examples one after the other, and memory that is kept."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import coterie
from coterie.choosing import memory
from coterie.choosing.adaptive import adaptive_averaging
from coterie.engines import asking
from coterie.engines.compression import sketched
from coterie.engines.in_process import copies as copies_of
from coterie.errors import KnobError


def users() -> list[coterie.User]:
    """Return user 0 and five peers, two of whom have wrong labels."""
    random = torch.Generator().manual_seed(0)
    made = []
    for k in range(6):
        inputs = torch.randn(24, 4, generator=random, dtype=torch.float64)
        targets = (inputs @ torch.tensor([[1.0, -1], [1, 0], [0, 1], [0, 1]]).double()).argmax(1)
        made.append(coterie.User(str(k), inputs, 1 - targets if k > 3 else targets))
    return made


def trained(**settings: Any) -> coterie.Run:
    """Return a run of a small network."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    me, *peers = users()
    how = {"steps": 24, "lr": 0.05, "measure": False, "progress": False} | settings
    model = how.pop("model", model)
    rule = how.pop("rule", coterie.AdaptiveAveraging())
    return coterie.train(model, cross_entropy, me, peers, rule, **how)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let every model be large."""
    monkeypatch.setattr(memory, "LARGE", 0)
    return monkeypatch


def test_copies_one_after_the_other_are_the_same_candidates(large: pytest.MonkeyPatch) -> None:
    large.setattr(memory, "POINTS", 10**6)
    large.setattr(adaptive_averaging, "SKETCH", None)
    apart = trained()
    large.setattr(memory, "LARGE", 10**6)
    together = trained()
    inputs = torch.randn(50, 4, dtype=torch.float64)
    assert torch.allclose(apart.model(inputs), together.model(inputs), rtol=1e-9, atol=1e-9)
    one, other = (run.record.end.account for run in (apart, together))
    assert "one after the other" in one["memory"]
    assert "memory" not in other
    assert one["cost"] == other["cost"]
    for kind, line in other["leaderboard"].items():
        assert one["leaderboard"][kind] == pytest.approx(line, rel=1e-9), kind
    gradients = [run.record.end.costs["0"].gradients for run in (apart, together)]
    assert gradients[0] == gradients[1]


class Held(TorchDispatchMode):
    """Counts how many numbers tensors hold at most, of those with as many as `least`."""

    def __init__(self, least: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.least, self.most = least, 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count after one operation."""
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                numbers = storage.nbytes() // tensor.element_size()
                if numbers >= self.least:
                    held = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                    self._live[storage._cdata] = held, numbers
        gone = [at for at, (held, _) in self._live.items() if held.expired()]  # type: ignore[no-untyped-call]
        for at in gone:
            del self._live[at]
        self.most = max(self.most, sum(numbers for _, numbers in self._live.values()))
        return out


@pytest.mark.parametrize(("optimizer", "copies"), [(torch.optim.Adam, 30), (torch.optim.SGD, 24)])
def test_copies_of_a_large_model_that_are_held_at_once(
    large: pytest.MonkeyPatch, optimizer: Any, copies: int
) -> None:
    """Of a model that is much larger than its data, and than what passes hold beside it."""
    large.setattr(adaptive_averaging, "SKETCH", 64)
    large.setattr(asking, "HELD", 1)
    large.setitem(copies_of.MAX_PARAMETERS, "cpu", 1)
    hidden = [layer for _ in range(4) for layer in (nn.Linear(60, 60), nn.Tanh())]
    model = nn.Sequential(nn.Linear(4, 60), nn.Tanh(), *hidden, nn.Linear(60, 2))
    numbers = sum(p.numel() for p in model.parameters())
    with Held(numbers // 8) as held:
        trained(model=model.double(), lr=None, optimizer=partial(optimizer, lr=0.05))
    assert held.most <= copies * numbers
    plan = memory.MemoryPlan(4, memory.POINTS, one_by_one=True)
    state = memory.state_of(optimizer([torch.zeros(1)]))
    assert held.most <= plan.copies(state, settings=2, peers=5) * numbers


def test_few_points_are_kept_and_weights_come_from_sketches(large: pytest.MonkeyPatch) -> None:
    run = trained()
    account = run.record.end.account
    assert isinstance(run.model, nn.Module)
    assert account["weights"]["4"][-1] < 0.1 > account["weights"]["5"][-1]
    kept = getattr(run.model, "parts", [run.model])
    assert len(kept) <= memory.POINTS + 2  # last layers behind pooled, and the constant
    assert f"{memory.POINTS} points are kept" in account["memory"]


@pytest.mark.parametrize("at", [3, 17])
def test_a_resumed_run_has_the_same_bits(
    large: pytest.MonkeyPatch, tmp_path: Path, at: int
) -> None:
    whole = trained()
    settings: dict[str, Any] = {"out": tmp_path / "run", "checkpoint_every": 1}
    trained(hooks=[lambda step: step.step == at], **settings)
    resumed = trained(resume=True, **settings)
    assert resumed.record.end.step == 24
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_budget_is_kept_or_refused_with_the_least_that_does(large: pytest.MonkeyPatch) -> None:
    large.setattr(memory, "BESIDE", 0)
    numbers = sum(p.numel() for p in nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)).parameters())
    least = memory.MemoryPlan(2, 2, one_by_one=True).copies(2, 2, 5) * numbers * 8
    told = trained(memory=f"{least / 1000}KB").record.end.account["memory"]
    assert "2 folds in place of 4" in told
    assert "memory of" in told
    with pytest.raises(KnobError, match=r"cannot be kept: a model of 44 parameters needs at least"):
        trained(memory=f"{(least - 8) / 1000}KB")
    with pytest.raises(KnobError, match=r"`memory` must be a size, such as"):
        trained(memory="much")
    with pytest.raises(KnobError, match="add a unit"):
        trained(memory=8)


def test_a_small_model_gives_up_nothing_where_there_is_room() -> None:
    told = trained(memory="1GB").record.end.account["memory"]
    assert told == "memory of 1GB: 12 points are kept"


def test_sketches_in_pieces_keep_inner_products() -> None:
    random = torch.Generator().manual_seed(2)
    one, other = torch.randn(2, 2**18 + 77, generator=random)
    both = torch.stack([one, one + 0.5 * other])
    short = sketched(both, 4096, key=5)
    assert torch.allclose(short @ short.T, both @ both.T, rtol=0.1)
    assert torch.allclose(sketched(both[0], 4096, key=5), short[0])


def test_a_rule_and_a_closed_form_are_refused_what_they_cannot_keep() -> None:
    me, *peers = users()
    for rule in (coterie.Mixture(), coterie.WeightedAveraging(0.5)):
        how: dict[str, Any] = {"measure": False, "steps": 2, "rule": rule}
        model = nn.Linear(4, 2).double()
        coterie.train(model, cross_entropy, me, peers, memory="1GB", **how)
        with pytest.raises(KnobError, match=r"`memory` of 1MB cannot be kept: this run needs"):
            coterie.train(model, cross_entropy, me, peers, memory="1MB", **how)
