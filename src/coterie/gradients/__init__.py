"""Gradients as flat vectors.

What user 0 receives in one step, and the weights that combine them.
"""

from coterie.gradients.gradients import Gradients
from coterie.gradients.parameters import Parameters
from coterie.gradients.simplex import simplex_minimum, water_filling

__all__ = ["Gradients", "Parameters", "simplex_minimum", "water_filling"]
