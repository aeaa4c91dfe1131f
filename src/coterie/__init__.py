"""Train your model with your peers' gradients: personalized collaborative learning in PyTorch."""

from coterie import aggregators, data, errors, theory
from coterie.choosing.adaptive import AdaptiveAveraging
from coterie.engines import Engine, InProcess, attacks
from coterie.engines.in_process.forward_options import ForwardOptions
from coterie.evaluation import evaluate
from coterie.gradients import Gradients
from coterie.recording import Record
from coterie.rules import Alone, BiasCorrection, OracleCorrection, Rule, State, WeightedAveraging
from coterie.training.many import Wanted, train_many
from coterie.training.run import Run, Step
from coterie.training.train import train
from coterie.users import User

__version__ = "0.1.0"

__all__ = [
    "AdaptiveAveraging",
    "Alone",
    "BiasCorrection",
    "Engine",
    "ForwardOptions",
    "Gradients",
    "InProcess",
    "OracleCorrection",
    "Record",
    "Rule",
    "Run",
    "State",
    "Step",
    "User",
    "Wanted",
    "WeightedAveraging",
    "aggregators",
    "attacks",
    "data",
    "errors",
    "evaluate",
    "theory",
    "train",
    "train_many",
]
