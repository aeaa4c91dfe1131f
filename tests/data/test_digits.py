"""Digits by writer: fourteen segments, and user 0's examples in three parts that share nothing."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from tests.support.examples import everything
from torch import Tensor

import coterie
from coterie.data import handwriting
from coterie.errors import DataError

BOUNDS = (0, 130, 256, 386, 516, 646, 776, 915, 1029, 1157, 1287, 1415, 1545, 1667, 1797)


def parts(task: coterie.data.Task) -> list[tuple[Tensor, Tensor]]:
    return [everything(part) for part in (task.me.examples, task.me.validation, task.me.test)]


def as_rows(inputs: Tensor) -> list[bytes]:
    return [image.numpy().tobytes() for image in inputs]


@pytest.mark.parametrize("me", [0, 3, 13])
def test_every_segment_is_a_user(me: int) -> None:
    bunch = load_digits()
    images = torch.tensor(bunch.images / 16, dtype=torch.float32)[:, None]
    task = coterie.data.digits_by_writer(me=me, own_examples=30, seed=1)
    others = [k for k in range(14) if k != me]
    assert [peer.name for peer in task.peers] == [f"writer {k}" for k in others]
    for k, peer in zip(others, task.peers, strict=True):
        inputs, targets = everything(peer.examples)
        assert torch.equal(inputs, images[BOUNDS[k] : BOUNDS[k + 1]])
        assert targets.tolist() == bunch.target[BOUNDS[k] : BOUNDS[k + 1]].tolist()
    inputs = torch.cat([part[0] for part in parts(task)])
    assert sorted(as_rows(inputs)) == sorted(as_rows(images[BOUNDS[me] : BOUNDS[me + 1]]))
    assert task.me.name == f"writer {me}"
    assert (task.n_inputs, task.n_outputs) == (64, 10)
    assert sum(len(peer) for peer in task.peers) + sum(len(part[0]) for part in parts(task)) == 1797


@pytest.mark.parametrize("me", range(14))
def test_the_three_parts_are_disjoint_and_stratified(me: int) -> None:
    task = coterie.data.digits_by_writer(me=me, own_examples=30, seed=me)
    pieces = parts(task)
    size = BOUNDS[me + 1] - BOUNDS[me]
    assert [len(inputs) for inputs, _ in pieces] == [
        30,
        (size - 30) // 2,
        size - 30 - (size - 30) // 2,
    ]
    rows = [set(as_rows(inputs)) for inputs, _ in pieces]
    everyone = {row for peer in task.peers for row in as_rows(everything(peer.examples)[0])}
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert not rows[a] & rows[b]
    assert all(not part & everyone for part in rows)
    whole = np.bincount(torch.cat([targets for _, targets in pieces]), minlength=10) / size
    for inputs, targets in pieces:
        counts = np.bincount(targets, minlength=10)
        assert counts.min() >= 1
        assert np.abs(counts - whole * len(inputs)).max() < 2


def test_the_seed_chooses_the_examples() -> None:
    first, again, other = (
        parts(coterie.data.digits_by_writer(me=5, seed=seed)) for seed in (3, 3, 4)
    )
    for a, b, c in zip(first, again, other, strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])
        assert not torch.equal(a[0], c[0])


def test_bounds_cover_all_rows() -> None:
    assert handwriting.BOUNDS == BOUNDS
    assert all(a < b for a, b in pairwise(BOUNDS))
    assert BOUNDS[-1] == len(load_digits().target)


@pytest.mark.parametrize("own_examples", [10, 30, 94])
def test_how_many_own_examples(own_examples: int) -> None:
    # the smallest segment: 114 rows
    task = coterie.data.digits_by_writer(me=7, own_examples=own_examples)
    assert [len(set(targets.tolist())) for _, targets in parts(task)] == [10, 10, 10]
    assert len(task.me) == own_examples


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"me": 14}, "`me` must be a writer segment from 0 to 13, got 14"),
        ({"me": -1}, "from 0 to 13, got -1"),
        (
            {"me": 7, "own_examples": 95},
            r"`own_examples` must lie in \[10, 94\] for writer segment 7, .* got 95",
        ),
        ({"own_examples": 9}, r"must lie in \[10, 110\] .* got 9"),
        ({"own_examples": 0}, "got 0"),
    ],
)
def test_what_is_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        coterie.data.digits_by_writer(**arguments)


def test_ten_lines_of_python() -> None:
    """The example of the front page learns: far better than chance, and at least as well as alone."""
    task = coterie.data.digits_by_writer(me=3, own_examples=30)
    pieces = {}
    for rule in (coterie.Alone(), coterie.WeightedAveraging(alpha=0.5)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        )
        run = coterie.train(
            *(model, torch.nn.functional.cross_entropy, task.me, task.peers),
            rule=rule,
            optimizer=torch.optim.Adam,
            lr=1e-2,
            steps=150,
            seed=0,
        )
        pieces[type(rule).__name__] = run.test["accuracy"]
    assert pieces["WeightedAveraging"] > max(0.9, pieces["Alone"] - 0.001)
