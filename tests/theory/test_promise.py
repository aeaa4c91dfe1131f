"""What a promise of privacy costs: noise of a known size, in the theory as in what private peers do."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from tests.support.quadratics import within
from torch import Tensor, nn
from typer.testing import CliRunner

from coterie import BiasCorrection, Rule, User, WeightedAveraging, theory, train
from coterie.cli import app
from coterie.engines import PrivatePeers
from coterie.privacy import Privacy
from coterie.theory.estimates import Estimates
from coterie.theory.quadratic import NoisyQuadratic, Quadratic

pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: the extra `privacy`")
D, ROWS, STEPS = 600, 20, [2, 4, 12]
PROBLEM = theory.Constants(smoothness=2, pl=1, initial_gap=5, noise=2.0, n_peers=10, bias_floor=0.1)


class Point(nn.Module):
    """A model that is a point, and whose output is what lies between it and an example."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(D))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.x - inputs


def half_square(output: Tensor, _: Tensor) -> Tensor:
    """Return ½‖x − z‖², the mean over examples; its gradient is x less their mean."""
    return output.square().sum(1).mean() / 2


def centred(name: str, at: float) -> User:
    return User(name, torch.full((ROWS, D), at), torch.zeros(ROWS, 1))


@pytest.fixture
def seeded_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.privacy.noise.os.urandom", np.random.default_rng(7).bytes)


@pytest.mark.usefixtures("seeded_secrets")
@pytest.mark.parametrize("rule", [WeightedAveraging(0.4), BiasCorrection(0.7, 0.1)])
def test_private_peers_move_as_exact_moments_with_their_noise_say(rule: Rule) -> None:
    """Peers of whom each step sees all rows: what is random is the noise alone, σ_k² = s²/d on each number."""
    clip, counts = 2.0 * D**0.5, {"a": 0.3, "b": 0.6}  # so little that nothing is clipped
    promises = {
        name: theory.Promise(Privacy(1e3, 1e-3, clip, noise), ROWS, D, gradients=13)
        for name, noise in counts.items()
    }
    centres = {"a": 0.5, "b": -0.3}
    engine = PrivatePeers(
        Point(),
        half_square,
        centred("me", 0.0),
        [centred(name, at) for name, at in centres.items()],
        privacy={name: promise.privacy for name, promise in promises.items()},
        batch_size=ROWS,
    )
    peers = [Quadratic(1.0, at, promises[name].noise() / D**0.5) for name, at in centres.items()]
    exact = NoisyQuadratic(Quadratic(1.0, 0.0, 0.0), peers, x0=1.0).expected(rule, 0.2, STEPS).loss
    squares, x = [], torch.ones(D)
    weights, state = rule.weights(engine.names), rule.init(x)
    for step in range(max(STEPS) + 1):
        if step in STEPS:
            squares.append(x.numpy().astype(np.float64) ** 2)
        direction, state = rule(engine.gradients(x, step, weights), state)
        x = x - 0.2 * direction
    assert within(0.5 * np.array(squares).T, np.asarray(exact))


@pytest.mark.usefixtures("seeded_secrets")
def test_auto_measures_private_peers_by_gradients_that_count_and_knows_their_noise() -> None:
    """Peers like user 0: what they add is noise, no bias, though each gradient is of all their rows."""
    spread = torch.zeros(ROWS, D)
    spread[::2] += 1.0  # user 0 has noise to save
    users = [
        User("me", spread, torch.zeros(ROWS, 1)),
        *(centred(name, 0.0) for name in ("quiet", "noisy")),
    ]
    privacy = {
        name: Privacy(1e3, 1e-3, 2.0 * D**0.5, noise)
        for name, noise in (("quiet", 1.0), ("noisy", 2.0))
    }
    made: list[PrivatePeers] = []

    def engine(*given: Any, **options: Any) -> PrivatePeers:
        made.append(PrivatePeers(*given, privacy=privacy, **options))
        return made[0]

    model = Point()
    nn.init.ones_(model.x)
    how: dict[str, Any] = {"optimizer": torch.optim.SGD, "lr": 0.1, "steps": 40, "batch_size": ROWS}
    rule = WeightedAveraging("auto")
    run = train(model, half_square, users[0], users[1:], rule, engine=engine, guard="off", **how)
    measured = Estimates.from_plain(run.record.configuration.estimates)
    noise = {name: theory.Promise(promise, ROWS, D, 1).noise() for name, promise in privacy.items()}
    for name, peer in measured.peers.items():
        assert peer.added == pytest.approx(noise[name])
        assert peer.noise.value < 0.4 * noise[name], "what is left when the noise is taken off"
        assert peer.bias_floor.value**2 < noise[name] ** 2 / 4
    assert measured.constants(40).peer_noise == pytest.approx(list(noise.values()), rel=0.2)
    tau = run.record.configuration.choice["tau"]
    assert 0 < tau.get("noisy", 0.1) < tau["quiet"]
    for private in made[0].peers.values():
        assert private.ledger.given == 40 + 2 * 8, (
            "the gradients that constants were measured by count too"
        )


def test_the_noise_is_the_least_with_which_epsilon_lasts() -> None:
    promise = theory.Promise(
        Privacy(2.0, 1e-5, 3.0), examples=100, parameters=400, gradients=50, batch_size=25
    )
    noise = Privacy(2.0, 1e-5, 3.0).noise_at(0.25, 50)
    assert promise.noise() == pytest.approx(noise * 3.0 * 20 / 25)
    more = replace(promise, gradients=500)
    assert more.noise() > promise.noise()
    assert replace(promise, examples=1000, batch_size=None).noise() < promise.noise()


def test_private_peers_are_worth_fewer_plain_ones() -> None:
    cost = theory.promise_cost(
        PROBLEM, 1000, theory.Promise(Privacy(4.0, 1e-5, 1.0, 3.0), 100, 10_000, 1000)
    )
    assert [cost.noise, cost.worth] == pytest.approx([3.0, 4 / 13])
    fewer = replace(PROBLEM, n_peers=10 * cost.worth)
    assert float(theory.plan(fewer, 1000)["wga"].speedup) == pytest.approx(
        float(cost.private.speedup)
    )
    assert cost.plain.speedup > cost.private.speedup > 1
    assert float(theory.plan(PROBLEM, 1000)["wga"].bound) == cost.plain.bound < cost.private.bound


@pytest.mark.parametrize("noise", [3.0, 30.0, 3e3])
def test_with_one_peer_fewer_it_does_not_pay(noise: float) -> None:
    problem = theory.with_added_noise(PROBLEM, noise)
    needed = theory.peers_needed(problem, 1000)
    assert needed is not None

    def speedup(n: int) -> float:
        return float(theory.plan(replace(problem, n_peers=n), 1000)["wga"].speedup)

    assert speedup(needed) >= 1.05
    assert needed == 1 or speedup(needed - 1) < 1.05


def test_best_weights_fall_with_the_noise_that_a_promise_adds() -> None:
    """Unbiased peers are weighed by 1/(σ_k² + s_k²): the noisy one less, and not nothing."""
    noise = np.hypot(1.0, [0.0, 2.0])
    peers = theory.Peers(smoothness=1, pl=1, initial_gap=1, noise=1, peer_noise=noise)
    assert theory.best_averaging(peers, 1000).tau == pytest.approx([5 / 6, 1 / 6])


class TestCommand:
    """`coterie plan --epsilon`."""

    def run(self, *more: str, **changes: Any) -> Result:
        given = {
            "n_peers": 10,
            "noise": 2,
            "bias_floor": 0.1,
            "hessian_gap": 0.1,
            "smoothness": 2,
            "pl": 1,
        }
        given |= {
            "initial_gap": 5,
            "steps": 200,
            "examples": 100,
            "parameters": 400,
            "epsilon": 4,
        } | changes
        options = [
            f"--{name.replace('_', '-')}={value}"
            for name, value in given.items()
            if value is not None
        ]
        return CliRunner().invoke(app, ["plan", *options, *more])

    def test_json_is_the_theorys(self) -> None:
        found = json.loads(self.run("--json").stdout)["promise"]
        promise = theory.Promise(Privacy(4.0, 1e-5, 1.0), 100, 400, 200)
        cost = theory.promise_cost(replace(PROBLEM, hessian_gap=0.1), 200, promise)
        assert (found["noise"], found["worth"], found["pays_from"]) == (
            cost.noise,
            cost.worth,
            cost.pays_from,
        )
        assert found["private"]["speedup"] == pytest.approx(float(cost.private.speedup))

    def test_it_says_what_the_promise_costs_and_from_when_it_pays(self) -> None:
        words = " ".join(self.run().output.split())
        assert (
            "With peers that promise ε = 4 at δ = 1e-05 for every example, clipped to norm 1"
            in words
        )
        assert "of a plain peer" in words
        assert "It pays from" in words
        assert "It does not pay yet" in " ".join(self.run(clip=300).output.split())
        assert "No number of such peers pays" in " ".join(self.run(bias_floor=90).output.split())

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"examples": None}, "--examples"),
            ({"epsilon": 0}, "`--epsilon`"),
            ({"delta": 0.5}, "`--delta`"),
        ],
    )
    def test_what_cannot_be_is_refused(self, changes: dict[str, Any], said: str) -> None:
        result = self.run(**changes)
        assert result.exit_code
        assert said in str(result.exception) + result.output
