"""Means of the same neighbours have equal scores; which is taken must not depend on how sums are rounded."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import torch

from coterie.aggregators import Krum, NearestNeighbourMixing

N, D, F = 5, 3, 2


def squared(a: list[Fraction], b: list[Fraction]) -> Fraction:
    return sum(((x - y) ** 2 for x, y in zip(a, b, strict=True)), Fraction(0))


def exactly(rows: list[list[float]]) -> list[float]:
    """Mix neighbours and take the first of the lowest scores, in fractions."""
    exact = [[Fraction(number) for number in row] for row in rows]
    means = []
    for row in exact:
        nearest = sorted(range(N), key=lambda j: (squared(row, exact[j]), j))[: N - F]
        means.append([sum((exact[j][k] for j in nearest), Fraction(0)) / (N - F) for k in range(D)])
    scores = [
        sum(sorted(squared(mean, other) for other in means)[: N - F], Fraction(0)) for mean in means
    ]
    return [float(number) for number in means[scores.index(min(scores))]]


def test_of_equal_scores_the_first_is_taken() -> None:
    pool = NearestNeighbourMixing(F, then=Krum(F))
    for seed in range(300):  # without rounding of scores 5 of them differ
        rows = np.random.default_rng(seed).normal(size=(N, D))
        found = pool(torch.from_numpy(rows)).tolist()
        np.testing.assert_allclose(found, exactly(rows.tolist()), atol=1e-9, err_msg=str(seed))
