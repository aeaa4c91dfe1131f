"""Whom to listen to, how much and until when.

Chosen from the data, before the first step or as the run goes.
"""

from coterie.choosing.adaptive import AdaptiveAveraging
from coterie.choosing.auto import chooser_for
from coterie.choosing.chooser import Algorithm, Chooser, RuleChoice, TellsGradients
from coterie.choosing.mixture import Mixture
from coterie.rules import RULES

__all__ = [
    "AdaptiveAveraging",
    "Algorithm",
    "Chooser",
    "Mixture",
    "RuleChoice",
    "TellsGradients",
    "chooser_for",
]

RULES.register("adaptive", AdaptiveAveraging)
RULES.register("mixture", Mixture, benchmark_settings=[])
