"""Messages in half precision with error feedback.

What rounding loses is added to the next message.
"""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

Compress: TypeAlias = Literal["bf16", "fp16"]
HALVES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What messages can be rounded to."""


class Rounding:
    """Rounds one message after the other to a dtype.

    Over time their sum is exact but for the last rounding.

    Messages of another shape than the last begin anew. What is not finite, also what overflows,
    loses nothing.

    Example:
        >>> rounding, exact = Rounding(torch.bfloat16), torch.tensor([1.001])
        >>> round(sum(float(rounding(exact)) for _ in range(1000))), 1000 * float(exact.to(torch.bfloat16))
        (1001, 1000.0)
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.lost: Tensor | None = None

    def __call__(self, exact: Tensor) -> Tensor:
        """Return a message and what the last ones lost, rounded."""
        if self.lost is not None and self.lost.shape == exact.shape:
            exact = exact + self.lost.to(exact)
        rounded = exact.to(self.dtype)
        lost = exact - rounded.to(exact)
        self.lost = lost.masked_fill_(~lost.isfinite(), 0.0)
        return rounded


def relative_error(exact: Tensor, sent: Tensor) -> float:
    """Return ‖sent − exact‖ / ‖exact‖; 0 without a comparison where nothing was rounded."""
    if sent.dtype == exact.dtype:
        return 0.0
    return float(
        (sent.to(exact) - exact).norm() / exact.norm().clamp(min=torch.finfo(exact.dtype).tiny)
    )
