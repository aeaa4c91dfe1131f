"""Ranking, confusion and calibration, against scikit-learn and by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from sklearn.calibration import calibration_curve

from coterie.evaluation.metrics import (
    METRICS,
    area_under_roc,
    calibration,
    confusion,
    less_is_better,
    roc_curve,
    sensitivities,
)

RANDOM = np.random.default_rng(0)
N = 200
WEIGHTS: dict[str, Any] = {"even": None, "uneven": RANDOM.integers(0, 4, N).astype(float)}


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_two_classes_are_as_scikit_learn_has_them(weights: Any) -> None:
    truth = RANDOM.integers(0, 2, N)
    scores = np.round(truth * 0.3 + RANDOM.random(N), 1) / 1.3  # with ties
    assert area_under_roc(scores, truth, weights) == pytest.approx(
        sk.roc_auc_score(truth, scores, sample_weight=weights)
    )
    false, true = roc_curve(scores, truth, weights)
    wanted = sk.roc_curve(truth, scores, sample_weight=weights, drop_intermediate=False)
    np.testing.assert_allclose(false, wanted[0])
    np.testing.assert_allclose(true, wanted[1])
    told = (scores > 0.5).astype(int)
    matrix = confusion(told, truth, 2, weights)
    np.testing.assert_allclose(matrix, sk.confusion_matrix(truth, told, sample_weight=weights))
    recalls = [sk.recall_score(truth, told, pos_label=k, sample_weight=weights) for k in (0, 1)]
    np.testing.assert_allclose(sensitivities(matrix), recalls)


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("n_classes", [2, 4])
def test_metrics_of_outputs_are_as_scikit_learn_has_them(weights: Any, n_classes: int) -> None:
    outputs = torch.tensor(RANDOM.normal(size=(N, n_classes)))
    truth = torch.tensor(RANDOM.integers(0, n_classes, N))
    probabilities = outputs.softmax(1).numpy()
    scores = probabilities[:, 1] if n_classes == 2 else probabilities
    told: dict[str, Any] = {"sample_weight": weights}
    wanted = {
        "accuracy": sk.accuracy_score(truth, outputs.argmax(1), **told),
        "auc": sk.roc_auc_score(truth, scores, multi_class="ovr", **told),
        "balanced-accuracy": sk.balanced_accuracy_score(truth, outputs.argmax(1), **told),
        "brier": sk.brier_score_loss(truth, scores, **told),
    }
    given = {} if weights is None else {"weights": torch.tensor(weights)}
    for name, value in wanted.items():
        assert METRICS[name](outputs, truth, **given) == pytest.approx(value), name
    assert [name for name in wanted if less_is_better(name)] == ["brier"]


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_metrics_of_numbers_are_as_scikit_learn_has_them(weights: Any) -> None:
    outputs, truth = torch.tensor(RANDOM.normal(size=(2, N, 1)))
    wanted = {
        "rmse": sk.root_mean_squared_error(truth, outputs, sample_weight=weights),
        "mae": sk.mean_absolute_error(truth, outputs, sample_weight=weights),
        "r2": sk.r2_score(truth, outputs, sample_weight=weights),
    }
    given = {} if weights is None else {"weights": torch.tensor(weights)}
    for name, value in wanted.items():
        assert METRICS[name](outputs, truth, **given) == pytest.approx(value), name


def test_calibration_bins_have_equal_sizes_and_are_as_scikit_learn_has_them() -> None:
    told = RANDOM.random(N)
    truth = (RANDOM.random(N) < told).astype(int)
    bins = calibration(told, truth, 5)
    assert [one.rows for one in bins] == [40] * 5
    share, mean = calibration_curve(truth, told, n_bins=5, strategy="quantile")
    np.testing.assert_allclose([one.came_true for one in bins], share)
    np.testing.assert_allclose([one.predicted for one in bins], mean)
    doubled = calibration(told, truth, 5, np.full(N, 2.0))
    # not twice the rows
    np.testing.assert_allclose([one.error for one in doubled], [one.error for one in bins])
    assert [one.rows for one in calibration([0.3] * 6, [0, 1] * 3)] == [6]


def test_what_is_not_defined_is_not_a_number() -> None:
    assert math.isnan(area_under_roc([0.1, 0.2], [1, 1]))
    assert math.isnan(METRICS["r2"](torch.zeros(3, 1), torch.ones(3, 1)))
    outputs, one_class = torch.eye(3), torch.tensor([1, 1, 1])
    assert math.isnan(METRICS["auc"](outputs[:, :2], one_class))
    # of the two classes that are there
    assert METRICS["auc"](outputs, torch.tensor([0, 1, 1])) == 0.875
