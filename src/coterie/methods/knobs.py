"""Checks of the knobs that several methods have."""

from __future__ import annotations

import math

from coterie.errors import KnobError


def check_share(name: str, value: float) -> None:
    """Check a number that must lie in [0, 1].

    Example:
        >>> check_share("mixing", 0.5)
    """
    if isinstance(value, bool) or not 0 <= value <= 1:
        raise KnobError(f"`{name}` must lie in [0, 1], got {value!r}")


def check_positive(name: str, value: float) -> None:
    """Check a number that must be finite and above 0.

    Example:
        >>> check_positive("penalty", 0.1)
    """
    if isinstance(value, bool) or not 0 < value < math.inf:
        raise KnobError(f"`{name}` must be a finite number above 0, got {value!r}")


def check_count(name: str, value: int, least: int = 1) -> None:
    """Check a whole number.

    Example:
        >>> check_count("clusters", 2)
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise KnobError(f"`{name}` must be a whole number, at least {least}, got {value!r}")
