"""Boosted trees from sums of histograms, against a scalar twin and a few properties."""

from typing import Any

import numpy as np
import pytest

from coterie.mixture.families import SOFTMAX, SQUARED, Array, Family
from coterie.mixture.posterior import Rows
from coterie.trees.boosting import (
    Bins,
    Grown,
    Growth,
    Level,
    Part,
    driven,
    grow,
    peers_here,
)

GROWTH = Growth(trees=6, depth=2, looks=(3, 6), fewest=3.0)


def rows(n: int, seed: int, classes: int = 1) -> tuple[Array, Array]:
    """Return rows whose target is a product of two columns; every ninth value is missing."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(n, 3))
    y = x[:, 0] * x[:, 1] + 0.1 * random.normal(size=n)
    x.ravel()[::9] = np.nan
    return x, y[:, None] if classes == 1 else np.eye(classes)[(y > 0).astype(int)]


def part(
    data: tuple[Array, Array], weights: Array, family: Family, bins: Bins, **how: bool
) -> Part:
    """Return the rows of one user."""
    owners = np.zeros(len(data[0]), dtype=np.int64)
    places = bins.places(data[0], mine=how.get("mine", False))
    return Part(places, data[1], owners, weights, family=family, bins=bins, growth=GROWTH)


def test_one_tree_is_that_of_a_scalar_loop() -> None:
    x, y = rows(40, 0)
    bins = Bins.of(x)
    mine = part((x, y), np.ones((40, 1)), SQUARED, bins, mine=True)
    level = Level((), ())
    histogram = mine.answer(level)[:, 0, 0]
    slope = np.round(1024 * (mine.outputs()[:, 0, 0] - y[:, 0])) / 1024  # whole grains
    assert mine.intercepts[0, 0, 0] == pytest.approx(
        y.sum() / 41
    )  # the mean under a prior of one row
    best, where = -np.inf, np.ones(40, dtype=bool)
    for c, edges in enumerate(bins.edges):
        for edge in [*edges, np.inf]:
            for missing_left in (False, True):
                left = (x[:, c] <= edge) | (np.isnan(x[:, c]) & missing_left)
                if 3 <= left.sum() <= 37:
                    gain = sum(slope[s].sum() ** 2 / (s.sum() + 1) for s in (left, ~left))
                    if gain > best + 1e-9:
                        best, where = gain, left
    grown = driven(grow(mine, bins, GROWTH._replace(trees=1, depth=1, looks=(1,))), lambda _: None)
    expected = [-GROWTH.rate * slope[s].sum() / (s.sum() + 1) for s in (where, ~where)]
    assert histogram[:, 2].sum() == 40 * 4
    assert grown.trees[0].values[0] == pytest.approx(expected)


def everything(parts: list[tuple[Array, Array]], family: Family, how: str) -> Grown:
    """Grow with the first as user 0, and ask the others together, one by one, or anew each time."""
    bins = Bins.of(parts[0][0])
    weights = np.ones((len(parts[0][0]), 2))
    weights[::4, 1] = 0  # the second ensemble does not see a fold
    mine = part(parts[0], weights, family, bins, mine=True)
    growing = grow(mine, bins, GROWTH)
    if how == "together":
        equal = np.ones((len(parts) - 1, 2))
        return driven(
            growing,
            peers_here(
                bins, [Rows(*each) for each in parts[1:]], equal, family=family, growth=GROWTH
            ),
        )
    sites = [part(each, np.ones((len(each[0]), 2)), family, bins) for each in parts[1:]]

    def ask(level: Level) -> Array:
        if how == "anew":
            sites[:] = [part(p, np.ones((len(p[0]), 2)), family, bins) for p in parts[1:]]
        total: Array = np.sum([each.answer(level) for each in sites], 0)
        return total

    return driven(growing, ask)


@pytest.mark.parametrize(("family", "classes"), [(SQUARED, 1), (SOFTMAX, 2)])
def test_sites_give_what_one_process_gives_and_a_site_that_starts_anew_the_same_bits(
    family: Family, classes: int
) -> None:
    parts = [rows(n, seed, classes) for seed, n in enumerate((30, 50, 40))]
    together, apart, anew = (
        everything(parts, family, how) for how in ("together", "apart", "anew")
    )
    assert together.outputs == pytest.approx(apart.outputs, abs=1e-9)
    assert (apart.outputs == anew.outputs).all()
    assert np.square(apart.outputs[0]).sum() > 0


def test_rows_of_a_fold_change_nothing_in_the_ensemble_that_is_blind_to_it() -> None:
    parts = [rows(n, seed) for seed, n in enumerate((30, 50))]
    before = everything(parts, SQUARED, "together")
    parts[0][1][::4] += 100
    after = everything(parts, SQUARED, "together")
    assert (before.outputs[:, :, 1] == after.outputs[:, :, 1]).all()
    assert (before.outputs[:, :, 0] != after.outputs[:, :, 0]).all()


def test_a_peer_lost_in_mid_tree_is_left_out_and_growth_goes_on() -> None:
    parts = [rows(n, seed) for seed, n in enumerate((30, 50))]
    bins = Bins.of(parts[0][0])
    mine, peer = (
        part(p, np.ones((len(p[0]), 1)), SQUARED, bins, mine=k == 0) for k, p in enumerate(parts)
    )
    asked: list[int] = []

    def ask(level: Level) -> Array | None:
        asked.append(len(level.trees))
        return (
            None if len(asked) == 4 else peer.answer(level)
        )  # at the second level of the second tree

    grown = driven(grow(mine, bins, GROWTH), ask)
    assert len(asked) == 12
    assert np.isfinite(grown.outputs).all()
    assert np.square(grown.outputs[-1] - parts[0][1][:, None]).mean() < parts[0][1].var()


def test_very_many_rows_are_drawn_anew_for_each_tree() -> None:
    x, y = rows(300, 0)
    bins = Bins.of(x)
    owners = np.zeros(300, dtype=np.int64)
    few = GROWTH._replace(most_rows=100)
    how: dict[str, Any] = {"family": SQUARED, "bins": bins, "growth": few}
    mine = Part(bins.places(x, mine=True), y, owners, np.ones((300, 1)), **how)
    first = mine.drawn
    grown = driven(grow(mine, bins, few), lambda _: None)
    assert first is not None
    assert mine.drawn is not None
    assert set(first) != set(mine.drawn)
    assert np.square(grown.outputs[-1][:, 0] - y).mean() < 0.9 * y.var()
