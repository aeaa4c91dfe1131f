"""A user's batches: a function of (seed, user, step), unbiased, independent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from tests.support.counting import Lazy, counting, indices

import coterie
from coterie.users.sampling import MAX_STEPS_AHEAD


def test_batch_depends_on_seed_name_and_step_alone() -> None:
    user = counting("a", 100)
    first = indices(user, 10, range(5))
    for step in (
        3,
        0,
        4,
        4,
        1,
    ):  # in any order, any number of times, whatever the global generators do
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


@pytest.mark.parametrize("lag", [1, 2, MAX_STEPS_AHEAD])
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


def test_a_fingerprint_is_of_the_examples_not_of_the_name() -> None:
    assert (
        coterie.User("a", [[1.0]], [0.5]).fingerprint()
        == coterie.User("b", [[1.0]], [0.5]).fingerprint()
    )
