"""Users: a name, examples, and batches that are a function of (seed, user, step)."""

from coterie.users.user import Loss, User

__all__ = ["Loss", "User"]
