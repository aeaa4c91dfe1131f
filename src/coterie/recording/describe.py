"""What a rule, a loss or a model is, in one line."""

from __future__ import annotations

import functools
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def describe(thing: Any) -> str:
    """Return what a rule, loss or optimizer is in one line that is the same in every process.

    Example:
        >>> from coterie import WeightedAveraging
        >>> describe(WeightedAveraging(0.5)), describe(torch.nn.functional.mse_loss)
        ('WeightedAveraging(alpha=0.5)', 'mse_loss')
    """
    if is_dataclass(thing) and not isinstance(thing, type):
        shown = [
            f"{f.name}={describe(getattr(thing, f.name))}"
            for f in fields(thing)
            if getattr(thing, f.name) != f.default
        ]
        return f"{type(thing).__name__}({', '.join(shown)})"
    if isinstance(thing, torch.nn.Module):
        return " ".join(repr(thing).split())
    if isinstance(thing, functools.partial):
        keywords = "".join(f", {name}={describe(value)}" for name, value in thing.keywords.items())
        return f"partial({describe(thing.func)}{''.join(f', {describe(a)}' for a in thing.args)}{keywords})"
    if callable(thing):
        return str(getattr(thing, "__qualname__", getattr(thing, "__name__", type(thing).__name__)))
    return repr(thing)
