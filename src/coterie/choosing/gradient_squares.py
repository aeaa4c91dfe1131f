"""Squares of means from a few batches of gradients, without what noise would add to them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.engines.engine import Engine
from coterie.errors import DataError

Array = NDArray[np.float64]

SKETCH = 2**15
"""Longer gradients are folded to this length with random signs; products of them then err by 0.6 %."""


@dataclass(frozen=True, eq=False)
class SampledGradients:
    """Gradients of a few batches, each at the same two points."""

    rows: Array  # of shape (2, batches, 1 + peers, length), user 0's first
    losses: Array  # user 0's, of shape (2, batches)
    distance: float  # between the points
    names: tuple[str, ...]  # the peers that answered every time
    left_out: dict[str, str]  # the others, each with the reason

    def without(self, batch: int) -> Self:
        """Return the same without one batch."""
        rows, losses = np.delete(self.rows, batch, axis=1), np.delete(self.losses, batch, axis=1)
        return replace(self, rows=rows, losses=losses)


def sample_gradients(engine: Engine, x: Tensor, batches: int, reach: float) -> SampledGradients:
    """Ask everybody for gradients at x and, `reach` steps that bring a linear loss to zero, downhill of it."""
    first = engine.gradients(x, batches, {})  # a batch of its own, so that the way is not fitted to the others
    _check_finite(first.own, float(first.own_loss))
    if float(first.own_loss) <= 0 or not bool(first.own.any()):
        why = "user 0's loss is not positive or its gradient is zero at the start: no scale to measure by"
        raise DataError(why)
    step = (-reach * float(first.own_loss) / first.own.square().sum()) * first.own
    equal = dict.fromkeys(engine.names, 1 / max(1, len(engine.names)))
    shorten = _sketch(x)
    answers: list[dict[str | None, Tensor]] = []
    losses, left_out = [], dict[str, str]()
    for point in (x, x + step):
        for batch in range(batches):
            g = engine.gradients(point, batch, equal, rows=True)
            _check_finite(g.own, float(g.own_loss))
            rows = shorten(torch.cat([g.own[None], *([g.rows] if g.rows is not None else [])]))
            answers.append(dict(zip((None, *g.names), rows, strict=True)))
            losses.append(float(g.own_loss))
            left_out |= g.left_out
    names = tuple(name for name in engine.names if all(name in one for one in answers))
    if not names:
        raise DataError("no peer's gradient can be used")
    stacked = torch.stack([one[name] for one in answers for name in (None, *names)])
    rows_of_all = stacked.reshape(2, batches, 1 + len(names), -1).numpy()
    return SampledGradients(rows_of_all, np.array(losses).reshape(2, batches), float(step.norm()), names, left_out)


def _sketch(like: Tensor) -> Callable[[Tensor], Tensor]:
    """Return what shortens gradients, in double precision, with products kept in the mean (a count sketch)."""
    if len(like) <= SKETCH:
        return lambda rows: rows.double().cpu()
    generator = torch.Generator().manual_seed(0)
    place = torch.randint(SKETCH, (len(like),), generator=generator).to(like.device)
    sign = (2 * torch.randint(2, (len(like),), generator=generator) - 1).to(like)
    return lambda rows: rows.new_zeros(len(rows), SKETCH).index_add_(1, place, rows * sign).double().cpu()


def squares(sampled: SampledGradients, size: Array, of: Array) -> dict[str, Array]:
    """Return squares of what is measured, by what it is: of one example's noise, of the bias, of the curvature, ….

    By user: `size` examples in a batch, `of` as many as there are, infinite for fresh samples.
    """
    rows, losses, distance = sampled.rows, sampled.losses, sampled.distance
    change = rows[1] - rows[0]
    each, data = _variances(rows[0], size, of)
    _, change_data = _variances(change, size, of)
    gradient = [_square(at[:, 0]) - data[0] for at in rows]
    bias = [_square(at[:, 1:] - at[:, :1]) - data[0] - data[1:] for at in rows]
    curvature = _square(change[:, 0]) - change_data[0]
    if not curvature > 0:  # lost in the noise of the batches' own curvature: then with it, as an upper estimate
        curvature = np.square(change[:, 0].mean(0)).sum()
    gap = _square(change[:, 1:] - change[:, :1]) - change_data[0] - change_data[1:]
    fall = gradient[0] - gradient[1]
    most = np.maximum(bias[0], 0) / gradient[0] if gradient[0] > 0 else np.zeros_like(bias[0])
    growth = np.clip((bias[0] - bias[1]) / fall, 0, most) if fall > 0 else np.zeros_like(most)
    return {
        "each": each,
        "gradient": gradient[0],
        "bias": bias[0],
        "growth": growth,
        "floor": bias[0] - growth * gradient[0],
        "smoothness": curvature / distance**2,
        "gap": gap / distance**2,
        "loss": losses[0].mean(),
        "pl": np.min(np.divide(gradient, 2 * losses.mean(1))),
    }


def _variances(rows: Array, size: Array, of: Array) -> tuple[Array, Array]:
    """Return the variance of one example's gradient, and that of the mean over the examples there are, by user.

    A batch of b of n examples varies (1 − b/n)/b times as much as one example does. A user whose batch is all it
    has is taken to vary as the others do in the mean.
    """
    known = size < of
    variance = rows.var(axis=0, ddof=1).sum(-1)
    each = np.divide(variance * size, 1 - size / of, out=np.zeros_like(variance), where=known)
    each[~known] = each[known].mean() if known.any() else 0.0
    return each, each / of


def _square(vectors: Array) -> Any:
    """Return ‖E v‖², the mean product of two different vectors, so that noise adds nothing; batches first."""
    n = len(vectors)
    return (np.square(vectors.sum(0)).sum(-1) - np.square(vectors).sum((0, -1))) / (n * (n - 1))


def _check_finite(gradient: Tensor, loss: float) -> None:
    if not (math.isfinite(loss) and bool(gradient.isfinite().all())):
        raise DataError("user 0's loss or gradient is not finite at the start")
