"""The systems that coterie is compared with, over the same users, record and costs. See docs/methods.md."""

from coterie.methods.fedavg import FedAvg
from coterie.methods.federation import Federation
from coterie.methods.rounds import Method
from coterie.methods.scaffold import Scaffold

__all__ = ["FedAvg", "Federation", "Method", "Scaffold"]
