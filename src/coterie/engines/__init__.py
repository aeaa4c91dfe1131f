"""Engines: where the users are. Each engine gives the gradients of all users at one point."""

from coterie.engines.capabilities import AnswersAtOwnPoints, Asks, Captures, Local, require
from coterie.engines.engine import Capabilities, Engine, MakeEngine
from coterie.engines.in_process.engine import InProcess
from coterie.engines.private_peers import PrivatePeers
from coterie.engines.processes.engine import Mutual, TorchDistributed, serve
from coterie.engines.remote.engine import Remote
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
