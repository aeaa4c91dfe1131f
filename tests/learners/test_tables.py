"""Everybody's examples in one pool."""

import torch

from coterie import User
from coterie.learners.tables import ExamplePool


def test_examples_that_users_share_are_kept_once() -> None:
    users = [User(name, [[1.0], [2.0]], [0, 1]) for name in ("a", "b")]
    pool = ExamplePool(users, torch.device("cpu"))
    assert len(pool.examples) == 2
    assert pool.stream(users[1], batch_size=32, seed=0).size == 2
