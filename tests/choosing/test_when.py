"""When to stop and which path to serve, by hand."""

import numpy as np

from coterie.choosing.account import sentence
from coterie.choosing.when import Resampled, best_path, standard_error


def test_a_look_that_is_better_on_every_example_is_always_the_best() -> None:
    table = np.array([[1.0, 2.0], [0.5, 1.0]])
    assert Resampled(np.array([0, 1]), seed=0).frequencies(table).tolist() == [0.0, 1.0]


def test_the_path_of_least_mean_loss_is_served() -> None:
    assert best_path({"alone": np.array([2.0, 1.0]), "branch": np.ones(2), "pooled": np.zeros(2)}) == "pooled"


def test_the_standard_error_of_a_mean() -> None:
    assert standard_error([0.0, 2.0]) == 1.0


def test_no_more_is_said_than_is_known() -> None:
    said = "the model trained alone is served: following peers was not better on own examples that were held out"
    assert sentence({"path": "alone", "folds": 3}, 0) == said
