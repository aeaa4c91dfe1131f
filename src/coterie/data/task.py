"""A task: user 0 and its peers."""

from dataclasses import dataclass

from coterie.users.user import User


@dataclass(frozen=True)
class Task:
    """User 0, with examples held out for validation and test, and its peers.

    Args:
        me: user 0.
        peers: the others.
        n_inputs: the number of features of an example.
        n_outputs: the number of classes, or 1 for regression.
    """

    me: User
    peers: tuple[User, ...]
    n_inputs: int
    n_outputs: int
