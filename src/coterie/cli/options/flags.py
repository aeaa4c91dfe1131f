"""Options that take no value."""

from typing import Any


def bare_flags(options: list[Any]) -> list[Any]:
    """Return options of which those that take no value do not look in the help as if they took one."""
    for option in options:
        if getattr(option, "is_flag", False):
            option.metavar = ""
    return options
