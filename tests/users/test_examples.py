"""Examples from arrays, tensors and data sets, and what cannot be learned from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.counting import Lazy, counting
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import coterie
from coterie.errors import DataError


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
    user = coterie.User(
        "a", torch.zeros(2, 1, dtype=torch.float64), torch.zeros(2, dtype=torch.float16)
    )
    assert [tensor.dtype for tensor in user.batch(2, seed=0, step=0)] == [
        torch.float64,
        torch.float16,
    ]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_classes_become_what_losses_take(dtype: torch.dtype) -> None:
    user = coterie.User("a", torch.zeros(2, 1), torch.tensor([0, 1], dtype=dtype))
    assert torch.equal(user.batch(2, seed=0, step=0)[1], torch.tensor([0, 1]))


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
    assert not torch.equal(
        first[0] - first[1][:, None], user.batch(5, seed=0, step=2)[0] - first[1][:, None]
    )
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


def test_held_out_sets() -> None:
    user = coterie.User("a", [[1.0]], [0], validation=([[2.0], [3.0]], [0, 1]), test=Lazy(5))
    assert user.validation is not None
    assert user.test is not None
    assert (len(user), len(user.validation), len(user.test)) == (1, 2, 5)


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
        (("", [[1.0]], [0]), "name must be a non-empty string without control characters, got ''"),
        ((3, [[1.0]], [0]), "name must be a non-empty string without control characters, got 3"),
        (
            ("a", [[1.0], [2.0]], [0]),
            "user 'a' has 2 inputs but 1 targets; give one target for each",
        ),
        (("a", np.zeros((0, 2)), np.zeros(0)), "user 'a' has no examples; leave it out"),
        (
            ("a", [[1.0], [2.0]], [0.0, float("nan")]),
            r"target of user 'a' is NaN \(example 1\); drop",
        ),
        (("a", [[1.0], [2.0]], [[0.0, 1.0], [float("nan"), 1.0]]), r"NaN \(example 1\)"),
        (
            ("a", [["x"], ["y"]], [0, 1]),
            "inputs of user 'a' cannot be made a tensor: .*; encode them as numbers",
        ),
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


def test_items_that_are_not_pairs() -> None:
    inputs, targets = coterie.User.from_dataset("a", Triples(4)).batch(2, seed=0, step=0)
    assert [len(part) for part in (*inputs, targets)] == [2, 2, 2]
    assert (
        coterie.User.from_dataset("a", TensorDataset(torch.zeros(4, 1))).batch(2, seed=0, step=0)[1]
        == ()
    )
