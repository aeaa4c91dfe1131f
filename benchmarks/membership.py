"""Whether an example was among a peer's, from the gradients that user 0 sees and the model it trains by them.

For `leakage.py`. Scores are larger for who is held to be a member.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from coterie.engines.in_process.passes import Passes
from coterie.privacy.noise import clip_factors

Examples: TypeAlias = tuple[Tensor, Tensor]
UNKNOWN = 0.01
"""What gradients vary by in directions that user 0's own examples do not show, in shares of what they do."""


def scores(
    passes: Passes,
    asked: Examples,
    known: Examples,
    *,
    seen: Callable[[Tensor, int], Tensor],
    steps: int,
    lr: float,
    clip: float,
    spread: float,
) -> dict[str, Tensor]:
    """Train by the gradients seen, and return two scores of each example asked about.

    By loss: how low that of the last model is (Yeom et al. 2018). By products: that of the gradient
    seen with the example's own, both less the mean over the examples that user 0 knows, and in
    directions in which those vary much worth less; of several steps the sum. `spread` is the
    variance of the noise, in squares of `clip`, over the batch.
    """
    x, products = passes.parameters.vector().clone(), torch.zeros(len(asked[1]))
    for step in range(steps):
        gradient = seen(x, step)
        rows, others = (
            _clipped(passes.each_example(x, *examples), clip) for examples in (asked, known)
        )
        mean = others.mean(0)
        rows, others = rows - mean, (others - mean) / len(others) ** 0.5
        products += _weighed(rows, others, gradient - mean, spread)
        x = x - lr * gradient
    output = passes.output(x, asked[0]).detach()
    return {
        "loss": -nn.functional.cross_entropy(output, asked[1], reduction="none"),
        "products": products,
    }


def _clipped(rows: Tensor, clip: float) -> Tensor:
    return rows * clip_factors(rows.norm(dim=1), clip)[:, None]


def _weighed(rows: Tensor, others: Tensor, surprise: Tensor, spread: float) -> Tensor:
    """Return rᵀ S⁻¹ v / √(rᵀ S⁻¹ r) for each row r, S being the others' covariance and some more."""
    gram = others @ others.T
    more = spread + UNKNOWN * float(gram.diagonal().mean())
    crossed = others @ torch.cat([surprise[None], rows]).T
    solved = torch.linalg.solve(gram + more * torch.eye(len(gram)), crossed)
    products = rows @ surprise - crossed[:, 1:].T @ solved[:, 0]
    lengths = rows.square().sum(1) - (crossed[:, 1:] * solved[:, 1:]).sum(0)
    weighed: Tensor = products / lengths.clamp(min=1e-12).sqrt()
    return weighed


def told_apart(members: Tensor, others: Tensor, false: float = 0.01) -> tuple[float, float]:
    """Return how often a member has the larger score than another, and how many are found at this rate of errors.

    Example:
        >>> told_apart(torch.tensor([3.0, 1.0]), torch.tensor([0.0, 2.0]), false=0.5)
        (0.75, 1.0)
    """
    larger = (members[:, None] > others).double() + 0.5 * (members[:, None] == others).double()
    allowed = int(false * len(others))  # so many of the others may be above the threshold
    threshold = others.sort(descending=True).values[allowed]
    return float(larger.mean()), float((members > threshold).double().mean())
