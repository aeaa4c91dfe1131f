"""User-centric learning: its weights written out, its fixed point, planted clusters."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.least_squares import (
    EYE,
    LOCAL_STEPS,
    PROBLEM,
    START,
    D,
    LeastSquares,
    N,
    last_of,
    planted,
    pull,
)

import coterie
from coterie.methods import UserCentric


def mixing_by_hand(problem: LeastSquares, blocks: int) -> list[list[float]]:
    """Return the weights of user-centric learning at 0, written out."""
    means, noises = [], []
    for user in problem.users:
        inputs, targets = user.examples.take(torch.arange(len(user)))
        whole = -2 * inputs.T @ targets.flatten() / len(user)
        parts = [
            -2 * inputs[b::blocks].T @ targets[b::blocks].flatten() / len(inputs[b::blocks])
            for b in range(blocks)
        ]
        means.append(whole)
        noises.append(
            math.sqrt(sum(float((part - whole).square().sum()) for part in parts) / blocks)
        )
    rows = []
    for mean, noise in zip(means, noises, strict=True):
        raw = [
            len(user) * math.exp(-float((mean - other).square().sum()) / (2 * noise * theirs))
            for user, other, theirs in zip(problem.users, means, noises, strict=True)
        ]
        rows.append([w / sum(raw) for w in raw])
    return rows


@pytest.mark.parametrize("blocks", [2, 5])
def test_user_centric_weights_are_the_formula(blocks: int) -> None:
    run = PROBLEM.train(UserCentric(1, blocks=blocks), rounds=1, lr=0.05)
    expected = mixing_by_hand(PROBLEM, blocks)
    assert torch.allclose(
        run.state["mixing"], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9
    )
    assert run.state["weights"].tolist() == pytest.approx(expected[0])
    assert run.state["weight"] == pytest.approx(sum(expected[0][1:]))
    points = torch.stack([START - 0.05 * PROBLEM.gradient(k, START) for k in range(N)])
    assert torch.allclose(
        last_of(run), torch.tensor(expected, dtype=torch.float64) @ points, rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("local_steps", LOCAL_STEPS)
@pytest.mark.parametrize("clusters", [None, 2])
def test_user_centric_ends_where_mixed_local_steps_stand_still(
    local_steps: int, clusters: int | None
) -> None:
    """x_k = Σ_j w_kj (o_j + S_j^K (x_j − o_j)) for all k at once, solved as one linear system."""
    run = PROBLEM.train(
        UserCentric(local_steps, clusters, blocks=3), rounds=600 // local_steps, lr=0.1
    )
    powers = EYE - pull(PROBLEM.curvatures, local_steps, 0.1)
    stays = PROBLEM.optima - torch.einsum("kij,kj->ki", powers, PROBLEM.optima)
    system = torch.einsum("kj,jab->kajb", run.state["mixing"], powers).reshape(N * D, N * D)
    right = (run.state["mixing"] @ stays).flatten()
    expected = torch.linalg.solve(torch.eye(N * D).double() - system, right).reshape(N, D)
    assert torch.allclose(last_of(run), expected, rtol=0, atol=1e-9)


def test_user_centric_finds_planted_clusters() -> None:
    groups = [0, 1, 0, 2, 1, 0, 2]
    problem = planted([3 * torch.eye(D).double()[group] for group in groups], examples=100)
    mixing = problem.train(UserCentric(1, clusters=3), rounds=1, lr=0.05).state["mixing"]
    for k, mine in enumerate(groups):
        for j, other in enumerate(groups):
            assert torch.equal(mixing[k], mixing[j]) == (mine == other)
            assert (float(mixing[k, j]) > 0.1) == (mine == other)
    assert torch.allclose(mixing.sum(1), torch.ones(7).double())
    one = problem.train(UserCentric(1, clusters=1), rounds=1, lr=0.05).state["mixing"]
    each = problem.train(UserCentric(1), rounds=1, lr=0.05).state["mixing"]
    assert torch.allclose(one, each.mean(0).expand(7, -1))


def test_user_centric_mixes_with_nobody_whose_gradients_are_not_finite() -> None:
    bad = coterie.User(
        "bad", torch.full((6, D), torch.inf, dtype=torch.float64), torch.zeros(6, 1).double()
    )
    problem = LeastSquares([*PROBLEM.users, bad], PROBLEM.curvatures, PROBLEM.optima)
    run = problem.train(UserCentric(2), rounds=3, lr=0.05)
    assert run.state["mixing"][:4, 4].tolist() == [0.0] * 4
    assert run.state["mixing"][4].tolist() == [0.0] * 4 + [1.0]
    assert torch.isfinite(last_of(run)).all()
