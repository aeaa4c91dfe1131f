"""Each row goes to its group's model; whose it is must be said, and nothing is pooled in silence."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tests.support.hospitals import visits

import coterie
from coterie.errors import DataError, KnobError, ModelError
from coterie.sklearn import CoterieClassifier, CoterieRegressor

QUICK: dict[str, Any] = {"steps": 5, "lr": 0.5, "rule": coterie.WeightedAveraging(0.5)}
FEATURES = ["hospital", "age", "pressure", "smoker"]
TABLE = visits(90)
X, Y = TABLE[FEATURES], TABLE["ill"]


def outputs(fitted: CoterieClassifier, name: Any, rows: pd.DataFrame) -> np.ndarray[Any, Any]:
    """Return a model's own probabilities, by torch alone."""
    model = fitted.models_.get(name, fitted.pooled_).eval()
    inputs = fitted.group_models_.preparation.inputs(rows)
    return np.asarray(model(inputs).detach().double().softmax(1).numpy())


def test_each_row_goes_to_its_groups_model_and_an_unseen_group_to_the_pooled_one() -> None:
    fitted = CoterieClassifier("hospital", **QUICK).fit(X, Y)
    new = X.assign(hospital=np.resize(["Chur", "Basel", "Bern", "Geneva"], len(X)))
    found = fitted.predict_proba(new)
    for name in ("Chur", "Basel", "Bern", "Geneva"):
        own = (new["hospital"] == name).to_numpy()
        np.testing.assert_allclose(found[own], outputs(fitted, name, new[own]), atol=1e-6)
    assert not np.allclose(outputs(fitted, "Basel", X), outputs(fitted, "Chur", X), atol=0.05)


def test_numbers_name_groups_too_whatever_their_type() -> None:
    numbers = X["hospital"].map({"Geneva": 1, "Bern": 2, "Basel": 3})
    whole = CoterieClassifier("hospital", **QUICK).fit(X.assign(hospital=numbers), Y)
    assert set(whole.models_) == set(whole.weights_.to_dict()) == {1, 2, 3}
    as_floats = X.assign(hospital=numbers.astype(float))
    np.testing.assert_array_equal(
        whole.predict_proba(as_floats), whole.predict_proba(X.assign(hospital=numbers))
    )
    array = X.assign(hospital=numbers)[["age", "pressure", "hospital"]].to_numpy()
    assert list(CoterieClassifier(2, **QUICK).fit(array, Y).models_) == list(dict.fromkeys(numbers))


def test_a_group_is_the_same_in_any_rows() -> None:
    """Rows of one group only, as text, as numbers, or without the names of columns, go to the same model."""
    short = X.assign(hospital=X["hospital"].map({"Geneva": "2", "Bern": "Bern", "Basel": "7"}))[
        ["hospital", "age"]
    ]
    fitted = CoterieClassifier(0, **QUICK).fit(short.to_numpy(dtype=object), Y)
    found = fitted.predict_proba(short.to_numpy(dtype=object))
    own = (short["hospital"] == "2").to_numpy()
    np.testing.assert_array_equal(
        fitted.predict_proba(short[own].to_numpy(dtype=object)), found[own]
    )
    by_name = CoterieClassifier("hospital", **QUICK).fit(short, Y)
    with pytest.warns(UserWarning, match="X does not have valid feature names"):
        np.testing.assert_allclose(
            by_name.predict_proba(short.to_numpy(dtype=object)), found, atol=1e-6
        )
    numbers = short.assign(hospital=short["hospital"].map({"2": 2, "Bern": 3, "7": 7}))
    as_numbers = CoterieClassifier("hospital", **QUICK).fit(numbers, Y)
    texts = numbers.assign(hospital=numbers["hospital"].astype(str))
    np.testing.assert_array_equal(
        as_numbers.predict_proba(texts), as_numbers.predict_proba(numbers)
    )


def test_only_me_listens_to_others() -> None:
    everybody, mine = (
        CoterieClassifier("hospital", me=me, **QUICK).fit(X, Y) for me in (None, "Geneva")
    )
    alone = CoterieClassifier("hospital", **QUICK | {"rule": coterie.Alone()}).fit(X, Y)
    for name, wanted in (
        ("Geneva", everybody),
        ("Bern", alone),
        ("Basel", alone),
        ("Chur", everybody),
    ):
        rows = X.assign(hospital=name)
        np.testing.assert_allclose(mine.predict_proba(rows), wanted.predict_proba(rows), atol=1e-6)
    with pytest.raises(
        DataError, match=r"`me` names no group: those of the rows are .*'Basel'.*, got 'Chur'"
    ):
        CoterieClassifier("hospital", me="Chur").fit(X, Y)


def test_one_group_is_trained_alone() -> None:
    only = X["hospital"] == "Bern"
    fitted = CoterieClassifier("hospital", **QUICK).fit(X[only], Y[only])
    assert list(fitted.models_) == ["Bern"]
    np.testing.assert_array_equal(
        fitted.predict_proba(X.assign(hospital="Chur")),
        fitted.predict_proba(X.assign(hospital="Bern")),
    )


def test_a_group_of_one_class_is_told_and_goes_to_the_pooled_model() -> None:
    targets = Y.where(X["hospital"] != "Bern", "ill")
    with pytest.warns(UserWarning, match="'Bern' is left out: .* one class only"):
        fitted = CoterieClassifier("hospital", **QUICK).fit(X, targets)
    assert sorted(fitted.models_) == ["Basel", "Geneva"]
    np.testing.assert_array_equal(
        fitted.predict_proba(X.assign(hospital="Bern")),
        fitted.predict_proba(X.assign(hospital="Chur")),
    )


def test_groups_that_predict_is_not_given_are_an_error() -> None:
    with pytest.raises(
        TypeError, match="`fit` takes no `groups`; the group is a column of X: say by `group` which"
    ):
        CoterieClassifier().fit(X[FEATURES[1:]], Y, groups=X["hospital"])
    fitted = CoterieClassifier("hospital", **QUICK).fit(X, Y)
    with pytest.raises(
        ValueError, match="Feature names seen at fit time, yet now missing:\n- hospital"
    ):
        fitted.predict(X[FEATURES[1:]])
    with pytest.raises(
        DataError, match=r"column 'hospital' is empty in 1 of 90 rows, first row 4 .*; say of which"
    ):
        fitted.predict(X.assign(hospital=X["hospital"].where(X.index != 4)))
    with pytest.raises(
        KnobError, match=r"the columns of X have no names; give a position, or .*set_output"
    ):
        CoterieClassifier("hospital").fit(X.to_numpy(), Y)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"group": "ward"},
            DataError,
            "`group` is 'ward', which X does not have; its columns are 'hospital', 'age'",
        ),
        (
            {"group": 4},
            KnobError,
            "`group` must be the name or the position of one of 4 columns of X, got 4",
        ),
        (
            {"group": 1.5},
            KnobError,
            "`group` must be the name or the position of one of 4 columns of X, got 1.5",
        ),
        ({"categorical": ["ward"]}, DataError, "`categorical` is 'ward', which X does not have"),
        (
            {"module": "deep"},
            ModelError,
            "unknown model 'deep'; choose linear, mlp, or module.path:factory",
        ),
        (
            {"module": 3},
            ModelError,
            "a model is made by a function of the numbers of inputs and outputs, got 3",
        ),
        (
            {"rule": "bcc"},
            KnobError,
            r"unknown rule 'bcc'; .* did you mean 'bc'",
        ),
        ({"steps": 0}, KnobError, "`steps` must be a whole number, at least 1, got 0"),
        (
            {"validation": 1.5},
            DataError,
            r"`validation` must be above 0 and below 1, or None, got 1.5",
        ),
    ],
)
def test_bad_settings_are_told_by_fit(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        CoterieClassifier(**{"group": "hospital", **QUICK, **settings}).fit(X, Y)


def test_bad_rows_are_told() -> None:
    mixed = X.assign(
        hospital=X["hospital"].map({"Geneva": 1, "Bern": "1", "Basel": 2}).astype(object)
    )
    with pytest.raises(DataError, match="two groups are both written '1'"):
        CoterieClassifier("hospital").fit(mixed, Y)
    with pytest.raises(DataError, match="y has one class only"):
        CoterieClassifier("hospital").fit(X, np.zeros(len(X), dtype=int))
    with pytest.raises(ValueError, match="contains infinity"):
        CoterieRegressor(0).fit(np.full((9, 2), np.inf), np.arange(9))


def test_what_was_found_is_at_the_estimator_and_survives_pickle() -> None:
    rng = np.random.default_rng(0)
    X = np.column_stack([np.repeat([1, 2, 3], 60), rng.normal(size=(180, 3))])
    y = X[:, 1] + rng.normal(0, 0.3, 180)
    closed = CoterieRegressor(0).fit(X, y)
    again = pickle.loads(pickle.dumps(closed))  # noqa: S301  # our own
    assert list(closed.verdict_) == list(closed.whom_) == [1.0, 2.0, 3.0]
    assert all(
        "than one trained alone" in said or "trained" in said for said in closed.verdict_.values()
    )
    board = closed.leaderboard_
    assert list(board.index) == [1.0, 2.0, 3.0]
    assert np.isfinite(board.to_numpy()).all()
    assert again.verdict_ == closed.verdict_
    pd.testing.assert_frame_equal(again.leaderboard_, board)
    stepped = CoterieRegressor(0, rule="wga", steps=20).fit(X, y)
    assert stepped.leaderboard_.empty
    assert (stepped.weights_.to_numpy().sum(1) <= 1).all()


def test_sample_weights_are_the_weights_of_a_column() -> None:
    rng = np.random.default_rng(0)
    X = np.column_stack([np.repeat([1, 2, 3], 60), rng.normal(size=180)])
    y = np.where(rng.random(180) < 0.5, "a", "b")
    heavy = np.where(y == "b", 20.0, 1.0)
    share = [
        np.mean(CoterieClassifier(0, steps=50).fit(X, y, weights).predict(X) == "b")
        for weights in (1 / heavy, heavy)
    ]
    assert share[1] - share[0] > 0.4
    with pytest.raises(ValueError, match=r"sample_weight.shape"):
        CoterieClassifier(0, steps=50).fit(X, y, heavy[:3])


def test_rows_of_weight_0_are_as_if_they_were_not_there() -> None:
    """Also in closed form, which takes no other weights."""
    rng = np.random.default_rng(0)
    X = np.column_stack([np.repeat([1, 2], 30), rng.normal(size=(60, 2))])
    y, weights = X[:, 1] + rng.normal(size=60), np.resize([2.0, 2.0, 0.0], 60)
    y[weights == 0] = 1e6
    weighted, fewer = (
        CoterieRegressor(0).fit(X[rows], y[rows], each).predict(X)
        for rows, each in ((weights >= 0, weights), (weights > 0, None))
    )
    np.testing.assert_array_equal(weighted, fewer)
    with pytest.raises(ValueError, match="weight"):
        CoterieRegressor(0).fit(X, y, 0 * weights)


def test_a_row_of_weight_w_counts_as_w_rows() -> None:
    """In whole batches, with nothing held out, against weighted least squares."""
    rng = np.random.default_rng(1)
    X, weights = rng.normal(size=(40, 3)), rng.integers(0, 5, 40).astype(float)
    y = X @ [1.0, -2.0, 0.5] + rng.normal(size=40)
    plain: dict[str, Any] = {"rule": "alone", "steps": 1500, "lr": 0.03, "batch_size": 200}
    fitted = CoterieRegressor(**plain, validation=0.0).fit(X, y, weights).predict(X)
    design = np.column_stack([X, np.ones(40)])
    root = np.sqrt(weights)
    wanted, other = (
        design @ np.linalg.lstsq(design * each[:, None], y * each, rcond=None)[0]
        for each in (root, root > 0)
    )
    np.testing.assert_allclose(fitted, wanted, atol=1e-3)
    assert np.abs(fitted - other).max() > 0.1


@pytest.mark.parametrize("options", [{}, {"steps": 5, "lr": 0.3}], ids=["closed form", "steps"])
def test_rows_of_weight_0_are_not_there_and_equal_weights_are_none(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(2)
    X = np.column_stack([np.repeat([1, 2, 3], 30), rng.normal(size=(90, 2))])
    y = np.where(X[:, 1] + rng.normal(size=90) > 0, "a", "b")
    there = np.arange(90) % 7 > 0
    y[~there] = "c"
    fitted = CoterieClassifier(0, **options).fit(X, y, 3.0 * there)
    without = CoterieClassifier(0, **options).fit(X[there], y[there])
    assert fitted.classes_.tolist() == ["a", "b"]
    assert ("hierarchical" in fitted.leaderboard_) is not bool(options)  # fitted in closed form
    np.testing.assert_array_equal(fitted.predict_proba(X), without.predict_proba(X))
    with pytest.raises(ValueError, match="weight"):
        CoterieClassifier(0, **options).fit(X, y, np.zeros(90))
