"""Robust pools: one vector in the place of several, some of which may be bad.

A pool is a function of the peers' gradients, one a row, and its knobs are fields: `Krum(f=2)(rows)`. It stands in
the place of the weighted sum in `WeightedAveraging(pool=…)` and `BiasCorrection(pool=…)`.

No pool can promise more than to come near the mean of the good rows: where those differ, what is plausible is wide,
and bad rows inside it do harm step after step. What keeps user 0 from harm is the guard; see `coterie.guard`.
"""

from coterie.pools.coordinates import CoordinateMedian, Mean, TrimmedMean
from coterie.pools.distances import CentredClipping, Krum, MultiKrum
from coterie.pools.geometric_median import GeometricMedian
from coterie.pools.mixing import Bucketing, NearestNeighbourMixing
from coterie.pools.points import Points, Pool

__all__ = [
    "Bucketing",
    "CentredClipping",
    "CoordinateMedian",
    "GeometricMedian",
    "Krum",
    "Mean",
    "MultiKrum",
    "NearestNeighbourMixing",
    "Points",
    "Pool",
    "TrimmedMean",
]
