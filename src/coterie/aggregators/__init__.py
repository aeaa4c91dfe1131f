"""Robust aggregators: one vector in the place of several, some of which may be bad.

An aggregator is a function of the peers' gradients, one a row, and knobs are fields: `Krum(n_byzantine=2)(rows)`.
It stands in the place of the weighted sum in `WeightedAveraging(aggregator=…)` and `BiasCorrection(aggregator=…)`.

No aggregator can promise more than to come near the mean of the good rows. Where those differ, a bad row can stay
among them and do harm step after step. The guard keeps user 0 from that harm; see `coterie.training.guard`.
"""

from coterie.aggregators.coordinates import CoordinateMedian, Mean, TrimmedMean
from coterie.aggregators.distances import CentredClipping, Krum, MultiKrum
from coterie.aggregators.geometric_median import GeometricMedian
from coterie.aggregators.mixing import Bucketing, NearestNeighbourMixing
from coterie.aggregators.points import Aggregator, Points

__all__ = [
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
]
