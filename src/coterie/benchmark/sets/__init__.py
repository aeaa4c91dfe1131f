"""The benchmark's sets: real users' data in its original formats, and tasks made of it under conditions."""

from coterie.benchmark.sets.conditions import CONDITIONS
from coterie.benchmark.sets.population import Population
from coterie.benchmark.sets.registry import SETS, UserSet, load, missing
from coterie.benchmark.sets.tasks import SetTask, candidates, task_of

__all__ = ["CONDITIONS", "SETS", "Population", "SetTask", "UserSet", "candidates", "load", "missing", "task_of"]
