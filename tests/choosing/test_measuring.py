"""Measured constants against problems whose constants are known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.planted import PLANTED, D, measured, within
from tests.support.regressions import TRUTH, regression
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import coterie
from coterie import theory
from coterie.choosing.measuring import Sampling, before_training, measure
from coterie.engines import Capabilities
from coterie.errors import DataError
from coterie.learners.spec import RunSpec
from coterie.recording.costs import Traffic
from coterie.theory.quadratic import NoisyQuadratic, Quadratic


def test_constants_of_planted_quadratics() -> None:
    root = math.sqrt(D)
    for seed in range(5):
        estimates = measured(PLANTED, seed)
        copy, shifted, curved = estimates.peers.values()
        assert estimates.smoothness.value == pytest.approx(2.0, rel=1e-6)
        assert estimates.pl == pytest.approx(2.0, rel=0.05)
        assert estimates.loss == pytest.approx(0.5 * 2.0 * 9 * D)
        assert within(estimates.gradient, 2.0 * 3.0 * root)
        for one, truth in (
            (estimates.noise, 1.0),
            (copy.noise, 0.5),
            (shifted.noise, 1.0),
            (curved.noise, 2.0),
        ):
            assert one.value == pytest.approx(truth * root, rel=0.25)  # √(2/(3·60)) = 11 % each
            assert one.error < 0.25 * one.value
        assert within(copy.bias_floor, 0.0)
        assert copy.bias_floor.value < 0.5 * root
        assert shifted.bias_floor.value == pytest.approx(2.0 * root, rel=0.2)
        assert [round(p.hessian_gap.value, 6) for p in (copy, shifted, curved)] == [0.0, 0.0, 3.0]
        # ∇f_3 − ∇f_0 = 3x = 1.5∇f_0: all growth, no floor
        assert curved.bias_growth.value == pytest.approx(2.25, rel=0.1)
        assert curved.bias_floor.value < 1.5 * root
        assert (copy.bias_growth.value, shifted.bias_growth.value) == pytest.approx(
            (0.0, 0.0), abs=1e-9
        )


def test_errors_are_those_of_repetition() -> None:
    """And a little more, since two of them are to cover nineteen of twenty with eight batches."""
    runs = [measured(PLANTED, seed) for seed in range(40)]
    for seen in (
        [r.noise for r in runs],
        [r.peers["2"].bias_floor for r in runs],
        [r.gradient for r in runs],
    ):
        values, stated = np.array(seen).T
        assert 0.9 < np.sqrt(np.mean(stated**2)) / values.std(ddof=1) < 1.6


@pytest.mark.parametrize(("s", "r"), [(1000.0, 1.0), (1.0, 1e-3), (0.02, 50.0)])
def test_estimates_scale_as_their_dimensions(s: float, r: float) -> None:
    """f → s·f multiplies gradients by s; x → r·x divides them by r."""

    def scaled(user: Quadratic) -> Quadratic:
        curvature, optimum, noise = (
            np.asarray(v) for v in (user.curvature, user.optimum, user.noise)
        )
        return Quadratic(s / r**2 * curvature, r * optimum, s / r * noise)

    other = NoisyQuadratic(
        scaled(PLANTED.own), [scaled(p) for p in PLANTED.peers], x0=r * np.asarray(PLANTED.x0)
    )
    one, two = measured(PLANTED), measured(other)
    assert two.loss == pytest.approx(s * one.loss)
    assert two.smoothness.value == pytest.approx(s / r**2 * one.smoothness.value)
    assert two.pl == pytest.approx(s / r**2 * one.pl)
    assert two.noise == pytest.approx([s / r * v for v in one.noise])
    for name, peer in one.peers.items():
        assert two.peers[name].bias_floor == pytest.approx(
            [s / r * v for v in peer.bias_floor], abs=1e-5 * s / r
        )
        assert two.peers[name].bias_growth.value == pytest.approx(peer.bias_growth.value)
        assert two.peers[name].hessian_gap.value == pytest.approx(
            s / r**2 * peer.hessian_gap.value, abs=1e-6 * s / r**2
        )
    mine, theirs = (theory.best_averaging(e.constants(1000), 1000) for e in (one, two))
    assert theirs.alpha == pytest.approx(mine.alpha)
    assert theirs.tau == pytest.approx(mine.tau, abs=1e-6)


def setting(
    users: list[coterie.User], batch_size: int, model: nn.Module | None = None, **more: Any
) -> Any:
    model = model or nn.Linear(20, 1, bias=False).double()
    problem = RunSpec(
        *(model, mse_loss, users[0], users[1:]),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        batch_size=batch_size,
        **more,
    )
    return coterie.InProcess(model, mse_loss, users[0], users[1:], batch_size=batch_size), problem


def test_noise_is_not_taken_for_bias() -> None:
    """Identical users with tiny batches, and with all of few examples: ζ is that of the users, not of the draw."""
    parts = {2: list[float](), 64: list[float]()}
    for batch_size, shares in parts.items():
        for seed in range(25):
            users = [
                regression(f"u{k}", 24 if k == 0 else 48, TRUTH, 10 * seed + k) for k in range(3)
            ]
            engine, problem = setting(users, batch_size)
            with torch.no_grad():
                problem.model.weight.zero_()
            got = before_training(engine, problem)
            noise = got.noise.value**2 + got.peers["u1"].noise.value ** 2
            shares += [peer.bias_floor.value**2 / noise for peer in got.peers.values()]
    # At size 2 one batch has 24 times the noise of all 48 examples: ζ² is a small part of it.
    assert np.mean(parts[2]) < 0.1
    # At 64 every batch is all there is, and the difference of two samples of 24 and 48 would be all
    # "bias": 1.
    assert np.mean(parts[64]) < 0.6


def test_noise_of_examples_is_the_same_from_any_batch() -> None:
    users = [regression(f"u{k}", 40, TRUTH, k) for k in range(3)]
    x = torch.zeros(20, dtype=torch.float64)
    inputs, targets = users[0].batch(40, seed=0, step=0)
    each = -2 * targets * inputs
    variance = float(each.var(0).sum())
    for size in (5, 10, 20):
        engine, _ = setting(users, size)
        drawn = Sampling(size, 40, in_run=size)
        noises = [
            measure(
                coterie.InProcess(
                    engine.passes.model, mse_loss, users[0], users[1:], batch_size=size, seed=seed
                ),
                x,
                own=drawn,
                peers={"u1": drawn, "u2": drawn},
            ).noise.value
            ** 2
            for seed in range(12)
        ]
        assert np.mean(noises) * size == pytest.approx(variance, rel=0.15)


def test_examples_seen_again_are_not_fresh() -> None:
    users = [regression("me", 30, TRUTH, 0), regression("a", 3000, TRUTH, 1)]
    engine, problem = setting(users, 32)
    estimates = before_training(engine, problem)
    assert (estimates.share, estimates.peers["a"].share) == (1.0, 32 / 3000)
    short, long = estimates.constants(1), estimates.constants(1000)
    assert short.noise == estimates.noise.value
    assert long.noise == pytest.approx(estimates.noise.value * math.sqrt(1000))
    expected = estimates.peers["a"].noise.value * math.sqrt(1000 * 32 / 3000)
    assert long.peer_noise[0] == pytest.approx(expected)  # type: ignore[index]


def test_peers_that_cannot_be_measured_are_left_out() -> None:
    users = [regression("me", 20, TRUTH, 0), regression("a", 20, TRUTH, 1)]
    broken = coterie.User(
        "broken", torch.full((5, 20), torch.inf, dtype=torch.float64), torch.zeros(5, 1).double()
    )
    estimates = before_training(*setting([*users, broken], 8))
    assert list(estimates.peers) == ["a"]
    assert estimates.left_out == {"broken": "not finite"}
    with pytest.raises(DataError, match="no peer's gradient can be used"):
        before_training(*setting([users[0], broken], 8))
    with pytest.raises(DataError, match="at least 3, got 2"):
        measure(PLANTED.engine(), torch.zeros(D), batches=2)
    quiet = NoisyQuadratic(Quadratic(1, [0.0], noise=0), [Quadratic(1, 0, noise=0)])
    with pytest.raises(DataError, match="gradient is zero at the start"):
        measure(quiet.engine(), torch.zeros(1))


@pytest.mark.parametrize(("n", "size"), [(30, 16), (60, 8), (200, 32)])
def test_two_standard_errors_of_what_measure_gives_cover_in_process(n: int, size: int) -> None:
    """Noise, gradient, no bias and a bias, at 0 in linear regression, where all of them are known."""
    d, repetitions, rng = 20, 100, np.random.default_rng(n)
    model = nn.Linear(d, 1, bias=False).double()
    with torch.no_grad():
        model.weight.zero_()
    covered = dict.fromkeys(("noise", "gradient", "no bias", "bias"), 0)
    for k in range(repetitions):
        users = []
        for name, optimum in (("me", 1.0), ("alike", 1.0), ("shifted", 1.5)):
            x = rng.normal(size=(n, d))
            y = x.sum(1) * optimum / math.sqrt(d) + rng.normal(size=n)
            users.append(coterie.User(name, torch.from_numpy(x), torch.from_numpy(y[:, None])))
        engine = coterie.InProcess(model, mse_loss, users[0], users[1:], batch_size=size, seed=k)
        got = measure(engine, torch.zeros(d, dtype=torch.float64))
        # E‖g‖² − ‖E g‖² of a batch, for targets of variance 2
        variance = (4 * (2 * d + 2) - 4) / size
        truths = {
            "noise": (got.noise, math.sqrt(variance)),
            "gradient": (got.gradient, 2.0),
            "no bias": (got.peers["alike"].bias_floor, 0.0),
            "bias": (got.peers["shifted"].bias_floor, 1.0),
        }
        for name, (estimate, truth) in truths.items():
            covered[name] += within(estimate, truth, errors=2.0)
    assert min(covered.values()) >= 0.88 * repetitions, covered  # 0.92 to 1.0 over 200 repetitions


class Watched:
    """Counts what an engine is asked for."""

    capabilities = Capabilities()

    def __init__(self, engine: Any) -> None:
        self.engine, self.asked = engine, list[tuple[int, int, bool]]()
        self.names = engine.names

    def gradients(
        self, x: Tensor, step: int, weights: Any, rows: bool = False
    ) -> coterie.Gradients:
        self.asked.append((step, len(weights), rows))
        g: coterie.Gradients = self.engine.gradients(x, step, weights, rows)
        return g

    def describe(self) -> dict[str, Any]:
        return {}

    def traffic(self) -> dict[str, Traffic]:
        return {}

    def close(self) -> None:
        pass


def test_measuring_takes_eight_passes_at_each_of_two_points() -> None:
    watched = Watched(PLANTED.engine())
    measure(watched, torch.ones(D))
    assert watched.asked == [(t, 3, True) for t in range(8)] * 2


def test_curvature_is_that_of_other_examples_than_chose_the_way() -> None:
    """Few examples: along a way fitted to them they would show L² = 6.1 for 4, and δ² = 3.1 for 6.25."""
    squares = []
    for seed in range(60):
        users = [
            regression(name, 30, TRUTH / TRUTH.norm(), 10 * seed + k)
            for k, name in enumerate(("me", "curved"))
        ]
        inputs, targets = users[1].examples.take(torch.arange(30))
        engine, problem = setting(
            [users[0], coterie.User("curved", 1.5 * inputs, 1.5 * targets)], 8
        )
        with torch.no_grad():
            problem.model.weight.zero_()
        estimates = before_training(engine, problem)
        squares.append(
            (estimates.smoothness.value**2, estimates.peers["curved"].hessian_gap.value ** 2)
        )
    error = np.std(squares, axis=0) / math.sqrt(len(squares))
    assert (np.abs(np.mean(squares, axis=0) - [4.0, 6.25]) < 3 * error).all()
    assert (error < [0.6, 1.3]).all()


def test_user_0s_examples_are_dealt_out_whatever_the_engine() -> None:
    """An engine elsewhere gives the peers' batches; user 0's own examples are in this process."""
    users = [regression(f"u{k}", 40, TRUTH, k) for k in range(3)]
    engine, problem = setting(users, 8)
    watched = Watched(engine)
    watched.capabilities = Capabilities(examples={user.name: 40 for user in users}, batch_size=8)
    here, there = (before_training(one, problem) for one in (engine, watched))
    assert there.noise == here.noise
    assert there.smoothness == here.smoothness
    assert there.peers["u1"].noise.value == pytest.approx(here.peers["u1"].noise.value, rel=0.3)
    assert watched.asked == [(t, 2, True) for t in range(8)] * 2
