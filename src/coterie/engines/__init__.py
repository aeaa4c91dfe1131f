"""Engines: where the users are. Each engine gives the gradients of all users at one point."""

from coterie.engines.engine import (
    AnswersAtOwnPoints,
    Asks,
    Capabilities,
    Captures,
    Engine,
    Local,
    MakeEngine,
    require,
)
from coterie.engines.in_process.engine import InProcess
from coterie.engines.processes.engine import Mutual, TorchDistributed, serve
from coterie.engines.remote.engine import PrivatePeers, Remote
from coterie.engines.remote.sites import LocalSites, Replies, Sites

__all__ = [
    "AnswersAtOwnPoints",
    "Asks",
    "Capabilities",
    "Captures",
    "Engine",
    "InProcess",
    "Local",
    "LocalSites",
    "MakeEngine",
    "Mutual",
    "PrivatePeers",
    "Remote",
    "Replies",
    "Sites",
    "TorchDistributed",
    "require",
    "serve",
]
