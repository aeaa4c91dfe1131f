"""A personal model for every user, tied to the others' by a penalty, a mixture, a cluster or a common start."""

from coterie.methods.personal.apfl import APFL
from coterie.methods.personal.ditto import Ditto
from coterie.methods.personal.hyp_cluster import HypCluster
from coterie.methods.personal.l2gd import L2GD
from coterie.methods.personal.mapper import Mapper
from coterie.methods.personal.per_fedavg import PerFedAvg

__all__ = ["APFL", "L2GD", "Ditto", "HypCluster", "Mapper", "PerFedAvg"]
