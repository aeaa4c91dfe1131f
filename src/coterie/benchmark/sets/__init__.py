"""The data sets of real users, one reader each, in their original formats."""

from coterie.benchmark.sets import (  # noqa: F401  # registers them
    digits,
    heart,
    mnist,
    school,
    shakespeare,
    vowels,
    wisdm,
)
from coterie.benchmark.sets.user_set import SETS, UserSet, load, register_set

__all__ = ["SETS", "UserSet", "load", "register_set"]
