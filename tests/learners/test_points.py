"""Gradients at several points: one pass against point by point, and both against ordinary gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.many_runs import from_disk
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import coterie
from coterie.engines.in_process import copies
from coterie.learners.points import Judged, Points, Sums, combined
from coterie.learners.points_together import PointsTogether
from coterie.learners.spec import RunSpec

Users = Callable[..., list[coterie.User]]


def network(*, large: bool = False) -> nn.Module:
    """Return a network; `large`: one that is not layers in a row, as most large models."""
    torch.manual_seed(1)
    between = [nn.LayerNorm(5, elementwise_affine=False)] if large else []
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), *between, nn.Linear(5, 3)).double()


def parts(n: int, folds: int = 3) -> Tensor:
    blind = torch.arange(n) % folds != torch.arange(folds)[:, None]
    return torch.cat([torch.ones(1, n, dtype=torch.bool), blind])


def points(users: list[coterie.User], batch_size: int, *, large: bool = False) -> tuple[Points, PointsTogether]:
    spec = RunSpec(network(large=large), cross_entropy, users[0], users[1:], batch_size=batch_size)
    engine = spec.in_process()
    return Points(spec, engine, parts(len(users[0]))), PointsTogether(spec, engine, parts(len(users[0])))


@pytest.fixture(params=[False, True], ids=["small", "large"])
def large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether copies are passed one after the other, as those of large models are."""
    if request.param:
        monkeypatch.setattr(copies, "MAX_MAPPED_SIZE", 0)
    return bool(request.param)


@pytest.mark.parametrize("batch_size", [3, 100])
def test_one_pass_is_point_by_point(make_users: Users, batch_size: int, large: bool) -> None:
    users = make_users((13, 16, 9, 5))
    apart, together = points(users, batch_size, large=large)
    assert together._copies.one_by_one == large
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 38, generator=generator).double()
    weights = torch.rand(4, 3, generator=generator).double()
    weights[1, 2] = 0.0
    for step in (0, 7):
        one, other = (each.own(x, step, [0, 1, 2, 3]) for each in (apart, together))
        torch.testing.assert_close(one.gradients, other.gradients)
        torch.testing.assert_close(one.loss, other.loss)
        assert one.buffers.shape == other.buffers.shape == (4, 0)
        sums = [each.sums(x, step, weights / weights.sum(1, keepdim=True)) for each in (apart, together)]
        torch.testing.assert_close(sums[0].sums, sums[1].sums)
        torch.testing.assert_close(sums[0].answered, torch.ones(4).double())
        torch.testing.assert_close(sums[1].answered, torch.ones(4).double())
        rows = [each.rows(x[:2], step, torch.ones(2, 3, dtype=torch.bool))[0] for each in (apart, together)]
        torch.testing.assert_close(*rows)
    torch.testing.assert_close(*(each.on_all(x, 0, [3, 2, 1, 0]) for each in (apart, together)))
    torch.testing.assert_close(*(each.losses(x, users[0].examples) for each in (apart, together)))


def test_copies_at_one_point_and_peers_of_no_weight(make_users: Users, large: bool) -> None:
    *users, last = make_users((13, 16, 9, 5))
    users.append(
        coterie.User(last.name, torch.full((5, 3), torch.nan).double(), last.examples.take(torch.arange(5))[1])
    )
    apart, together = points(users, 3, large=large)
    x = torch.cat([apart.start().repeat(3, 1), 2 * apart.start()[None]])
    weights = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]).double()
    one, other = (each.sums(x, 2, weights) for each in (apart, together))
    torch.testing.assert_close(one.sums, other.sums)
    assert not one.left_out
    assert not other.left_out
    assert one.answered.tolist() == other.answered.tolist() == [1.0, 1.0, 1.0, 0.0]
    before = other.sums.clone()
    torch.testing.assert_close(together.sums(x + 1, 3, weights).answered, other.answered)
    assert torch.equal(other.sums, before)  # what is held is not written over


def test_they_are_the_gradients_of_each_users_examples(make_users: Users) -> None:
    users = make_users()
    apart, together = points(users, 100)
    model, masks = network(), parts(12)

    def gradient(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(model(inputs), targets)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    x = apart.start().expand(4, -1)
    inputs, targets = users[0].examples.take(torch.arange(12))
    expected = torch.stack([gradient(inputs[kept], targets[kept]) for kept in masks])
    peers = torch.stack([gradient(*peer.examples.take(torch.arange(len(peer)))) for peer in users[1:]])
    for each in (apart, together):
        torch.testing.assert_close(each.own(x, 0, range(4)).gradients, expected)
        torch.testing.assert_close(each.on_all(x, 0, range(4)), expected)
        torch.testing.assert_close(each.rows(x[:1], 0, torch.ones(1, 3, dtype=torch.bool))[0][0], peers)
        torch.testing.assert_close(
            each.losses(x, users[0].examples).mean(1)[0], cross_entropy(model(inputs), targets)
        )


def test_points_that_are_not_finite_leave_nobody_out(make_users: Users) -> None:
    users = make_users()
    weights = torch.full((2, 3), 1 / 3).double()
    for each in points(users, 4):
        x = each.start().repeat(2, 1)
        x[1] = torch.inf
        sums = each.sums(x, 0, weights)
        assert not sums.left_out
        assert sums.answered.tolist() == pytest.approx([1.0, 0.0])
        assert bool(sums.sums.isfinite().all())


def test_examples_read_one_by_one_are_those_in_memory(make_users: Users) -> None:
    users = make_users()
    read = [from_disk(users[0]), *users[1:]]
    spec = RunSpec(network(), cross_entropy, read[0], read[1:], batch_size=4)
    disk, memory = Points(spec, spec.in_process(), parts(12)), points(users, 4)[0]
    x = memory.start().expand(4, -1)
    torch.testing.assert_close(disk.own(x, 3, range(4)).gradients, memory.own(x, 3, range(4)).gradients)
    torch.testing.assert_close(disk.losses(x, read[0].examples), memory.losses(x, users[0].examples))


def test_rows_that_are_not_finite_are_left_out() -> None:
    rows = torch.tensor([[[3.0, 4.0], [float("nan"), 0.0]]])
    sums = combined(rows, torch.tensor([[0.5, 0.5]]), {})
    torch.testing.assert_close(sums.sums, torch.tensor([[1.5, 2.0]]))
    torch.testing.assert_close(sums.answered, torch.tensor([0.5]))


def test_who_is_far_is_taken_for_missing_at_those_points() -> None:
    nan = float("nan")
    theirs = torch.tensor([[[3.0, 4.0], [0.6, 0.8], [0.0, 2.0]], [[0.0, 1.0], [nan, nan], [60.0, 80.0]]])
    ours = torch.tensor([[0.0, 1.0], [3.0, 4.0]])
    judged = Judged(theirs, ours, Sums(torch.zeros(1, 2), torch.ones(1)), {"b": "late"})
    lengths, usual = judged.lengths()
    torch.testing.assert_close(lengths, torch.tensor([[5.0, 1.0, 2.0], [1.0, nan, 100.0]]), equal_nan=True)
    assert usual.tolist() == [2.0, 5.0]  # the median of the peers; user 0's where that is longer
    far = lengths > 10 * usual[:, None]
    without = judged.without(far, "far", ["a", "b", "c"])
    assert without.left_out == {"b": "late", "c": "far"}
    assert without.theirs.isnan().all(2).tolist() == [[False, False, False], [False, True, True]]
    torch.testing.assert_close(without.theirs[0], theirs[0])
    assert judged.without(lengths < 0, "far", ["a", "b", "c"]) is judged
