"""Trunk and branch against a twin in plain NumPy, on every kind of engine, interrupted and resumed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.linear_users import TRUTH, D, user
from tests.support.trunk_and_branch_twin import trunk_and_branch
from torch import nn
from torch.nn.functional import mse_loss

import coterie
from coterie import AdaptiveAveraging, InProcess, User
from coterie.choosing.adaptive.adaptive_learner import Schedule
from coterie.choosing.adaptive.evaluations import split
from coterie.engines.attacks import Attacked
from coterie.engines.engine import Capabilities
from coterie.errors import ModelError, UserCodeError
from coterie.gradients.parameters import Parameters
from coterie.mixture.served import MixedPredictions


def double(one: User) -> User:
    def whole(examples: Any) -> Any:
        return tuple(each.double() for each in examples.take(torch.arange(len(examples))))

    return User(
        one.name,
        *whole(one.examples),
        validation=None if one.validation is None else whole(one.validation),
    )


def users(kind: str, held_out: int = 0, own: int = 15) -> tuple[User, list[User]]:
    truth = {"alike": TRUTH, "wrong": TRUTH, "strangers": -2 * TRUTH}[kind]
    validation = (
        user("held out", held_out, TRUTH).examples.take(torch.arange(held_out))
        if held_out
        else None
    )
    peers = [user(f"{kind} {k}", 20 + 10 * k, truth) for k in range(3)]
    if kind == "wrong":
        peers.append(user("contrary", 60, -TRUTH))
    return double(user("me", own, TRUTH, validation=validation)), [double(peer) for peer in peers]


def train(me: User, peers: list[User], **changed: Any) -> coterie.Run:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "optimizer": torch.optim.SGD,
        "lr": 0.05,
        "rule": AdaptiveAveraging(linear=False),
        "steps": 40,
        "batch_size": 100,
        "measure": False,
    }
    return coterie.train(
        nn.Linear(D, 1).double(), mse_loss, me, peers, **(settings | {"progress": False} | changed)
    )


def vector(run: coterie.Run) -> torch.Tensor:
    return Parameters(run.model).vector()


def distance(run: coterie.Run) -> float:
    return float((vector(run)[:D] - TRUTH).norm())


def weight(run: coterie.Run, *kinds: str) -> float:
    """Return the share that kinds of candidates have of what is served."""
    board = run.record.end.account["leaderboard"]
    return float(sum(board[kind]["weight"] for kind in kinds if kind in board))


@pytest.mark.parametrize("held_out", [0, 9])
@pytest.mark.parametrize("kind", ["alike", "wrong", "strangers"])
def test_it_is_the_twin_in_numpy(kind: str, held_out: int) -> None:
    me, peers = users(kind, held_out)
    run, folds = train(me, peers), split(me, 4, 0).numpy()
    plain = [
        tuple(
            t.squeeze(-1).numpy() if t.shape[-1] == 1 else t.numpy()
            for t in e.take(torch.arange(len(e)))
        )
        for e in (me.examples, *(peer.examples for peer in peers))
    ]
    validation = (np.zeros((0, D)), np.zeros(0))
    if me.validation is not None:
        x, y = me.validation.take(torch.arange(held_out))
        validation = x.numpy(), y[:, 0].numpy()
    torch.manual_seed(0)
    start = Parameters(nn.Linear(D, 1).double()).vector().numpy()
    twin = trunk_and_branch(
        *(plain[0], plain[1:], validation, start, folds),
        steps=40,
        lr=0.05,
        evaluations=set(Schedule.of(40).evaluations),
    )
    account = run.record.end.account
    for name, share in twin["weight"].items():
        assert account["leaderboard"][name]["weight"] == pytest.approx(share, abs=1e-6)
    np.testing.assert_allclose(vector(run), twin["point"], atol=1e-6)
    assert account["out_of_fold"] == pytest.approx(twin["served"].mean(), abs=1e-6)
    change = twin["served"] - twin["alone"]
    assert account["difference"] == pytest.approx(change.mean(), abs=1e-6)


class PointByPoint:
    """An engine that cannot pass a model in copies."""

    def __init__(self, *given: Any, **options: Any) -> None:
        self.engine = InProcess(*given, **options)
        self.names = self.engine.names
        self.capabilities = Capabilities(examples=self.engine.capabilities.examples)

    def __getattr__(self, name: str) -> Any:
        if name in ("copies", "users", "draw"):
            raise AttributeError(name)
        return getattr(self.engine, name)


def small_batches() -> dict[str, Any]:
    return {"batch_size": 4, "optimizer": torch.optim.Adam, "lr": 0.03}


def test_point_by_point_agrees_with_one_pass() -> None:
    me, peers = users("wrong", 9)
    together, apart = (
        train(me, peers, engine=engine, **small_batches()) for engine in (InProcess, PointByPoint)
    )
    torch.testing.assert_close(vector(together), vector(apart), rtol=1e-7, atol=1e-8)
    one, other = (run.record.end.account for run in (together, apart))
    assert one["tau"] == pytest.approx(other["tau"], abs=1e-7)
    assert one["cost"] == other["cost"]
    costs = [run.record.end.costs for run in (together, apart)]
    assert costs[0] == costs[1]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.03),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.mark.parametrize("stop", [7, 20, 31])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_resuming_gives_the_same_bits(tmp_path: Path, kind: str, stop: int) -> None:
    me, peers = users("wrong", 9)
    halving = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 15, 0.5)  # noqa: E731
    asked: dict[str, Any] = {
        "batch_size": 4,
        "optimizer": OPTIMIZERS[kind],
        "lr": None,
        "scheduler": halving,
    }
    whole = train(me, peers, **asked)
    train(
        me, peers, out=tmp_path, checkpoint_every=5, hooks=[lambda step: step.step == stop], **asked
    )
    resumed = train(me, peers, out=tmp_path, resume=True, **asked)
    assert torch.equal(vector(whole), vector(resumed))
    assert whole.record.end.account == resumed.record.end.account
    assert whole.record.end.costs == resumed.record.end.costs


def test_what_is_served_early_is_the_best_so_far() -> None:
    me, peers = users("alike", 30)
    early = train(me, peers, hooks=[lambda step: step.step == 33])
    assert weight(early, "branch", "branch from pooled", "pooled") > 0.5
    in_the_trunk = train(me, peers, hooks=[lambda step: step.step == 9])
    assert "branch" not in in_the_trunk.record.end.account["leaderboard"]
    assert distance(early) < distance(in_the_trunk)


def test_models_with_buffers_and_random_parts_train() -> None:
    me, peers = users("wrong", 20)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(D, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1)
    ).double()
    before = [buffer.clone() for buffer in model.buffers()]
    settings: dict[str, Any] = {"steps": 40, "lr": 0.03, "batch_size": 8, "progress": False}
    run, again = (coterie.train(model, mse_loss, me, peers, **settings) for _ in range(2))
    assert run.record.end.account == again.record.end.account
    served, same = run.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(served[name], same[name]) for name in served)
    means = [value for name, value in served.items() if name.endswith("1.running_mean")]
    assert means
    assert not any(torch.equal(mean, before[0]) for mean in means)
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    assert run.record.points[-1].validation["loss"] < run.record.points[0].validation["loss"]


def test_running_means_of_batch_norm_count_the_batches_of_their_own_copy() -> None:
    me, peers = users("wrong", 20)
    torch.manual_seed(0)
    # the mean of all batches: it divides by how many there were
    norm = nn.BatchNorm1d(8, momentum=None)
    model = nn.Sequential(nn.Linear(D, 8, bias=False), norm, nn.Linear(8, 1)).double()
    settings: dict[str, Any] = {
        "steps": 40,
        "lr": 0.03,
        "batch_size": 8,
        "progress": False,
        "measure": False,
    }
    made: list[Any] = []
    coterie.train(model, mse_loss, me, peers, watched(made), **settings)
    alone = [{name: value.double() for name, value in model.state_dict().items()}]

    def note(step: Any) -> None:
        alone.append(
            {name: value.double() for name, value in copy.deepcopy(step.model).state_dict().items()}
        )

    coterie.train(model, mse_loss, me, peers, coterie.Alone(), hooks=[note], **settings)
    candidates = made[-1].looks.paths["alone"].points
    judged = [step for step in sorted(Schedule.of(40).evaluations) for _ in range(2)]
    kept = [each for each in zip(judged, candidates, strict=True) if each[1] is not None]
    assert len(kept) > 1
    for (step, point), decayed in zip(kept, judged_with_decay(candidates), strict=True):
        if not decayed:
            told = made[-1].looks.points.model_at(point).state_dict()
            for name, value in alone[step].items():
                torch.testing.assert_close(told[name].double(), value, rtol=1e-6, atol=1e-9)


def judged_with_decay(candidates: list[Any]) -> list[bool]:
    """Return of each candidate that is kept whether it is of the second setting."""
    return [bool(place % 2) for place, point in enumerate(candidates) if point is not None]


def test_batch_norm_takes_any_number_of_own_examples_that_parts_can_have() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    settings: dict[str, Any] = {"steps": 2, "lr": 0.03, "progress": False, "measure": False}
    many, peers = users("alike", own=1367)  # of which three quarters are 1,024 and one or more
    run = coterie.train(model, mse_loss, many, peers, **settings)
    assert run.record.end.account["cost"]["rows"] == 4
    few, _ = users("alike", own=3)
    with pytest.raises(
        ModelError, match="trains on parts of the 3 own examples too, the least of 1; give more own"
    ):
        coterie.train(model, mse_loss, few, peers, **settings)


class Turning:
    """Behave until a step, then send a multiple of the good peers' mean."""

    def __init__(self, first: int, factor: float) -> None:
        self.first, self.factor = first, factor

    def __call__(self, honest: torch.Tensor, n: int, step: int) -> torch.Tensor:
        return honest.mean(0).expand(n, -1) * (self.factor if step >= self.first else 1)


@pytest.mark.parametrize("factor", [-10, -1e4, 1e30])
def test_an_attacker_who_behaves_while_it_is_judged_is_survived(factor: float) -> None:
    me, peers = users("alike", own=8)
    peers = [*peers, *(double(user(f"late {k}", 40, TRUTH)) for k in range(2))]

    def attacked(*given: Any, **options: Any) -> Attacked:
        return Attacked(InProcess(*given, **options), ["late 0", "late 1"], Turning(20, factor))

    alone = train(me, peers, rule=coterie.Alone())
    fixed = train(me, peers, rule=coterie.WeightedAveraging(0.9), engine=attacked, norm_bound=None)
    survived = train(me, peers, engine=attacked)
    assert distance(survived) < distance(alone) < distance(fixed)


@pytest.mark.parametrize("factor", [100, -1e6, 1e30])
@pytest.mark.parametrize("first", [0, 5])
def test_a_peer_that_sends_far_more_than_the_others_costs_no_gain(
    factor: float, first: int
) -> None:
    """Neither from the first step on nor between two Gram matrices: what is served is what the others give."""
    me, peers = users("alike", own=8)
    loud = double(user("loud", 40, TRUTH))

    def attacked(*given: Any, **options: Any) -> Attacked:
        return Attacked(InProcess(*given, **options), ["loud"], Turning(first, factor))

    # which does not forget a huge gradient for a thousand steps
    adam = {"optimizer": torch.optim.Adam}
    survived = train(me, [*peers, loud], engine=attacked, **adam)
    without = train(me, peers, **adam)
    alone = train(me, peers, rule=coterie.Alone(), **adam)
    assert distance(survived) < 1.1 * distance(without) < 0.8 * distance(alone)
    assert weight(survived, "branch", "branch from pooled", "pooled") > 0.5
    assert survived.record.end.account["tau"].get("loud", 0.0) == 0.0
    assert "more than 10 times as long as the median of all" in survived.record.end.left_out["loud"]


def test_a_loud_peer_costs_no_gain_where_numbers_of_examples_are_not_known() -> None:
    """Those of streams are not."""

    def stream(name: str, scale: float) -> User:
        def draw(size: int, seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
            inputs = torch.randn(
                size, D, generator=torch.Generator().manual_seed((seed + step) % 2**63)
            ).double()
            return scale * inputs, inputs @ TRUTH.double()[:, None]

        return User.stream(name, draw)

    me, _ = users("alike", own=8)
    run = train(me, [stream("a", 1.0), stream("b", 1.0), stream("loud", 1e3)], batch_size=20)
    assert weight(run, "branch", "branch from pooled", "pooled") > 0.5
    assert sorted(run.record.end.account["tau"]) == ["a", "b"]


def watched(made: list[Any], **knobs: Any) -> AdaptiveAveraging:
    """Return the rule; its learners are kept."""

    class Watched(AdaptiveAveraging):
        def learner(self, *given: Any, **options: Any) -> Any:
            made.append(super().learner(*given, **options))
            return made[-1]

    return Watched(**knobs)


def test_a_trunk_follows_no_sum_that_is_longer_than_peers_may_send() -> None:
    made: list[Any] = []
    train(*users("alike"), rule=watched(made), hooks=[lambda step: True])  # one step
    learner = made[-1]
    learner.longest.fill_(2.0)
    sums, own = torch.zeros_like(learner.peers.x), torch.ones_like(learner.alone.x)
    sums[:2, 0] = torch.tensor([0.9, 1.1])
    learner.direct(own, sums, sums.new_full((5,), 0.5))  # half has answered
    torch.testing.assert_close(learner.peers.direction[:2, 0], sums.new_tensor([1.8, 0.0]))
    assert not learner.peers.direction[:, 1:].any()
    # held back towards 0, where the setting has weight decay
    torch.testing.assert_close(learner.alone.direction, own + learner.decays * learner.alone.x)
    assert sorted(set(learner.decays.flatten().tolist())) == [0.0, 0.03]


def test_a_peer_that_is_missing_now_and_then_is_left_out_of_those_steps() -> None:
    me, peers = users("wrong", own=8)

    class Absent(PointByPoint):
        def gradients(
            self, x: torch.Tensor, step: int, weights: dict[str, float], rows: bool = False
        ) -> Any:
            there = {
                name: weight for name, weight in weights.items() if name != "wrong 1" or step % 3
            }
            g = self.engine.gradients(x, step, there, rows=True)
            lost = {name: "no answer" for name in weights if name not in there}
            assert g.rows is not None
            given = [weights[name] for name in g.names]
            peers, answered = coterie.gradients.gradients.weighted_sum(g.own, g.rows, given)
            rest = {"peers": None if rows else peers, "rows": g.rows if rows else None}
            return coterie.Gradients(
                g.own, **rest, names=g.names, answered=answered, left_out=lost, own_loss=g.own_loss
            )

    run = train(me, peers, engine=Absent)
    assert run.record.end.left_out == {"wrong 1": {"no answer": 14}}
    assert run.record.end.account["weights"]["contrary"][-1] < 0.01
    assert float((vector(run)[:D] - TRUTH).norm()) < float(
        (vector(train(me, peers, rule=coterie.Alone()))[:D] - TRUTH).norm()
    )


class Meddled(PointByPoint):
    """Peers that send what `sent` makes of their gradients at a step; nothing where that is None."""

    sent: Callable[[str, torch.Tensor, int], torch.Tensor | None]

    def gradients(
        self, x: torch.Tensor, step: int, weights: dict[str, float], rows: bool = False
    ) -> Any:
        g = self.engine.gradients(x, step, weights, rows=True)
        if not weights:
            return replace(g, rows=None)
        assert g.rows is not None
        made = {
            name: type(self).sent(name, row, step)
            for name, row in zip(g.names, g.rows, strict=True)
        }
        there = {name: row for name, row in made.items() if row is not None}
        lost = {name: "no answer" for name in weights if name not in there}
        matrix = torch.stack(list(there.values())) if there else x.new_zeros(0, len(x))
        return g.with_peers(matrix, tuple(there), weights, lost, rows=rows)


def meddled(sent: Callable[[str, torch.Tensor, int], torch.Tensor | None]) -> type[Meddled]:
    return type("Those", (Meddled,), {"sent": staticmethod(sent)})


def test_peers_that_miss_the_end_of_the_trunk_are_heard_again_in_the_branch() -> None:
    """They were judged before, by which it is known how long their gradients are."""
    me, peers = users("alike", own=8)
    away = meddled(lambda name, row, step: None if 12 <= step < 20 else row)
    assert weight(train(me, peers, engine=away), "branch", "branch from pooled", "pooled") > 0.5
    gone = meddled(lambda name, row, step: None if name == "alike 1" and step < 20 else row)
    assert "alike 1" not in train(me, peers, engine=gone).record.end.account["tau"]


def test_where_no_peer_can_be_followed_everything_says_so() -> None:
    me, peers = users("alike", 9)
    run = train(me, peers, engine=meddled(lambda name, row, step: None))
    assert set(run.record.end.account["leaderboard"]) == {*("served", "constant", "alone")}
    assert run.record.end.tau == {}
    assert "most weight" not in run.summary()


def test_an_optimizer_that_fails_is_named() -> None:
    with pytest.raises(
        UserCodeError, match="the optimizer raised RuntimeError: SparseAdam does not support dense"
    ):
        train(*users("alike"), optimizer=torch.optim.SparseAdam)


def test_a_point_that_is_no_number_is_no_candidate() -> None:
    made: list[Any] = []

    def lose(step: coterie.Step) -> None:
        if step.step == 19:  # the last but one of the trunk
            made[-1].peers.x[-1] = torch.nan  # pooled

    run = train(*users("alike"), rule=watched(made, linear=False), hooks=[lose])
    assert bool(vector(run).isfinite().all())
    assert weight(run, "branch") > 0.5


@pytest.mark.parametrize(("own", "told"), [(5, False), (6, True)])
def test_no_loss_is_told_of_very_few_examples(own: int, told: bool) -> None:
    account = train(*users("alike", own=own)).record.end.account
    assert ("out_of_fold" in account) is told


@pytest.mark.parametrize("single", [False, True])
def test_a_network_is_served_as_one_module(tmp_path: Path, single: bool) -> None:
    """It can be saved, exported and trained on; without what is less than one percent of it."""
    me, peers = users("wrong", own=12)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    settings: dict[str, Any] = {"steps": 40, "lr": 0.03, "progress": False, "measure": False}
    run = coterie.train(model, mse_loss, me, peers, AdaptiveAveraging(single=single), **settings)
    x, _ = me.examples.take(torch.arange(12))
    expected = run.model(x)
    if single:
        assert isinstance(run.model, nn.Sequential)
        weights = [one["weight"] for one in run.record.end.account["leaderboard"].values()]
        assert sorted(weights)[-2:] == [1.0, 1.0]  # all that is served is of one kind
    else:
        assert isinstance(run.model, MixedPredictions)
        shares = torch.zeros(len(run.model.parts)).index_add(
            0, run.model.which, run.model.weights.float()
        )
        assert float(shares.min()) >= 0.01
    torch.save(run.model, tmp_path / "model")
    again = torch.load(tmp_path / "model", weights_only=False)
    torch.testing.assert_close(again(x), expected)
    exported = torch.export.export(run.model, (x,)).module()
    torch.testing.assert_close(exported(x), expected)
    tuned = coterie.train(run.model, mse_loss, me, peers, coterie.Alone(), **settings)
    assert not torch.equal(tuned.model(x), expected)


def test_a_loss_of_ones_own_gets_the_best_single_candidate() -> None:
    """Nothing says how its predictions may be mixed."""
    me, peers = users("wrong", 9, own=12)

    def robust(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).abs().mean()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    settings: dict[str, Any] = {"steps": 60, "lr": 0.03, "progress": False, "measure": False}
    run = coterie.train(model, robust, me, peers, **settings)
    assert isinstance(run.model, nn.Sequential)
    board = run.record.end.account["leaderboard"]
    assert "constant" not in board
    assert board["served"]["loss"] <= board["alone"]["loss"]
    held = me.validation
    assert held is not None
    x, y = held.take(torch.arange(9))
    assert robust(run.model(x), y) < robust(model(x), y)


def test_where_nothing_can_be_learned_a_constant_is_served() -> None:
    """Labels of own and peers' examples that have nothing to do with the inputs."""
    generator = torch.Generator().manual_seed(0)

    def noise(name: str, n: int) -> User:
        x = torch.randn(n, D, generator=generator)
        return User(name, x, (torch.rand(n, generator=generator) < 0.3).long())

    me, peers = noise("me", 60), [noise(f"peer {k}", 60) for k in range(2)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 32), nn.ReLU(), nn.Linear(32, 2))
    run = coterie.train(
        model, nn.functional.cross_entropy, me, peers, steps=100, measure=False, progress=False
    )
    board = run.record.end.account["leaderboard"]
    assert board["served"]["loss"] <= board["constant"]["loss"] * 1.05
    test = noise("test", 2000).examples
    loss = coterie.evaluation.evaluate(run.model, nn.functional.cross_entropy, test)["loss"]
    assert loss < 0.68  # that of the shares is .61, of 2,000 steps alone above 2
