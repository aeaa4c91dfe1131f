"""The systems that coterie is compared with, over the same users, record and costs. See docs/methods.md."""

from coterie.methods.apfl import APFL
from coterie.methods.clients import Clients
from coterie.methods.data_interpolation import data_interpolation
from coterie.methods.ditto import Ditto
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedfomo import FedFomo
from coterie.methods.fine_tuning import FineTuning
from coterie.methods.hyp_cluster import HypCluster
from coterie.methods.l2gd import L2GD
from coterie.methods.mapper import Mapper
from coterie.methods.mime import Mime
from coterie.methods.model_averaging import averaging_error, averaging_weights
from coterie.methods.mvr import MVR
from coterie.methods.per_fedavg import PerFedAvg
from coterie.methods.rounds import Method
from coterie.methods.saga import SAGA
from coterie.methods.scaffold import Scaffold
from coterie.methods.selfish import Selfish
from coterie.methods.svrg import SVRG
from coterie.methods.user_centric import UserCentric
from coterie.methods.waffle import Waffle
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
