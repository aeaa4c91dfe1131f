"""Descriptions of rules, losses and functions in one line."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import coterie
from coterie.recording.configuration import describe


def named(step: int, scale: float = 1.0) -> float:
    return scale / (step + 1)


@pytest.mark.parametrize(
    ("thing", "text"),
    [
        (coterie.Alone(), "Alone()"),
        (coterie.BiasCorrection(0.5, named), "BiasCorrection(alpha=0.5, beta=named)"),
        (
            coterie.WeightedAveraging(0.5, {"a": 1.0}),
            "WeightedAveraging(alpha=0.5, tau={'a': 1.0})",
        ),
        (torch.nn.functional.cross_entropy, "cross_entropy"),
        (nn.CrossEntropyLoss(label_smoothing=0.1), "CrossEntropyLoss()"),
        (functools.partial(named, 3, scale=2), "partial(named, 3, scale=2)"),
        (None, "None"),
    ],
)
def test_descriptions_are_the_same_in_every_process(thing: Any, text: str) -> None:
    assert describe(thing) == text
    assert "0x" not in describe(thing)
