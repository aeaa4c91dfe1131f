"""Random draws as a function of (seed, user, step).

No generator state is carried from step to step.
"""

import contextlib
import hashlib
import os
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_key(seed: int, name: str) -> int:
    """Return the 64-bit key of a user's random stream, a hash of the seed and the name."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def uniform(seed: int, name: str, step: int) -> float:
    """Return a number in [0, 1) for one purpose at one step; all users draw the same one."""
    return float(np.random.default_rng([random_key(seed, name), step]).random())


def sample_of(weights: Mapping[str, float], most: int, seed: int, step: int) -> dict[str, float]:
    """Return so many peers, drawn by (seed, step), with weights of which each is as before in the mean.

    The chance of a peer is proportional to its weight τ_k: min(1, n τ_k) where only one draw can be
    certain, else as much of what those who are certain leave. Those who are drawn weigh alike,
    those who are certain as before, so that the weights keep their sum. The order is shuffled, and
    every interval of one n-th has one draw: nobody is drawn twice.

    Without bias: E Σ τ̂_k g_k = Σ τ_k g_k. With equal weights n of N peers are drawn without
    replacement, with the variance (N − n)/(n(N − 1)) Σ‖g_k − ḡ‖²/N; else it is about
    Σ τ_k (1 − (n − 1)τ_k) ‖g_k − ḡ‖²/n (Hartley and Rao, 1962).

    Args:
        weights: τ, by name, each positive.
        most: n.
        seed: of the run.
        step: of the run.

    Example:
        >>> tau = {"a": 0.5, "b": 0.25, "c": 0.25}
        >>> sorted(sample_of(tau, 2, seed=0, step=0).values())
        [0.5, 0.5]
        >>> sample_of(tau, 3, seed=0, step=0) == tau
        True
    """
    if len(weights) <= most:
        return dict(weights)
    random = np.random.default_rng([random_key(seed, "peers of a step"), step])
    names, order = list(weights), random.permutation(len(weights))
    tau = np.array(list(weights.values()))[order]
    certain = np.zeros(len(tau), dtype=bool)
    while True:
        left, rest = most - int(certain.sum()), float(tau[~certain].sum())
        more = ~certain & (tau * left >= rest)
        if not more.any():
            break
        certain |= more
    drawn = {names[order[k]]: float(tau[k]) for k in np.flatnonzero(certain)}
    if left:
        others, each = np.flatnonzero(~certain), rest / left
        points = (random.random() + np.arange(left)) * each
        places = np.searchsorted(np.cumsum(tau[others]), points, side="right")
        for k in others[np.minimum(places, len(others) - 1)]:
            drawn[names[order[k]]] = each
    return drawn


def draw(streams: Sequence[int], sizes: Sequence[int], batch: int, steps: Sequence[int]) -> Tensor:
    """Draw the indices of one batch for each step and user at once, of shape (steps, users, batch).

    The generator is counter-based (SplitMix64 of stream, step and position), so it has no state.
    `streams` are the users' keys, from `random_key`; `sizes` their numbers of examples, each at
    least `batch`.
    """
    position = np.arange(batch)
    counter = _mix(
        np.array(streams, np.uint64)
        + _GOLDEN * (np.array(steps, np.uint64)[:, None] + np.uint64(1))
    )
    bits = _mix(counter[..., None] + _GOLDEN * (position + 1).astype(np.uint64))
    uniform = (bits >> np.uint64(11)) * 2.0**-53
    length = np.array(sizes)[:, None]
    indices = ((position + uniform) * (length / batch)).astype(np.int64)
    # rounding may reach the end of a slice
    return torch.from_numpy(np.minimum(indices, length - 1))


MAX_STEPS_AHEAD = 64
"""For how many steps indices are computed at a time, at most.

What they are does not depend on it.
"""


@dataclass(frozen=True)
class BatchStream:
    """One user's batches under one seed, step after step."""

    key: int  # of the random stream, from `random_key`
    n: int  # how many examples the user has
    size: int  # how many of them a batch has
    first: int = 0  # where the user's examples begin in a pool of examples


class IndexTable:
    """The examples that several users draw, a row for each step.

    This is where indices of batches are drawn.

    `places` are the columns where the users' batches begin, one after the other when None. `filled`
    is the row before anything is drawn: it says what stands in columns that are nobody's. At most
    `max_entries` indices are computed at a time.
    """

    def __init__(
        self,
        streams: Sequence[BatchStream],
        places: Sequence[int] | None = None,
        filled: Tensor | None = None,
        *,
        max_entries: int = 2**18,
    ) -> None:
        ends = np.cumsum([0, *(stream.size for stream in streams)]).tolist()
        self._filled = torch.zeros(ends[-1], dtype=torch.int64) if filled is None else filled
        self._ahead = max(1, min(MAX_STEPS_AHEAD, max_entries // max(1, len(self._filled))))
        self._sizes: list[tuple[list[BatchStream], Tensor, Tensor]] = []
        begins = ends[:-1] if places is None else places
        for size in sorted({stream.size for stream in streams if stream.size}):
            same = [
                (stream, begin)
                for stream, begin in zip(streams, begins, strict=True)
                if stream.size == size
            ]
            alike, at = zip(*same, strict=True)
            columns = (torch.tensor(at)[:, None] + torch.arange(size)).flatten()
            self._sizes.append(
                (list(alike), columns, torch.tensor([stream.first for stream in alike])[:, None])
            )
        self._block: tuple[int, Tensor] | None = None

    def block(self, step: int) -> Tensor:
        """Return the rows of a step and of some after it."""
        steps = range(step, step + self._ahead)
        rows = self._filled.repeat(len(steps), 1)
        for alike, columns, first in self._sizes:
            drawn = draw([s.key for s in alike], [s.n for s in alike], alike[0].size, steps) + first
            rows[:, columns] = drawn.flatten(1)
        return rows

    def row(self, step: int, device: torch.device | None = None) -> Tensor:
        """Return the row of a step, from a block that is kept on the device."""
        if self._block is None or not self._block[0] <= step < self._block[0] + len(self._block[1]):
            # a selection of peers may be asked but once: the first time no step ahead is drawn
            ahead, self._ahead = self._ahead, 1 if self._block is None else self._ahead
            self._block = step, self.block(step).to(device)
            self._ahead = ahead
        return self._block[1][step - self._block[0]]


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2⁶⁴/φ, SplitMix64's increment


def _mix(z: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Scramble 64-bit integers: SplitMix64's finaliser."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class _Shared:
    """What all threads share."""

    lock = threading.RLock()

    @classmethod
    def renew(cls) -> None:
        """Forget who held the lock: the thread is not in a process that is forked."""
        cls.lock = threading.RLock()


os.register_at_fork(after_in_child=_Shared.renew)


def one_thread() -> AbstractContextManager[object]:
    """Return the lock to hold while something is changed that all threads share, such as a global generator."""
    return _Shared.lock


@contextlib.contextmanager
def seeded(seed: int, name: str, step: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed the generators of torch, NumPy and Python by (seed, user, step) inside, and restore them afterwards.

    Inside, other threads wait that want the same, so that none draws another's numbers.
    """
    key = random_key(seed, f"{name}/{step}")
    on_gpu = device is not None and device.type == "cuda"
    with one_thread(), torch.random.fork_rng(devices=[device] if on_gpu else []):
        before, numpy_before = random.getstate(), np.random.get_state()  # transforms use it
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
