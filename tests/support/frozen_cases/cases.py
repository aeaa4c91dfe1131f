"""What a case is, and what it gives: vectors by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from tests.support.frozen_cases.library import RENAMED, models_of, numbers_of, points_of, state_of
from torch import Tensor

Parts: TypeAlias = dict[str, dict[str, Tensor]]
"""What a case gives: parameters, points, numbers and the rule's state, each as vectors of float64 by name."""


def parts_of(runs: Mapping[str, Any], **more: Any) -> Parts:
    """Return what runs give, by name of the run where there are several, with some numbers more."""
    parts: Parts = {"parameters": {}, "points": {}, "numbers": dict(flattened(more)), "state": {}}
    for name, run in runs.items():
        before = f"{name}: " if len(runs) > 1 else ""
        for whose, model in models_of(run).items():
            parts["parameters"][before + whose] = flat(model.state_dict().values())
        of_run = {
            "points": curves(points_of(run)),
            "numbers": numbers_of(run),
            "state": state_of(run),
        }
        for part, values in of_run.items():
            parts[part] |= {before + path: vector for path, vector in flattened(values)}
    return parts


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return tensors as one vector; every value is one of float64."""
    return torch.cat([tensor.detach().cpu().double().flatten() for tensor in tensors])


def curves(points: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return each quantity over all points, not a number where it was not recorded."""
    names = sorted({name for point in points for name in point})
    return {
        name: torch.tensor([float(p.get(name, np.nan)) for p in points], dtype=torch.float64)
        for name in names
    }


def flattened(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield all numbers in nested mappings and sequences, with their paths by the names that are frozen."""
    if isinstance(value, Tensor):
        yield path, flat([value])
    elif isinstance(value, bool | int | float | np.number | np.bool_):
        yield path, torch.tensor([float(value)], dtype=torch.float64)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            longer = f"{path}.{name}" if path else str(name)
            known = RENAMED.get(longer, RENAMED.get(str(name)))
            yield from flattened(
                inner, longer if known is None else f"{path}.{known}" if path else known
            )
    elif isinstance(value, list | tuple | np.ndarray) and len(value):
        if all(isinstance(inner, bool | int | float | np.number | np.bool_) for inner in value):
            yield path, torch.tensor([float(inner) for inner in value], dtype=torch.float64)
        else:
            for k, inner in enumerate(value):
                yield from flattened(inner, f"{path}.{k}")


CASES: dict[str, Callable[[], Parts]] = {}
"""By name, what each gives."""
DRAWS: set[str] = set()
"""The cases that depend on torch's own generator, which is not the same on every machine."""
BITS: set[str] = set()
"""The cases that are far apart where one bit is: where bits decide of an order, a tie or a draw."""


def case(
    name: str, *, draws: bool = False, bits: bool = False
) -> Callable[[Callable[[], Any]], None]:
    """Add a case, which gives a run, runs by name, or parts."""

    def add(work: Callable[[], Any]) -> None:
        if name in CASES:
            raise ValueError(f"two cases are called {name!r}")
        CASES[name] = functools.partial(_worked, work)
        if draws:
            DRAWS.add(name)
        if bits:
            BITS.add(name)

    return add


def _worked(work: Callable[[], Any]) -> Parts:
    result = work()
    if isinstance(result, dict):
        parts: Parts = result if "parameters" in result else parts_of(result)
        return parts
    return parts_of({"run": result})
