"""What a peer gives at most, and how a gradient is clipped to a norm."""

import math
from dataclasses import dataclass

from torch import Tensor

from coterie.arguments import COUNT, POSITIVE, check_fields, optional, whole


@dataclass(frozen=True)
class Caps:
    """What a peer gives at most.

    Args:
        gradients: how many gradients in all, over every run that its log knows of; no limit when
            None.
        norm: the norm that a gradient is clipped to; not clipped when None.
        examples: how many examples must be behind a gradient.

    Example:
        >>> Caps(gradients=1000, norm=1.0, examples=20)
        Caps(gradients=1000, norm=1.0, examples=20)
    """

    gradients: int | None = None
    norm: float | None = None
    examples: int = 1

    def __post_init__(self) -> None:
        check_fields(
            self, {"gradients": optional(whole(0)), "norm": optional(POSITIVE), "examples": COUNT}
        )

    def in_words(self) -> str:
        """Return the caps in words.

        Example:
            >>> Caps(gradients=1000, examples=20).in_words()
            '1000 gradients in all, of any norm, each of 20 examples or more'
        """
        count = "any number of" if self.gradients is None else str(self.gradients)
        norm = "of any norm" if self.norm is None else f"clipped to norm {self.norm:g}"
        return f"{count} gradients in all, {norm}, each of {self.examples} examples or more"


def clipped(gradient: Tensor, max_norm: float | None) -> tuple[Tensor, float]:
    """Return a gradient of at most this norm, and the norm it had.

    Not finite where an entry is not.
    """
    norm, scale = float(gradient.norm()), 1.0
    if not math.isfinite(norm) and bool(gradient.isfinite().all()):  # the squares overflow
        scale = float(gradient.abs().max())
        norm = float((gradient / scale).double().norm())
    if max_norm is None or not math.isfinite(norm) or norm * scale <= max_norm:
        return gradient, norm * scale
    return gradient / scale * (max_norm / norm), norm * scale
