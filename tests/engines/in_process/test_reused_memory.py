"""Memory that is used again, and never while somebody holds it."""

from __future__ import annotations

import torch
from tests.support.layer_cases import (
    asked,
    case,
    make_users,
)
from torch.nn import functional as f

import coterie
from coterie.engines.in_process.passes import ReusedMemory


def test_rows_that_are_held_are_not_written_over() -> None:
    model, shape = case("linear")
    users = make_users(shape, [6] * 5)
    engine = coterie.InProcess(model, f.mse_loss, users[0], users[1:], batch_size=4)
    x = engine.passes.parameters.vector()
    first = asked(engine, x)
    kept, part = first.clone(), first[1:2]
    places = {first.data_ptr()}
    del first
    for _ in range(3):
        places.add(asked(engine, x + 1).data_ptr())
    assert torch.equal(part[0], kept[1])
    assert len(places) == 2  # one that is held, one used again and again


def test_room_of_another_size_lets_the_old_go() -> None:
    room, like = ReusedMemory(), torch.zeros((), dtype=torch.bfloat16)
    small = room.empty((2, 2), like)
    assert (small.shape, small.dtype) == ((2, 2), torch.bfloat16)
    large = room.empty((3, 3), like)
    del small
    assert room.empty((3, 3), like).data_ptr() != large.data_ptr()
    assert len(room._kept) == 2  # the two large ones; one of them free
    assert room.empty((0, 3), like).shape == (0, 3)
