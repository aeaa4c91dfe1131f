"""Questions at several points: the one operator against point by point, and both against ordinary gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.many_runs import from_disk
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import coterie
from coterie.engines.asking import GradientsAtPoints, OwnUser, StackedGradients
from coterie.engines.engine import PeerEvidence, Question
from coterie.engines.in_process import copies
from coterie.engines.in_process.engine import InProcess
from coterie.engines.in_process.stacked_sums import MAX_LAYOUTS, ExamplePool, StackedSums
from coterie.users.examples import InMemory

Users = Callable[..., list[coterie.User]]


def network(*, large: bool = False) -> nn.Module:
    """Return a network; `large`: one that is not layers in a row, as most large models."""
    torch.manual_seed(1)
    between = [nn.LayerNorm(5, elementwise_affine=False)] if large else []
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), *between, nn.Linear(5, 3)).double()


def parts(n: int, folds: int = 3) -> Tensor:
    blind = torch.arange(n) % folds != torch.arange(folds)[:, None]
    return torch.cat([torch.ones(1, n, dtype=torch.bool), blind])


def both(
    users: list[coterie.User], batch_size: int, *, large: bool = False
) -> tuple[GradientsAtPoints, StackedGradients]:
    user = OwnUser(network(large=large), cross_entropy, users[0], batch_size, 0)
    engine = InProcess(user.model, user.loss, users[0], users[1:], batch_size=batch_size)
    each = parts(len(users[0]))
    return GradientsAtPoints(engine, user, each), StackedGradients(engine, user, each)


@pytest.fixture(params=[False, True], ids=["small", "large"])
def large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether copies are passed one after the other, as those of large models are."""
    if request.param:
        monkeypatch.setattr(copies, "MAX_MAPPED_SIZE", 0)
    return bool(request.param)


@pytest.mark.parametrize("batch_size", [3, 100])
def test_the_operator_gives_what_is_given_point_by_point(
    make_users: Users, batch_size: int, large: bool
) -> None:
    users = make_users((13, 16, 9, 5))
    apart, together = both(users, batch_size, large=large)
    assert together.copies.one_by_one == large
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 38, generator=generator).double()
    weights = torch.rand(4, 3, generator=generator).double()
    weights[1, 2] = 0.0
    weights /= weights.sum(1, keepdim=True)
    for step, judging in ((0, [3, 1]), (7, [])):
        question = Question(x, step, weights, own=[0, 1, 2, 3], each=judging)
        one, other = apart.ask(question), together.ask(question)
        for name in ("sums", "losses", "answered"):
            torch.testing.assert_close(getattr(one, name), getattr(other, name))
        assert one.sums is not None
        assert one.sums.shape == (8, 38)
        torch.testing.assert_close(one.answered, torch.ones(4).double())
        if judging:
            assert one.judged is not None
            assert other.judged is not None
            torch.testing.assert_close(one.judged.theirs, other.judged.theirs)
            torch.testing.assert_close(one.judged.ours, other.judged.ours)
        drawn = together.block(step)[0]
        torch.testing.assert_close(together.on(question, drawn).sums, one.sums)
    torch.testing.assert_close(*(each.losses(x, users[0].examples) for each in (apart, together)))


def test_weights_may_change_in_place(make_users: Users) -> None:
    apart, together = both(make_users(), 4)
    x, weights = apart.start().repeat(3, 1), torch.full((2, 3), 1 / 3).double()
    question = Question(x, 0, weights, own=[0])
    before = together.ask(question).sums
    weights.copy_(torch.eye(3).double()[:2])
    torch.testing.assert_close(together.ask(question).sums, apart.ask(question).sums)
    assert before is not None
    torch.testing.assert_close(before[0], before[1])  # what is held is not written over


def test_copies_at_one_point_and_peers_of_no_weight(make_users: Users, large: bool) -> None:
    *users, last = make_users((13, 16, 9, 5))
    users.append(
        coterie.User(
            last.name,
            torch.full((5, 3), torch.nan).double(),
            last.examples.take(torch.arange(5))[1],
        )
    )
    apart, together = both(users, 3, large=large)
    x = torch.cat([apart.start().repeat(3, 1), 2 * apart.start()[None]])
    weights = torch.tensor(
        [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    ).double()
    question = Question(x, 2, weights)
    one, other = (each.ask(question) for each in (apart, together))
    torch.testing.assert_close(one.sums, other.sums)
    assert not one.left_out
    assert not other.left_out
    assert one.answered.tolist() == other.answered.tolist() == [1.0, 1.0, 1.0, 0.0]
    assert other.sums is not None
    before = other.sums.clone()
    torch.testing.assert_close(
        together.ask(replace(question, points=x + 1, step=3)).answered, other.answered
    )
    assert torch.equal(other.sums, before)  # what is held is not written over


def test_they_are_the_gradients_of_each_users_examples(make_users: Users) -> None:
    users = make_users()
    apart, together = both(users, 100)
    model, masks = network(), parts(12)

    def gradient(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(model(inputs), targets)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    x = apart.start().expand(5, -1)
    inputs, targets = users[0].examples.take(torch.arange(12))
    expected = torch.stack([gradient(inputs[kept], targets[kept]) for kept in masks])
    peers = torch.stack(
        [gradient(*peer.examples.take(torch.arange(len(peer)))) for peer in users[1:]]
    )
    weights = torch.tensor([[0.2, 0.5, 0.3]]).double()
    for each in (apart, together):
        answers = each.ask(Question(x, 0, weights, own=range(4), each=[2]))
        assert answers.sums is not None
        assert answers.judged is not None
        torch.testing.assert_close(answers.sums, torch.cat([weights @ peers, expected]))
        torch.testing.assert_close(answers.judged.theirs[0], peers)
        torch.testing.assert_close(answers.judged.ours, expected[2:3])
        torch.testing.assert_close(
            each.losses(x, users[0].examples).mean(1)[0], cross_entropy(model(inputs), targets)
        )


def test_points_that_are_not_finite_leave_nobody_out(make_users: Users) -> None:
    users = make_users()
    weights = torch.full((2, 3), 1 / 3).double()
    for each in both(users, 4):
        x = each.start().repeat(2, 1)
        x[1] = torch.inf
        answers = each.ask(Question(x, 0, weights))
        assert not answers.left_out
        assert answers.answered.tolist() == pytest.approx([1.0, 0.0])
        assert answers.sums is not None
        assert bool(answers.sums.isfinite().all())


def test_examples_read_one_by_one_are_those_in_memory(make_users: Users) -> None:
    users = make_users()
    read = [from_disk(users[0]), *users[1:]]
    disk, memory = both(users, 4)
    user = replace(memory.user, me=read[0])
    engine = InProcess(user.model, user.loss, read[0], read[1:], batch_size=4)
    disk = GradientsAtPoints(engine, user, parts(12))
    question = Question(memory.start().expand(4, -1), 3, torch.zeros(0, 3).double(), own=range(4))
    torch.testing.assert_close(disk.ask(question).sums, memory.ask(question).sums)
    torch.testing.assert_close(
        disk.losses(question.points, read[0].examples),
        memory.losses(question.points, users[0].examples),
    )


@pytest.mark.parametrize("a_pass", [1, 10_000])
def test_sums_pass_over_batches_that_weigh_something(
    make_users: Users, a_pass: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.engines.in_process.stacked_sums.A_PASS", a_pass)
    users = make_users((13, 16, 9, 5, 20))
    engine = InProcess(network(), cross_entropy, users[0], users[1:], batch_size=4, seed=0)
    pool = ExamplePool(users, torch.device("cpu"))
    stacked = StackedSums(engine.copies(), pool, [pool.stream(user, 4, 0) for user in users])
    weights = torch.rand(40, 5, dtype=torch.float64) * (
        torch.rand(40, 5) < torch.linspace(0, 1, 40).unsqueeze(1)
    )
    points = torch.randn(40, 38, dtype=torch.float64)
    sums, _ = stacked.sums(points, weights, stacked.drawn(3))
    for point, given, found in zip(points, weights, sums, strict=True):
        each = [engine.on(user.name, point, _drawn(user), 3)[0] for user in users]
        torch.testing.assert_close(found, given @ torch.stack(each))


def _drawn(user: coterie.User) -> Tensor:
    """Return the examples of a user's batch in step 3."""
    inputs, _ = user.batch(4, seed=0, step=3)
    assert isinstance(user.examples, InMemory)
    return torch.stack([(user.examples.inputs == row).all(1).nonzero()[0, 0] for row in inputs])


def test_points_that_need_the_same_share_it(make_users: Users) -> None:
    users = make_users((13, 16, 9, 5))
    engine = InProcess(network(), cross_entropy, users[0], users[1:])
    pool = ExamplePool(users, torch.device("cpu"))
    streams = [pool.stream(user, 4, seed) for seed in (0, 1) for user in users]
    stacked = StackedSums(engine.copies(), pool, streams)
    asked = torch.zeros(10, 8, dtype=torch.bool)
    asked[::2, :4] = asked[1::2, 4:] = True
    (shared,) = stacked._passes(asked)
    # two seeds, five points each
    assert (shared.outputs.shape, shared.rows.shape) == ((10,), (2, 16))
    asked = torch.zeros(2, 8, dtype=torch.bool)
    asked[0, 0] = asked[1, :4] = True
    (one,) = stacked._passes(asked)
    assert one.there.sum(1).tolist() == [4, 16]  # who needs one user only is not taken through four


def test_what_a_captured_step_reads_stays_where_it_is(
    make_users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph holds addresses: where other memory came to lie there, indices were out of range on a GPU."""
    users = make_users((13, 16, 9))
    engine = InProcess(network(), cross_entropy, users[0], users[1:])
    pool = ExamplePool(users, torch.device("cpu"))
    stacked = StackedSums(engine.copies(), pool, [pool.stream(user, 4, 0) for user in users])
    made: list[Tensor] = []
    make = stacked._passes

    def passes(wanted: Tensor) -> Any:
        made.append(wanted)
        return make(wanted)

    monkeypatch.setattr(stacked, "_passes", passes)
    points, asked = torch.randn(2, 38, dtype=torch.float64), torch.ones(2, 3)
    weights = torch.rand(2, 3, dtype=torch.float64)
    first, _ = stacked.sums(points, weights, stacked.drawn(0), asked=asked)
    for _ in range(2 * MAX_LAYOUTS):  # steps between that are taken one by one
        stacked.sums(points, weights.clone(), stacked.drawn(0))
    made.clear()
    again, _ = stacked.sums(points, weights, stacked.drawn(0), asked=asked)
    assert not made
    assert torch.equal(again, first)


def test_examples_that_users_share_are_kept_once() -> None:
    users = [coterie.User(name, [[1.0], [2.0]], [0, 1]) for name in ("a", "b")]
    pool = ExamplePool(users, torch.device("cpu"))
    assert len(pool.examples) == 2
    assert pool.stream(users[1], batch_size=32, seed=0).size == 2


def test_who_is_far_is_taken_for_missing_at_those_points() -> None:
    nan = float("nan")
    theirs = torch.tensor(
        [[[3.0, 4.0], [0.6, 0.8], [0.0, 2.0]], [[0.0, 1.0], [nan, nan], [60.0, 80.0]]]
    )
    ours = torch.tensor([[0.0, 1.0], [3.0, 4.0]])
    evidence = PeerEvidence(theirs, ours)
    lengths, usual = evidence.lengths()
    torch.testing.assert_close(
        lengths, torch.tensor([[5.0, 1.0, 2.0], [1.0, nan, 100.0]]), equal_nan=True
    )
    assert usual.tolist() == [2.0, 5.0]  # the median of the peers; user 0's where that is longer
    without = evidence.without(lengths > 10 * usual[:, None])
    assert without.theirs.isnan().all(2).tolist() == [[False, False, False], [False, True, True]]
    torch.testing.assert_close(without.theirs[0], theirs[0])
    assert evidence.without(lengths < 0) is evidence
