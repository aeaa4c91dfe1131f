"""A peer: what it answers to a request, within its caps, and what it keeps to itself."""

from coterie.engines.peer.peer import Caps, Peer

__all__ = ["Caps", "Peer"]
