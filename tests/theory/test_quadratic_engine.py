"""The quadratic engine: ordinary rules and the ordinary training loop agree with the exact moments."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support.quadratics import CASES, DRIFTING, IDS, PAIR, Lr, paper, within

from coterie import Alone, BiasCorrection, OracleCorrection, Rule, User, WeightedAveraging, train
from coterie.theory.dynamics import FloatArray
from coterie.theory.quadratic import NoisyQuadratic, Quadratic

TRIALS = 1_000


def simulate(
    problem: NoisyQuadratic, rule: Rule, lr: Lr, steps: list[int], *, rows: bool = False
) -> FloatArray:
    """The squared distances to the optimum at the recorded steps, of shape (steps, d)."""
    engine = problem.engine(seed=5)
    start = np.random.default_rng(6).standard_normal(problem.dim)
    x = torch.tensor(problem.vector(problem.x0) + problem.vector(problem.x0_spread) * start)
    weights, state, out = rule.weights(engine.names), rule.init(x), []
    for t in range(max(steps) + 1):
        if t in steps:
            out.append((x.numpy() - engine.optimum(t)) ** 2)
        direction, state = rule(engine.gradients(x, t, weights, rows=rows), state)
        x = x - (lr(t) if callable(lr) else lr) * direction
    return np.array(out)


def copies(problem: NoisyQuadratic) -> NoisyQuadratic:
    """The same problem in TRIALS coordinates."""
    return NoisyQuadratic(
        problem.own, problem.peers, np.full(TRIALS, problem.x0), problem.x0_spread, problem.drift
    )


@pytest.mark.parametrize(("name", "rule", "lr"), CASES, ids=IDS)
def test_expected_agrees_with_the_ordinary_rules(name: str, rule: Rule, lr: Lr) -> None:
    steps, problem = [0, 1, 2, 10, 60], copies(PAIR)
    if isinstance(rule, OracleCorrection):
        rule = problem.oracle(0.6, noise=rule.bias.noise)  # type: ignore[attr-defined]
    squares = simulate(problem, rule, lr, steps)
    assert within(0.75 * squares.T, PAIR.expected(CASES[IDS.index(name)][1], lr, steps).loss)
    assert problem.expected(rule, lr, steps).loss == pytest.approx(
        TRIALS * PAIR.expected(CASES[IDS.index(name)][1], lr, steps).loss, rel=1e-10
    )


@pytest.mark.parametrize("rule", [Alone(), WeightedAveraging(0.4), BiasCorrection(0.7, 0.05)])
def test_expected_agrees_with_the_ordinary_rules_under_drift(rule: Rule) -> None:
    squares = simulate(copies(DRIFTING), rule, 0.05, [0, 5, 60])
    assert within(0.75 * squares.T, DRIFTING.expected(rule, 0.05, [0, 5, 60]).loss)


@pytest.mark.parametrize("rows", [False, True])
def test_unequal_peers_agree_with_the_ordinary_rules(rows: bool) -> None:
    peers = [Quadratic(0.5, 3.0, 1.0), Quadratic(2.0, -1.0, 4.0), Quadratic(1.0, 1.0, 0.1)]
    problem = NoisyQuadratic(Quadratic(1.0, 0.5, 2.0), peers)
    rule = BiasCorrection(0.6, 0.1, tau={"1": 0.2, "2": 0.5, "3": 0.3}, correction=0.8)
    squares = simulate(copies(problem), rule, 0.1, [1, 5, 40], rows=rows)
    assert within(0.5 * squares.T, problem.expected(rule, 0.1, [1, 5, 40]).loss)


def test_unequal_coordinates_agree_with_the_ordinary_rules() -> None:
    def problem(times: int) -> NoisyQuadratic:
        return NoisyQuadratic(
            Quadratic(
                np.tile([1.0, 0.3], times), np.tile([0.0, 2.0], times), np.tile([1.0, 3.0], times)
            ),
            [Quadratic(np.tile([0.5, 0.9], times), np.tile([4.0, -2.0], times), 0.5)] * 2,
        )

    rule, steps = BiasCorrection(0.6, 0.1), [1, 5, 40]
    squares = simulate(problem(TRIALS), rule, 0.1, steps).reshape(3, TRIALS, 2)
    assert within((squares @ np.array([0.5, 0.15])).T, problem(1).expected(rule, 0.1, steps).loss)


def test_the_ordinary_training_loop_agrees_with_the_exact_loss() -> None:
    problem, rule = copies(PAIR), BiasCorrection(0.7, 0.05)
    model = torch.nn.Linear(1, TRIALS, bias=False, dtype=torch.float64)
    start = -1 + 0.5 * np.random.default_rng(6).standard_normal(TRIALS)
    model.load_state_dict({"weight": torch.tensor(start)[:, None]})
    me = User(
        "0", torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, TRIALS, dtype=torch.float64)
    )
    run = train(
        model,
        torch.nn.functional.mse_loss,
        me,
        [],
        rule,
        optimizer=torch.optim.SGD,
        lr=0.05,
        steps=60,
        engine=problem.engine(seed=5),
    )
    trained = next(run.model.parameters()).detach().numpy()[:, 0]
    np.testing.assert_allclose(
        (trained - 0.3) ** 2, simulate(problem, rule, 0.05, [60])[0], rtol=1e-9
    )
    assert within(0.75 * (trained - 0.3) ** 2, PAIR.expected(rule, 0.05, [60]).loss[0])


def test_noise_depends_on_seed_user_and_step_alone() -> None:
    problem, x = paper(), torch.zeros(1, dtype=torch.float64)
    asked = {"1": 1.0}
    first = problem.engine(seed=1).gradients(x, 3, asked)
    late = problem.engine(seed=1)
    late.gradients(x, 9, asked)
    again = late.gradients(x, 3, asked)
    other = problem.engine(seed=2).gradients(x, 3, asked)
    assert first.peers is not None
    assert again.peers is not None
    assert torch.equal(first.own, again.own)
    assert torch.equal(first.peers, again.peers)
    assert not torch.equal(first.own, other.own)
    # g_0 = x − 1 + n_0, g_1 = 2(x − 5) + n_1
    assert not torch.equal(first.own + 1, first.peers / 2 + 5)


def test_a_drifting_engine_can_go_back() -> None:
    problem = NoisyQuadratic(Quadratic(1, 0, 0), drift=1.0)
    engine = problem.engine(seed=3)
    forward = [engine.optimum(t)[0] for t in range(6)]
    assert [engine.optimum(t)[0] for t in (4, 2, 5)] == [forward[4], forward[2], forward[5]]


def test_gradients_of_users_without_noise() -> None:
    problem = NoisyQuadratic(Quadratic(1, 0, noise=0), [Quadratic(2, 5, noise=0)] * 2)
    g = problem.engine().gradients(torch.ones(1), step=0, weights={"1": 0.5, "2": 0.5})
    assert g.peers is not None
    assert (g.own.tolist(), g.peers.tolist()) == ([1.0], [-8.0])
