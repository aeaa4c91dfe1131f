"""Memory for results of every step, used again once nobody holds the earlier results."""

import math
import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class ReusedMemory:
    """Give tensors in memory that nobody else holds, and reuse that memory later.

    The operating system takes large memory back when it is freed, and clears every page when it
    hands it out again. On a CPU that can cost as much as the writing itself. For a GPU, torch keeps
    the memory by itself.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[NDArray[np.uint8], weakref.ref[Any]]] = []

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return a tensor to be filled, of the dtype and device of another."""
        size = math.prod(shape) * like.element_size()
        if like.device.type != "cpu" or not size:
            return like.new_empty(shape)
        self._kept = [kept for kept in self._kept if len(kept[0]) == size or kept[1]() is not None]
        free = next(
            (
                i
                for i, (memory, lent) in enumerate(self._kept)
                if len(memory) == size and lent() is None
            ),
            None,
        )
        memory = np.empty(size, np.uint8) if free is None else self._kept.pop(free)[0]
        lent = memory[:]  # the tensor and its views hold this, and nothing else does
        self._kept.append((memory, weakref.ref(lent)))
        return torch.from_numpy(lent).view(like.dtype).view(shape)
