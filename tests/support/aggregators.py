"""Every aggregator with knobs for two bad rows, and rows to combine."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.aggregators import (
    Aggregator,
    Bucketing,
    CentredClipping,
    CoordinateMedian,
    GeometricMedian,
    Krum,
    Mean,
    MultiKrum,
    NearestNeighbourMixing,
    TrimmedMean,
)

F = 2
AGGREGATORS: dict[str, Aggregator] = {
    "mean": Mean(),
    "median": CoordinateMedian(),
    "trimmed": TrimmedMean(F),
    "geometric": GeometricMedian(),
    "krum": Krum(F),
    "multi-krum": MultiKrum(F),
    "multi-krum of 3": MultiKrum(F, m=3),
    "clipping": CentredClipping(3.0),
    "clipping once": CentredClipping(3.0, iterations=1),
    "mixing, trimmed": NearestNeighbourMixing(F, then=TrimmedMean(F)),
    "mixing, krum": NearestNeighbourMixing(F, then=Krum(F)),
    "mixing, geometric": NearestNeighbourMixing(F, then=GeometricMedian()),
    "mixing, clipping": NearestNeighbourMixing(F, then=CentredClipping(3.0)),
    "bucketing, median": Bucketing(2, then=CoordinateMedian()),
    "bucketing, geometric": Bucketing(2, then=GeometricMedian()),
}
ROBUST = {name: aggregator for name, aggregator in AGGREGATORS.items() if name != "mean"}
NOT_EQUIVARIANT = ("clipping", "bucketing", "mixing, clipping", "mixing, krum")
"""By design; and means of neighbours tie, which Krum decides by order."""
EQUIVARIANT = {
    name: one for name, one in AGGREGATORS.items() if not name.startswith(NOT_EQUIVARIANT)
}
every_aggregator = pytest.mark.parametrize("aggregator", AGGREGATORS.values(), ids=AGGREGATORS)
every_robust = pytest.mark.parametrize("aggregator", ROBUST.values(), ids=ROBUST)
every_equivariant = pytest.mark.parametrize("aggregator", EQUIVARIANT.values(), ids=EQUIVARIANT)


def normal(n: int, d: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        dtype
    )


def sum_of_distances(v: np.ndarray[Any, Any], x: np.ndarray[Any, Any]) -> float:
    return sum(math.dist(v, row) for row in x)
