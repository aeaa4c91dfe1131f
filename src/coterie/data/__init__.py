"""Data sets as users: digits by writer, and tables with a user column."""

from coterie.data.handwriting import digits_by_writer
from coterie.data.preparation import Preparation
from coterie.data.reading import read_table
from coterie.data.statistics import Statistics
from coterie.data.table import TableTask, TableUsers, Task, from_table, users_from_table

__all__ = [
    "Preparation",
    "Statistics",
    "TableTask",
    "TableUsers",
    "Task",
    "digits_by_writer",
    "from_table",
    "read_table",
    "users_from_table",
]
