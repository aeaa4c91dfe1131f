"""What user 0 asks of a peer and what a peer answers, whatever carries it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from coterie.engines.engine import AllRows, LocalWork, form_of

MAX_STEP = 2**62
"""The steps that can be asked for end here, far beyond any run."""

MAX_STREAMED = 2**20
"""How many new examples a stream may be asked for at once."""

MAX_POINTS = 16
"""At how many points one request may ask for gradients."""

MOST_NOISE_TOLD = 1e30
"""A peer that tells of more noise than this is not believed: its square would be no number."""

MAX_LOCAL_STEPS = 1024
"""How many steps of its own a peer takes for one request."""


@dataclass(frozen=True, eq=False)
class Request:
    """What user 0 asks of a peer.

    The gradient at each of some points, all on the batch of (seed, user, step).

    With `work`, the peer takes steps of its own from each point, and gives its displacement over
    their size. With `e_step` it answers that.
    """

    points: Tensor  # of shape (P, d)
    step: int
    seed: int
    batch_size: int  # all examples where the peer has fewer
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    """User 0's, where the peer's model may have others: a row for each point, or one for all."""
    frozen: str | None = None  # `frozen_digest` of user 0's model; not compared when None
    # steps from each point, on the batches of this step and those after it
    work: LocalWork | None = None
    e_step: AllRows | None = None  # on all examples, the layers before it at the point

    @property
    def gradients(self) -> int:
        """How many gradients are behind the answer, all of which count."""
        if self.e_step is not None:
            return self.e_step.gradients
        return len(self.points) * (1 if self.work is None else self.work.count)

    @property
    def form(self) -> Tensor:
        """Something like the answer."""
        return form_of(self.points, self.e_step)

    def misfit(self, model: nn.Module, size: int, *, streamed: bool) -> str | None:
        """Return what is wrong with the request for a model of `size` trained parameters, if anything is."""
        points = self.points
        if (
            points.ndim != 2
            or not len(points)
            or points.shape[1] != size
            or not points.is_floating_point()
        ):
            return f"a point must be {size} finite floating-point numbers"
        if len(points) > MAX_POINTS:
            return f"it answers at {MAX_POINTS} points at most"
        return (
            self._wrong_numbers(streamed=streamed)
            or self._wrong_work()
            or self._wrong_buffers(model)
        )

    def _wrong_numbers(self, *, streamed: bool) -> str | None:
        if (
            not 0 <= self.step < MAX_STEP
            or self.batch_size < 1
            or not -(2**63) <= self.seed < 2**64
        ):
            return "step, seed and batch size must be whole numbers"
        if streamed and self.batch_size > MAX_STREAMED:
            return f"it draws {MAX_STREAMED} examples at most"
        return None

    def _wrong_work(self) -> str | None:
        work = self.work
        if self.e_step is not None:
            alone = work is None and len(self.points) == 1
            return self.e_step.wrong() if alone else "an E-step has one point, and no other work"
        if work is None:
            return None
        if not 1 <= work.count <= MAX_LOCAL_STEPS:
            return f"it takes 1 to {MAX_LOCAL_STEPS} steps of its own"
        most = torch.finfo(self.points.dtype).max
        if not (0 < work.lr < most and 0 <= work.decay < most):
            return "step size and decay must be finite numbers, not below 0"
        if work.add is not None and (
            work.add.shape != self.points.shape or not work.add.isfinite().all()
        ):
            return "what is added must be finite numbers like the points"
        return None

    def _wrong_buffers(self, model: nn.Module) -> str | None:
        ours = dict(model.named_buffers()) if self.buffers else {}
        for name, rows in self.buffers.items():
            if name not in ours or rows.shape not in [
                (n, *ours[name].shape) for n in (1, len(self.points))
            ]:
                return "its model has other buffers"
        return None


@dataclass(frozen=True, eq=False)
class Reply:
    """What a peer answers: a gradient for each point, clipped, or why all are refused."""

    gradients: Tensor | None = None  # of shape (P, d), or of the request's `form`
    refused: str | None = None
    seconds: float = 0.0
    examples: int | None = None  # about how many the peer has; None for a stream
    noise: float | None = None  # the standard deviation of what a private peer added to each number


def promise_told(reported: Any) -> dict[str, float] | None:
    """Return what a peer says it promises and has spent of it, where that can be true.

    Example:
        >>> promise_told({"epsilon": 4.0, "delta": 1e-5, "clip": 1.0, "spent": 0.5, "more": "words"})
        {'epsilon': 4.0, 'delta': 1e-05, 'clip': 1.0, 'spent': 0.5}
        >>> promise_told({"epsilon": 4.0, "delta": -1.0, "clip": 1.0, "spent": 0.5}) is None
        True
    """
    fields = reported if isinstance(reported, dict) else {}
    told = {name: fields.get(name) for name in ("epsilon", "delta", "clip", "spent")}
    fine = all(isinstance(value, float) and 0 <= value < math.inf for value in told.values())
    return (
        {name: float(value) for name, value in told.items() if value is not None} if fine else None
    )


def whole_number(reported: Any, least: int = 1) -> int | None:
    """Return a number that a peer tells, such as of its examples, where it can be one.

    Example:
        >>> whole_number(40), whole_number(0), whole_number("a stream"), whole_number(10**5000)
        (40, None, None, None)
    """
    return reported if type(reported) is int and least <= reported < 2**53 else None


def noise_told(reported: Any) -> float:
    """Return the standard deviation of the noise that a peer says it adds to each number.

    0 where it says none.

    Example:
        >>> noise_told(0.5), noise_told(1e300), noise_told("much")
        (0.5, 0.0, 0.0)
    """
    return reported if isinstance(reported, float) and 0 <= reported < MOST_NOISE_TOLD else 0.0


def to_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return a copy of a tensor as an array that can be sent."""
    plain = tensor.detach().cpu()
    # NumPy has no bfloat16
    return np.array((plain.float() if plain.dtype == torch.bfloat16 else plain).numpy())
