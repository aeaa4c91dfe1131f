"""The methods that coterie is compared with, over the same users, record and costs. See docs/methods.md."""

from coterie.methods.averaging import FedAvg, FineTuning, averaging_error, averaging_weights, data_interpolation
from coterie.methods.clients import Clients
from coterie.methods.personal import APFL, L2GD, Ditto, HypCluster, Mapper, PerFedAvg
from coterie.methods.rounds import Method
from coterie.methods.variance import MVR, SAGA, SVRG, Mime, Scaffold
from coterie.methods.weighting import FedFomo, Selfish, UserCentric, Waffle
from coterie.rules.similarity import MirrorDescent, WeightErosion

__all__ = [
    "APFL",
    "L2GD",
    "MVR",
    "SAGA",
    "SVRG",
    "Clients",
    "Ditto",
    "FedAvg",
    "FedFomo",
    "FineTuning",
    "HypCluster",
    "Mapper",
    "Method",
    "Mime",
    "MirrorDescent",
    "PerFedAvg",
    "Scaffold",
    "Selfish",
    "UserCentric",
    "Waffle",
    "WeightErosion",
    "averaging_error",
    "averaging_weights",
    "data_interpolation",
]
