"""What a rule, a loss or a model is, in one line, and how many of a thing there are."""

import functools
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def describe(thing: Any) -> str:
    """Return what a rule, loss or optimizer is in one line that is the same in every process."""
    if is_dataclass(thing) and not isinstance(thing, type):
        values = [(f.name, getattr(thing, f.name), f.default) for f in fields(thing)]
        shown = [f"{name}={describe(value)}" for name, value, default in values if value != default]
        return f"{type(thing).__name__}({', '.join(shown)})"
    if isinstance(thing, torch.nn.Module):
        return " ".join(repr(thing).split())
    if isinstance(thing, functools.partial):
        keywords = "".join(f", {name}={describe(value)}" for name, value in thing.keywords.items())
        return f"partial({describe(thing.func)}{''.join(f', {describe(a)}' for a in thing.args)}{keywords})"
    if callable(thing):
        return str(getattr(thing, "__qualname__", getattr(thing, "__name__", type(thing).__name__)))
    return repr(thing)


def counted(n: int, thing: str) -> str:
    """Return how many there are of a thing.

    Example:
        >>> counted(1, "step"), counted(0, "step"), counted(1200, "step")
        ('1 step', '0 steps', '1200 steps')
    """
    return f"{n} {thing}" if n == 1 else f"{n} {thing}s"
