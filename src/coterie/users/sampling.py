"""Random draws as a function of (seed, user, step): no generator state is carried from step to step."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_key(seed: int, name: str) -> int:
    """Return the 64-bit key of a user's random stream, a hash of the seed and the name.

    Example:
        >>> random_key(0, "a") == random_key(0, "a") != random_key(0, "b")
        True
    """
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def uniform(seed: int, name: str, step: int) -> float:
    """Return a number in [0, 1) for one purpose at one step; all users draw the same one.

    Example:
        >>> uniform(0, "coin", 3) == uniform(0, "coin", 3) != uniform(0, "coin", 4)
        True
    """
    return float(np.random.default_rng([random_key(seed, name), step]).random())


def draw(streams: Sequence[int], sizes: Sequence[int], batch: int, steps: Sequence[int]) -> Tensor:
    """Draw the indices of one batch for each step and user at once, of shape (steps, users, batch).

    The generator is counter-based (SplitMix64 of stream, step and position), so it has no state.

    Args:
        streams: each user's key, from `random_key`.
        sizes: each user's number of examples, at least `batch`.
        batch: the number of examples in a batch.
        steps: the steps to draw for.

    Example:
        >>> draw([random_key(0, "a")], [5], 5, steps=[3])
        tensor([[[0, 1, 2, 3, 4]]])
    """
    position = np.arange(batch)
    counter = _mix(np.array(streams, np.uint64) + _GOLDEN * (np.array(steps, np.uint64)[:, None] + np.uint64(1)))
    bits = _mix(counter[..., None] + _GOLDEN * (position + 1).astype(np.uint64))
    uniform = (bits >> np.uint64(11)) * 2.0**-53
    length = np.array(sizes)[:, None]
    indices = ((position + uniform) * (length / batch)).astype(np.int64)
    return torch.from_numpy(np.minimum(indices, length - 1))  # rounding may reach the end of a slice


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2⁶⁴/φ, SplitMix64's increment


def _mix(z: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Scramble 64-bit integers: SplitMix64's finaliser."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@contextlib.contextmanager
def seeded(seed: int, name: str, step: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed the generators of torch, NumPy and Python by (seed, user, step) inside, and restore them afterwards."""
    key = random_key(seed, f"{name}/{step}")
    on_gpu = device is not None and device.type == "cuda"
    before, numpy_before = random.getstate(), np.random.get_state()  # transforms use it
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        torch.default_generator.manual_seed(key)
        random.seed(key)
        np.random.seed(key % 2**32)
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(key)
        try:
            yield
        finally:
            random.setstate(before)
            np.random.set_state(numpy_before)
