"""Batches of all users, drawn together."""

from __future__ import annotations

import pytest
import torch
from tests.support.counting import Lazy, counting

import coterie
from coterie.engines.in_process.sampler import BatchSampler
from coterie.users.sampling import MAX_STEPS_AHEAD


@pytest.mark.parametrize("sizes", [(20, 20, 20), (20, 7, 33), (3, 100, 8)])
def test_drawing_together_is_drawing_alone(sizes: tuple[int, ...]) -> None:
    users = [counting(name, size) for name, size in zip("abc", sizes, strict=True)]
    everyone = BatchSampler(users[0], users[1:], batch_size=8, seed=5, device=torch.device("cpu"))
    for names in (("b", "c"), ("c",), ("c", "b"), ()):
        for step in (0, 1, MAX_STEPS_AHEAD - 1, MAX_STEPS_AHEAD, 3, 1000):
            own, others = everyone.draw(names, step)
            assert torch.equal(own[1], users[0].batch(8, seed=5, step=step)[1])
            seen = []
            for batch in others:
                for position, targets in zip(
                    batch.positions, batch.by_user(batch.targets), strict=True
                ):
                    alone = users["abc".index(names[position])].batch(8, seed=5, step=step)
                    assert torch.equal(targets, alone[1])
                    seen.append(position)
            assert sorted(seen) == list(range(len(names)))


def test_everybodys_examples_are_held_once_and_ones_own_are_left_alone() -> None:
    users = [counting(name, size) for name, size in zip("abc", (3, 5, 4), strict=True)]
    before = [user.examples for user in users]
    everyone = BatchSampler(users[0], users[1:], batch_size=2, seed=0, device=torch.device("cpu"))
    held = [user.examples for user in everyone.users.values()]
    for part in ("inputs", "targets"):
        assert len({getattr(examples, part).untyped_storage().data_ptr() for examples in held}) == 1
    for user, examples, own in zip(users, held, before, strict=True):
        assert user.examples is own
        every = torch.arange(len(user))
        assert len(examples) == len(user)
        assert all(map(torch.equal, examples.take(every), own.take(every)))


def test_drawing_together_from_datasets() -> None:
    users = [coterie.User.from_dataset("a", Lazy(20, noise=1.0)), counting("b", 9)]
    everyone = BatchSampler(users[0], users[1:], batch_size=4, seed=5, device=torch.device("cpu"))
    own, (batch,) = everyone.draw(("b",), 3)
    assert torch.equal(own[0], users[0].batch(4, seed=5, step=3)[0])
    assert torch.equal(batch.inputs, users[1].batch(4, seed=5, step=3)[0])
