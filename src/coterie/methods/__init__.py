"""The systems that coterie is compared with, over the same users, record and costs. See docs/methods.md."""

from coterie.methods.fedavg import FedAvg
from coterie.methods.federation import Federation
from coterie.methods.fedfomo import FedFomo
from coterie.methods.mime import Mime
from coterie.methods.mvr import MVR
from coterie.methods.rounds import Method
from coterie.methods.saga import SAGA
from coterie.methods.scaffold import Scaffold
from coterie.methods.selfish import Selfish
from coterie.methods.svrg import SVRG
from coterie.methods.user_centric import UserCentric
from coterie.methods.waffle import Waffle
from coterie.similarity import MirrorDescent, WeightErosion

__all__ = [
    "MVR",
    "SAGA",
    "SVRG",
    "FedAvg",
    "FedFomo",
    "Federation",
    "Method",
    "Mime",
    "MirrorDescent",
    "Scaffold",
    "Selfish",
    "UserCentric",
    "Waffle",
    "WeightErosion",
]
