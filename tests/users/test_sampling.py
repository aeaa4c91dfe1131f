"""The generator of indices, and seeded blocks."""

from __future__ import annotations

import random

import numpy as np
import torch

from coterie.users.sampling import BatchStream, IndexTable, draw, random_key, seeded, uniform


def test_batches_are_splitmix_of_a_hash() -> None:
    """The generator in plain integers, and values written down once: changing them breaks every old record."""

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    def index(key: int, n: int, size: int, step: int, position: int) -> int:
        counter = mix((key + 0x9E3779B97F4A7C15 * (step + 1)) % 2**64)
        bits = mix((counter + 0x9E3779B97F4A7C15 * (position + 1)) % 2**64)
        return int((position + (bits >> 11) / 2**53) * (n / size))

    keys, steps = [random_key(7, "ward 3"), random_key(7, "ward 4")], [0, 1, 1_000_000]
    sizes = [(keys[0], 50), (keys[1], 13)]
    wanted = [[[index(key, n, 5, step, p) for p in range(5)] for key, n in sizes] for step in steps]
    assert draw(keys, [50, 13], 5, steps).tolist() == wanted
    assert random_key(0, "a") == 0x1F404C7F32E8BB7
    assert draw(keys[:1], [50], 5, [0, 1_000_000]).tolist() == [
        [[3, 11, 22, 32, 46]],
        [[7, 19, 29, 35, 43]],
    ]


def test_a_full_batch_is_in_order_and_a_coin_is_the_same_for_all() -> None:
    assert draw([random_key(0, "a")], [5], 5, steps=[3]).tolist() == [[[0, 1, 2, 3, 4]]]
    assert random_key(0, "a") == random_key(0, "a") != random_key(0, "b")
    all_of_both = [
        BatchStream(random_key(0, "a"), 3, 3),
        BatchStream(random_key(0, "b"), 2, 2, first=3),
    ]
    assert IndexTable(all_of_both).row(7).tolist() == [0, 1, 2, 3, 4]
    assert uniform(0, "coin", 3) == uniform(0, "coin", 3) != uniform(0, "coin", 4)


def test_seeded_restores_the_generator() -> None:
    before = torch.get_rng_state()
    with seeded(0, "a", 1):
        first = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    with seeded(0, "a", 1):
        assert torch.equal(torch.rand(3), first)
    for other in ((1, "a", 1), (0, "b", 1), (0, "a", 2)):
        with seeded(*other):
            assert not torch.equal(torch.rand(3), first)


def test_seeded_draws_depend_on_the_step_alone_and_leave_every_generator_as_it_was() -> None:
    def draws() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(np.random.rand())

    def start() -> None:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)

    start()
    undisturbed = [draws() for _ in range(2)]
    start()
    first = draws()
    with seeded(0, "a", 5):
        inside = draws()
    assert [first, draws()] == undisturbed
    with seeded(0, "a", 5):
        assert draws() == inside
    with seeded(0, "a", 6):
        assert all(x != y for x, y in zip(draws(), inside, strict=True))


def test_a_table_of_indices_is_what_each_user_draws() -> None:
    """Blocks, places and gaps change nothing about what is drawn."""
    streams = [BatchStream(random_key(3, name), n, size, first) for name, n, size, first in SEVERAL]
    table = IndexTable(streams, max_entries=40)
    places, gaps = [9, 0, 14, 5], torch.full((16,), -1)
    spread = IndexTable(streams, places, gaps, max_entries=10)
    for step in (0, 1, 5, 6, 2, 100):
        ends = 0
        for stream, place in zip(streams, places, strict=True):
            drawn = stream.first + torch.arange(stream.n)[:0]
            if stream.size:
                drawn = draw([stream.key], [stream.n], stream.size, [step])[0, 0] + stream.first
            assert torch.equal(table.row(step)[ends : ends + stream.size], drawn)
            assert torch.equal(spread.row(step)[place : place + stream.size], drawn)
            ends += stream.size
        assert spread.row(step)[[4, 8, 12, 13, 15]].tolist() == [-1, -1, -1, -1, -1]
        assert torch.equal(table.block(step)[0], table.row(step))


SEVERAL = [("a", 9, 3, 0), ("b", 4, 4, 9), ("none", 5, 0, 13), ("c", 30, 3, 18)]
