"""Adaptation and interpolation: closed forms on heterogeneous quadratics, and two rounds of each in plain loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy.linalg import block_diag
from scipy.optimize import minimize_scalar
from tests.support.least_squares import D, LeastSquares, balance, least_squares, weights_of
from torch import Tensor, nn

import coterie
from coterie.errors import KnobError
from coterie.gradients.simplex import simplex_minimum
from coterie.methods import (
    APFL,
    L2GD,
    Clients,
    Ditto,
    FedAvg,
    FineTuning,
    HypCluster,
    Mapper,
    Method,
    PerFedAvg,
    averaging_error,
    averaging_weights,
    data_interpolation,
)
from coterie.methods.personal.l2gd import heads_in_a_row
from coterie.recording.costs import Costs
from coterie.users.sampling import uniform

STEPS = [1, 3, 8]
PROBLEM = least_squares()
A, O = PROBLEM.curvatures, PROBLEM.optima  # noqa: E741
N = len(PROBLEM.users)
EQUAL = torch.full((N,), 1 / N, dtype=torch.float64)
EXAMPLES = torch.tensor([len(user) for user in PROBLEM.users], dtype=torch.float64)
SHARES = EXAMPLES / EXAMPLES.sum()
ONE = torch.eye(D, dtype=torch.float64)
ZERO = torch.zeros(D, dtype=torch.float64)


@dataclass(frozen=True)
class Seed:
    seed: int = 0


class ExactUsers(Clients):
    """The users of a problem, whose gradients are computed from A_k and o_k: hundreds of rounds in no time."""

    def __init__(self, problem: LeastSquares) -> None:
        self.problem, self.engine = problem, Seed()  # type: ignore[assignment]
        self.names = tuple(user.name for user in problem.users)
        self.sizes = torch.tensor([float(len(user)) for user in problem.users], dtype=torch.float64)
        self.costs = Costs(dict.fromkeys(self.names, 1))
        self.least = torch.stack([loss(problem, k, x) for k, x in enumerate(problem.optima)])

    def gradients(self, points: Tensor, step: int) -> Tensor:
        return torch.einsum("kij,kj->ki", self.problem.curvatures, points - self.problem.optima)

    def losses(self, points: Tensor, step: int) -> Tensor:
        apart = points - self.problem.optima
        return torch.einsum("ki,kij,kj->k", apart, self.problem.curvatures, apart) / 2 + self.least

    def play(self, method: Method, rounds: int, lr: float) -> Tensor:
        """Return the personal models after some rounds."""
        state = method.init(self, ZERO)
        for _ in range(rounds):
            state = method.round(self, state, lr)
        return method.models(state).expand(len(self.names), -1)


def loss(problem: LeastSquares, k: int, x: Tensor) -> Tensor:
    """Return user k's loss at x, from its examples."""
    inputs, targets = problem.users[k].batch(10**6, seed=0, step=0)
    return ((inputs @ x - targets.flatten()) ** 2).mean()


def g(k: int, x: Tensor) -> Tensor:
    """Return user k's gradient at x, from its examples."""
    inputs, targets = PROBLEM.users[k].batch(10**6, seed=0, step=0)
    return 2 * inputs.T @ (inputs @ x - targets.flatten()) / len(inputs)


def pull(curvatures: Tensor, local_steps: int, lr: float) -> Tensor:
    """Return 1 − (1 − ηA_k)^K: by how much K steps bring a point nearer to o_k."""
    kept: Tensor = torch.linalg.matrix_power(ONE - lr * curvatures, local_steps)
    return ONE - kept


def models_of(run: coterie.Run) -> Tensor:
    """Return everybody's model as a row."""
    return torch.stack([next(iter(model.parameters())).detach().flatten() for model in run.models.values()])


def same_as(run: coterie.Run, rows: list[Tensor]) -> bool:
    """Say whether everybody's model is this row, user 0's in both places."""
    return torch.allclose(models_of(run), torch.stack(rows), atol=1e-12) and torch.equal(
        models_of(run)[0], weights_of(run)
    )


EXACT = ExactUsers(PROBLEM)


def test_exact_users_are_the_users() -> None:
    engine = coterie.InProcess(
        nn.Linear(D, 1, bias=False).double(), nn.functional.mse_loss, PROBLEM.users[0], PROBLEM.users[1:]
    )
    costs = Costs(dict.fromkeys(EXACT.names, 1))
    users = Clients(engine, PROBLEM.users[0], PROBLEM.users[1:], costs)
    points = torch.randn(N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(users.gradients(points, 0), EXACT.gradients(points, 0), atol=1e-12)
    assert torch.allclose(users.losses(points, 0), EXACT.losses(points, 0), atol=1e-12)
    assert torch.allclose(users.shares, EXACT.shares)


def test_losses_move_no_running_statistics_and_drop_out_alike() -> None:
    model = nn.Sequential(nn.Linear(D, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    engine = coterie.InProcess(model, nn.functional.mse_loss, PROBLEM.users[0], PROBLEM.users[1:])
    users = Clients(engine, PROBLEM.users[0], PROBLEM.users[1:], Costs(dict.fromkeys(EXACT.names, 1)))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    points = engine.passes.parameters.vector().expand(N, -1)
    first, again = users.losses(points, 3), users.losses(points, 3)
    assert torch.equal(first, again)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize(
    "method",
    [
        APFL(3),
        Ditto(together=FedAvg(3), personal_steps=2),
        FineTuning(2, FedAvg(3)),
        HypCluster(2, 3),
        L2GD(3),
        Mapper(2),
        PerFedAvg(2),
        PerFedAvg(2, difference=0.1),
    ],
    ids=repr,
)
def test_a_round_draws_the_batches_it_counts(method: Method) -> None:
    drawn: list[int] = []

    class Listening(ExactUsers):
        def gradients(self, points: Tensor, step: int) -> Tensor:
            drawn.append(step)
            return super().gradients(points, step)

        def losses(self, points: Tensor, step: int) -> Tensor:
            drawn.append(step)
            return super().losses(points, step)

    users = Listening(PROBLEM)
    state = method.init(users, ZERO)
    for _ in range(4):
        before, drawn[:] = state["step"], []
        state = method.round(users, state, 0.1)
        assert set(drawn) == set(range(before, state["step"]))


# FedAvg with an aggregator


def test_fedavg_pools_the_moves() -> None:
    def median(rows: Tensor) -> Tensor:
        return rows.quantile(0.5, dim=0)

    x = ZERO
    for _ in range(2):
        moves = []
        for k in range(N):
            y = x
            for _ in range(3):
                y = y - 0.1 * g(k, y)
            moves.append((y - x).tolist())
        x = x + torch.from_numpy(np.median(moves, axis=0))
    run = PROBLEM.train(FedAvg(3, aggregator=median), rounds=2, lr=0.1)
    assert torch.allclose(weights_of(run), x, atol=1e-12)
    mean = PROBLEM.train(FedAvg(3, aggregator=lambda rows: rows.mean(0)), rounds=2, lr=0.1)
    assert torch.allclose(weights_of(mean), weights_of(PROBLEM.train(FedAvg(3, "equal"), rounds=2, lr=0.1)))


# Fine-tuning


@pytest.mark.parametrize("local_steps", STEPS)
def test_fine_tuning_is_fedavg_then_the_exact_path_alone(local_steps: int) -> None:
    method = FineTuning(5, FedAvg(local_steps))
    together = weights_of(PROBLEM.train(FedAvg(local_steps), rounds=5, lr=0.1))
    assert torch.equal(weights_of(PROBLEM.train(method, rounds=5, lr=0.1)), together)
    run = PROBLEM.train(method, rounds=9, lr=0.1)
    kept = ONE - pull(A, 4 * local_steps, 0.1)
    assert same_as(run, [O[k] + kept[k] @ (together - O[k]) for k in range(N)])
    assert run.record.end["costs"]["user 1"]["sent"] == 5 * D


# Per-FedAvg


def meta_curvatures(inner_lr: float, *, hessian: bool) -> Tensor:
    """Return B_k, of which the steps of Per-FedAvg are x − ηB_k(x − o_k)."""
    adapted = A @ (ONE - inner_lr * A)
    return (ONE - inner_lr * A) @ adapted if hessian else adapted


@pytest.mark.parametrize("local_steps", STEPS)
@pytest.mark.parametrize("difference", [None, 1e-2])
def test_per_fedavg_ends_at_its_fixed_point(local_steps: int, difference: float | None) -> None:
    b = meta_curvatures(0.1, hessian=difference is not None)
    meta = balance(EQUAL, pull(b, local_steps, 0.1), O)
    found = EXACT.play(PerFedAvg(local_steps, 0.1, difference), rounds=600, lr=0.1)
    assert torch.allclose(found, meta - 0.1 * EXACT.gradients(meta.expand(N, -1), 0), atol=1e-9)


def test_per_fedavg_without_hessian_products_minimises_the_meta_objective() -> None:
    """Autograd says so, of mean f_k(x − a∇f_k(x)); the first-order variant's point is another."""

    def slope(difference: float | None) -> float:
        state = PerFedAvg(1, 0.1, difference).init(EXACT, ZERO)
        for _ in range(600):
            state = PerFedAvg(1, 0.1, difference).round(EXACT, state, 0.1)
        x = state["x"].clone().requires_grad_()
        adapted = x - 0.1 * EXACT.gradients(x.expand(N, -1), 0)
        objective = torch.einsum("ki,kij,kj->", adapted - O, A, adapted - O) / (2 * N)
        return float(torch.autograd.grad(objective, x)[0].norm())

    assert slope(1e-2) < 1e-9
    assert slope(None) > 1e-3


@pytest.mark.parametrize("difference", [None, 1e-2])
def test_per_fedavg_against_a_plain_loop(difference: float | None) -> None:
    x = ZERO
    for _ in range(2):
        ends = []
        for k in range(N):
            y = x
            for _ in range(3):
                outer = g(k, y - 0.2 * g(k, y))
                product = A[k] @ outer if difference else 0.0
                y = y - 0.1 * (outer - 0.2 * product)
            ends.append(y)
        x = torch.stack(ends).mean(0)
    run = PROBLEM.train(PerFedAvg(3, 0.2, difference), rounds=2, lr=0.1)
    assert same_as(run, [x - 0.2 * g(k, x) for k in range(N)])


def test_per_fedavg_takes_a_fresh_batch_for_every_gradient() -> None:
    """One round at batches of 4: batch 0 adapts, batch 1 steps, batch 2 makes the personal model."""

    def batch_gradient(k: int, x: Tensor, step: int) -> Tensor:
        inputs, targets = PROBLEM.users[k].batch(4, seed=0, step=step)
        return 2 * inputs.T @ (inputs @ x - targets.flatten()) / len(inputs)

    moved = [ZERO - 0.1 * batch_gradient(k, ZERO - 0.2 * batch_gradient(k, ZERO, 0), 1) for k in range(N)]
    x = torch.stack(moved).mean(0)
    run = PROBLEM.train(PerFedAvg(1, 0.2), rounds=1, lr=0.1, batch_size=4)
    assert same_as(run, [x - 0.2 * batch_gradient(k, x, 2) for k in range(N)])


# Ditto


@pytest.mark.parametrize("local_steps", STEPS)
@pytest.mark.parametrize("penalty", [0.1, 2.0])
def test_ditto_ends_at_the_penalised_minimiser(local_steps: int, penalty: float) -> None:
    w = balance(SHARES, pull(A, local_steps, 0.1), O)
    method = Ditto(penalty, FedAvg(local_steps), personal_steps=local_steps)
    expected = [
        torch.linalg.solve(A[k] + penalty * ONE, A[k] @ O[k] + penalty * w) for k in range(N)
    ]  # argmin f_k(v) + (λ/2)‖v − w*‖²
    assert torch.allclose(EXACT.play(method, rounds=800, lr=0.1), torch.stack(expected), atol=1e-9)


def test_ditto_draws_fresh_batches_for_the_personal_models() -> None:
    inputs, targets = PROBLEM.users[0].batch(4, seed=0, step=2)
    own = 2 * inputs.T @ targets.flatten() / len(inputs)
    run = PROBLEM.train(Ditto(0.5, FedAvg(2)), rounds=1, lr=0.1, batch_size=4)
    assert torch.allclose(weights_of(run), 0.1 * own, atol=1e-12)


def test_ditto_against_a_plain_loop() -> None:
    w, v = ZERO, [ZERO] * N
    for _ in range(2):
        ends = []
        for k in range(N):
            y = w
            for _ in range(3):
                y = y - 0.1 * g(k, y)
            ends.append(float(SHARES[k]) * y)
            for _ in range(2):
                v[k] = v[k] - 0.1 * (g(k, v[k]) + 0.5 * (v[k] - w))
        w = torch.stack(ends).sum(0)
    assert same_as(PROBLEM.train(Ditto(0.5, FedAvg(3), 2), rounds=2, lr=0.1), v)


# APFL


@pytest.mark.parametrize("local_steps", STEPS)
@pytest.mark.parametrize("mixing", [0.3, 0.8])
def test_apfl_ends_where_its_mixture_stands_still(local_steps: int, mixing: float) -> None:
    """In a round v ← Mv + b with M = 1 − ηa²A and w_k on its way from w to o_k; K = 1: the own optimum."""
    lr, expected = 0.3, []
    w = balance(EQUAL, pull(A, local_steps, lr), O)
    for k in range(N):
        m = ONE - lr * mixing**2 * A[k]
        b = ZERO
        for j in range(local_steps):
            on_the_way = O[k] + torch.linalg.matrix_power(ONE - lr * A[k], j) @ (w - O[k])
            b = m @ b - lr * mixing * A[k] @ ((1 - mixing) * on_the_way - O[k])
        v = torch.linalg.solve(ONE - torch.linalg.matrix_power(m, local_steps), b)
        expected.append(mixing * v + (1 - mixing) * w)
    found = EXACT.play(APFL(local_steps, mixing, learned=False), rounds=5000 // local_steps, lr=lr)
    assert torch.allclose(found, torch.stack(expected), atol=1e-9)
    assert torch.allclose(found, O, atol=1e-9) == (local_steps == 1)


def test_apfl_with_learned_mixing_ends_at_the_own_optimum_too() -> None:
    assert torch.allclose(EXACT.play(APFL(1), rounds=4000, lr=0.2), O, atol=1e-9)


@pytest.mark.parametrize("learned", [False, True])
def test_apfl_against_a_plain_loop(learned: bool) -> None:
    w, v, a = ZERO, [ZERO] * N, [0.4] * N
    seen = []
    for _ in range(3):
        ends = []
        for k in range(N):
            y = w
            for j in range(2):
                mixed, difference = g(k, a[k] * v[k] + (1 - a[k]) * y), v[k] - y
                v[k], y = v[k] - 0.3 * a[k] * mixed, y - 0.3 * g(k, y)
                if learned and j == 0:
                    a[k] = min(1.0, max(0.0, a[k] - 0.3 * float(difference @ mixed)))
            ends.append(y)
        w = torch.stack(ends).mean(0)
        seen += a
    run = PROBLEM.train(APFL(2, 0.4, learned), rounds=3, lr=0.3)
    assert same_as(run, [a[k] * v[k] + (1 - a[k]) * w for k in range(N)])
    assert (0.0 in seen or 1.0 in seen) == learned  # the clamp is met


# L2GD


def penalised(penalty: float) -> Tensor:
    """Return the minimiser of Σ f_k(x_k) + (λ/2)‖x_k − mean x‖², by one linear system in all x_k."""
    matrix = penalty * np.kron(np.eye(N) - 1 / N, np.eye(D)) + block_diag(*A.numpy())
    found = np.linalg.solve(matrix, (A @ O.unsqueeze(2)).flatten().numpy())
    return torch.from_numpy(found).reshape(N, D)


@pytest.mark.parametrize("local_steps", STEPS)
@pytest.mark.parametrize(("penalty", "probability"), [(1.0, 0.3), (0.3, 0.7)])
def test_l2gd_is_its_penalised_solution_on_average(local_steps: int, penalty: float, probability: float) -> None:
    """Affine steps that are unbiased keep the mean over time exact; a round ends after an own step."""
    lr, method = 0.05, L2GD(local_steps, penalty, probability)
    state, rows = method.init(EXACT, ZERO), []
    for _ in range(8000 // local_steps):
        state = method.round(EXACT, state, lr)
        rows.append(state["x"])
    path = torch.stack(rows)[len(rows) // 8 :]
    batches = torch.stack([part.mean(0) for part in path.chunk(20)])
    error = batches.std(0) / len(batches) ** 0.5
    solution = penalised(penalty)
    after_own_step = solution - lr / (1 - probability) * EXACT.gradients(solution, 0)
    assert ((batches.mean(0) - after_own_step).abs() < 4 * error).all()
    assert error.max() < 0.1 * (solution - O).abs().max()


def test_l2gd_against_a_plain_loop_of_coins() -> None:
    x, p, lr, penalty, exchanges = [ZERO] * N, 0.6, 0.1, 2.0, 0
    for step in range(6):
        left, exchanged = 1 - uniform(0, "coin", step), False
        while left <= p:  # heads
            left /= p
            mean = torch.stack(x).mean(0)
            x = [row - lr * penalty / p * (row - mean) for row in x]
            exchanged = True
        exchanges += exchanged
        x = [row - lr / (1 - p) * g(k, row) for k, row in enumerate(x)]
    run = PROBLEM.train(L2GD(3, penalty, p), rounds=2, lr=lr)
    assert same_as(run, x)
    assert 0 < exchanges < 6
    assert run.record.end["costs"]["user 1"]["sent"] == D * exchanges
    assert torch.equal(models_of(run), models_of(PROBLEM.train(L2GD(1, penalty, p), rounds=6, lr=lr)))


def test_heads_in_a_row_are_geometric() -> None:
    found = np.bincount([heads_in_a_row(0.6, 0, step) for step in range(20000)], minlength=6) / 20000
    expected = 0.4 * 0.6 ** np.arange(6)
    assert (abs(found[:6] - expected) < 4 * np.sqrt(expected / 20000)).all()


def test_l2gd_never_pulls_beyond_the_mean() -> None:
    found = EXACT.play(L2GD(1, penalty=1e9, probability=0.99), rounds=300, lr=0.001)
    assert (found - found.mean(0)).abs().max() < 1  # one own step apart at most: heads nearly always


# MAPPER


@pytest.mark.parametrize("local_steps", STEPS)
def test_mapper_ends_at_the_pooled_minimiser_or_at_the_own_optima(local_steps: int) -> None:
    pooled = EXACT.play(Mapper(local_steps, (0.0,)), rounds=200, lr=0.3)
    assert torch.allclose(pooled, PROBLEM.minimiser(SHARES).expand(N, -1), atol=1e-9)
    own = EXACT.play(Mapper(local_steps, (0.5, 0.9)), rounds=1000 // local_steps, lr=0.3)
    assert torch.allclose(own, O, atol=1e-9)


def test_mapper_against_a_plain_loop() -> None:
    w, v, a, chosen = ZERO, [ZERO] * N, [0.0] * N, set()
    for _ in range(2):
        slope = ZERO
        for k in range(N):
            tried: list[tuple[float, float, Tensor]] = []
            for mixing in (0.3, 0.6, 0.9):
                own = v[k]
                for _ in range(2):
                    own = own - 0.6 * mixing * g(k, mixing * own + (1 - mixing) * w)
                tried.append((float(loss(PROBLEM, k, mixing * own + (1 - mixing) * w)), mixing, own))
            _, a[k], v[k] = min(tried, key=lambda found: found[0])
            slope = slope + SHARES[k] * (1 - a[k]) * g(k, a[k] * v[k] + (1 - a[k]) * w)
        w = w - 0.6 * slope
        chosen |= set(a)
    run = PROBLEM.train(Mapper(2, (0.3, 0.6, 0.9)), rounds=2, lr=0.6)
    assert same_as(run, [a[k] * v[k] + (1 - a[k]) * w for k in range(N)])
    assert len(chosen) > 1  # else the choice is not tested


# HypCluster


def planted(signs: tuple[int, ...]) -> LeastSquares:
    """Return users of clusters: those of a sign want nearly the same, of the other sign the opposite."""
    random, users, optima = torch.Generator().manual_seed(5), [], []
    problem = least_squares((8, 20, 12, 15, 9), seed=2)
    for user, sign in zip(problem.users, signs, strict=True):
        inputs, _ = user.batch(10**6, seed=0, step=0)
        truth = sign * torch.ones(D, 1).double() + 0.2 * torch.randn(D, 1, generator=random).double()
        targets = inputs @ truth + 0.1 * torch.randn(len(inputs), 1, generator=random).double()
        users.append(coterie.User(user.name, inputs, targets))
        optima.append(torch.linalg.lstsq(inputs, targets).solution.flatten())
    return LeastSquares(users, problem.curvatures, torch.stack(optima))


@pytest.mark.parametrize("local_steps", STEPS)
@pytest.mark.parametrize("signs", [(1, -1, 1, -1, -1), (-1, 1, 1, 1, 1)])
def test_hyp_cluster_recovers_planted_clusters(local_steps: int, signs: tuple[int, ...]) -> None:
    problem, which = planted(signs), torch.tensor(signs)
    users = ExactUsers(problem)
    found = users.play(HypCluster(2, local_steps), rounds=2400 // local_steps, lr=0.1)
    for sign in (-1, 1):
        mine = which == sign
        shares = users.sizes[mine] / users.sizes[mine].sum()
        point = balance(shares, pull(problem.curvatures[mine], local_steps, 0.1), problem.optima[mine])
        assert torch.allclose(found[mine], point.expand(int(mine.sum()), -1), atol=1e-9)


def test_hyp_cluster_against_a_plain_loop() -> None:
    problem = planted((1, -1, 1, -1, -1))
    users = ExactUsers(problem)
    models, cluster = list(HypCluster(4, 2).init(users, ZERO)["x"]), [0] * 5
    assert torch.equal(models[0], ZERO)
    for _ in range(2):
        ends = []
        for k in range(5):
            losses = [float(loss(problem, k, model)) for model in models]
            cluster[k] = losses.index(min(losses))
            y = models[cluster[k]]
            for _ in range(2):
                y = y - 0.1 * problem.curvatures[k] @ (y - problem.optima[k])
            ends.append(y)
        for j in set(cluster):
            members = [k for k in range(5) if cluster[k] == j]
            weight = sum(len(problem.users[k]) for k in members)
            models[j] = sum((len(problem.users[k]) / weight * ends[k] for k in members), ZERO)
    run = problem.train(HypCluster(4, 2), rounds=2, lr=0.1)
    assert same_as(run, [models[j] for j in cluster])
    assert torch.allclose(run.state["x"], torch.stack(models), atol=1e-12)
    assert len(set(cluster) | {0}) < 4  # a model other than zero has nobody, and stays


def test_one_cluster_is_fedavg() -> None:
    one, fedavg = HypCluster(1, 3), FedAvg(3)
    assert torch.allclose(EXACT.play(one, 20, 0.1), EXACT.play(fedavg, 20, 0.1), atol=1e-12)


# Data interpolation


@pytest.mark.parametrize("mixing", [0.0, 0.4, 1.0])
def test_data_interpolation_minimises_the_mixture_of_own_and_pooled(mixing: float) -> None:
    me, *peers = PROBLEM.users
    model = nn.Linear(D, 1, bias=False).double()
    run = coterie.train(
        model,
        nn.functional.mse_loss,
        me,
        peers,
        data_interpolation(me, peers, mixing),
        optimizer=torch.optim.SGD,
        lr=0.3,
        steps=300,
        evaluate_every=300,
    )
    own = torch.tensor([1.0, 0, 0, 0]).double()
    assert torch.allclose(weights_of(run), PROBLEM.minimiser(mixing * own + (1 - mixing) * SHARES), atol=1e-7)


# Model averaging for means

SIZES, NOISE = (5, 3, 12, 40), 2.0


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
def test_fine_weights_are_the_minimum_of_the_exact_moments(spread: float) -> None:
    """θ̂_k − θ_0 have the covariance diag(σ²/n) + s²(1 + 1ᵀ) off user 0: a program on the simplex."""
    gram = np.diag(NOISE**2 / np.array(SIZES))
    gram[1:, 1:] += spread**2 * (1 + np.eye(len(SIZES) - 1))
    weights = averaging_weights(SIZES, NOISE, spread)
    assert weights == pytest.approx(simplex_minimum(gram), abs=1e-9)
    assert averaging_error(weights, SIZES, NOISE, spread) == pytest.approx(weights @ gram @ weights)


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
def test_coarse_weights_are_the_best_mixture_of_own_and_pooled(spread: float) -> None:
    own, pooled = np.eye(len(SIZES))[0], np.array(SIZES) / sum(SIZES)

    def error(w: float) -> float:
        return averaging_error(w * own + (1 - w) * pooled, SIZES, NOISE, spread)

    best = minimize_scalar(error, bounds=(0, 1), method="bounded", options={"xatol": 1e-10}).x
    weights = averaging_weights(SIZES, NOISE, spread, "coarse")
    assert weights == pytest.approx(best * own + (1 - best) * pooled, abs=1e-5)
    fine = averaging_error(averaging_weights(SIZES, NOISE, spread), SIZES, NOISE, spread)
    assert fine <= averaging_error(weights, SIZES, NOISE, spread) + 1e-12


def test_the_error_of_averaging_is_the_one_of_drawn_users() -> None:
    random, draws = np.random.default_rng(0), 200_000
    truths = 7 + 0.8 * random.normal(size=(draws, len(SIZES)))
    means = truths + NOISE / np.sqrt(SIZES) * random.normal(size=truths.shape)
    weights = np.array([0.5, 0.2, 0.2, 0.1])
    errors = (means @ weights - truths[:, 0]) ** 2
    assert averaging_error(weights, SIZES, NOISE, 0.8) == pytest.approx(errors.mean(), abs=4 * errors.std() / 447)


# Knobs


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: FineTuning(0), "`rounds`"),
        (lambda: FedAvg(shares="half"), "`shares`"),  # type: ignore[arg-type]
        (lambda: PerFedAvg(inner_lr=0.0), "`inner_lr`"),
        (lambda: PerFedAvg(difference=-1.0), "`difference`"),
        (lambda: Ditto(penalty=-0.1), "`penalty`"),
        (lambda: Ditto(personal_steps=0), "`personal_steps`"),
        (lambda: APFL(mixing=1.2), r"`mixing` must lie in \[0, 1\], got 1.2"),
        (lambda: L2GD(probability=1.0), "`probability`"),
        (lambda: Mapper(mixings=()), "`mixings`"),
        (lambda: Mapper(mixings=(0.5, 2.0)), "`mixings`"),
        (lambda: HypCluster(clusters=0), "`clusters`"),
        (lambda: HypCluster(spread=float("inf")), "`spread`"),
        (lambda: data_interpolation(PROBLEM.users[0], PROBLEM.users[1:], -0.1), "`mixing`"),
        (lambda: averaging_weights([3], 1.0, 1.0), "`sizes`"),
        (lambda: averaging_weights([3, 3], 0.0, 1.0), "`noise`"),
        (lambda: averaging_weights([3, 3], 1.0, 1.0, "medium"), "`grain`"),  # type: ignore[arg-type]
        (lambda: averaging_error([0.5, 0.6], [3, 3], 1.0, 1.0), "`weights`"),
    ],
)
def test_knobs_out_of_range_are_refused(make: Callable[[], object], match: str) -> None:
    with pytest.raises(KnobError, match=match):
        make()
