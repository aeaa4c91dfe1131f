"""Robust aggregators: they combine several gradients into one, although some may be bad.

An aggregator is a function of the peers' gradients, one a row; its knobs are fields:
`Krum(n_byzantine=2)(rows)`. It replaces the weighted sum in `WeightedAveraging(aggregator=…)` and
`BiasCorrection(aggregator=…)`.

No aggregator can do better than come near the mean of the good rows. Where those differ, a bad row
can stay among them and do harm step after step. The guard protects user 0 from that harm; see
`coterie.training.guard`.
"""

from coterie.aggregators.geometric_median import GeometricMedian
from coterie.aggregators.points import Aggregator, Points
from coterie.aggregators.robust import (
    Bucketing,
    CentredClipping,
    CoordinateMedian,
    Krum,
    Mean,
    MultiKrum,
    NearestNeighbourMixing,
    TrimmedMean,
)
from coterie.registry import Computed, Registry

__all__ = [
    "AGGREGATORS",
    "Aggregator",
    "Bucketing",
    "CentredClipping",
    "CoordinateMedian",
    "GeometricMedian",
    "Krum",
    "Mean",
    "MultiKrum",
    "NearestNeighbourMixing",
    "Points",
    "TrimmedMean",
    "register_aggregator",
]

AGGREGATORS: Registry[type[Aggregator]] = Registry("aggregator", "coterie.aggregators")
register_aggregator = AGGREGATORS.register

# just less than half of the peers
_BAD = {"n_byzantine": Computed(lambda run: (len(run.peers) - 1) // 2)}

AGGREGATORS.register("mean", Mean, benchmark_settings=[])  # weighted averaging is the same
AGGREGATORS.register("median", CoordinateMedian)
AGGREGATORS.register("trimmed", TrimmedMean, defaults=_BAD)
AGGREGATORS.register("geometric", GeometricMedian)
AGGREGATORS.register("krum", Krum, defaults=_BAD)
AGGREGATORS.register("multi-krum", MultiKrum, defaults=_BAD)
AGGREGATORS.register("clipping", CentredClipping, defaults={"radius": 1.0})
AGGREGATORS.register("mixing", NearestNeighbourMixing, defaults=_BAD | {"then": CoordinateMedian()})
AGGREGATORS.register("bucketing", Bucketing, defaults={"size": 2, "then": CoordinateMedian()})
