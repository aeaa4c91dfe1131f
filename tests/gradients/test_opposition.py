"""Opposition: who keeps pointing against user 0 and most of the others is left out; who merely differs is not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import coterie
from coterie.engines.attacks import Attacked, Scaled
from coterie.gradients.gradients import Gradients
from coterie.gradients.norm_bound import AGAINST, LIMIT, RATE, NormBound, Opposition

NAMES = tuple("abcdefghij")


def steps(n: int, count: int, d: int = 6, seed: int = 0) -> Tensor:
    """Return noisy gradients of user 0 and n peers, of which the last two are turned round."""
    random = torch.Generator().manual_seed(seed)
    signs = torch.tensor([1.0] * (n - 1) + [-1.0] * 2)
    return signs[:, None] * torch.ones(d) + torch.randn(count, n + 1, d, generator=random)


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)


def test_agrees_with_plain_loops() -> None:
    """Peers come and go: a cosine is as of when both answered."""
    opposition = Opposition()
    means: dict[tuple[str, str], float] = {}
    gone = {3: "b", 4: "b", 5: "i"}
    found_some = False
    for t, gradients in enumerate(steps(10, 40)):
        rows = {"me": gradients[0], **dict(zip(NAMES, gradients[1:], strict=True))}
        rows.pop(gone.get(t % 7, ""), None)
        for i, a in rows.items():
            for j, b in rows.items():
                before = means.get((i, j), 0.0)
                means[i, j] = before + RATE * (cosine(a.tolist(), b.tolist()) - before)
        names = tuple(name for name in rows if name != "me")
        expected = []
        for name in names:
            against = [other for other in rows if other != name and means[name, other] < LIMIT]
            expected.append("me" in against and len(against) > (len(rows) - 1) / 2)
        assert (
            opposition.opposed(gradients[0], torch.stack([rows[name] for name in names]), names)
            == expected
        )
        found_some |= any(expected)
    assert found_some


def test_a_state_goes_on() -> None:
    one, other = Opposition(), Opposition()
    for t, gradients in enumerate(steps(10, 30)):
        if t == 12:
            other.load_state_dict(one.state_dict())
        opposed = one.opposed(gradients[0], gradients[1:], NAMES)
        assert t < 12 or other.opposed(gradients[0], gradients[1:], NAMES) == opposed
    assert opposed == [False] * 8 + [True] * 2


@pytest.mark.parametrize("group", [(0, 1, 2, 3), (6, 7, 8, 9)])
def test_a_group_of_its_own_is_heard(group: tuple[int, ...]) -> None:
    """Four of ten peers want something else than the six, and user 0 is one of them, or agrees with nobody."""
    theirs, ours = torch.eye(6)[0], torch.eye(6)[1]
    rows = torch.stack([ours if k in group else -ours for k in range(10)])
    opposition = Opposition()
    for own in (ours, theirs):
        for _ in range(60):
            assert not any(opposition.opposed(own, rows, NAMES))


def test_half_of_the_others_are_not_most() -> None:
    """The third opposes user 0 and the first; the second wants something else, the fourth the same as it."""
    x, y, _ = torch.eye(3)
    opposition = Opposition()
    for _ in range(60):
        opposed = opposition.opposed(x, torch.stack([x, y, -x, -x]), ("a", "b", "c", "d"))
    assert opposed == [False] * 4


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30, math.inf, math.nan])
def test_any_length_is_taken(size: float) -> None:
    rows = torch.ones(3, 4)
    rows[2] *= -size
    opposition = Opposition()
    opposed = [opposition.opposed(torch.ones(4), rows, ("a", "b", "c")) for _ in range(20)]
    assert opposed[-1] == [False, False, math.isfinite(size)]


def test_only_what_is_summed_is_left_out() -> None:
    """A rule that sees each gradient has its own way with it."""
    rows = torch.tensor([1.0, 1.0, 1.0, -1.0]).outer(torch.ones(5))
    g = Gradients(own=torch.ones(5), rows=rows, names=tuple("abcd"), answered=1.0)
    weights = dict.fromkeys("abcd", 0.25)
    summing, seeing = NormBound(3.0, torch.zeros(5)), NormBound(3.0, torch.zeros(5))
    for _ in range(20):
        summed, seen = summing.kept(g, weights, rows=False), seeing.kept(g, weights, rows=True)
    assert summed.left_out == {"d": AGAINST}
    assert summed.answered == pytest.approx(0.75)
    assert summed.peers is not None
    assert torch.allclose(summed.peers, torch.ones(5))  # what d would have had is user 0's
    assert seen is g


def turned_round(norm_bound: float | None, **how: Any) -> tuple[coterie.Run, list[str], list[str]]:
    """Train where four of ten peers send −2 × the mean of the good ones; return them and the good ones too."""
    task = coterie.data.digits_by_writer(me=3, own_examples=30)
    peers = [peer.name for peer in task.peers[:10]]
    torch.manual_seed(0)
    run = coterie.train(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
        *(cross_entropy, task.me, task.peers[:10], coterie.WeightedAveraging(0.5)),
        lr=0.03,
        engine=lambda *a, **s: Attacked(coterie.InProcess(*a, **s), peers[:4], Scaled(-2.0)),
        guard="off",
        norm_bound=norm_bound,
        measure=False,
        progress=False,
        **how,
    )
    return run, peers[:4], peers[4:]


def test_four_of_ten_who_turn_round_cost_nothing() -> None:
    """No length gives them away, and the sum of all points backwards."""
    heard, *_ = turned_round(None, steps=120)
    bounded, bad, good = turned_round(3.0, steps=120)
    assert bounded.test["accuracy"] > heard.test["accuracy"] + 0.03
    left_out = bounded.record.end.left_out
    assert all(left_out[name][AGAINST] > 40 for name in bad)
    assert not any(name in left_out for name in good)


def test_a_resumed_run_remembers_who_was_opposed(tmp_path: Path) -> None:
    whole, *_ = turned_round(3.0, steps=30)
    turned_round(3.0, steps=15, out=tmp_path)
    resumed, bad, _ = turned_round(3.0, steps=30, out=tmp_path, resume=True)
    assert resumed.record.end.left_out == whole.record.end.left_out
    assert whole.record.end.left_out[bad[0]][AGAINST] > 0
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
