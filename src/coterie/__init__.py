"""Train your model with your peers' gradients: personalized collaborative learning in PyTorch."""

from coterie import attacks, data, errors, pools, theory
from coterie.adaptive import AdaptiveAveraging
from coterie.engines import Engine, InProcess
from coterie.engines.passing import Passing
from coterie.evaluation import evaluate
from coterie.gradients import Gradients
from coterie.record import Record
from coterie.rules import Alone, BiasCorrection, OracleCorrection, Rule, State, WeightedAveraging
from coterie.run import Run, Step
from coterie.training import train
from coterie.training_many import Wanted, train_many
from coterie.users import User

__version__ = "0.1.0"

__all__ = [
    "AdaptiveAveraging",
    "Alone",
    "BiasCorrection",
    "Engine",
    "Gradients",
    "InProcess",
    "OracleCorrection",
    "Passing",
    "Record",
    "Rule",
    "Run",
    "State",
    "Step",
    "User",
    "Wanted",
    "WeightedAveraging",
    "attacks",
    "data",
    "errors",
    "evaluate",
    "pools",
    "theory",
    "train",
    "train_many",
]
