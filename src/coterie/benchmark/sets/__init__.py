"""The data sets of real users, one reader each, in their original formats."""

from coterie.benchmark.sets import pictures, shakespeare, tables  # noqa: F401  # registers them
from coterie.benchmark.sets.user_set import SETS, UserSet, load, register_set

__all__ = ["SETS", "UserSet", "load", "register_set"]
