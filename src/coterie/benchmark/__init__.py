"""The benchmark: methods × sets of real users × conditions × users × seeds, resumable and in parallel."""

from coterie.benchmark.cells import Cell, Selection, Store
from coterie.benchmark.methods import METHODS, Way
from coterie.benchmark.page import in_short, write_results
from coterie.benchmark.running import run
from coterie.benchmark.summary import overall, summary, table

__all__ = [
    "METHODS",
    "Cell",
    "Selection",
    "Store",
    "Way",
    "in_short",
    "overall",
    "run",
    "summary",
    "table",
    "write_results",
]
