"""Measured constants against problems whose constants are known, and the knobs that follow from them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import coterie
from coterie import theory
from coterie.choosing.gradient_squares import SKETCH, sample_gradients, squares
from coterie.choosing.measuring import Sampling, before_training, measure
from coterie.engines import Capabilities
from coterie.errors import DataError, KnobError
from coterie.gradients.parameters import Parameters
from coterie.learners.spec import Problem
from coterie.recording.traffic import Traffic
from coterie.theory.estimates import Estimates, Measured
from coterie.theory.quadratic import NoisyQuadratic, Quadratic

D = 60


def measured(problem: NoisyQuadratic, seed: int = 0) -> Estimates:
    return measure(problem.engine(seed), torch.tensor(problem.vector(problem.x0)))


def within(found: Measured, truth: float, errors: float = 4.0) -> bool:
    return abs(found.value - truth) <= errors * found.error + 1e-9


def spread(*values: float) -> list[float]:
    return list(np.resize(values, D))


PLANTED = NoisyQuadratic(
    Quadratic(2.0, spread(0.0), noise=1.0),
    [
        Quadratic(2.0, spread(0.0), noise=0.5),
        Quadratic(2.0, spread(1.0, -1.0), noise=1.0),
        Quadratic(5.0, spread(0.0), noise=2.0),
    ],
    x0=spread(3.0, 3.0),
)
"""A copy, one with a constant bias, one with another curvature. x0 is orthogonal to the shift."""


def test_constants_of_planted_quadratics() -> None:
    root = math.sqrt(D)
    for seed in range(5):
        found = measured(PLANTED, seed)
        copy, shifted, curved = found.peers.values()
        assert found.smoothness.value == pytest.approx(2.0, rel=1e-6)
        assert found.pl == pytest.approx(2.0, rel=0.05)
        assert found.loss == pytest.approx(0.5 * 2.0 * 9 * D)
        assert within(found.gradient, 2.0 * 3.0 * root)
        for one, truth in ((found.noise, 1.0), (copy.noise, 0.5), (shifted.noise, 1.0), (curved.noise, 2.0)):
            assert one.value == pytest.approx(truth * root, rel=0.25)  # √(2/(3·60)) = 11 % each
            assert one.error < 0.25 * one.value
        assert within(copy.bias_floor, 0.0)
        assert copy.bias_floor.value < 0.5 * root
        assert shifted.bias_floor.value == pytest.approx(2.0 * root, rel=0.2)
        assert [round(p.hessian_gap.value, 6) for p in (copy, shifted, curved)] == [0.0, 0.0, 3.0]
        # ∇f_3 − ∇f_0 = 3x = 1.5∇f_0: all growth, no floor
        assert curved.bias_growth.value == pytest.approx(2.25, rel=0.1)
        assert curved.bias_floor.value < 1.5 * root
        assert (copy.bias_growth.value, shifted.bias_growth.value) == pytest.approx((0.0, 0.0), abs=1e-9)


def test_errors_are_those_of_repetition() -> None:
    runs = [measured(PLANTED, seed) for seed in range(60)]
    for seen in ([r.noise for r in runs], [r.peers["2"].bias_floor for r in runs], [r.gradient for r in runs]):
        values, stated = np.array(seen).T
        assert np.sqrt(np.mean(stated**2)) == pytest.approx(values.std(ddof=1), rel=0.2)


def test_squares_are_unbiased() -> None:
    """Also where the noise is far above the bias: over many repetitions the mean of ζ² is the truth."""
    problem = NoisyQuadratic(
        Quadratic(1.0, spread(0.0), noise=4.0), [Quadratic(1.0, spread(0.5, -0.5), noise=4.0)], x0=spread(3.0, 3.0)
    )
    found = []
    for seed in range(300):
        seen = sample_gradients(problem.engine(seed), torch.full((D,), 3.0, dtype=torch.float64), 4, 0.25)
        found.append(float(squares(seen, np.ones(2), np.full(2, np.inf))["bias"][0]))
    error = np.std(found) / math.sqrt(len(found))
    assert abs(np.mean(found) - 0.25 * D) < 3.5 * error
    assert error < 0.05 * 2 * 16 * D / 4  # the noise of the mean difference, which must not be taken for bias


@pytest.mark.parametrize(("s", "r"), [(1000.0, 1.0), (1.0, 1e-3), (0.02, 50.0)])
def test_estimates_scale_as_their_dimensions(s: float, r: float) -> None:
    """f → s·f multiplies gradients by s; x → r·x divides them by r."""

    def scaled(user: Quadratic) -> Quadratic:
        curvature, optimum, noise = (np.asarray(v) for v in (user.curvature, user.optimum, user.noise))
        return Quadratic(s / r**2 * curvature, r * optimum, s / r * noise)

    other = NoisyQuadratic(scaled(PLANTED.own), [scaled(p) for p in PLANTED.peers], x0=r * np.asarray(PLANTED.x0))
    one, two = measured(PLANTED), measured(other)
    assert two.loss == pytest.approx(s * one.loss)
    assert two.smoothness.value == pytest.approx(s / r**2 * one.smoothness.value)
    assert two.pl == pytest.approx(s / r**2 * one.pl)
    assert two.noise == pytest.approx([s / r * v for v in one.noise])
    for name, peer in one.peers.items():
        assert two.peers[name].bias_floor == pytest.approx([s / r * v for v in peer.bias_floor], abs=1e-5 * s / r)
        assert two.peers[name].bias_growth.value == pytest.approx(peer.bias_growth.value)
        assert two.peers[name].hessian_gap.value == pytest.approx(
            s / r**2 * peer.hessian_gap.value, abs=1e-6 * s / r**2
        )
    mine, theirs = (theory.best_averaging(e.constants(1000), 1000) for e in (one, two))
    assert theirs.alpha == pytest.approx(mine.alpha)
    assert theirs.tau == pytest.approx(mine.tau, abs=1e-6)


# Users with examples.


def regression(name: str, n: int, truth: Tensor, seed: int, noise: float = 1.0) -> coterie.User:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, len(truth), generator=generator, dtype=torch.float64)
    targets = inputs @ truth + noise * torch.randn(n, generator=generator, dtype=torch.float64)
    return coterie.User(name, inputs, targets[:, None])


def setting(users: list[coterie.User], batch_size: int, model: nn.Module | None = None, **more: Any) -> Any:
    model = model or nn.Linear(20, 1, bias=False).double()
    problem = Problem(
        *(model, mse_loss, users[0], tuple(users[1:]), torch.optim.SGD(model.parameters(), lr=0.05)),
        batch_size=batch_size,
        **more,
    )
    return coterie.InProcess(model, mse_loss, users[0], users[1:], batch_size=batch_size), problem


TRUTH = torch.linspace(-1, 1, 20, dtype=torch.float64)


def test_noise_is_not_taken_for_bias() -> None:
    """Identical users with tiny batches, and with all of few examples: ζ is that of the users, not of the draw."""
    parts = {2: list[float](), 64: list[float]()}
    for batch_size, found in parts.items():
        for seed in range(40):
            users = [regression(f"u{k}", 24 if k == 0 else 48, TRUTH, 10 * seed + k) for k in range(3)]
            engine, problem = setting(users, batch_size)
            with torch.no_grad():
                problem.model.weight.zero_()
            got = before_training(engine, problem)
            noise = got.noise.value**2 + got.peers["u1"].noise.value ** 2
            found += [peer.bias_floor.value**2 / noise for peer in got.peers.values()]
    # At size 2 one batch has 24 times the noise of all 48 examples: ζ² is a small part of it.
    assert np.mean(parts[2]) < 0.1
    # At 64 every batch is all there is, and the difference of two samples of 24 and 48 would be all "bias": 1.
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
        found = [
            measure(
                coterie.InProcess(engine.passes.model, mse_loss, users[0], users[1:], batch_size=size, seed=seed),
                x,
                own=drawn,
                peers={"u1": drawn, "u2": drawn},
            ).noise.value
            ** 2
            for seed in range(25)
        ]
        assert np.mean(found) * size == pytest.approx(variance, rel=0.15)


def test_examples_seen_again_are_not_fresh() -> None:
    users = [regression("me", 30, TRUTH, 0), regression("a", 3000, TRUTH, 1)]
    engine, problem = setting(users, 32)
    found = before_training(engine, problem)
    assert (found.share, found.peers["a"].share) == (1.0, 32 / 3000)
    short, long = found.constants(1), found.constants(1000)
    assert short.noise == found.noise.value
    assert long.noise == pytest.approx(found.noise.value * math.sqrt(1000))
    assert long.peer_noise[0] == pytest.approx(found.peers["a"].noise.value * math.sqrt(1000 * 32 / 3000))  # type: ignore[index]


def test_long_gradients_are_sketched_within_their_error() -> None:
    d = 3 * SKETCH
    problem = NoisyQuadratic(
        Quadratic(2.0, np.zeros(d), noise=1.0), [Quadratic(3.0, np.resize([1.0, -1.0], d), noise=1.0)], x0=3.0
    )
    found = measured(problem)
    root = math.sqrt(d)
    assert found.smoothness.value == pytest.approx(2.0, rel=0.02)
    assert found.peers["1"].hessian_gap.value == pytest.approx(1.0, rel=0.02)
    assert found.noise.value == pytest.approx(root, rel=0.02)
    total = found.peers["1"].bias_floor.value ** 2 + found.peers["1"].bias_growth.value * found.gradient.value**2
    assert math.sqrt(total) == pytest.approx(root * math.sqrt(3.0**2 + 3.0**2), rel=0.03)


def test_peers_that_cannot_be_measured_are_left_out() -> None:
    users = [regression("me", 20, TRUTH, 0), regression("a", 20, TRUTH, 1)]
    broken = coterie.User("broken", torch.full((5, 20), torch.inf, dtype=torch.float64), torch.zeros(5, 1).double())
    found = before_training(*setting([*users, broken], 8))
    assert list(found.peers) == ["a"]
    assert found.left_out == {"broken": "not finite"}
    with pytest.raises(DataError, match="no peer's gradient can be used"):
        before_training(*setting([users[0], broken], 8))
    with pytest.raises(DataError, match="at least 3, got 2"):
        measure(PLANTED.engine(), torch.zeros(D), batches=2)
    quiet = NoisyQuadratic(Quadratic(1, [0.0], noise=0), [Quadratic(1, 0, noise=0)])
    with pytest.raises(DataError, match="gradient is zero at the start"):
        measure(quiet.engine(), torch.zeros(1))


def test_plain_data_and_back() -> None:
    found = measured(PLANTED)
    plain = found.to_plain()
    assert json.loads(json.dumps(plain)) == plain
    assert Estimates.from_plain(plain) == found


# In training.


class Watched:
    """Counts what an engine is asked for."""

    capabilities = Capabilities()

    def __init__(self, engine: Any) -> None:
        self.engine, self.asked = engine, list[tuple[int, int, bool]]()
        self.names = engine.names

    def gradients(self, x: Tensor, step: int, weights: Any, rows: bool = False) -> coterie.Gradients:
        self.asked.append((step, len(weights), rows))
        g: coterie.Gradients = self.engine.gradients(x, step, weights, rows)
        return g

    def describe(self) -> dict[str, Any]:
        return {}

    def traffic(self) -> dict[str, Traffic]:
        return {}

    def close(self) -> None:
        pass


def test_measuring_takes_eight_passes_and_one_own_gradient() -> None:
    watched = Watched(PLANTED.engine())
    measure(watched, torch.ones(D))
    assert watched.asked == [(4, 0, False), *((t, 3, True) for t in range(4)), *((t, 3, True) for t in range(4))]


def users_with_validation() -> list[coterie.User]:
    users = [regression(f"u{k}", 30, TRUTH, k) for k in range(4)]
    inputs = torch.randn(12, 20, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    held_out = (inputs, (inputs @ TRUTH)[:, None])
    mine = users[0].examples.take(torch.arange(30))
    return [coterie.User("u0", *mine, validation=held_out), *users[1:]]


@pytest.mark.parametrize("between", [[], [nn.BatchNorm1d(6)], [nn.Dropout(0.4)]])
def test_a_measured_run_has_the_bits_of_one_that_is_not(
    between: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    users = users_with_validation()

    def trained() -> coterie.Run:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(20, 6), *between, nn.Linear(6, 1)).double()
        return coterie.train(
            model, mse_loss, users[0], users[1:], coterie.BiasCorrection(0.6, 0.1), lr=0.01, steps=12
        )

    run = trained()
    assert set(run.record.configuration.estimates["peers"]) == {"u1", "u2", "u3"}
    monkeypatch.setattr("coterie.training.train._measured", lambda configuration, *_: configuration)
    plain = trained()
    assert not plain.record.configuration.estimates
    assert run.record.points == plain.record.points
    for key, value in plain.model.state_dict().items():
        assert torch.equal(run.model.state_dict()[key], value)


def test_alone_and_huge_models_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    users = users_with_validation()

    def trained(rule: Any) -> coterie.Run:
        return coterie.train(nn.Linear(20, 1).double(), mse_loss, users[0], users[1:], rule, steps=2)

    assert not trained(coterie.Alone()).record.configuration.estimates
    monkeypatch.setattr("coterie.training.train.MOST", 3 * 21 * 8 - 1)
    run = trained(coterie.WeightedAveraging(0.5))
    assert "would take 0.0 GiB" in run.record.configuration.not_measured
    assert "constants not measured: every peer's gradient" in run.summary()
    found = trained(coterie.WeightedAveraging("auto")).record.configuration  # who asks for it gets it
    assert found.estimates["peers"]


RULES = [
    coterie.WeightedAveraging("auto"),
    coterie.WeightedAveraging("auto", {"u1": 0.25, "u3": 0.75}),
    coterie.BiasCorrection("auto", "auto"),
    coterie.BiasCorrection(0.3, "auto"),
    coterie.BiasCorrection("auto", 0.2, {"u2": 1.0}),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_auto_is_the_training_with_the_knobs_it_names(rule: Any) -> None:
    users = users_with_validation()

    def trained(rule: Any) -> coterie.Run:
        torch.manual_seed(2)
        model = nn.Linear(20, 1).double()
        return coterie.train(
            model, mse_loss, users[0], users[1:], rule, optimizer=torch.optim.SGD, lr=0.02, steps=25, batch_size=8
        )

    run = trained(rule)
    configuration = run.record.configuration
    choice = configuration.choice
    assert sum(choice["tau"].values()) == pytest.approx(1.0)
    assert rule.tau is None or choice["tau"] == pytest.approx(rule.tau)
    assert choice["sentence"] in run.summary()
    knobs = {name: choice[name] for name in ("alpha", "beta") if hasattr(rule, name)}
    for name, knob in knobs.items():
        given = getattr(rule, name)
        assert 0 < knob < 1 if given == "auto" else (given == choice[name] or name == "alpha")
    if rule.alpha != "auto":
        knobs["alpha"] = rule.alpha
    fixed = trained(type(rule)(**knobs, tau=choice["tau"]))
    assert torch.equal(Parameters(run.model).vector(), Parameters(fixed.model).vector())

    found = Estimates.from_plain(configuration.estimates)
    peers = found.constants(25)
    if isinstance(rule, coterie.WeightedAveraging):
        tau = np.array([choice["tau"].get(name, 0.0) for name in found.peers])
        problem = peers.constants(tau)
        assert choice["alpha"] == pytest.approx(float(theory.best_alpha(problem, 25)))
        if rule.tau is None:
            args = {"peer_noise": peers.peer_noise, "bias_floor": peers.bias_floor}
            if not np.any(peers.bias_growth):
                assert tau == pytest.approx(theory.best_tau(problem, 0.0, 25, **args))


def test_auto_works_with_any_engine() -> None:
    """A noisy quadratic is no engine of this process; the model is its point."""
    point = nn.Linear(1, D, bias=False).double()
    with torch.no_grad():
        point.weight.fill_(3.0)
    me = coterie.User("me", torch.ones(2, 1).double(), torch.zeros(2, D).double())
    run = coterie.train(
        *(point, mse_loss, me, (), coterie.WeightedAveraging("auto")),
        engine=PLANTED.engine(),
        optimizer=torch.optim.SGD,
        lr=0.01,
        steps=400,
    )
    choice = run.record.configuration.choice
    # The shifted peer costs ζ² = 240 against a noise of 60/400; the copy's noise is half of user 0's.
    assert choice["tau"] == pytest.approx({"1": 1.0}, abs=1e-3)
    assert choice["alpha"] == pytest.approx(0.8, abs=0.06)


def test_bias_correction_leaves_out_peers_of_large_hessian_gap() -> None:
    peers = [Quadratic(c, spread(1.0, -1.0), noise=20.0) for c in (1.001, 6.0, 1.0, 0.999, 4.0, 1.0)]
    problem = NoisyQuadratic(Quadratic(1.0, spread(0.0), noise=20.0), peers, x0=spread(3.0))
    found = measured(problem)
    assert [round(peer.hessian_gap.value, 3) for peer in found.peers.values()] == [0.001, 5.0, 0.0, 0.001, 3.0, 0.0]
    for start in (None, 0.0):
        chosen = theory.best_corrected_peers(found.constants(10_000), 10_000, initial_error=start)
        assert chosen.tau.tolist() == [0.25, 0.0, 0.25, 0.25, 0.0, 0.25]
        assert chosen.knobs.alpha == pytest.approx(0.8, abs=0.08)  # N/(N + 1) of four
    # It is so because the bound says so: at the same alpha no other set of peers of smallest gap does better.
    constants = found.constants(10_000)
    order = np.argsort([peer.hessian_gap.value for peer in found.peers.values()])
    bounds = []
    for n in range(1, 7):
        tau = np.zeros(6)
        tau[order[:n]] = 1 / n
        bounds.append(float(theory.best_correction(constants.constants(tau), 10_000, 0.85).bound))
    assert int(np.argmin(bounds)) == 3
    # And with every peer's bias drifting alike, all are kept.
    alike = NoisyQuadratic(problem.own, [Quadratic(1.5, spread(1.0, -1.0), noise=20.0)] * 6, x0=spread(3.0))
    kept = theory.best_corrected_peers(measured(alike).constants(10_000), 10_000).tau
    assert (kept > 0).all()


def test_resuming_measures_and_chooses_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users = users_with_validation()

    def trained(rule: Any, folder: str | None, **more: Any) -> coterie.Run:
        torch.manual_seed(2)
        out, model = folder and tmp_path / folder, nn.Linear(20, 1).double()
        return coterie.train(model, mse_loss, users[0], users[1:], rule, steps=20, out=out, **more)

    rules = {"auto": coterie.BiasCorrection("auto", "auto"), "fixed": coterie.WeightedAveraging(0.5)}
    whole = {name: trained(rule, None) for name, rule in rules.items()}
    for name, rule in rules.items():
        trained(rule, name, checkpoint_every=5, callbacks=[lambda step: step.step == 8])

    def refuse(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr("coterie.training.train.before_training", refuse)
    monkeypatch.setattr("coterie.choosing.auto.before_training", refuse)
    for name, rule in rules.items():
        run = trained(rule, name, resume=True)
        assert run.record.configuration.estimates == whole[name].record.configuration.estimates
        assert run.record.configuration.choice == whole[name].record.configuration.choice
        assert torch.equal(Parameters(run.model).vector(), Parameters(whole[name].model).vector())


def test_the_page_of_a_run(tmp_path: Path) -> None:
    users = users_with_validation()
    model = nn.Linear(20, 1).double()
    for rule in (coterie.WeightedAveraging("auto"), coterie.AdaptiveAveraging(budget=8), coterie.Alone()):
        run = coterie.train(model, mse_loss, users[0], users[1:], rule, steps=20, guard="held-out")
        page = run.report(tmp_path / "report.html").read_text(encoding="utf-8")
        assert "<svg" in page
        assert ("Hessian gap δ_k" in page) == (not isinstance(rule, coterie.Alone))
        assert ("What was compared" in page) == isinstance(rule, coterie.AdaptiveAveraging)
        for line in run.summary().splitlines():
            assert line.replace("'", "&#39;") in page


def test_wrong_uses_are_named() -> None:
    with pytest.raises(KnobError, match=r"`alpha` must lie in .0, 1., got 'automatic'"):
        coterie.WeightedAveraging("automatic")  # type: ignore[arg-type]
    with pytest.raises(KnobError, match=r"`correction` must lie in .0, 1., got 'auto'"):
        coterie.BiasCorrection(0.5, 0.5, correction="auto")  # type: ignore[arg-type]
    rule = coterie.WeightedAveraging("auto")
    with pytest.raises(KnobError, match=r"`alpha` is 'auto', which `coterie\.train` sets before the first step"):
        rule(coterie.Gradients(own=torch.zeros(1), peers=torch.zeros(1)), rule.init(torch.zeros(1)))
    with pytest.raises(KnobError, match="`beta` is 'auto'"):
        PLANTED.stationary(coterie.BiasCorrection(0.5, "auto"), lr=0.1)
