"""The benchmark: methods × sets of real users × conditions × users × seeds, resumable and in parallel."""

from coterie.benchmark.cells import Cell, Selection, Store
from coterie.benchmark.page import in_short, write_results
from coterie.benchmark.population import Population
from coterie.benchmark.running import measure_cells, run
from coterie.benchmark.sets import SETS, UserSet, register_set
from coterie.benchmark.settings import Contender, Setting
from coterie.benchmark.summary import overall, summary, table
from coterie.benchmark.tools import Tool

__all__ = [
    "SETS",
    "Cell",
    "Contender",
    "Population",
    "Selection",
    "Setting",
    "Store",
    "Tool",
    "UserSet",
    "in_short",
    "measure_cells",
    "overall",
    "register_set",
    "run",
    "summary",
    "table",
    "write_results",
]
