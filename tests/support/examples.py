"""All examples of a set at once."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.users.examples import Examples


def everything(examples: Examples | None) -> tuple[Tensor, Tensor]:
    assert examples is not None
    return examples.take(torch.arange(len(examples)))
