"""The folds of user 0's examples: each is kept from one copy of the model, which it then judges."""

import numpy as np
import torch
from torch import Tensor

from coterie.users.examples import InMemory
from coterie.users.sampling import random_key
from coterie.users.user import User


def split(me: User, folds: int, seed: int) -> Tensor:
    """Return the fold of each of a user's examples, equal in size and, as far as they go, in targets."""
    random = np.random.default_rng(random_key(seed, f"{me.name}/folds"))
    targets = np.zeros(len(me))
    if isinstance(me.examples, InMemory):  # of a target of several numbers, the first
        targets = me.examples.targets.cpu().reshape(len(me), -1)[:, 0].numpy()
    dealt = np.arange(len(me)) % folds
    if np.issubdtype(targets.dtype, np.floating):  # numbers have one order only: shuffle each round
        dealt = np.concatenate([random.permutation(folds) for _ in range(-(-len(me) // folds))])[: len(me)]
    fold = np.empty(len(me), dtype=np.int64)
    fold[np.lexsort((random.random(len(me)), targets))] = dealt
    return torch.from_numpy(fold)
