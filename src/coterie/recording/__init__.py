"""What remains of a run: its record, its checkpoints, its costs and traffic, and what is shown while it goes."""

from coterie.recording.costs import Costs
from coterie.recording.record import Record
from coterie.recording.traffic import Traffic

__all__ = ["Costs", "Record", "Traffic"]
