"""The estimators are scikit-learn's: its checks pass, and what it has for estimators takes them."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pandas as pd
import pytest
import skops.io
import torch
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.estimator_checks import check_estimator
from tests.support.hospitals import visits
from torch import nn

import coterie
from coterie.sklearn import CoterieClassifier, CoterieRegressor

QUICK: dict[str, Any] = {"steps": 20, "lr": 0.1}
FEATURES = ["hospital", "age", "pressure", "smoker"]


def rows() -> tuple[pd.DataFrame, pd.Series[Any]]:
    table = visits()
    return table[FEATURES], table["ill"]


def net(n_inputs: int, n_outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(n_inputs, 3), nn.BatchNorm1d(3), nn.Linear(3, n_outputs))


@pytest.mark.parametrize(
    "estimator", [CoterieClassifier(steps=5, lr=0.5), CoterieRegressor(**QUICK)], ids=repr
)
def test_scikit_learns_own_checks(estimator: CoterieClassifier | CoterieRegressor) -> None:
    """All but one, which is for fits without held-out rows, in double precision.

    `test_a_row_of_weight_w_counts_as_w_rows` is in its place.
    """
    why = "which rows are held out depends on how many there are"
    expected = {"check_sample_weight_equivalence_on_dense_data": why}
    told = check_estimator(estimator, on_skip=None, on_fail=None, expected_failed_checks=expected)
    failed = {each["check_name"]: each for each in told if each["status"] == "failed"}
    assert not failed
    assert [each["check_name"] for each in told if each["status"] == "xfail"] == list(expected)


def test_what_fit_leaves() -> None:
    X, y = rows()
    fitted = CoterieClassifier("hospital", steps=60, lr=0.1).fit(X, y)
    assert fitted.classes_.tolist() == ["ill", "well"]
    assert fitted.groups_.tolist() == list(X["hospital"].unique()) == list(fitted.models_)
    assert fitted.feature_names_in_.tolist() == FEATURES
    probabilities = fitted.predict_proba(X)
    np.testing.assert_allclose(probabilities.sum(1), 1)
    assert fitted.classes_[probabilities.argmax(1)].tolist() == fitted.predict(X).tolist()
    everybody, without = CoterieClassifier(steps=60, lr=0.1), X.drop(columns="hospital")
    assert fitted.score(X, y) > everybody.fit(without, y).score(without, y) + 0.15


def test_regression_is_in_the_targets_units_and_listens_to_who_is_alike() -> None:
    X, y = rows()[0], 100 + 24 * visits()["days"]
    fitted = CoterieRegressor("hospital", steps=100, lr=0.1).fit(X, y)
    assert fitted.score(X, y) > 0.9
    # Basel's patients are the opposite
    assert fitted.weights_.loc["Geneva"].to_dict()["Bern"] > 0.9


def steps_before() -> Pipeline:
    scaled = make_column_transformer(
        (StandardScaler(), ["age", "pressure"]),
        (OneHotEncoder(sparse_output=False), ["smoker"]),
        remainder="passthrough",
        verbose_feature_names_out=False,
    )
    return make_pipeline(scaled)


def test_a_column_by_name_or_by_position_after_other_steps() -> None:
    X, y = rows()
    quick: dict[str, Any] = {"rule": coterie.WeightedAveraging(0.5), **QUICK}
    named = make_pipeline(
        steps_before().set_output(transform="pandas"), CoterieClassifier("hospital", **quick)
    )
    # an array of objects
    by_position = make_pipeline(steps_before(), CoterieClassifier(-1, **quick))
    wanted = named.fit(X, y).predict_proba(X)
    np.testing.assert_allclose(by_position.fit(X, y).predict_proba(X), wanted, atol=1e-6)
    assert list(by_position[-1].models_) == list(named[-1].models_)


def test_grid_search_finds_the_better_setting_and_clones_know_nothing() -> None:
    X, y = rows()
    grid = [{"rule": [coterie.Alone()], "lr": [1e-6]}, {"rule": [coterie.WeightedAveraging(0.5)]}]
    search = GridSearchCV(CoterieClassifier("hospital", steps=5, lr=0.5), grid, cv=2).fit(X, y)
    best = search.best_estimator_
    assert best.get_params()["rule"] == coterie.WeightedAveraging(0.5)
    assert not hasattr(clone(best), "classes_")
    assert clone(best).get_params() == best.get_params()


@pytest.mark.parametrize("module", [None, "mlp", net])
def test_pickle_and_skops(module: Any) -> None:
    X, y = rows()
    fitted = CoterieClassifier(
        "hospital", module=module, rule=coterie.WeightedAveraging(0.5), **QUICK
    ).fit(X, y)
    stored = skops.io.dumps(fitted)
    untrusted = skops.io.get_untrusted_types(data=stored)
    assert all(name.startswith(("coterie.", "tests.")) for name in untrusted)
    for back in (pickle.loads(pickle.dumps(fitted)), skops.io.loads(stored, trusted=untrusted)):  # noqa: S301
        np.testing.assert_array_equal(back.predict_proba(X), fitted.predict_proba(X))
        pd.testing.assert_frame_equal(back.weights_, fitted.weights_)
        assert back.get_params().keys() == fitted.get_params().keys()


def test_nobody_elses_random_numbers_are_drawn() -> None:
    X, y = rows()
    before = pickle.dumps(np.random.get_state()), torch.get_rng_state()
    first, again, other = (
        CoterieClassifier("hospital", rule=coterie.Alone(), random_state=seed, **QUICK)
        .fit(X, y)
        .predict_proba(X)
        for seed in (3, np.random.RandomState(0), np.random.RandomState(0))
    )
    assert pickle.dumps(np.random.get_state()) == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    np.testing.assert_array_equal(again, other)
    assert not np.array_equal(first, again)
