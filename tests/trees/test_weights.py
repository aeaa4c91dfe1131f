"""Rows with weights: a weight of w is w rows, in trees, in the closed form and at peers, wherever these are."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import coterie
from coterie.engines.in_process.passes import Passes
from coterie.engines.peer import Peer
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.sites import LocalSites
from coterie.mixture.candidates import OwnRows
from coterie.mixture.families import SOFTMAX, SQUARED, Array, Family
from coterie.mixture.fit import asks_here, driven, linear_candidates
from coterie.mixture.mixing import mix
from coterie.mixture.posterior import Rows, believed
from coterie.mixture.scaling import Scaling
from coterie.sklearn import CoterieClassifier, CoterieRegressor
from coterie.tables.models import loss_of
from coterie.trees.boosting import Bins, Growth, Level
from coterie.trees.histograms import Histograms
from coterie.trees.tree_candidates import boosted, forest

SHORT = Growth(trees=10, looks=(5, 10))
QUIET: dict[str, Any] = {"measure": False, "progress": False}


def rows(n: int, seed: int, family: Family) -> Rows:
    """Return rows of few values, whose target is a product of two columns, with whole weights."""
    random = np.random.default_rng(seed)
    x = random.integers(-6, 7, size=(n, 3)) / 3
    y = x[:, 0] * x[:, 1] + 0.3 * random.normal(size=n)
    targets = np.eye(2)[(y > 0).astype(int)] if family is SOFTMAX else y[:, None]
    return Rows(x, targets, random.integers(1, 4, n).astype(float))


def repeated(one: Rows) -> tuple[Rows, Array]:
    """Return every row as often as its weight says, and where each comes from."""
    places = np.repeat(np.arange(len(one.inputs)), one.counts.astype(int))
    return one.some(places)._replace(weights=None), places


def test_trees_of_weights_are_those_of_repeated_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what rounds: a slope of a row that counts twice once, of two rows twice."""
    monkeypatch.setattr("coterie.trees.boosting.GRAIN", 2.0**-40)
    own, peers = rows(40, 0, SOFTMAX), [rows(60, k, SOFTMAX) for k in (1, 2)]
    folds = np.arange(40) % 4
    again, places = repeated(own)
    weighted = boosted(own, peers, SOFTMAX, folds, growth=SHORT)
    often = boosted(again, [repeated(p)[0] for p in peers], SOFTMAX, folds[places], growth=SHORT)
    plain = boosted(own[:2], [p[:2] for p in peers], SOFTMAX, folds, growth=SHORT)
    for one, other, third in zip(weighted, often, plain, strict=True):
        assert one.outputs[places] == pytest.approx(other.outputs, abs=1e-9)
        assert np.abs(one.outputs - third.outputs).max() > 0.05


@pytest.mark.parametrize("family", [SQUARED, SOFTMAX])
def test_the_closed_form_of_weights_is_that_of_repeated_rows(family: Family) -> None:
    own, peers = rows(40, 0, family), [rows(60, k, family) for k in range(1, 7)]
    folds, k = np.arange(40) % 4, own.targets.shape[1]
    again, places = repeated(own)
    scaling = Scaling.none(3, k)

    def outputs(mine: Rows, others: list[Rows], fold: Array) -> Any:
        judged = OwnRows.of(mine, family, folds=fold)
        asking = linear_candidates(judged, family, scaling, len(others))
        blocks = driven(asking, asks_here(others, family))[1]
        targets, counts = mine.targets, mine.weights
        board = mix(family, targets, fold, blocks, counts=counts)
        return np.concatenate([block.outputs for block in blocks], 1), board

    weighted, board = outputs(own, peers, folds)
    often, other = outputs(again, [repeated(p)[0] for p in peers], folds[places])
    assert weighted[places] == pytest.approx(often, abs=1e-6)
    assert board.served.losses.mean() == pytest.approx(other.served.losses.mean(), abs=1e-6)
    assert board.served.parameters == pytest.approx(other.served.parameters, abs=1e-6)


def test_of_many_rows_the_sums_are_by_weight() -> None:
    own = rows(400, 0, SQUARED)
    folds = np.arange(400) % 4
    few, all_rows = (OwnRows.of(own, SQUARED, folds=folds, most=most) for most in (100, 1000))
    for one in (few, all_rows):
        assert one.counts.tolist() == all_rows.counts.tolist()
    sums = [(e.rows.inputs * e.seen[:, 1:2]).T @ e.rows.targets for e in (few, all_rows)]
    assert sums[0] == pytest.approx(sums[1])


def test_a_forest_takes_weights() -> None:
    own = rows(60, 0, SQUARED)
    light = own._replace(weights=np.where(own.targets[:, 0] > 0, 1e-3, 1.0))
    (plain,), (weighed,) = (forest(each, SQUARED) for each in (own._replace(weights=None), light))
    assert weighed.outputs.mean() < plain.outputs.mean() - 0.1


def test_weights_are_believed_as_so_many_rows_as_say_as_much() -> None:
    """After Kish: the variance of a weighted mean is that of a mean of so many rows."""
    random = np.random.default_rng(0)
    weights = random.exponential(size=30)
    means = random.normal(size=(20_000, 30)) @ weights / weights.sum()
    assert believed(weights).sum() == pytest.approx(1 / means.var(), rel=0.05)
    assert believed(1000 * weights) == pytest.approx(believed(weights))


def test_a_bin_that_is_told_has_as_many_rows_as_the_cap_says_whatever_they_weigh() -> None:
    x, y, weights = rows(60, 1, SQUARED)
    weights = np.where(np.arange(60) < 2, 25.0, 0.5)
    asked = Histograms("squared", Bins.of(x), np.zeros(1), 1.0, 1, Level((), ()), 60.0)
    part = asked.rows(Rows(x, y, weights))
    assert part.heaviest == 25.0
    assert asked.answer(part, fewest=1).any()
    assert not asked.answer(part, fewest=20).any()  # two heavy rows are fewer than 20


def weighted_users(loss: Any) -> list[coterie.User]:
    made = []
    for k in range(4):
        x, y, weights = rows(40 if k == 0 else 70, k, SOFTMAX)
        targets = {"value": torch.tensor(y.argmax(1)), "weight": torch.tensor(weights).float()}
        made.append(coterie.User("me" if k == 0 else f"peer {k}", torch.tensor(x).float(), targets))
    return made


def test_sites_weigh_their_rows_as_one_process_does() -> None:
    class About:
        kind, weights, class_weights = "classification", "w", None

    loss: Any = loss_of(About())  # type: ignore[arg-type]  # all that it looks at
    me, *peers = weighted_users(loss)
    held = {p.name: Peer(p, Passes(nn.Linear(3, 2), loss)) for p in peers}
    there = partial(Remote, sites=LocalSites(held), names=list(held))
    found = []
    for engine, some in ((coterie.InProcess, peers), (there, ())):
        run = coterie.train(
            *(nn.Linear(3, 2), loss, me, some, coterie.Mixture(trees=True)), engine=engine, **QUIET
        )
        board = run.record.end.account["leaderboard"]
        assert {"trees", "hierarchical", "forest, alone"} <= set(board)
        with torch.no_grad():
            found.append(run.model(torch.linspace(-2, 2, 90).reshape(30, 3)))
    torch.testing.assert_close(*found, atol=1e-5, rtol=0)


def test_the_estimators_fit_trees_to_weights_whatever_these_are_multiplied_by() -> None:
    random = np.random.default_rng(0)
    x = np.column_stack([np.repeat([1, 2, 3], 80), random.normal(size=(240, 3))])
    y, wrong = x[:, 1] * x[:, 2], random.random(240) < 0.4
    told = np.where(wrong, -3 * y, y)
    asked = np.column_stack([np.repeat([1, 2, 3], 50), random.normal(size=(150, 3))])
    truth = asked[:, 1] * asked[:, 2]
    weights = np.where(wrong, 1e-2, 1.0)
    fitted = CoterieRegressor(0).fit(x, told, weights)
    assert fitted.score(asked, truth) > max(
        0.3, CoterieRegressor(0).fit(x, told).score(asked, truth)
    )
    again = CoterieRegressor(0).fit(x, told, 1000 * weights)
    assert again.predict(asked) == pytest.approx(fitted.predict(asked), abs=1e-4)
    assert "trees" in fitted.leaderboard_.columns
    only = CoterieClassifier(0, module="trees").fit(x, told > 0, weights)
    assert only.score(asked, truth > 0) > 0.6
