"""Letters between processes: plain data and arrays as one run of bytes. Nothing in them is code."""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

ARRAY = "array"
"""In the text, the one entry of what stands for an array.

Its type, its shape, and where it begins.
"""
_HEAD = 8
_ALIGNED = 64
_KINDS = "fiub"


def packed(content: Any) -> Tensor:
    """Return a letter, of bytes.

    The length of its text, the text, and the arrays, each where it can be read.

    Example:
        >>> letter = packed({"step": 3, "points": np.eye(2, dtype=np.float32)})
        >>> unpacked(letter)["points"].tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    arrays: list[np.ndarray[Any, Any]] = []
    text = json.dumps(_written(content, arrays)).encode()
    text += b" " * (-(_HEAD + len(text)) % _ALIGNED)
    end = _HEAD + len(text)
    letter = torch.empty(end + _length(arrays), dtype=torch.uint8)
    data = letter.numpy()
    data[:end] = np.frombuffer(len(text).to_bytes(_HEAD, "little") + text, dtype=np.uint8)
    for array in arrays:
        np.ndarray(array.shape, array.dtype, data, end)[...] = array
        data[end + array.nbytes : end + _length([array])] = 0
        end += _length([array])
    return letter


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


def _length(arrays: Sequence[np.ndarray[Any, Any]]) -> int:
    """Return how many bytes arrays take, filled up so that the next begins where it can be read."""
    return sum(array.nbytes + -array.nbytes % _ALIGNED for array in arrays)


def _written(content: Any, arrays: list[np.ndarray[Any, Any]]) -> Any:
    """Return the content with each array, which is put aside, replaced by its description."""
    if isinstance(content, np.ndarray):
        begin = _length(arrays)
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
    if (
        dtype.kind not in _KINDS
        or not whole
        or begin + math.prod(shape) * dtype.itemsize > len(data)
    ):
        raise ValueError("a letter describes an array that it does not hold")
    return np.ndarray(tuple(shape), dtype, data, begin)
