"""Train your model with your peers' gradients: personalized collaborative learning in PyTorch."""

from coterie import errors
from coterie.gradients import Gradients
from coterie.rules import Alone, BiasCorrection, OracleCorrection, Rule, State, WeightedAveraging
from coterie.users import User

__version__ = "0.1.0"

__all__ = [
    "Alone",
    "BiasCorrection",
    "Gradients",
    "OracleCorrection",
    "Rule",
    "State",
    "User",
    "WeightedAveraging",
    "errors",
]
