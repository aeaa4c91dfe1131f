"""Users: batches that depend on (seed, user, step) alone, drawn evenly, from whatever holds the examples."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import coterie
from coterie.engines.in_process.sampler import AHEAD, BatchSampler
from coterie.errors import DataError
from coterie.users.sampling import draw, random_key, seeded


def counting(name: str, size: int) -> coterie.User:
    """Return a user whose inputs say which example they are."""
    return coterie.User(name, torch.arange(float(size))[:, None], torch.arange(size))


def indices(user: coterie.User, size: int, steps: range, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.stack([user.batch(size, seed=seed, step=step)[1].numpy() for step in steps])


class Lazy(Dataset[tuple[Tensor, int]]):
    """Examples made when they are read, with noise from torch's generator."""

    def __init__(self, size: int, noise: float = 0.0) -> None:
        self.size, self.noise, self.reads = size, noise, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.reads += 1
        return torch.tensor([float(index)]) + self.noise * torch.randn(1), index


# What a batch depends on.


def test_batch_depends_on_seed_name_and_step_alone() -> None:
    user = counting("a", 100)
    first = indices(user, 10, range(5))
    for step in (3, 0, 4, 4, 1):  # in any order, any number of times, whatever the global generators do
        torch.manual_seed(step)
        np.random.seed(step)  # the global generator is what is meant
        assert np.array_equal(indices(user, 10, range(step, step + 1))[0], first[step])
    assert np.array_equal(indices(counting("a", 100), 10, range(5)), first)
    assert not np.array_equal(indices(counting("b", 100), 10, range(5)), first)
    assert not np.array_equal(indices(user, 10, range(5), seed=1), first)
    assert len({tuple(row) for row in first}) == 5


def test_batch_leaves_the_global_generators_alone() -> None:
    before = torch.get_rng_state()
    counting("a", 10).batch(3, seed=0, step=0)
    coterie.User.from_dataset("a", Lazy(10, noise=1.0)).batch(3, seed=0, step=0)
    assert torch.equal(torch.get_rng_state(), before)


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
    assert draw(keys[:1], [50], 5, [0, 1_000_000]).tolist() == [[[3, 11, 22, 32, 46]], [[7, 19, 29, 35, 43]]]


@pytest.mark.parametrize("sizes", [(20, 20, 20), (20, 7, 33), (3, 100, 8)])
def test_drawing_together_is_drawing_alone(sizes: tuple[int, ...]) -> None:
    users = [counting(name, size) for name, size in zip("abc", sizes, strict=True)]
    everyone = BatchSampler(users[0], users[1:], batch_size=8, seed=5, device=torch.device("cpu"))
    for names in (("b", "c"), ("c",), ("c", "b"), ()):
        for step in (0, 1, AHEAD - 1, AHEAD, 3, 1000):
            own, others = everyone.draw(names, step)
            assert torch.equal(own[1], users[0].batch(8, seed=5, step=step)[1])
            seen = []
            for batch in others:
                for position, targets in zip(batch.positions, batch.by_user(batch.targets), strict=True):
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


# How batches are drawn.

STEPS = range(4000)


@pytest.mark.parametrize(("n", "size"), [(10, 3), (10, 5), (7, 4), (50, 1), (9, 8)])
def test_every_example_is_drawn_as_often(n: int, size: int) -> None:
    counts = np.bincount(indices(counting("a", n), size, STEPS).ravel(), minlength=n)
    mean = len(STEPS) * size / n
    # An example at the border of two slices has a count of smaller variance than this.
    z = (counts - mean) / np.sqrt(len(STEPS) * size / n * max(1 - size / n, 0.05))
    assert np.abs(z).max() < 4.5


def test_batch_means_are_unbiased() -> None:
    user = counting("a", 11)
    means = indices(user, 4, STEPS).mean(1)
    z = (means.mean() - 5.0) / (means.std() / np.sqrt(len(STEPS)))
    assert abs(z) < 4.5
    plain = np.arange(11).std() / np.sqrt(4)
    assert means.std() < plain  # one from each slice: no noisier than drawing with replacement


@pytest.mark.parametrize("lag", [1, 2, AHEAD])
def test_steps_are_independent(lag: int) -> None:
    drawn = indices(counting("a", 8), 1, STEPS)[:, 0]
    table = np.zeros((8, 8))
    np.add.at(table, (drawn[:-lag], drawn[lag:]), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-4


def test_users_and_positions_are_independent() -> None:
    a, b = (indices(counting(name, 16), 2, STEPS) for name in ("a", "b"))
    for first, second in ((a[:, 0], b[:, 0]), (a[:, 0], a[:, 1] - 8), (b[:, 0], b[:, 1] - 8)):
        table = np.zeros((8, 8))
        np.add.at(table, (first, second), 1)
        assert stats.chi2_contingency(table).pvalue > 1e-4


@pytest.mark.parametrize(("n", "size"), [(12, 12), (12, 40), (1, 1), (5, 8)])
def test_full_batch_is_every_example_once(n: int, size: int) -> None:
    drawn = indices(counting("a", n), size, range(200))
    assert np.array_equal(drawn, np.tile(np.arange(n), (200, 1)))


@pytest.mark.parametrize(("n", "size"), [(12, 4), (12, 6), (100, 10), (30, 30)])
def test_no_duplicates_when_the_size_divides(n: int, size: int) -> None:
    drawn = indices(counting("a", n), size, range(500))
    assert all(len(set(row)) == size for row in drawn.tolist())


# Where examples come from.


def test_arrays_lists_and_tensors_are_the_same() -> None:
    rows, labels = [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]], [0, 1, 1]
    made = [
        coterie.User("a", rows, labels),
        coterie.User("a", np.array(rows), np.array(labels)),
        coterie.User("a", np.array(rows, np.float16), tuple(labels)),
        coterie.User("a", torch.tensor(rows), torch.tensor(labels)),
        coterie.User.from_dataset("a", TensorDataset(torch.tensor(rows), torch.tensor(labels))),
    ]
    for user in made:
        inputs, targets = user.batch(2, seed=1, step=2)
        assert inputs.dtype == torch.get_default_dtype()
        assert torch.equal(inputs, made[0].batch(2, seed=1, step=2)[0])
        assert torch.equal(targets, made[0].batch(2, seed=1, step=2)[1])
        assert len(user) == 3


def test_a_tensor_keeps_its_dtype() -> None:
    user = coterie.User("a", torch.zeros(2, 1, dtype=torch.float64), torch.zeros(2, dtype=torch.int32))
    assert [tensor.dtype for tensor in user.batch(2, seed=0, step=0)] == [torch.float64, torch.int32]


def test_arrays_that_torch_does_not_take_as_they_are() -> None:
    fixed = np.arange(6.0, dtype=np.float32).reshape(3, 2)
    fixed.flags.writeable = False  # as pandas gives them
    labels = np.array([1, 0, 1])[::-1]  # a negative stride
    inputs, targets = coterie.User("a", fixed, labels).batch(3, seed=0, step=0)
    assert inputs.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert targets.tolist() == [1, 0, 1]


def test_a_tensor_with_a_gradient_is_detached() -> None:
    user = coterie.User("a", torch.zeros(2, 1, requires_grad=True), torch.zeros(2))
    assert not user.batch(1, seed=0, step=0)[0].requires_grad


def test_datasets_are_read_when_needed_and_reproducibly() -> None:
    data = Lazy(100, noise=1.0)
    user = coterie.User.from_dataset("a", data)
    assert data.reads == 0
    first = user.batch(5, seed=0, step=1)
    assert data.reads == 5
    torch.manual_seed(99)
    again = user.batch(5, seed=0, step=1)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], counting("a", 100).batch(5, seed=0, step=1)[1])
    assert not torch.equal(first[0] - first[1][:, None], user.batch(5, seed=0, step=2)[0] - first[1][:, None])
    other = coterie.User.from_dataset("b", data).batch(100, seed=0, step=1)
    assert not torch.equal(user.batch(100, seed=0, step=1)[0], other[0])


def test_floats_of_a_dataset_take_the_default_dtype() -> None:
    class Numbers(Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> tuple[Any, float]:
            return np.array([1.0, 2.0]), 0.5

    inputs, targets = coterie.User.from_dataset("a", Numbers()).batch(2, seed=0, step=0)
    assert inputs.dtype == targets.dtype == torch.get_default_dtype()


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


def test_held_out_sets() -> None:
    user = coterie.User("a", [[1.0]], [0], validation=([[2.0], [3.0]], [0, 1]), test=Lazy(5))
    assert user.validation is not None
    assert user.test is not None
    assert (len(user), len(user.validation), len(user.test)) == (1, 2, 5)


# What cannot be learned from.


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


class Triples(Lazy):
    def __getitem__(self, index: int) -> Any:
        return index, index, index


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", [[1.0]], [0]), "name must be a non-empty string, got ''"),
        ((3, [[1.0]], [0]), "name must be a non-empty string, got 3"),
        (("a", [[1.0], [2.0]], [0]), "user 'a' has 2 inputs but 1 targets; give one target for each"),
        (("a", np.zeros((0, 2)), np.zeros(0)), "user 'a' has no examples; leave it out"),
        (("a", [[1.0], [2.0]], [0.0, float("nan")]), r"target of user 'a' is NaN \(example 1\); drop"),
        (("a", [[1.0], [2.0]], [[0.0, 1.0], [float("nan"), 1.0]]), r"NaN \(example 1\)"),
        (("a", [["x"], ["y"]], [0, 1]), "inputs of user 'a' cannot be made a tensor: .*; encode them as numbers"),
        (("a", [[1.0], [2.0, 3.0]], [0, 1]), "inputs of user 'a' cannot be made a tensor"),
        (("a", 1.0, [0]), "inputs of user 'a' must have one row an example, got a single number"),
    ],
)
def test_examples_that_cannot_be_learned_from(arguments: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        coterie.User(*arguments)


def test_held_out_sets_are_checked_too() -> None:
    with pytest.raises(DataError, match="validation set of 'a' has 1 inputs but 2 targets"):
        coterie.User("a", [[1.0]], [0], validation=([[1.0]], [0, 1]))
    with pytest.raises(DataError, match="a target of test set of 'a' is NaN"):
        coterie.User("a", [[1.0]], [0], test=([[1.0]], [float("nan")]))


@pytest.mark.parametrize("data", [Endless(), Lazy(0)])
def test_datasets_that_cannot_be_learned_from(data: Dataset[Any]) -> None:
    with pytest.raises(DataError, match=r"map-style Dataset|no examples"):
        coterie.User.from_dataset("a", data)


@pytest.mark.parametrize("data", [Triples(4), TensorDataset(torch.zeros(4, 1))])
def test_items_that_are_not_pairs(data: Dataset[Any]) -> None:
    with pytest.raises(DataError, match=r"pair \(input, target\), got tuple"):
        coterie.User.from_dataset("a", data).batch(2, seed=0, step=0)


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
