"""Handwritten digits by writer segment, from scikit-learn's copy."""

import numpy as np
import torch
from torch import Tensor

from coterie.data.table import Task
from coterie.errors import DataError
from coterie.users.user import User

BOUNDS = (0, 130, 256, 386, 516, 646, 776, 915, 1029, 1157, 1287, 1415, 1545, 1667, 1797)
"""Where one writer segment ends and the next begins.

The data carries no writer column; the segments follow
from the order of the rows."""


def digits_by_writer(me: int = 0, own_examples: int = 30, seed: int = 0) -> Task:
    """Return the 1,797 digits of scikit-learn as 14 users, one a writer segment.

    User 0 learns from `own_examples`; of the rest of its segment one half is for validation, the
    other for test; all three are stratified by class and disjoint. Peers use their whole segment.

    Args:
        me: the segment that is user 0, from 0 to 13.
        own_examples: how many examples user 0 learns from.
        seed: which examples those are.

    Example:
        >>> task = digits_by_writer(me=3, own_examples=30)
        >>> task.me, len(task.peers), len(task.me.validation), len(task.me.test)
        (User('writer 3', 30 examples), 13, 50, 50)
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    n_users = len(BOUNDS) - 1
    if not 0 <= me < n_users:
        raise DataError(f"`me` must be a writer segment from 0 to {n_users - 1}, got {me!r}")
    bunch = load_digits()
    inputs = torch.tensor(bunch.images / 16, dtype=torch.float32)[:, None]
    targets = torch.tensor(bunch.target)
    mine = np.arange(BOUNDS[me], BOUNDS[me + 1])
    if not 10 <= own_examples <= len(mine) - 20:
        raise DataError(
            f"`own_examples` must lie in [10, {len(mine) - 20}] for writer segment {me}, which has"
            f" {len(mine)} examples, so that training, validation and test each can have all ten"
            f" digits; got {own_examples}"
        )

    def halves(rows: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray]:
        a, b = train_test_split(
            rows, train_size=first, stratify=bunch.target[rows], random_state=seed
        )
        return a, b

    own, rest = halves(mine, own_examples)
    validation, test = halves(rest, len(rest) // 2)

    def examples(rows: np.ndarray) -> tuple[Tensor, Tensor]:
        return inputs[rows], targets[rows]

    user = User(
        f"writer {me}", *examples(own), validation=examples(validation), test=examples(test)
    )
    others = {k: np.arange(BOUNDS[k], BOUNDS[k + 1]) for k in range(n_users) if k != me}
    peers = tuple(User(f"writer {k}", *examples(rows)) for k, rows in others.items())
    return Task(user, peers, n_inputs=64, n_outputs=10)
