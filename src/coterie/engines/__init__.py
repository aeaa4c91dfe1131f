"""Engines: where the users are. Each engine gives the gradients of all users at one point."""

from coterie.engines.engine import Engine, MakeEngine
from coterie.engines.in_process.engine import InProcess

__all__ = ["Engine", "InProcess", "MakeEngine"]
