"""Plain tools: each against scikit-learn by itself or a planted truth, without a look at the test examples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from tests.support.examples import everything
from tests.support.populations import make, parts, people

from coterie.benchmark import Population, Selection
from coterie.benchmark.methods import DEFAULT, contender
from coterie.benchmark.sets import SETS
from coterie.benchmark.tasks import SetTask, task_of
from coterie.benchmark.tools import TOOLS, Tool, ToolRows, _around
from coterie.users.examples import InMemory

RNG = np.random.default_rng(0)


def planted(n_classes: int, spread: float = 0.0) -> SetTask:
    """Make users with the same slopes and, by `spread`, their own intercepts; 12 rows to learn from."""
    rng = np.random.default_rng(3)
    n, d, users = 120, 12, 7
    slopes = rng.normal(size=(d, max(1, n_classes)))
    x = rng.normal(size=(users * n, d))
    owner = np.repeat(np.arange(users), n)
    scores = (
        x @ slopes
        + spread * rng.normal(size=(users, max(1, n_classes)))[owner]
        + rng.normal(size=(len(x), 1))
    )
    targets = scores.argmax(1) if n_classes else scores[:, 0]
    inputs = torch.tensor(x, dtype=torch.float32)
    shaped = targets if n_classes else targets[:, None].astype(np.float32)
    names = np.array([f"user {k}" for k in owner])
    return task_of(
        Population(inputs, shaped, names, n_classes), "user 0", own_examples=12, most_peers=10
    )


@pytest.mark.parametrize("n_classes", [0, 3])
def test_tools_that_use_peers_who_are_alike_beat_alone(n_classes: int) -> None:
    task = planted(n_classes)
    reached = {name: tool.outcome(task) for name, tool in TOOLS.items()}
    for name in ("sklearn-pooled", "sklearn-users", "sklearn-towards", "sklearn-bayes"):
        assert reached[name].loss < 0.8 * reached["sklearn-alone"].loss, name
    assert all(np.isfinite(one.loss) and one.wrong_weight is None for one in reached.values())
    assert {one.metric for one in reached.values()} == {"accuracy" if n_classes else "-rmse"}


def test_the_prior_leaves_to_the_own_rows_what_users_differ_in() -> None:
    """Where users differ in their intercepts only, pooling is wrong about them and the prior is not."""
    task = planted(0, spread=5.0)
    reached = {name: tool.outcome(task).loss for name, tool in TOOLS.items()}
    assert reached["sklearn-bayes"] < 0.75 * min(
        reached["sklearn-alone"], reached["sklearn-pooled"]
    )
    assert reached["sklearn-users"] < 0.5 * reached["sklearn-pooled"]


def test_the_strong_alone_is_ridge_of_the_best_strength_on_training_and_validation_rows() -> None:
    task = planted(0)
    outcome = contender("sklearn-alone").outcome(task)  # type: ignore[union-attr]
    own = [everything(parts(task)[part]) for part in ("own", "validation")]
    x, y = (torch.cat([pair[k] for pair in own]).double().numpy() for k in (0, 1))
    test_x, test_y = (part.double().numpy() for part in everything(parts(task)["test"]))
    strength = float(outcome.setting.removeprefix("strength "))
    model = Ridge(alpha=1 / strength).fit(x, y[:, 0])
    assert outcome.loss == pytest.approx(
        float(((model.predict(test_x) - test_y[:, 0]) ** 2).mean()), rel=1e-2
    )
    strangers = replace(task, peers=tuple(planted(0, spread=9.0).peers))
    assert contender("sklearn-alone").outcome(strangers).loss == outcome.loss  # type: ignore[union-attr]


def test_the_penalised_fit_is_that_of_scikit_learn_where_the_centre_is_zero() -> None:
    x, y = RNG.normal(size=(50, 4)), RNG.integers(0, 3, 50)
    marked = np.column_stack([x, np.ones(50)])
    theirs = (
        LogisticRegression(C=0.3, fit_intercept=False, tol=1e-8, max_iter=1000)
        .fit(marked, y)
        .coef_.T
    )
    ours = _around(ToolRows(x, y), np.zeros((5, 3)), np.array([0.3]), 3)
    np.testing.assert_allclose(ours, theirs, atol=1e-3)
    centre, numbers = RNG.normal(size=(5, 1)), RNG.normal(size=50)
    model = Ridge(alpha=1 / 0.3, fit_intercept=False).fit(marked, numbers - marked @ centre[:, 0])
    moved = _around(ToolRows(x, numbers), centre, np.array([0.3]), 0)
    np.testing.assert_allclose(moved[:, 0], centre[:, 0] + model.coef_, atol=1e-9)


@pytest.mark.parametrize("name", TOOLS)
def test_test_rows_choose_nothing(name: str) -> None:
    task = make(people())
    inputs, targets = everything(parts(task)["test"])
    odd = make(people())
    odd.me.test = InMemory(inputs, (targets + 1) % 4)
    before, after = TOOLS[name].outcome(task), TOOLS[name].outcome(odd)
    assert (before.setting, before.validation_loss) == (after.setting, after.validation_loss)
    assert before.loss != after.loss


def test_a_class_that_no_row_had_is_improbable_but_not_impossible() -> None:
    task = planted(3)
    own = [everything(parts(task)[part]) for part in ("own", "validation")]
    for (x, y), part in zip(own, ("examples", "validation"), strict=True):
        setattr(task.me, part, InMemory(x, torch.zeros_like(y)))  # one class, which a fold has, too
    for name, tool in TOOLS.items():
        assert np.isfinite(tool.outcome(task).loss), name


def test_tools_are_contenders_by_name_and_left_out_where_they_do_not_fit() -> None:
    assert {"alone", *TOOLS} <= set(DEFAULT)
    assert contender("sklearn-trees") is TOOLS["sklearn-trees"]
    assert (
        Selection(["digits"], ["sklearn-bayes"]).contender("sklearn-bayes").name == "sklearn-bayes"
    )
    texts = Population(
        torch.zeros(4, 3, dtype=torch.long), np.zeros((4, 3), int), np.array(list("aabb")), 5
    )
    assert not TOOLS["sklearn-alone"].fits(texts)
    assert TOOLS["sklearn-alone"].fits(people())
    mine = Tool(
        "mine",
        lambda peers, n_classes: lambda own, strength: lambda x: np.zeros((len(x), n_classes)),
    )
    cells = list(Selection([SETS["digits"]], [mine], ["honest"], users=1).cells(None))
    assert [cell.method for cell in cells] == ["alone", "sklearn-alone", "mine"]
