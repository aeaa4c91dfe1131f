"""How a site stands with user 0, and what can be true of what it tells."""

import math
from dataclasses import dataclass
from typing import Any

from coterie.engines.flare.sites import Replies


@dataclass
class Standing:
    """How a site stands."""

    pause: int  # steps to let pass before it is asked whether it is back
    missed: int = 0  # steps in a row without an answer
    since: int = 0  # the step that the pause is counted from
    silent_at: int = -1  # the last step that it missed
    probe: Replies | None = None  # the question whether it is back, where one is on its way


def whole_number(reported: Any) -> int | None:
    """Return the number of examples that a site says it has, where it can be one."""
    return reported if type(reported) is int and 0 < reported < 2**53 else None


def seconds_told(reported: Any, most: float) -> float:
    """Return the seconds that a site says it computed, as far as they can be true."""
    return reported if isinstance(reported, float) and 0 <= reported <= most else 0.0


def promise_told(reported: Any) -> dict[str, float] | None:
    """Return what a site says it promises and has spent of it, where that can be true.

    Example:
        >>> promise_told({"epsilon": 4.0, "delta": 1e-5, "clip": 1.0, "spent": 0.5, "more": "words"})
        {'epsilon': 4.0, 'delta': 1e-05, 'clip': 1.0, 'spent': 0.5}
        >>> promise_told({"epsilon": 4.0, "delta": -1.0, "clip": 1.0, "spent": 0.5}) is None
        True
    """
    fields = reported if isinstance(reported, dict) else {}
    told = {name: fields.get(name) for name in ("epsilon", "delta", "clip", "spent")}
    fine = all(isinstance(value, float) and 0 <= value < math.inf for value in told.values())
    return {name: float(value) for name, value in told.items() if value is not None} if fine else None


def noise_told(reported: Any) -> float:
    """Return the standard deviation of the noise that a site says it adds to each number; 0 where it says none."""
    return reported if isinstance(reported, float) and 0 <= reported < math.inf else 0.0
