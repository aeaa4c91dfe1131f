"""SVRG, SAGA, SAG and MVR, which user 0 runs alone, against exact second moments and plain loops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from tests.support.least_squares import EYE, PROBLEM, START, D, path_of, weights_of
from torch import Tensor

from coterie.methods import MVR, SAGA, SVRG
from coterie.users.sampling import draw, random_key

OPTIMUM = PROBLEM.optima[0]
BATCH = 4
"""Half of user 0's examples: one of each of 4 pairs, so that a batch is one of 16, each as likely."""


def batches() -> list[tuple[Tensor, Tensor]]:
    """Return the curvature A_ξ and the gradient at the optimum, b_ξ, of each batch that user 0 may draw."""
    inputs, targets = PROBLEM.users[0].examples.take(torch.arange(8))
    moments = []
    for chosen in itertools.product(*((2 * i, 2 * i + 1) for i in range(BATCH))):
        a, b = inputs[list(chosen)], targets[list(chosen)].flatten()
        moments.append((2 * a.T @ a / BATCH, 2 * a.T @ (a @ OPTIMUM - b) / BATCH))
    return moments


def second_moments(maps: list[Tensor]) -> Tensor:
    """Return E[M ⊗ M], which takes E[z zᵀ] a step further for z ← M z with one of these maps, each as likely."""
    return torch.stack([torch.kron(m, m) for m in maps]).mean(0)


def rate(operator: Tensor) -> float:
    return float(torch.linalg.eigvals(operator).abs().max())


def svrg_rate(local_steps: int, lr: float) -> float:
    """Return by what E‖x − o‖² falls in a round, from the exact moments of (x − o, y − o)."""
    whole, zero = PROBLEM.curvatures[0], torch.zeros(D, D, dtype=torch.float64)
    maps = [
        torch.cat([torch.cat([EYE - lr * a, lr * (a - whole)], 1), torch.cat([zero, EYE], 1)])
        for a, _ in batches()
    ]
    again = torch.cat([torch.cat([EYE, zero], 1), torch.cat([EYE, zero], 1)])
    return rate(
        torch.linalg.matrix_power(second_moments(maps), local_steps) @ torch.kron(again, again)
    )


def saga_rate(blocks: int, lr: float, biased: bool) -> float:
    """Return by what E‖x − o‖² falls in a step, from the exact moments of (x, t_1, …, t_B) less their limits."""
    maps = []
    size = D * (1 + blocks)
    inputs, _ = PROBLEM.users[0].examples.take(torch.arange(8))
    cuts = [inputs[j::blocks] for j in range(blocks)]
    shares = [len(cut) / 8 for cut in cuts]
    for j, cut in enumerate(cuts):
        m = torch.eye(size, dtype=torch.float64)
        row = m[:D]
        fresh = 2 * cut.T @ cut / len(cut)
        scale = shares[j] if biased else blocks * shares[j]
        row[:, :D] -= lr * scale * fresh
        for i in range(blocks):
            row[:, D * (1 + i) : D * (2 + i)] -= lr * (shares[i] - scale * (i == j)) * EYE
        m[D * (1 + j) : D * (2 + j)] = 0
        m[D * (1 + j) : D * (2 + j), :D] = fresh
        maps.append(m)
    return rate(second_moments(maps))


def fitted(path: Tensor) -> float:
    """Return the slope of log ‖x − o‖² by round, between 1e-2 and 1e-20 of its start."""
    squared = (path - OPTIMUM).square().sum(1) / OPTIMUM.square().sum()
    used = ((squared < 1e-2) & (squared > 1e-20)).nonzero().flatten().double()
    logs = squared[used.long()].log()
    line = used - used.mean()
    return float((line @ logs) / (line @ line))


@pytest.mark.parametrize("local_steps", [3, 8, 20])
def test_svrg_converges_at_the_rate_of_its_exact_moments(local_steps: int) -> None:
    path = path_of(PROBLEM, SVRG(local_steps), rounds=800 // local_steps, lr=0.1, batch_size=BATCH)
    assert fitted(path) == pytest.approx(math.log(svrg_rate(local_steps, 0.1)), rel=0.03)
    assert torch.allclose(path[-1], OPTIMUM, rtol=0, atol=1e-9)


# of 3, 3 and 2 examples where 3
@pytest.mark.parametrize(("size", "blocks"), [(4, 2), (3, 3), (2, 4)])
@pytest.mark.parametrize("biased", [False, True])
def test_saga_and_sag_converge_at_the_rate_of_their_exact_moments(
    size: int, blocks: int, biased: bool
) -> None:
    path = path_of(PROBLEM, SAGA(5, biased), rounds=160, lr=0.1, batch_size=size)
    assert fitted(path) == pytest.approx(5 * math.log(saga_rate(blocks, 0.1, biased)), rel=0.04)
    assert torch.allclose(path[-1], OPTIMUM, rtol=0, atol=1e-9)


def test_sgd_with_the_same_step_does_not_get_there() -> None:
    path = path_of(PROBLEM, MVR(1, rate=1.0), rounds=800, lr=0.1, batch_size=BATCH)
    assert float((path[400:] - OPTIMUM).square().sum(1).min()) > 1e-6


def test_svrg_against_a_plain_loop() -> None:
    x = START
    for first in (0, 3):
        y, whole = x, PROBLEM.curvatures[0] @ (x - OPTIMUM)
        for step in range(first, first + 3):
            x = x - 0.1 * (
                PROBLEM.gradient(0, x, step, 3) - PROBLEM.gradient(0, y, step, 3) + whole
            )
    run = PROBLEM.train(SVRG(3), rounds=2, lr=0.1, batch_size=3)
    assert torch.allclose(weights_of(run), x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("biased", [False, True])
def test_saga_against_a_plain_loop(biased: bool) -> None:
    """Four rounds of two steps, written out."""
    inputs, targets = PROBLEM.users[0].examples.take(torch.arange(8))
    blocks = [[0, 3, 6], [1, 4, 7], [2, 5]]
    key = random_key(0, "user 0")
    x, table = START, dict[int, Tensor]()
    for step in range(8):
        j = int(draw([key], [3], 1, [step]))
        a, b = inputs[blocks[j]], targets[blocks[j]].flatten()
        fresh = 2 * a.T @ (a @ x - b) / len(a)
        total = sum(len(blocks[i]) / 8 * row for i, row in table.items()) + torch.zeros(D).double()
        change = len(blocks[j]) / 8 * (fresh - table.get(j, torch.zeros(D).double()))
        table[j] = fresh
        seen = sum(len(blocks[i]) for i in table) / 8
        x = x - 0.1 * ((total + change) / seen if biased else total + 3 * change)
    assert len(table) == 3
    run = PROBLEM.train(SAGA(2, biased), rounds=4, lr=0.1, batch_size=3)
    assert torch.allclose(weights_of(run), x, rtol=0, atol=1e-12)


def test_mvr_against_a_plain_loop() -> None:
    x, before, d = START, START, None
    for step in range(6):
        fresh, old = PROBLEM.gradient(0, x, step, 3), PROBLEM.gradient(0, before, step, 3)
        d = fresh if d is None else fresh + 0.7 * (d - old)
        x, before = x - 0.1 * d, x
    run = PROBLEM.train(MVR(3, rate=0.3), rounds=2, lr=0.1, batch_size=3)
    assert torch.allclose(weights_of(run), x, rtol=0, atol=1e-12)


def mvr_errors(a: float, lr: float) -> tuple[float, float]:
    """Return E‖d_t − ∇f(x_t)‖² and E‖x_t − o‖² in the long run, from the moments of (x, before, d, 1)."""
    maps = []
    for curvature, offset in batches():
        d = torch.cat([curvature, -(1 - a) * curvature, (1 - a) * EYE, a * offset.unsqueeze(1)], 1)
        m = torch.zeros(3 * D + 1, 3 * D + 1, dtype=torch.float64)
        m[:D], m[D : 2 * D, :D], m[2 * D : 3 * D], m[-1, -1] = -lr * d, EYE, d, 1.0
        m[:D, :D] += EYE
        maps.append(m)
    values, vectors = torch.linalg.eig(second_moments(maps))
    moments = vectors[:, int((values - 1).abs().argmin())].real.reshape(3 * D + 1, 3 * D + 1)
    moments = moments / moments[-1, -1]
    error = torch.cat([0 * EYE, -PROBLEM.curvatures[0], EYE, torch.zeros(D, 1).double()], 1)
    return float((error @ moments @ error.T).trace()), float(moments[:D, :D].trace())


@pytest.mark.parametrize("a", [1.0, 0.3, 0.1])
def test_the_error_of_mvr_is_that_of_its_exact_moments(a: float) -> None:
    path = path_of(PROBLEM, MVR(1, rate=a), rounds=1500, lr=0.1, batch_size=BATCH)
    d, x = (path[:-1] - path[1:]) / 0.1, path[:-1]
    error = (d - (x - OPTIMUM) @ PROBLEM.curvatures[0]).square().sum(1)[100:].mean()
    assert float(error) == pytest.approx(mvr_errors(a, 0.1)[0], rel=0.2)


def test_the_error_of_mvr_falls_with_its_rate_and_the_models_only_below_step_times_curvature() -> (
    None
):
    errors, floors = zip(*(mvr_errors(a, 0.1) for a in (1.0, 0.3, 0.1, 0.005)), strict=True)
    assert all(later < 0.5 * earlier for earlier, later in itertools.pairwise(errors))
    assert floors[2] > 0.6 * floors[0]  # 0.1 is above step × curvature, about 0.05
    assert floors[3] < 0.2 * floors[0]
