"""Users' data: digits by writer, tables with a user column."""

from coterie.data.digits import digits_by_writer
from coterie.data.task import Task

__all__ = ["Task", "digits_by_writer"]
