"""The systems that coterie is compared with, over the same users, record and costs. See docs/methods.md."""

from coterie.methods.apfl import APFL
from coterie.methods.data_interpolation import data_interpolation
from coterie.methods.ditto import Ditto
from coterie.methods.fedavg import FedAvg
from coterie.methods.federation import Federation
from coterie.methods.fine_tuning import FineTuning
from coterie.methods.hyp_cluster import HypCluster
from coterie.methods.l2gd import L2GD
from coterie.methods.mapper import Mapper
from coterie.methods.model_averaging import averaging_error, averaging_weights
from coterie.methods.per_fedavg import PerFedAvg
from coterie.methods.rounds import Method
from coterie.methods.scaffold import Scaffold

__all__ = [
    "APFL",
    "L2GD",
    "Ditto",
    "FedAvg",
    "Federation",
    "FineTuning",
    "HypCluster",
    "Mapper",
    "Method",
    "PerFedAvg",
    "Scaffold",
    "averaging_error",
    "averaging_weights",
    "data_interpolation",
]
