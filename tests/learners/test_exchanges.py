"""Fewer exchanges: held peers and local steps agree with exact moments, with a plain loop, and when resumed."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.linear_users import TRUTH, alike, user
from tests.support.quadratics import DRIFTING, PAIR, within
from tests.support.small_runs import same, state_of
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import coterie
from coterie import Alone, BiasCorrection, Rule, User, WeightedAveraging
from coterie.errors import CheckpointError, KnobError
from coterie.methods import FedAvg
from coterie.rules.streams import StreamAveraging
from coterie.theory.dynamics import FloatArray
from coterie.theory.quadratic import NoisyQuadratic, Quadratic

TRIALS, LR = 600, 0.05
KINDS = [(1, 1), (4, 1), (16, 1), (1, 4), (1, 16), (4, 4)]
AVERAGING, CORRECTION = WeightedAveraging(0.4), BiasCorrection(0.7, 0.1)


def simulated(problem: NoisyQuadratic, rule: Rule, steps: int) -> FloatArray:
    """The squared distances to the optimum after some steps of the ordinary training loop, one a trial."""
    many = replace(problem, x0=np.full(TRIALS, problem.x0))
    model = nn.Linear(1, TRIALS, bias=False, dtype=torch.float64)
    start = -1 + 0.5 * np.random.default_rng(6).standard_normal(TRIALS)
    model.load_state_dict({"weight": torch.tensor(start)[:, None]})
    me = User(
        "0", torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, TRIALS, dtype=torch.float64)
    )
    engine = many.engine(seed=5)
    run = coterie.train(
        model,
        mse_loss,
        me,
        [],
        rule,
        optimizer=torch.optim.SGD,
        lr=LR,
        norm_bound=None,
        steps=steps,
        engine=engine,
        exchange_every=problem.exchange_every,
        local_steps=problem.local_steps,
    )
    ends = next(run.model.parameters()).detach().numpy()[:, 0]
    return np.asarray((ends - engine.optimum(steps)) ** 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "rule", [AVERAGING, CORRECTION, BiasCorrection(0.7, 0.1, correction=0.5, start="zero")]
)
def test_exact_moments_are_those_of_training(rule: Rule, kind: tuple[int, int]) -> None:
    problem, steps = (
        replace(PAIR, exchange_every=kind[0], local_steps=kind[1]),
        38 if kind[1] < 16 else 6,
    )
    squares = simulated(problem, rule, steps)
    assert within(0.75 * squares, float(problem.expected(rule, LR, [steps]).loss[0]))


@pytest.mark.parametrize(
    "rule", [CORRECTION, BiasCorrection(lambda t: 0.9 / (1 + t), lambda t: 0.3)]
)
def test_exact_moments_follow_a_drift_and_schedules(rule: Rule) -> None:
    problem = replace(DRIFTING, exchange_every=4)
    assert within(
        0.75 * simulated(problem, rule, 22), float(problem.expected(rule, LR, [22]).loss[0])
    )


def test_the_mean_of_the_iterates_and_long_runs_have_exact_moments_too() -> None:
    """Period by period and in one go give the same, and at last the stationary level."""
    problem = replace(PAIR, exchange_every=4, local_steps=3)
    stops = [3, 8, 21, 40, 4001]
    one, many = (
        problem.expected(CORRECTION, LR, stops),
        problem.expected(CORRECTION, LR, range(4002)),
    )
    assert one.loss == pytest.approx(many.loss[stops], rel=1e-9)
    assert problem.expected(CORRECTION, LR, [40_000]).loss[0] == pytest.approx(
        problem.stationary(CORRECTION, LR), rel=1e-9
    )
    paths = problem.paths(CORRECTION, LR, range(1, 41), trials=4000)[:, 20:, 0]
    averaged = problem.expected(CORRECTION, LR, [40], average_from=20).loss[0]
    assert within(0.75 * paths.mean(1) ** 2, averaged)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_from_the_largest_step_size_on_nothing_converges(kind: tuple[int, int]) -> None:
    problem = replace(PAIR, exchange_every=kind[0], local_steps=kind[1])
    for rule in (AVERAGING, CORRECTION):
        limit = problem.max_lr(rule)
        assert (
            problem.spectral_radius(rule, 0.999 * limit)
            < 1
            <= problem.spectral_radius(rule, 1.001 * limit)
        )


def test_nothing_exact_is_known_of_local_steps_with_a_schedule_a_drift_or_an_oracle() -> None:
    problem = replace(PAIR, local_steps=2)
    for case, rule, lr in (
        (problem, AVERAGING, lambda t: 0.1),
        (replace(DRIFTING, local_steps=2), AVERAGING, 0.1),
        (problem, problem.oracle(0.5), 0.1),
    ):
        with pytest.raises(KnobError, match="nothing exact is known of `local_steps`"):
            case.expected(rule, lr, [1])


# Ordinary users.


def users() -> tuple[User, list[User]]:
    me = user("me", 40, TRUTH)
    return me, [*alike(2, 50), user("other", 50, -TRUTH)]


def trained(rule: Any, **settings: Any) -> coterie.Run:
    torch.manual_seed(0)
    how = {
        "optimizer": torch.optim.SGD,
        "lr": 0.02,
        "steps": 12,
        "batch_size": 8,
        "measure": False,
        **settings,
    }
    return coterie.train(nn.Linear(6, 1), mse_loss, *users(), rule, **how)


def by_hand(alpha: float, beta: float, every: int, local_steps: int, steps: int) -> Tensor:
    """Bias correction by the definition, with autograd and nothing of coterie but the users' batches."""
    torch.manual_seed(0)
    start = nn.Linear(6, 1)
    x = torch.cat([start.weight.detach().flatten(), start.bias.detach()])
    me, peers = users()
    c, seen, peers_said, c_then = torch.zeros(7), 0, torch.zeros(7), torch.zeros(7)

    def followed(who: User, x: Tensor, t: int) -> Tensor:
        total, y = torch.zeros(7), x.clone()
        for step in range(t * local_steps, (t + 1) * local_steps):
            y.requires_grad_()
            inputs, targets = who.batch(8, seed=0, step=step)
            loss = mse_loss(inputs @ y[:6, None] + y[6], targets)
            (g,) = torch.autograd.grad(loss, y)
            y, total = (y - 0.02 * g).detach(), total + g
        return total

    for t in range(steps):
        own = followed(me, x, t)
        if t % every == 0:
            peers_said = torch.stack([followed(peer, x, t) for peer in peers]).mean(0)
            c_then = c if seen else peers_said - own
            rate = max(beta, 1 / (seen + 1))
            c, seen = (1 - rate) * c_then + rate * (peers_said - own), seen + 1
            first = seen == 1
        used = peers_said - own if first else c_then
        x = x - 0.02 * ((1 - alpha) * own + alpha * (peers_said - used))
    return x


@pytest.mark.parametrize(("every", "local_steps"), [(1, 1), (4, 1), (1, 3), (5, 2)])
def test_training_is_the_definition(every: int, local_steps: int) -> None:
    run = trained(
        BiasCorrection(0.8, 0.1), exchange_every=every, local_steps=local_steps, norm_bound=None
    )
    wanted = by_hand(0.8, 0.1, every, local_steps, 12)
    torch.testing.assert_close(
        torch.cat([p.detach().flatten() for p in run.model.parameters()]), wanted
    )


def test_fewer_exchanges_cost_fewer_numbers() -> None:
    costs = {
        kind: trained(AVERAGING, exchange_every=kind[0], local_steps=kind[1]).record.end.costs
        for kind in ((1, 1), (4, 1), (1, 3), (4, 3))
    }
    sent = {
        kind: (cost["other"].gradients, cost["other"].numbers_sent // 7)
        for kind, cost in costs.items()
    }
    assert sent == {(1, 1): (12, 12), (4, 1): (3, 3), (1, 3): (36, 12), (4, 3): (9, 3)}
    assert {kind: cost["me"].gradients for kind, cost in costs.items()} == {
        (1, 1): 12,
        (4, 1): 12,
        (1, 3): 36,
        (4, 3): 36,
    }


RULES: dict[str, Any] = {
    "averaging": AVERAGING,
    "correction": CORRECTION,
    "rows": WeightedAveraging(0.5, aggregator=coterie.aggregators.CoordinateMedian()),
    "stream": StreamAveraging(12),
    "alone": Alone(),
    "adaptive": coterie.AdaptiveAveraging(),
}


@pytest.mark.filterwarnings("ignore:`exchange_every` has no effect with `Alone`")
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, rule: Any) -> None:
    """It is broken off between two exchanges."""
    how: dict[str, Any] = {"exchange_every": 4, "evaluate_every": 6}
    how |= {} if isinstance(rule, coterie.AdaptiveAveraging) else {"local_steps": 2}
    whole = trained(rule, **how)

    def stop(step: Any) -> bool:
        return bool(step.step == 6)

    trained(rule, out=tmp_path / "run", hooks=[stop], **how)
    resumed = trained(rule, out=tmp_path / "run", resume=True, **how)
    assert resumed.step == 12
    assert same(state_of(resumed.model), state_of(whole.model))
    with pytest.raises(CheckpointError, match="`exchange_every` was 4 and is now 3"):
        trained(rule, out=tmp_path / "run", resume=True, **how | {"exchange_every": 3})


def test_adaptive_averaging_asks_less_often_and_still_finds_whom_to_follow() -> None:
    """In 240 steps with K = 8: at every eighth, where peers are judged, and after the fork."""
    rule = coterie.AdaptiveAveraging(linear=False)  # closed forms ask in exchanges of their own
    often, seldom = (
        trained(rule, steps=240, exchange_every=every, lr=0.05).record.end for every in (1, 8)
    )
    assert seldom.account["weights"]["other"][-1] < 0.1
    asked = seldom.costs["alike 0"].gradients / often.costs["alike 0"].gradients
    assert 1 / 8 <= asked < 1 / 4
    assert seldom.costs["me"].gradients == often.costs["me"].gradients
    assert seldom.account["cost"]["runs"] < 1


def test_between_exchanges_adaptive_averaging_follows_what_the_peers_last_said() -> None:
    made: list[Any] = []

    class Watched(coterie.AdaptiveAveraging):
        def learner(self, *given: Any, **options: Any) -> Any:
            made.append(super().learner(*given, **options))
            return made[-1]

    followed: list[Tensor] = []
    # of the pooled model
    hooks = [lambda step: followed.append(made[-1].peers.direction[-1].clone())]
    trained(Watched(), steps=240, exchange_every=8, lr=0.05, hooks=hooks)
    for step in (*range(1, 119), *range(121, 240)):  # at the fork all begins anew
        asked = step % 8 == 0 or (step < 120 and step % made[-1].schedule.between_grams == 0)
        assert torch.equal(followed[step], followed[step - 1]) != asked, step
        assert followed[step].any()


def test_alone_has_nobody_to_exchange_with_less_often() -> None:
    """It is told, not refused: `Alone` is one of many rules that are compared. A guard's shadow is not told of."""
    with pytest.warns(UserWarning, match="`exchange_every` has no effect with `Alone`") as told:
        seldom = trained(Alone(), exchange_every=4)
    assert told[0].filename == __file__
    assert same(state_of(seldom.model), state_of(trained(Alone()).model))
    held_out = user("held out", 40, TRUTH).batch(40, seed=0, step=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guarded = user("me", 40, TRUTH, validation=held_out)
        coterie.train(
            nn.Linear(6, 1), mse_loss, guarded, users()[1], AVERAGING, steps=9, exchange_every=4
        )
        trained(Alone(), local_steps=4)  # plain steps of its own


def test_a_guard_that_restarts_forgets_what_the_peers_said() -> None:
    """After a restart the first step that listens is an exchange that is due."""
    me = user("me", 40, TRUTH, validation=user("held out", 40, TRUTH).batch(40, seed=0, step=0))
    contrary = [user(f"contrary {k}", 60, -3 * TRUTH) for k in range(3)]
    asked: list[int] = []

    class Noting(coterie.InProcess):
        def gradients(
            self, x: Tensor, step: int, weights: Any, rows: bool = False
        ) -> coterie.Gradients:
            if weights:
                asked.append(step)
            return super().gradients(x, step, weights, rows)

    torch.manual_seed(0)
    how: dict[str, Any] = {"exchange_every": 7, "lr": 0.1, "engine": Noting, "measure": False}
    run = coterie.train(
        nn.Linear(6, 1), mse_loss, me, contrary, WeightedAveraging(0.9), steps=60, **how
    )
    assert run.record.points[-1].guard is not None
    assert run.record.points[-1].guard.restarts > 0
    assert 0 in asked
    assert {step for step in asked if step} <= {*range(7, 60, 7)}


def test_who_decides_on_exchanges_itself_refuses_to_have_fewer() -> None:
    for rule, message in (
        (None, "adaptive averaging judges its peers by gradients"),
        (FedAvg(2), "rounds of its own"),
    ):
        with pytest.raises(KnobError, match=message):
            trained(rule, local_steps=2)
    groups = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(
        [{"params": [groups.weight], "lr": 0.1}, {"params": [groups.bias], "lr": 0.2}]
    )
    with pytest.raises(KnobError, match="plain steps of one size"):
        coterie.train(groups, mse_loss, *users(), AVERAGING, optimizer=optimizer, local_steps=2)


def test_peers_without_spare_noise_pull_local_steps_to_their_own_optima() -> None:
    """Bias correction takes that off: without noise it ends at user 0's optimum, averaging does not."""
    problem = NoisyQuadratic(
        Quadratic(1, 0, 0), [Quadratic(2, 3, 0)], x0=1, local_steps=8, exchange_every=2
    )
    assert problem.stationary(BiasCorrection(0.5, 0.2), 0.02) == pytest.approx(0, abs=1e-12)
    assert problem.stationary(WeightedAveraging(0.5), 0.02) > 0.1
