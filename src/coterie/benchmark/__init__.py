"""The benchmark: methods × sets of real users × conditions × users × seeds, resumable and in parallel."""

from coterie.benchmark.cells import Cell, Selection, Store
from coterie.benchmark.contenders import Contender, MethodSetting
from coterie.benchmark.results import in_short, write_results
from coterie.benchmark.running import measure_cells, run
from coterie.benchmark.sets import SETS, UserSet, register_set
from coterie.benchmark.tasks import Population
from coterie.benchmark.tools import Tool
from coterie.benchmark.totals import overall, summary, table

__all__ = [
    "SETS",
    "Cell",
    "Contender",
    "MethodSetting",
    "Population",
    "Selection",
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
