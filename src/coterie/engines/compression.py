"""What travels in fewer bits or numbers.

Messages in half precision, where what rounding loses is added to the next message; and sketches, a
few numbers of a gradient that keep norms and inner products, by a projection that all draw alike.
"""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from coterie.arguments import one_of
from coterie.users.sampling import random_key

Compress: TypeAlias = Literal["bf16", "fp16"]
HALVES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What messages can be rounded to."""
COMPRESS = one_of(*HALVES, None)


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


SKETCH = 2048
"""How many numbers a sketch has.

Weights found from so many were, on digits, WISDM and MNIST, within .04 of those
found from gradients (`benchmarks/sketches.py`)."""


def sketch_size(d: int, *, rows: bool) -> int | None:
    """Return how many numbers a peer shows of a gradient of d; None where it shows it all.

    Peers that give rows show a gradient that is no longer than a sketch. Those that give sums only
    show at most half as many numbers as the gradient has, so that no sketch determines it.
    """
    if rows:
        return SKETCH if d > SKETCH else None
    return max(1, min(SKETCH, d // 2))


def sketch_key(seed: int, step: int) -> int:
    """Return what the projection of a step is drawn from."""
    return random_key(seed, f"sketch/{step}")


AT_ONCE = 2**18
"""Of so many numbers of a long gradient a sketch is drawn at a time."""


class Sketch:
    """A count sketch: every coordinate, with a random sign, is added to a random one of k numbers.

        s_b = Σ_{i in b} ±g_i,   E⟨s, s'⟩ = ⟨g, g'⟩,   relative error about √(2/k)

    It is linear. Where the same key gives the same draw everywhere, sketches made in different
    places can be compared.

    Args:
        d: how many numbers a gradient has.
        k: how many a sketch has.
        key: what the projection is drawn from.

    Example:
        >>> sketch, g = Sketch(d=10_000, k=1_000, key=3), torch.linspace(-1, 1, 10_000)
        >>> sketch(g).shape, bool((sketch(g).norm() / g.norm() - 1).abs() < 0.1)
        (torch.Size([1000]), True)
    """

    def __init__(self, d: int, k: int, key: int) -> None:
        generator = torch.Generator().manual_seed(key % 2**63)
        self.k = k
        self.places = torch.randint(0, k, (d,), generator=generator)
        self.signs = torch.randint(0, 2, (d,), generator=generator, dtype=torch.int8) * 2 - 1

    def __call__(self, gradients: Tensor) -> Tensor:
        """Return the sketch of a gradient (d,), or of each row."""
        signed = gradients * self.signs.to(gradients.device)
        empty = gradients.new_zeros(*gradients.shape[:-1], self.k)
        return empty.index_add_(-1, self.places.to(gradients.device), signed)


def sketched(gradients: Tensor, k: int, key: int) -> Tensor:
    """Return sketches of k numbers of long gradients, (…, d), some coordinates at a time.

    Example:
        >>> g = torch.linspace(-1, 1, 10_000)
        >>> bool((sketched(g, 1_000, key=3).norm() / g.norm() - 1).abs() < 0.1)
        True
    """
    total = gradients.new_zeros(*gradients.shape[:-1], k)
    for part, some in enumerate(torch.split(gradients, AT_ONCE, -1)):
        total += Sketch(some.shape[-1], k, key + part)(some)
    return total
