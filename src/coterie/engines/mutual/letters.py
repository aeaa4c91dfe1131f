"""Letters between processes: plain data and arrays as one run of bytes. Nothing in them is code."""

import json
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

ARRAY = "array"
"""In the text, the one entry of what stands for an array: its type, its shape, and where it begins."""
_HEAD = 8
_KINDS = "fiub"


def packed(content: Any) -> Tensor:
    """Return a letter, of bytes: the length of its text, the text, and the arrays one after the other.

    Example:
        >>> letter = packed({"step": 3, "points": np.eye(2, dtype=np.float32)})
        >>> unpacked(letter)["points"].tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    arrays: list[np.ndarray[Any, Any]] = []
    text = json.dumps(_written(content, arrays)).encode()
    parts = [len(text).to_bytes(_HEAD, "little"), text, *(array.tobytes() for array in arrays)]
    return torch.frombuffer(bytearray().join(parts), dtype=torch.uint8)


def unpacked(letter: Tensor) -> Any:
    """Return what is in a letter; `ValueError` where it is none."""
    data = letter.numpy().data
    end = _HEAD + int.from_bytes(data[:_HEAD], "little")
    if not _HEAD <= end <= len(data):
        raise ValueError("the text of a letter is longer than the letter")
    try:
        return _read(json.loads(bytes(data[_HEAD:end])), data[end:])
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"not a letter: {type(error).__name__}") from error


def _written(content: Any, arrays: list[np.ndarray[Any, Any]]) -> Any:
    """Return the content with each array, which is put aside, replaced by its description."""
    if isinstance(content, np.ndarray):
        begin = sum(array.nbytes for array in arrays)
        arrays.append(content)
        return {ARRAY: [content.dtype.str, list(content.shape), begin]}
    if isinstance(content, dict):
        return {name: _written(value, arrays) for name, value in content.items()}
    return content


def _read(content: Any, data: memoryview) -> Any:
    if not isinstance(content, dict):
        return content
    if set(content) != {ARRAY}:
        return {name: _read(value, data) for name, value in content.items()}
    kind, shape, begin = content[ARRAY]
    dtype = np.dtype(str(kind))
    whole = all(type(number) is int and number >= 0 for number in [*shape, begin])
    if dtype.kind not in _KINDS or not whole or begin + math.prod(shape) * dtype.itemsize > len(data):
        raise ValueError("a letter describes an array that it does not hold")
    return np.ndarray(tuple(shape), dtype, data, begin)
