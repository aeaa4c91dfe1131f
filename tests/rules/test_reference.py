"""Every rule, and training with it, against plain loops over Python's floats."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import coterie

Vector = list[float]
Knob = float | Callable[[int], float]

ALPHAS: dict[str, Knob] = {"constant": 0.7, "scheduled": lambda t: 0.9 / (1 + 0.1 * t)}
BETAS: dict[str, Knob] = {"constant": 0.2, "scheduled": lambda t: 1 / (t + 2)}
TAU = {"peer 1": 0.5, "peer 2": 0.2, "peer 3": 0.3}
NAMES = tuple(TAU)


def at(knob: Knob, step: int) -> float:
    return knob(step) if callable(knob) else knob


@dataclass
class Scalar:
    """The family of rules, one number after the other."""

    alpha: Knob = 0.0
    beta: Knob = 0.0
    correction: float = 0.0
    start: str = "first"
    warm_up: bool = True
    c: Vector = field(default_factory=list)
    seen: int = 0

    def __call__(
        self, step: int, own: Vector, rows: Sequence[Vector], tau: Sequence[float]
    ) -> Vector:
        """Return the direction; the weight missing in `tau` is that of peers who did not answer."""
        present = math.fsum(tau)
        self.c = self.c or [0.0] * len(own)
        if not present:
            return list(own)
        alpha, beta = at(self.alpha, step), at(self.beta, step)
        if self.warm_up:
            beta = max(beta, 1 / (self.seen + 1))
        direction = []
        for j, mine in enumerate(own):
            average = (
                math.fsum(t * row[j] for t, row in zip(tau, rows, strict=True))
                + (1 - present) * mine
            )
            bias = (
                math.fsum(t * (row[j] - mine) for t, row in zip(tau, rows, strict=True)) / present
            )
            if self.start == "first" and not self.seen:
                self.c[j] = bias
            direction.append(
                (1 - alpha) * mine + alpha * (average - self.correction * present * self.c[j])
            )
            self.c[j] = self.c[j] + beta * present * (bias - self.c[j])
        self.seen += 1
        return direction


def assert_same(direction: Tensor, wanted: Sequence[float]) -> None:
    torch.testing.assert_close(
        direction, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-13
    )


def both_rules() -> list[Any]:
    """Return each rule of the paper with its scalar twin, over the knobs."""
    cases = []
    for (a, alpha), (t, tau) in itertools.product(
        ALPHAS.items(), {"equal": None, "given": TAU}.items()
    ):
        cases.append(
            pytest.param(
                coterie.WeightedAveraging(alpha, tau), Scalar(alpha), id=f"averaging-{a}-tau {t}"
            )
        )
        for (b, beta), w, start, warm_up in itertools.product(
            BETAS.items(), (0.0, 0.5, 1.0), ("first", "zero"), (True, False)
        ):
            cases.append(
                pytest.param(
                    coterie.BiasCorrection(
                        alpha,
                        beta,
                        tau,
                        correction=w,
                        start=start,  # type: ignore[arg-type]  # the literal is lost in the loop
                        warm_up=warm_up,
                    ),
                    Scalar(alpha, beta, w, start, warm_up),
                    id=f"correction-{a}-tau {t}-beta {b}-w {w}-{start}-{'warm' if warm_up else 'exact'}",
                )
            )
    return cases


def weights_of(rule: Any, names: Sequence[str]) -> list[float]:
    return [TAU[name] if rule.tau else 1 / len(NAMES) for name in names]


@pytest.mark.parametrize(("rule", "scalar"), both_rules())
@pytest.mark.parametrize("by", ["peers", "rows"])
def test_directions(rule: Any, scalar: Scalar, by: str) -> None:
    scalar = copy.deepcopy(scalar)
    rng = np.random.default_rng(5)
    state = rule.init(torch.zeros(4, dtype=torch.float64))
    for step in range(8):
        own, rows = rng.normal(size=4), rng.normal(1.0, size=(3, 4))
        tau = weights_of(rule, NAMES)
        if by == "rows":
            g = coterie.Gradients(own=torch.tensor(own), rows=torch.tensor(rows), names=NAMES)
        else:
            g = coterie.Gradients(own=torch.tensor(own), peers=torch.tensor(np.array(tau) @ rows))
        direction, state = rule(g, state)
        assert_same(direction, scalar(step, own.tolist(), rows.tolist(), tau))
        if "c" in state:
            assert_same(state["c"], scalar.c)
        assert state["step"] == step + 1
        assert state["weight"] == pytest.approx(at(rule.alpha, step), rel=1e-12)


@pytest.mark.parametrize(("rule", "scalar"), both_rules())
def test_directions_with_peers_left_out(rule: Any, scalar: Scalar) -> None:
    scalar = copy.deepcopy(scalar)
    rng = np.random.default_rng(6)
    state = rule.init(torch.zeros(4, dtype=torch.float64))
    who_answers = [
        "",
        "peer 2",
        "peer 1 peer 3",
        "",
        "peer 1 peer 2 peer 3",
        "peer 3",
        "peer 1 peer 2 peer 3",
    ]
    for step, answered in enumerate(who_answers):
        names = [name for name in NAMES if name in answered]
        own, rows, tau = (
            rng.normal(size=4),
            rng.normal(1.0, size=(len(names), 4)),
            weights_of(rule, names),
        )
        g = coterie.Gradients(
            own=torch.tensor(own),
            rows=torch.tensor(rows),
            names=tuple(names),
            answered=math.fsum(tau),
        )
        direction, state = rule(g, state)
        assert_same(direction, scalar(step, own.tolist(), rows.tolist(), tau))
        if "c" in state:
            assert_same(state["c"], scalar.c)
            assert state["seen"] == scalar.seen
        assert state["weight"] == pytest.approx(at(rule.alpha, step) * sum(tau), rel=1e-12)


def test_alone_and_oracle() -> None:
    own, peers, x = (
        torch.tensor(v, dtype=torch.float64) for v in ([1.0, -2.0], [4.0, 0.5], [3.0, 5.0])
    )
    rule = coterie.Alone()
    assert torch.equal(rule(coterie.Gradients(own=own, peers=peers), rule.init(x))[0], own)
    oracle = coterie.OracleCorrection(alpha=0.3, bias=lambda x: 2 * x)
    direction, state = oracle(coterie.Gradients(own=own, peers=peers, x=x), oracle.init(x))
    assert_same(direction, [0.7 * 1.0 + 0.3 * (4.0 - 6.0), 0.7 * -2.0 + 0.3 * (0.5 - 10.0)])
    assert (state["step"], state["weight"]) == (1, 0.3)


# Training, end to end: quadratics by hand, a network by a loop of autograd over users.


class Point(nn.Module):
    """A point x, seen by an example of curvature a as √a·x: f = ½ Σ a (x − m)² is a loss of the output."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.linspace(-1, 1, size, dtype=torch.float64))

    def forward(self, root: Tensor) -> Tensor:
        return root * self.x


def half_square(output: Tensor, target: Tensor) -> Tensor:
    return 0.5 * (output - target).square().sum(1).mean()


def quadratic_users() -> list[coterie.User]:
    rng = np.random.default_rng(1)
    users = []
    for k, n in enumerate((7, 9, 5, 8)):
        root, centre = np.sqrt(rng.uniform(0.5, 2, (n, 3))), rng.normal(k, 1, (n, 3))
        users.append(
            coterie.User(
                "me" if not k else f"peer {k}", torch.tensor(root), torch.tensor(root * centre)
            )
        )
    return users


def quadratic_gradient(user: coterie.User, x: Vector, step: int) -> Vector:
    root, target = (tensor.tolist() for tensor in user.batch(4, seed=3, step=step))
    return [
        math.fsum(r[j] * (r[j] * x[j] - t[j]) for r, t in zip(root, target, strict=True))
        / len(root)
        for j in range(len(x))
    ]


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def network_users() -> list[coterie.User]:
    generator = torch.Generator().manual_seed(4)
    return [
        coterie.User(
            "me" if not k else f"peer {k}",
            torch.randn(n, 3, generator=generator, dtype=torch.float64) + 0.3 * k,
            torch.arange(n) % 3,
        )
        for k, n in enumerate((7, 9, 5, 8))
    ]


def network_gradient(user: coterie.User, x: Vector, step: int) -> Vector:
    model, done = network(), 0
    for p in model.parameters():
        p.data = torch.tensor(x[done : done + p.numel()], dtype=torch.float64).view_as(p)
        done += p.numel()
    inputs, targets = user.batch(4, seed=3, step=step)
    total = torch.zeros((), dtype=torch.float64)
    for row, target in zip(
        model(inputs), targets.tolist(), strict=True
    ):  # cross-entropy, written out
        total = total + torch.log(torch.exp(row).sum()) - row[target]
    gradients = torch.autograd.grad(total / len(inputs), list(model.parameters()))
    return [value for gradient in gradients for value in gradient.flatten().tolist()]


class ScalarSGD:
    """SGD with momentum and weight decay on Python's floats."""

    def __init__(self, lr: float, momentum: float = 0.0, decay: float = 0.0) -> None:
        self.lr, self.momentum, self.decay = lr, momentum, decay
        self.v: Vector | None = None

    def __call__(self, x: Vector, direction: Vector) -> Vector:
        d = [g + self.decay * value for g, value in zip(direction, x, strict=True)]
        self.v = (
            d if self.v is None else [self.momentum * v + g for v, g in zip(self.v, d, strict=True)]
        )
        return [value - self.lr * v for value, v in zip(x, self.v, strict=True)]


class ScalarAdam:
    """Adam on Python's floats."""

    def __init__(self, lr: float) -> None:
        self.lr, self.t = lr, 0
        self.m: Vector = []
        self.v: Vector = []

    def __call__(self, x: Vector, direction: Vector) -> Vector:
        self.t += 1
        self.m = [
            0.9 * m + 0.1 * g for m, g in zip(self.m or [0.0] * len(x), direction, strict=True)
        ]
        self.v = [
            0.999 * v + 0.001 * g * g
            for v, g in zip(self.v or [0.0] * len(x), direction, strict=True)
        ]
        a, b = 1 - 0.9**self.t, 1 - 0.999**self.t
        return [
            value - self.lr * (m / a) / (math.sqrt(v / b) + 1e-8)
            for value, m, v in zip(x, self.m, self.v, strict=True)
        ]


OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], Callable[[], Any]]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1), lambda: ScalarSGD(0.1)),
    "momentum": (
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
        lambda: ScalarSGD(0.05, 0.9, 0.01),
    ),
    "adam": (lambda p: torch.optim.Adam(p, lr=0.05), lambda: ScalarAdam(0.05)),
}
RULES: dict[str, tuple[Any, Scalar]] = {
    "alone": (coterie.Alone(), Scalar()),
    "averaging": (coterie.WeightedAveraging(0.6), Scalar(0.6)),
    "averaging, scheduled, tau": (
        coterie.WeightedAveraging(ALPHAS["scheduled"], TAU),
        Scalar(ALPHAS["scheduled"]),
    ),
    "correction": (coterie.BiasCorrection(0.8, 0.1), Scalar(0.8, 0.1, 1.0)),
    "correction, exact": (
        coterie.BiasCorrection(0.8, 0.1, TAU, warm_up=False),
        Scalar(0.8, 0.1, 1.0, warm_up=False),
    ),
    "correction, half, scheduled, from zero": (
        coterie.BiasCorrection(
            ALPHAS["scheduled"], BETAS["scheduled"], correction=0.5, start="zero"
        ),
        Scalar(ALPHAS["scheduled"], BETAS["scheduled"], 0.5, "zero"),
    ),
}
PROBLEMS: dict[str, tuple[Any, ...]] = {
    "quadratics": (lambda: Point(3), half_square, quadratic_users, quadratic_gradient),
    "network": (network, nn.functional.cross_entropy, network_users, network_gradient),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_training(problem: str, rule: str, optimizer: str) -> None:
    make, loss, make_users, gradient = PROBLEMS[problem]
    (ours, scalar), (factory, scalar_optimizer) = copy.deepcopy(RULES[rule]), OPTIMIZERS[optimizer]
    users, update = make_users(), scalar_optimizer()
    path: list[Tensor] = []

    def note(step: coterie.Step) -> None:
        path.append(torch.cat([p.detach().flatten() for p in step.model.parameters()]))

    coterie.train(
        make(),
        loss,
        users[0],
        users[1:],
        ours,
        optimizer=factory,
        steps=10,
        batch_size=4,
        seed=3,
        hooks=[note],
    )
    x = [value for p in make().parameters() for value in p.flatten().tolist()]
    tau = [] if rule == "alone" else weights_of(ours, NAMES)
    for step, point in enumerate(path):
        own, *rows = (gradient(user, x, step) for user in users)
        x = update(x, scalar(step, own, rows[: len(tau)], tau))
        assert_same(point, x)
    assert len(path) == 10
