"""Engines: where the users are. Each engine gives the gradients of all users at one point."""

from coterie.engines.capabilities import AnswersAtOwnPoints, Captures, Local, require
from coterie.engines.engine import Capabilities, Engine, MakeEngine
from coterie.engines.flare.private_peers import PrivatePeers
from coterie.engines.in_process.engine import InProcess

__all__ = [
    "AnswersAtOwnPoints",
    "Capabilities",
    "Captures",
    "Engine",
    "InProcess",
    "Local",
    "MakeEngine",
    "PrivatePeers",
    "require",
]
