"""Configurations of runs that nobody took, for tests of records and of what is made of them."""

from __future__ import annotations

from typing import Any

from coterie.recording import Configuration, UserSummary


def configuration(**changed: Any) -> Configuration:
    """Return what a run was asked to do, with some of it changed."""
    me = UserSummary(name="me", examples=12, validation=6, test=5)
    return Configuration(
        **{"rule": "Alone()", "me": me, "peers": {"a": 40}, "steps": 20, **changed}
    )
