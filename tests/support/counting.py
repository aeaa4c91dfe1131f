"""Users whose examples say which they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

import coterie


def counting(name: str, size: int) -> coterie.User:
    """Return a user whose inputs say which example they are."""
    return coterie.User(name, torch.arange(float(size))[:, None], torch.arange(size))


def indices(
    user: coterie.User, size: int, steps: range, seed: int = 0
) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.stack([user.batch(size, seed=seed, step=step)[1].numpy() for step in steps])


class Lazy(Dataset[tuple[Tensor, int]]):
    """Examples made when they are read, with noise from torch's generator."""

    def __init__(self, size: int, noise: float = 0.0) -> None:
        self.size, self.noise, self.reads = size, noise, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.reads += 1
        return torch.tensor([float(index)]) + self.noise * torch.randn(1), index
