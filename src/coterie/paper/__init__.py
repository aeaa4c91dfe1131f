"""Reproduction of the paper: every figure with its settings, exact values and sampled runs."""

from coterie.paper.series import Series, Setting
from coterie.paper.studies import STUDIES, Study
from coterie.paper.writing import reproduce

__all__ = ["STUDIES", "Series", "Setting", "Study", "reproduce"]
