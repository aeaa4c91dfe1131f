"""The whole of it: planted problems against scikit-learn, honest folds, and input that is bad."""

import math
from dataclasses import replace

import numpy as np
import pytest
from sklearn.linear_model import RidgeCV

from coterie.mixture.candidates import (
    Candidates,
    OwnRows,
    constant,
    flat_prior,
    guesses,
    paths,
)
from coterie.mixture.families import LOGISTIC, POISSON, SOFTMAX, SQUARED, Array, Family
from coterie.mixture.fit import Fitted, asks_here, driven, fit_here, linear_candidates
from coterie.mixture.mixing import halves, mixed, weights_of
from coterie.mixture.posterior import Priors, Rows
from coterie.mixture.prior import find_priors
from coterie.mixture.scaling import ManyRows, Scaling


def regression(
    random: np.random.Generator, *, stranger: bool = False
) -> tuple[list[tuple[Array, Array]], Array]:
    """Return user 0 with 40 rows and 8 peers with 200, who differ in one of 8 coefficients; and user 0's truth."""
    centre, spread = random.normal(size=8), np.array([0.05] * 7 + [1.0])
    users, truths = [], []
    for k, n in enumerate([40] + [200] * 8):
        truth = (-centre if stranger and k == 0 else centre) + spread * random.normal(size=8)
        x = random.normal(size=(n, 8))
        users.append((x, x @ truth + random.normal(size=n)))
        truths.append(truth)
    return users, truths[0]


@pytest.mark.parametrize(("stranger", "most"), [(False, 0.4), (True, 1.1)])
def test_planted_regression_beside_ridge(stranger: bool, most: float) -> None:
    ours, theirs = [], []
    for seed in range(24):
        users, truth = regression(np.random.default_rng(seed), stranger=stranger)
        fitted = fit_here(*users[0], users[1:], SQUARED)
        ridge = RidgeCV(alphas=np.logspace(-3, 3, 25)).fit(*users[0])
        ours.append(np.square(fitted.served.parameters[:-1, 0] - truth).sum())
        theirs.append(np.square(ridge.coef_ - truth).sum())
    assert np.mean(ours) <= most * np.mean(theirs)


def test_an_intercept_of_ones_own_beside_coefficients_in_common() -> None:
    """As by who knows the coefficients: the intercept is the mean of what they leave."""
    random, truth = np.random.default_rng(2), np.array([1.0, -2.0, 0.5])
    users = [
        (x := random.normal(size=(n, 3)), x @ truth + (3 if not k else 0) + random.normal(size=n))
        for k, n in enumerate([12] + [300] * 4)
    ]
    left = np.mean(users[0][1] - users[0][0] @ truth)
    entries = fit_here(*users[0], users[1:], SQUARED).entries
    its_own, shrunk = (
        entries[kind].parameters[:, 0] for kind in ("hierarchical, own intercept", "hierarchical")
    )
    np.testing.assert_allclose(its_own, [*truth, left], atol=0.15)
    assert abs(shrunk[-1] - left) > abs(its_own[-1] - left)


def test_what_judges_a_row_has_not_seen_its_fold() -> None:
    """Other targets in a fold change no output for that fold: not of a candidate, not of the constant."""
    random = np.random.default_rng(0)
    x, y = (
        np.column_stack([random.normal(size=(20, 3)), np.ones(20)]),
        np.eye(2)[random.integers(0, 2, 20)],
    )
    folds = OwnRows.of(Rows(x, y), SOFTMAX, 0).folds
    other = np.where((folds == 1)[:, None], 1 - y, y)
    priors = {"alone": Priors(np.zeros((4, 1, 2)), flat_prior(4, 2, intercept=True), np.ones(1))}
    plain = Scaling(np.zeros(3), np.ones(3), np.zeros(2), np.ones(2), intercept=True)

    def candidates(targets: Array) -> list[Candidates]:
        own = replace(OwnRows.of(Rows(x, y), SOFTMAX, 0), rows=Rows(x, targets))
        own = replace(own, guesses=guesses(SOFTMAX, targets, own.folds))
        return [*paths(own, SOFTMAX, priors, plain), constant(own, plain)]

    for one, two in zip(candidates(y), candidates(other), strict=True):
        np.testing.assert_array_equal(one.outputs[folds == 1], two.outputs[folds == 1])
        assert not np.array_equal(one.outputs[folds == 2], two.outputs[folds == 2])
        assert one.parameters is not None
        assert two.parameters is not None
        assert not np.array_equal(one.parameters, two.parameters)


def test_the_mixture_of_a_fold_is_weighed_without_it() -> None:
    random = np.random.default_rng(1)
    outputs, y, folds = (
        random.normal(size=(12, 3, 1)),
        random.normal(size=(12, 1)),
        np.arange(12) % 3,
    )
    other = np.where((folds == 0)[:, None], y + 9, y)
    one, two = (mixed(SQUARED, outputs, each, folds, np.full(3, 1 / 3)) for each in (y, other))
    np.testing.assert_array_equal(one.outputs[folds == 0], two.outputs[folds == 0])
    assert not np.array_equal(one.weights, two.weights)


def test_weights_are_those_of_a_plain_loop() -> None:
    totals, prior = np.array([3.0, 4.0, 9.0]), np.array([0.5, 0.25, 0.25])
    raw = [p * math.exp(-t / 2) for p, t in zip(prior, totals, strict=True)]
    np.testing.assert_allclose(weights_of(totals, 10, 1, prior, SOFTMAX), np.array(raw) / sum(raw))
    noise = 2 * 3.0 / 10  # the least mean squared error; a total is half a sum of squares
    raw = [p * math.exp(-t / noise / 2) for p, t in zip(prior, totals, strict=True)]
    np.testing.assert_allclose(weights_of(totals, 10, 1, prior, SQUARED), np.array(raw) / sum(raw))
    np.testing.assert_allclose(
        weights_of(np.array([np.nan, 1.0, 2.0]), 10, 1, prior, SOFTMAX)[0], 0
    )
    np.testing.assert_allclose([halves(np.arange(3) < 3).sum(), halves(np.arange(7) < 2).sum()], 1)


def test_targets_and_columns_in_other_units_give_the_same() -> None:
    users, _ = regression(np.random.default_rng(3))
    units = np.array([1e9, 1e-6, 1.0, 1.0, 5.0, 1.0, 1e4, 0.1])
    euros = [(x * units + 3 * units, 1e5 * y - 7) for x, y in users]
    plain, scaled = fit_here(*users[0], users[1:], SQUARED), fit_here(*euros[0], euros[1:], SQUARED)
    np.testing.assert_allclose(
        scaled.served.parameters[:-1, 0] * units / 1e5, plain.served.parameters[:-1, 0], rtol=1e-6
    )
    np.testing.assert_allclose(scaled.served.losses / 1e10, plain.served.losses, rtol=1e-5)


def finite(fitted: Fitted) -> bool:
    return bool(
        np.isfinite(fitted.served.parameters).all() and np.isfinite(fitted.alone.parameters).all()
    )


@pytest.mark.parametrize("n", [1, 2, 3, 5, 40])
@pytest.mark.parametrize(
    "family", [SQUARED, SOFTMAX, LOGISTIC, POISSON], ids=lambda family: family.name
)
def test_bad_peers_and_few_rows(n: int, family: Family) -> None:
    """One row, one class, NaN, 10⁹ times the scale, collinear and constant columns: survived."""
    random = np.random.default_rng(n)
    k = 3 if family is SOFTMAX else 1

    def user(rows: int, scale: float = 1.0) -> tuple[Array, Array]:
        x = scale * random.normal(size=(rows, 4))
        x[:, 2], x[:, 3] = x[:, 1], 7.0
        y = random.integers(0, 2, rows)
        return x, y if family is SOFTMAX else y.astype(float)

    broken, one_class = user(20), user(20)
    broken[0][:] = np.nan
    one_class[1][:] = 2 if family is SOFTMAX else 1  # for classes one that nobody else has
    peers = [user(30), user(1), broken, one_class, user(30, 1e9)]
    assert finite(fit_here(*user(n), peers, family, k))
    assert finite(fit_here(*user(n), [], family, k))


def test_more_columns_than_rows() -> None:
    random = np.random.default_rng(0)
    users = [
        (x := random.normal(size=(n, 120)), x[:, :3].sum(1) + random.normal(size=n))
        for n in (15, 60, 60)
    ]
    assert finite(fit_here(*users[0], users[1:], SQUARED))


def test_noise_is_answered_by_no_more_than_the_constant() -> None:
    """Where nothing can be learned, the model served is hardly worse than the mean of the targets."""
    excess = []
    for seed in range(10):
        random = np.random.default_rng(seed)
        users = [(random.normal(size=(n, 5)), random.normal(size=n)) for n in (30, 60, 60, 60)]
        fitted = fit_here(*users[0], users[1:], SQUARED)
        excess.append(
            np.square(fitted.served.parameters).sum()
            - np.square(fitted.entries["constant"].parameters).sum()
        )
    assert np.mean(excess) < 0.05


@pytest.mark.parametrize("liars", [1, 4])
@pytest.mark.parametrize("lie", ["contrary", "huge", "noise", "constant"])
def test_peers_that_lie_cost_little(lie: str, liars: int) -> None:
    """Ten peers, of whom one or four lie: over seeds no more loss than Alone, three standard errors allowed."""
    differences = []
    for seed in range(8):
        random = np.random.default_rng(seed)
        truth = random.normal(size=5)
        users = [
            (x := random.normal(size=(n, 5)), x @ truth + random.normal(size=n))
            for n in [30] + [60] * 10
        ]
        for k in range(1, liars + 1):
            x, y = users[k]
            lies = {
                "contrary": -y,
                "huge": 1e6 * y,
                "noise": random.normal(size=60),
                "constant": np.full(60, 9.0),
            }
            users[k] = x, lies[lie]
        fitted = fit_here(*users[0], users[1:], SQUARED)
        served, alone = (
            np.square(one.parameters[:5, 0] - truth).sum() for one in (fitted.served, fitted.alone)
        )
        differences.append(served - alone)
    assert np.mean(differences) <= 3 * np.std(differences, ddof=1) / len(differences) ** 0.5


def test_many_own_rows_are_fitted_as_few() -> None:
    """The sums of a fold are all that the squared loss needs: judged by the same rows, the same is served."""
    random = np.random.default_rng(2)

    def user(n: int) -> tuple[Array, Array]:
        x = random.normal(size=(n, 4))
        return x, x.sum(1, keepdims=True) + random.normal(size=(n, 1))

    me, peers = user(300), [user(40) for _ in range(6)]
    scaling = Scaling.of(*me, SQUARED, intercept=True)
    rows = scaling.rows(*me)
    whole = OwnRows.of(rows, SQUARED, 0)
    few = OwnRows.of(rows, SQUARED, 0, most=100)
    assert (len(few.rows.inputs), len(few.judging.inputs)) == (4 * 6, 100)
    again = replace(few, judging=whole.judging, folds=whole.folds)
    asks = asks_here([scaling.clipped(scaling.rows(*peer)) for peer in peers], SQUARED)
    found = [driven(find_priors(own, SQUARED, 6), asks) for own in (whole, again)]
    np.testing.assert_allclose(found[0].tau, found[1].tau, atol=1e-7)
    for one, two in zip(*(each.priors for each in found), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-8)
    flat = {"alone": Priors(np.zeros((5, 1, 1)), flat_prior(5, 1, intercept=True), np.ones(1))}
    first, second = (paths(own, SQUARED, flat, scaling)[0] for own in (whole, again))
    np.testing.assert_allclose(first.outputs, second.outputs, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("family", [SQUARED, SOFTMAX])
def test_many_rows_that_are_scaled_in_pieces_give_the_same_model(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of 100 of 300 rows, in single precision, one of them not finite."""
    random = np.random.default_rng(0)
    inputs = random.normal(2.0, 3.0, (300, 3)).astype(np.float32)
    inputs[7, 1] = np.inf
    outputs = inputs[:, :1] + random.normal(size=(300, 1))
    targets = outputs if family is SQUARED else np.eye(2)[(outputs[:, 0] > 2).astype(int)]
    whole = Scaling.of(inputs.astype(np.float64), targets, family, intercept=True)
    monkeypatch.setattr("coterie.mixture.scaling.PIECE", 100)
    scaling = Scaling.of(inputs, targets, family, intercept=True)
    for one, other in zip(scaling[:4], whole[:4], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)
    many, rows = ManyRows.of(inputs, targets, scaling), scaling.rows(inputs, targets).finite()
    in_pieces, at_once = (OwnRows.of(each, family, most=50) for each in (many, rows))
    for one, other in zip(in_pieces.judging[:2], at_once.judging[:2], strict=True):
        np.testing.assert_array_equal(one, other)
    fitted = [linear_fit(each, family, scaling) for each in (in_pieces, at_once)]
    np.testing.assert_allclose(fitted[0], fitted[1], rtol=1e-9)


def linear_fit(own: OwnRows, family: Family, scaling: Scaling) -> Array:
    """Return the parameters of all candidates that ask nobody."""
    _, found = driven(linear_candidates(own, family, scaling, 0), lambda _: None)  # type: ignore[arg-type,return-value]
    return np.concatenate([np.asarray(one.parameters) for one in found], 1)
