"""How a site stands with user 0, and what can be true of what it tells."""

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
