"""Modes and variances against scikit-learn, and against each other."""

from dataclasses import replace

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, PoissonRegressor, Ridge

from coterie.mixture import posterior as module
from coterie.mixture.families import FAMILIES, LOGISTIC, POISSON, SOFTMAX, SQUARED, Family
from coterie.mixture.posterior import Priors, Rows, most_probable, outputs_of, posterior

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(60, 5))


def one_prior(variance: float, k: int, mean: float = 0.0) -> Priors:
    return Priors(np.full((5, 1, k), mean), np.full((5, 1, k), variance), np.ones(1))


def test_rows_with_what_is_no_number_do_not_count() -> None:
    inputs, targets = np.ones((5, 2)), np.arange(5.0)[:, None]
    whole = Rows(inputs, targets)
    assert whole.finite() is whole
    inputs, targets = inputs.copy(), targets.copy()
    inputs[1, 1], targets[3, 0] = np.nan, np.inf
    assert Rows(inputs, targets).finite().targets[:, 0].tolist() == [0.0, 2.0, 4.0]
    assert Rows(inputs, targets).finite().inputs.shape == (3, 2)


def test_squared_is_ridge() -> None:
    y = X @ np.arange(5.0) + RANDOM.normal(size=60)
    found = most_probable(Rows(X, y[:, None]), SQUARED, one_prior(0.2, 1))
    expected = Ridge(alpha=5.0, fit_intercept=False).fit(X, y).coef_
    np.testing.assert_allclose(found[:, 0, 0], expected, rtol=1e-8)


@pytest.mark.parametrize("s", [0.05, 1.0, 30.0])
def test_softmax_is_logistic_regression(s: float) -> None:
    y = (X @ RANDOM.normal(size=(5, 3)) + RANDOM.gumbel(size=(60, 3))).argmax(1)
    found = most_probable(Rows(X, SOFTMAX.targets(y, 3)), SOFTMAX, one_prior(s, 3), tolerance=1e-8)
    model = LogisticRegression(C=s, fit_intercept=False, tol=1e-10, max_iter=5000).fit(X, y)
    np.testing.assert_allclose(found[:, 0].T, model.coef_, atol=1e-4)


def test_logistic_and_poisson() -> None:
    y = (X[:, 0] + RANDOM.logistic(size=60) > 0).astype(float)
    found = most_probable(Rows(X, y[:, None]), LOGISTIC, one_prior(2.0, 1), tolerance=1e-8)
    model = LogisticRegression(C=2.0, fit_intercept=False, tol=1e-10, max_iter=5000).fit(X, y)
    np.testing.assert_allclose(found[:, 0, 0], model.coef_[0], atol=1e-5)
    counts = RANDOM.poisson(np.exp(0.3 * X[:, 1]))
    found = most_probable(
        Rows(X, counts[:, None].astype(float)), POISSON, one_prior(1 / 6, 1), tolerance=1e-8
    )
    poisson = PoissonRegressor(alpha=0.1, fit_intercept=False, tol=1e-10, max_iter=5000).fit(
        X, counts
    )
    np.testing.assert_allclose(found[:, 0, 0], poisson.coef_, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_many_priors_at_once_are_each_for_itself(family: Family) -> None:
    targets = family.targets(RANDOM.integers(0, 2, 60), 2 if family is SOFTMAX else 1)
    k = targets.shape[1]
    priors = Priors(
        RANDOM.normal(size=(5, 4, k)) / 5,
        np.repeat([1e-6, 0.1, 1.0, 50.0], k).reshape(1, 4, k) + np.zeros((5, 1, 1)),
        np.array([1.0, 2.0, 0.5, 1.0]),
    )
    seen = RANDOM.integers(0, 2, (60, 4)).astype(float)
    together = most_probable(Rows(X, targets), family, priors, seen)
    for b in range(4):
        kept = seen[:, b] > 0
        one = Priors(
            priors.mean[:, b : b + 1], priors.variance[:, b : b + 1], priors.noise[b : b + 1]
        )
        alone = most_probable(Rows(X[kept], targets[kept]), family, one)
        np.testing.assert_allclose(
            together[:, b], alone[:, 0], atol=2e-4 * np.sqrt(priors.variance[:, b].max())
        )


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_slopes_and_curvatures_are_derivatives(family: Family) -> None:
    k = 3 if family is SOFTMAX else 2
    outputs = RANDOM.normal(size=(7, k))
    targets = np.eye(k)[RANDOM.integers(0, k, 7)]
    slope, small = family.predict(outputs) - targets, 1e-5
    for j in range(k):
        there = np.zeros(k)
        there[j] = small
        by_loss = (
            (family.losses(outputs + there, targets) - family.losses(outputs - there, targets))
            / 2
            / small
        )
        np.testing.assert_allclose(slope[:, j], by_loss, atol=1e-8)
        by_slope = (
            (family.predict(outputs + there) - family.predict(outputs - there))[:, j] / 2 / small
        )
        np.testing.assert_allclose(
            family.curvature(family.predict(outputs))[:, j], by_slope, atol=1e-8
        )
    assert np.isfinite(family.losses(1e6 * outputs, targets)).all()


def test_both_systems_of_the_squared_loss_agree() -> None:
    """More columns than rows and fewer: the same posterior by the inverse of D and of n."""
    y = RANDOM.normal(size=(4, 1))
    few = Rows(X[:4], y)
    priors = Priors(
        RANDOM.normal(size=(5, 1, 1)), RANDOM.uniform(0.1, 3, (5, 1, 1)), np.array([0.7])
    )
    precision = X[:4].T @ X[:4] / 0.7 + np.diag(1 / priors.variance[:, 0, 0])
    right = X[:4].T @ y / 0.7 + (priors.mean / priors.variance)[:, 0]
    np.testing.assert_allclose(
        most_probable(few, SQUARED, priors)[:, 0], np.linalg.solve(precision, right)
    )
    ones = np.ones((4, 1))
    variance = posterior(few, SQUARED, priors, ones, tolerance=1e-4, iterations=100)[1]
    np.testing.assert_allclose(variance[:, 0, 0], np.diag(np.linalg.inv(precision)))


def test_outputs_of_many_models() -> None:
    parameters = RANDOM.normal(size=(5, 3, 2))
    one_by_one = np.stack([X @ parameters[:, b] for b in range(3)], axis=1)
    np.testing.assert_allclose(outputs_of(X, parameters), one_by_one)


@pytest.mark.parametrize("family", [SQUARED, LOGISTIC], ids=["squared", "logistic"])
@pytest.mark.parametrize("n", [3, 20])
def test_users_in_a_stack_have_the_posteriors_that_each_has_by_itself(
    family: Family, n: int
) -> None:
    """Two users of as many rows, three priors each, rows weighted; fewer rows than columns, and more."""
    inputs, parameters = RANDOM.normal(size=(2, n, 5)), RANDOM.normal(size=(5, 1))
    targets = (inputs @ parameters > 0).astype(float)
    stack, seen = Rows(inputs, targets), RANDOM.uniform(0.2, 1, (n, 6))
    variance = RANDOM.uniform(0.1, 2, (5, 6, 1))
    priors = Priors(RANDOM.normal(size=(5, 6, 1)), variance, RANDOM.uniform(0.5, 2, 6))
    together = posterior(stack, family, priors, seen, tolerance=1e-9, iterations=200)
    for b in range(6):
        rows = Rows(inputs[b // 3], targets[b // 3])
        mine = Priors(priors.mean[:, [b]], variance[:, [b]], priors.noise[[b]])
        alone = posterior(rows, family, mine, seen[:, [b]], tolerance=1e-9, iterations=200)
        for one, other in zip(together, alone, strict=True):
            np.testing.assert_allclose(one[:, [b]], other, rtol=0, atol=1e-7)


@pytest.mark.parametrize("columns", [3, 60])
def test_rows_that_are_taken_in_turn_give_the_same_mode(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    rows = Rows(random.normal(size=(200, columns)), np.eye(3)[random.integers(0, 3, 200)])
    shape = (columns, 4, 3)
    priors = Priors(0.1 * random.normal(size=shape), np.ones(shape), np.ones(4))
    seen = (random.random((200, 4)) < 0.8).astype(float)
    at_once = most_probable(rows, SOFTMAX, priors, seen, tolerance=1e-8)
    monkeypatch.setattr("coterie.mixture.posterior.AT_ONCE", 1000)
    in_turn = most_probable(rows, SOFTMAX, priors, seen, tolerance=1e-8)
    np.testing.assert_allclose(in_turn, at_once, atol=1e-7)
    monkeypatch.setattr("coterie.mixture.posterior.MANY_ROWS", 100)  # then it ends sooner
    near = most_probable(rows, SOFTMAX, priors, seen, tolerance=1e-8)
    assert 0 < np.abs(near - at_once).max() < 0.02  # of a posterior whose numbers are .17 wide


def test_rows_in_turn_are_all_rows_and_no_more_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(np.arange(100.0).reshape(50, 2), np.zeros((50, 1)))
    assert module._in_turn(rows, 4) == [slice(None)], "they fit"
    monkeypatch.setattr(module, "AT_ONCE", 80)
    turns = module._in_turn(rows, 4)
    assert [len(rows.inputs[turn]) for turn in turns] == [5] * 10  # a quarter of 80 / 4
    np.testing.assert_array_equal(np.concatenate([rows.inputs[t] for t in turns]), rows.inputs)
    assert module._in_turn(rows, 1000) == [slice(k, k + 1) for k in range(50)], "one at least"
    stack = Rows(rows.inputs[None], rows.targets[None])
    assert module._in_turn(stack, 4) == [slice(None)], "a stack goes at once"


@pytest.mark.parametrize("columns", [4, 60])
def test_the_search_starts_with_the_inverse_of_each_outputs_own_curvature(columns: int) -> None:
    """With many columns with that of its diagonal; by numerical slopes of the whole objective."""
    random = np.random.default_rng(0)
    rows = Rows(random.normal(size=(30, columns)), np.eye(3)[random.integers(0, 3, 30)])
    mean, variance = random.normal(size=(columns, 3)) / 9, random.uniform(0.5, 2, (columns, 3))
    seen, h, units = random.uniform(0.2, 1, 30), 1e-5, np.sqrt(variance)

    def slope(z: np.ndarray) -> np.ndarray:  # in units of the prior
        wrong = SOFTMAX.predict(rows.inputs @ (mean + units * z)) - rows.targets
        found: np.ndarray = units * (rows.inputs.T @ (seen[:, None] * wrong)) + z
        return found

    start = module._start(rows, SOFTMAX, mean[:, None], np.sqrt(variance)[:, None], seen[:, None])
    for k in range(3):
        hessian = np.empty((columns, columns))
        for j in range(columns):
            step = np.zeros((columns, 3))
            step[j, k] = h
            hessian[:, j] = (slope(step) - slope(-step))[:, k] / (2 * h)
        if columns == 4:
            np.testing.assert_allclose(start[0, k], np.linalg.inv(hessian), rtol=1e-6, atol=1e-9)
        else:
            np.testing.assert_allclose(start[0, k, 0], 1 / np.diag(hessian), rtol=1e-6)


def test_two_loops_are_the_inverse_of_bfgs_by_matrices() -> None:
    """Newest last: H ← (1 − ρsyᵀ) H (1 − ρysᵀ) + ρssᵀ, from a diagonal and from a matrix."""
    random = np.random.default_rng(0)
    g = random.normal(size=(5, 1, 1))
    curve = np.diag(random.uniform(0.5, 2, 5))
    steps = [random.normal(size=(5, 1, 1)) for _ in range(3)]
    changes = [(curve @ s[:, 0])[:, None] for s in steps]
    history = [(s, y, 1 / (s * y).sum(0)[:, 0]) for s, y in zip(steps, changes, strict=True)]
    for start in (np.diag(random.uniform(0.5, 2, 5)), np.linalg.inv(curve + 0.1)):
        inverse = start
        for s, y, rho in history:
            left = np.eye(5) - rho * np.outer(s, y)
            inverse = left @ inverse @ left.T + rho * np.outer(s, s)
        found = module.two_loops(g, history, start[None, None])
        np.testing.assert_allclose(found.ravel(), inverse @ g.ravel())
    diagonal = random.uniform(0.5, 2, 5)
    expected = module.two_loops(g, history, np.diag(diagonal)[None, None])
    found = module.two_loops(g, history, diagonal[None, None, None])
    np.testing.assert_allclose(found, expected)


@pytest.mark.parametrize(("columns", "most"), [(5, 12), (60, 120)])
def test_the_search_takes_few_passes(columns: int, most: int) -> None:
    """The memory of the last steps is used, and a step that is too long is a quarter the next time."""
    random = np.random.default_rng(0)
    inputs = random.normal(size=(80, columns)) * np.geomspace(0.1, 10, columns)
    rows = Rows(inputs, np.eye(3)[random.integers(0, 3, 80)])
    shape = (columns, 1, 3)
    priors, passes = Priors(np.zeros(shape), np.ones(shape), np.ones(1)), []

    def counted(outputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        passes.append(len(outputs))
        return SOFTMAX.losses(outputs, targets)

    most_probable(rows, replace(SOFTMAX, losses=counted), priors, tolerance=1e-6)
    assert len(passes) <= most


def test_what_is_worked_at_together_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    rows = Rows(random.normal(size=(200, 3)), np.eye(4)[random.integers(0, 4, 200)])
    shape, seen = (3, 5, 4), list[tuple[int, ...]]()
    priors = Priors(random.normal(size=shape), np.ones(shape), np.ones(5))
    at_once = most_probable(rows, SOFTMAX, priors, tolerance=1e-8)

    def noted(outputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        seen.append(outputs.shape)
        return SOFTMAX.losses(outputs, targets)

    monkeypatch.setattr(module, "MODELS", 2 * 3 * 4)  # numbers of two models
    monkeypatch.setattr(module, "AT_ONCE", 1000)
    in_parts = most_probable(rows, replace(SOFTMAX, losses=noted), priors, tolerance=1e-8)
    np.testing.assert_allclose(in_parts, at_once, atol=1e-7)
    assert max(models for _, models, _ in seen) == 2
    assert max(n * models * k for n, models, k in seen) <= 1000
    seen.clear()
    monkeypatch.setattr(module, "MODELS", 5 * 3 * 4)
    most_probable(rows, replace(SOFTMAX, losses=noted), priors, tolerance=1e-8)
    assert seen[0][1] == 5, "all that fit"
