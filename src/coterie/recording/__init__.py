"""What remains of a run.

Its record, its checkpoints, its costs and traffic, and what is shown while it goes.
"""

from coterie.recording.configuration import Configuration, UserSummary
from coterie.recording.costs import Cost, Costs, Traffic
from coterie.recording.record import Record
from coterie.recording.result import Comparison, Difference, End, GuardCheck, GuardDecision, Point

__all__ = [
    "Comparison",
    "Configuration",
    "Cost",
    "Costs",
    "Difference",
    "End",
    "GuardCheck",
    "GuardDecision",
    "Point",
    "Record",
    "Traffic",
    "UserSummary",
]
