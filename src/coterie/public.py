"""The public names, as `coterie` offers them.

`import coterie` imports this when the first of them is used.
"""

from typing import TYPE_CHECKING

from coterie import aggregators, errors, theory
from coterie.aggregators import register_aggregator
from coterie.choosing.adaptive import AdaptiveAveraging
from coterie.choosing.mixture import Mixture
from coterie.engines import Engine, InProcess, attacks
from coterie.engines.in_process.forward_options import ForwardOptions
from coterie.evaluation import evaluate, model_loss, per_example, register_metric
from coterie.everyone.runs import Runs
from coterie.everyone.train import train_everyone
from coterie.gradients import Gradients
from coterie.learners.spec import RunSpec
from coterie.methods import register_method
from coterie.recording import Record
from coterie.rules import (
    Alone,
    BiasCorrection,
    FormulaRule,
    Knob,
    OracleCorrection,
    Rule,
    State,
    WeightedAveraging,
    register_rule,
)
from coterie.training.hooks import Hook, register_tracker
from coterie.training.many import train_many
from coterie.training.run import Run, Step
from coterie.training.train import train
from coterie.users import User

if TYPE_CHECKING:
    from coterie import data  # imported when it is asked for: it brings pandas

__all__ = [
    "AdaptiveAveraging",
    "Alone",
    "BiasCorrection",
    "Engine",
    "FormulaRule",
    "ForwardOptions",
    "Gradients",
    "Hook",
    "InProcess",
    "Knob",
    "Mixture",
    "OracleCorrection",
    "Record",
    "Rule",
    "Run",
    "RunSpec",
    "Runs",
    "State",
    "Step",
    "User",
    "WeightedAveraging",
    "aggregators",
    "attacks",
    "data",
    "errors",
    "evaluate",
    "model_loss",
    "per_example",
    "register_aggregator",
    "register_method",
    "register_metric",
    "register_rule",
    "register_tracker",
    "theory",
    "train",
    "train_everyone",
    "train_many",
]
