"""What travels between processes that all train: it arrives as it was, and nonsense is told."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from coterie.engines.messages import packed, unpacked


def test_a_letter_arrives_as_it_was() -> None:
    rng = np.random.default_rng(0)
    buffers = {
        "mean": rng.normal(size=3),
        "count": np.array(7),
        "none": np.zeros((0, 2), dtype=np.float16),
    }
    sent: dict[str, Any] = {
        "question": 5,
        "arguments": {"points": rng.normal(size=(4, 9)).astype(np.float32)},
    }
    sent["arguments"] |= {
        "buffers": buffers,
        "work": {"lr": 0.1, "add": None},
        "frozen": "ab",
        "ok": True,
    }
    came = unpacked(packed(sent))
    assert came["question"] == 5
    assert came["arguments"]["work"] == {"lr": 0.1, "add": None}
    for name, array in {"points": sent["arguments"]["points"]}.items():
        np.testing.assert_array_equal(came["arguments"][name], array, strict=True)
    for name, array in buffers.items():
        np.testing.assert_array_equal(came["arguments"]["buffers"][name], array, strict=True)


def test_nonsense_is_no_letter() -> None:
    """Bytes of a real letter are changed, cut or made up: a letter, or a ValueError, and nothing else."""
    draws, real = random.Random(0), packed({"a": np.arange(6.0).reshape(2, 3), "b": [1, "c"]})
    refused = 0
    for _ in range(2000):
        letter = real[: draws.randrange(len(real) + 1)].clone()
        for _ in range(draws.randrange(4) if len(letter) else 0):
            letter[draws.randrange(len(letter))] = draws.randrange(256)
        try:
            unpacked(letter)
        except ValueError:
            refused += 1
    assert refused > 1000


@pytest.mark.parametrize(
    "described", [["<f8", [3], 0], ["<f8", [1], 8], ["O", [1], 0], ["<f8", [-1], 0], ["<f8", 1]]
)
def test_an_array_that_is_not_there(described: list[Any]) -> None:
    text = f'{{"array": {described}}}'.replace("'", '"').encode()
    letter = len(text).to_bytes(8, "little") + text + bytes(8)
    with pytest.raises(ValueError):  # noqa: PT011  # of any kind
        unpacked(torch.frombuffer(bytearray(letter), dtype=torch.uint8))
