"""Knobs that are "auto": the theory's choice for measured constants."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.planted import PLANTED, D, measured, spread
from tests.support.regressions import TRUTH, regression, users_with_validation
from torch import nn
from torch.nn.functional import mse_loss

import coterie
from coterie import theory
from coterie.choosing.auto import AutoAveraging
from coterie.choosing.measuring import measure
from coterie.errors import KnobError
from coterie.gradients.parameters import Parameters
from coterie.theory.estimates import Estimates
from coterie.theory.quadratic import NoisyQuadratic, Quadratic

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
            model,
            mse_loss,
            users[0],
            users[1:],
            rule,
            optimizer=torch.optim.SGD,
            lr=0.02,
            steps=25,
            batch_size=8,
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

    estimates = Estimates.from_plain(configuration.estimates)
    peers = estimates.constants(25)
    if isinstance(rule, coterie.WeightedAveraging):
        tau = np.array([choice["tau"].get(name, 0.0) for name in estimates.peers])
        problem = peers.constants(tau)
        cautious = estimates.constants(25, bias_errors=1).constants(tau)
        assert choice["alpha"] == pytest.approx(float(theory.best_alpha(cautious, 25)))
        assert choice["alpha"] < float(theory.best_alpha(problem, 25))
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
    # The shifted peer costs ζ² = 240 against a noise of 60/400; the copy's noise is half of user
    # 0's.
    assert choice["tau"] == pytest.approx({"1": 1.0}, abs=1e-3)
    # Twenty batches cannot show that the copy has no bias, which 400 steps would add up.
    assert 0 < choice["alpha"] < 0.4
    assert (
        "not known well enough to claim a gain" in choice["claim"] or "at least" in choice["claim"]
    )


@pytest.mark.parametrize("bias", [0.0, 0.03, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("d", [5, 200])
def test_a_bias_that_the_batches_cannot_show_does_no_harm(bias: float, d: int) -> None:
    """The exact long-run cost is not above Alone's, nor the speed claimed above the true."""
    steps, n = 3000, 5
    own = Quadratic(1, [0.0] * d, noise=d**-0.5)
    problem = NoisyQuadratic(
        own, [Quadratic(1, [bias * d**-0.5] * d, noise=d**-0.5)] * n, x0=[1.0] * d
    )
    estimates = measure(problem.engine(), torch.ones(d, dtype=torch.float64), batches=steps // 20)
    account = AutoAveraging(coterie.WeightedAveraging("auto")).account(
        Steps(steps),  # type: ignore[arg-type]
        estimates,
        None,
    )
    alpha = account["alpha"]
    true = theory.Constants(smoothness=1, pl=1, initial_gap=1, noise=1, n_peers=n, bias_floor=bias)
    cost, alone = (float(theory.averaging_cost(true, each, steps)) for each in (alpha, 0.0))
    assert cost <= 1.001 * alone
    claimed = re.search("at least ([0-9.]+) times", account["claim"])
    assert float(claimed[1] if claimed else 1) <= 1.001 * alone / cost
    if (
        d == 200 and not bias
    ):  # enough directions to tell bias from noise: some of the cost is saved
        assert cost < 0.9 * alone


@dataclass(frozen=True)
class Steps:
    """What the choice for averaging asks of a run."""

    steps: int


def test_alike_peers_are_followed_where_examples_show_it() -> None:
    """Thirty examples of user 0 and five peers with fifty: not timid, and far better than alone."""
    truth = TRUTH / TRUTH.norm()
    users = [regression(f"u{k}", 50 if k else 30, truth, k) for k in range(6)]

    def error(rule: Any) -> float:
        settings: dict[str, Any] = {
            "optimizer": torch.optim.SGD,
            "lr": 0.02,
            "steps": 400,
            "batch_size": 16,
        }
        model = nn.Linear(20, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        run = coterie.train(model, mse_loss, users[0], users[1:], rule, **settings)
        choice = run.record.configuration.choice
        assert not choice or (choice["alpha"] > 0.3 and "at least" in choice["claim"])
        return float((run.model.weight.detach()[0] - truth).square().sum())  # type: ignore[operator]

    assert error(coterie.WeightedAveraging("auto")) < 0.4 * error(coterie.Alone())


def test_bias_correction_leaves_out_peers_of_large_hessian_gap() -> None:
    peers = [
        Quadratic(c, spread(1.0, -1.0), noise=20.0) for c in (1.001, 6.0, 1.0, 0.999, 4.0, 1.0)
    ]
    problem = NoisyQuadratic(Quadratic(1.0, spread(0.0), noise=20.0), peers, x0=spread(3.0))
    estimates = measured(problem)
    assert [round(peer.hessian_gap.value, 3) for peer in estimates.peers.values()] == [
        0.001,
        5.0,
        0.0,
        0.001,
        3.0,
        0.0,
    ]
    for start in (None, 0.0):
        chosen = theory.best_corrected_peers(
            estimates.constants(10_000), 10_000, initial_error=start
        )
        assert chosen.tau.tolist() == [0.25, 0.0, 0.25, 0.25, 0.0, 0.25]
        assert chosen.knobs.alpha == pytest.approx(0.8, abs=0.08)  # N/(N + 1) of four
    # It is so because the bound says so: at the same alpha no other set of peers of smallest gap
    # does better.
    constants = estimates.constants(10_000)
    order = np.argsort([peer.hessian_gap.value for peer in estimates.peers.values()])
    bounds = []
    for n in range(1, 7):
        tau = np.zeros(6)
        tau[order[:n]] = 1 / n
        bounds.append(float(theory.best_correction(constants.constants(tau), 10_000, 0.85).bound))
    assert int(np.argmin(bounds)) == 3
    # And with every peer's bias drifting alike, all are kept.
    alike = NoisyQuadratic(
        problem.own, [Quadratic(1.5, spread(1.0, -1.0), noise=20.0)] * 6, x0=spread(3.0)
    )
    kept = theory.best_corrected_peers(measured(alike).constants(10_000), 10_000).tau
    assert (kept > 0).all()


def test_resuming_measures_and_chooses_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = users_with_validation()

    def trained(rule: Any, folder: str | None, **more: Any) -> coterie.Run:
        torch.manual_seed(2)
        out, model = folder and tmp_path / folder, nn.Linear(20, 1).double()
        return coterie.train(model, mse_loss, users[0], users[1:], rule, steps=20, out=out, **more)

    rules = {
        "auto": coterie.BiasCorrection("auto", "auto"),
        "fixed": coterie.WeightedAveraging(0.5),
    }
    whole = {name: trained(rule, None) for name, rule in rules.items()}
    for name, rule in rules.items():
        trained(rule, name, checkpoint_every=5, hooks=[lambda step: step.step == 8])

    def refuse(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr("coterie.training.algorithm.before_training", refuse)
    monkeypatch.setattr("coterie.choosing.auto.before_training", refuse)
    for name, rule in rules.items():
        run = trained(rule, name, resume=True)
        assert run.record.configuration.estimates == whole[name].record.configuration.estimates
        assert run.record.configuration.choice == whole[name].record.configuration.choice
        assert torch.equal(Parameters(run.model).vector(), Parameters(whole[name].model).vector())


def test_wrong_uses_are_named() -> None:
    with pytest.raises(KnobError, match=r"`alpha` must lie in .0, 1., got 'automatic'"):
        coterie.WeightedAveraging("automatic")  # type: ignore[arg-type]
    with pytest.raises(KnobError, match=r"`correction` must lie in .0, 1., got 'auto'"):
        coterie.BiasCorrection(0.5, 0.5, correction="auto")  # type: ignore[arg-type]
    rule = coterie.WeightedAveraging("auto")
    with pytest.raises(
        KnobError, match=r"`alpha` is 'auto', which `coterie\.train` sets before the first step"
    ):
        rule(coterie.Gradients(own=torch.zeros(1), peers=torch.zeros(1)), rule.init(torch.zeros(1)))
    with pytest.raises(KnobError, match="`beta` is 'auto'"):
        PLANTED.stationary(coterie.BiasCorrection(0.5, "auto"), lr=0.1)
