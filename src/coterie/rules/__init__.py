"""Rules: from the gradients of one step to the direction that user 0 follows."""

from coterie.rules.rules import Alone, BiasCorrection, OracleCorrection, Rule, State, WeightedAveraging

__all__ = ["Alone", "BiasCorrection", "OracleCorrection", "Rule", "State", "WeightedAveraging"]
