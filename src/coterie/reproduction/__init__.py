"""The paper reproduced: every figure with its settings, exact values and sampled runs."""

from coterie.reproduction.series import Series, Setting
from coterie.reproduction.studies import STUDIES, Study
from coterie.reproduction.writing import reproduce

__all__ = ["STUDIES", "Series", "Setting", "Study", "reproduce"]
