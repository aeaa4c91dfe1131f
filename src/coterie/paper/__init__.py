"""Reproduction of the paper: every figure with its settings, exact values and sampled runs."""

from coterie.paper.series import Line, Series
from coterie.paper.studies import STUDIES, Study
from coterie.paper.writing import reproduce

__all__ = ["STUDIES", "Line", "Series", "Study", "reproduce"]
