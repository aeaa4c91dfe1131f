"""EM from sums: against a plain loop, against planted users, and against peers that lie."""

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coterie.gradients.simplex import simplex_minimum
from coterie.mixture.answers import FARTHEST, EStep, Sums
from coterie.mixture.candidates import INTERCEPT, OwnRows
from coterie.mixture.families import SOFTMAX, SQUARED, Array
from coterie.mixture.fit import asks_here, driven
from coterie.mixture.posterior import Priors, Rows, most_probable
from coterie.mixture.prior import (
    EXCHANGES,
    FEWEST_PEERS,
    JOINT,
    POOLED,
    RELAXED,
    RIDGE,
    TIMES,
    Heard,
    NearestMixture,
    PriorAnswer,
    PriorQuestion,
    Units,
    _descend,
    _means,
    _of_peers,
    find_priors,
    maximised,
)
from coterie.mixture.scaling import Scaling

RANDOM = np.random.default_rng(0)


def all_seen(rows: Rows) -> OwnRows:
    """Return user 0's rows in one view, which sees all."""
    n = len(rows.inputs)
    return OwnRows(rows, np.ones((n, 1)), np.array([n]), np.zeros((1, 1)), rows, np.zeros(n))


def planted(users: int, rows: int, centre: Array, spread: Array) -> list[Rows]:
    """Return users of a linear regression whose coefficients are drawn around a centre."""
    made = []
    for _ in range(users):
        x = RANDOM.normal(size=(rows, len(centre)))
        truth = centre + spread * RANDOM.normal(size=len(centre))
        made.append(Rows(x, (x @ truth + RANDOM.normal(size=rows))[:, None]))
    return made


def asked(priors: Priors, told: str = "posterior", family: str = "squared") -> EStep:
    d, _, k = priors.mean.shape
    return EStep(family, Scaling.none(d, k), priors, told)


def zeros(d: int, p: int) -> Sums:
    wide, narrow = np.zeros((d, p, 1)), np.zeros(p)
    return Sums(narrow, narrow, wide, wide, narrow, wide, wide, wide)


def test_the_m_step_is_that_of_a_plain_loop() -> None:
    tau = np.array([0.5, 0.3, 0.2])
    modes, variances, mean, variance = RANDOM.normal(size=3), np.array([0.1, 0.2, 0.05]), 0.4, 1.5
    first = sum(t * (x - mean) for t, x in zip(tau, modes, strict=True))
    given = zeros(1, 1)._replace(
        first=np.full((1, 1, 1), first),
        second=np.full(
            (1, 1, 1), sum(t * (x - mean) ** 2 for t, x in zip(tau, modes, strict=True))
        ),
        variance=np.full((1, 1, 1), float(tau @ variances)),
    )
    priors = Priors(np.full((1, 1, 1), mean), np.full((1, 1, 1), variance), np.ones(1))
    new = maximised(priors, PriorAnswer(given, np.ones(1)), tau[None])
    n = 1 / sum(t**2 for t in tau)
    relaxed = min(RELAXED, 1 / (1 - tau @ variances / variance))
    expected = (mean + relaxed * first) * n / (n + variance)
    spread = sum(
        t * ((x - expected) ** 2 + v) for t, x, v in zip(tau, modes, variances, strict=True)
    )
    np.testing.assert_allclose([new.mean.item(), new.variance.item()], [expected, spread])


def test_planted_users_are_found() -> None:
    centre, spread = np.array([2.0, -1.0, 0.5]), np.array([0.02, 0.02, 1.0])
    peers, own = planted(40, 100, centre, spread), planted(1, 20, centre, spread)[0]
    questions = []
    ask = asks_here(peers, SQUARED)

    def counting(question: PriorQuestion) -> PriorAnswer:
        questions.append(question)
        return ask(question)

    found = driven(find_priors(all_seen(own), SQUARED, 40), counting)
    assert len(questions) == POOLED + JOINT + EXCHANGES <= 60
    np.testing.assert_allclose(found.priors.mean[:2, 0, 0], centre[:2], atol=0.05)
    assert found.priors.variance[0, 0, 0] < 0.01
    assert 0.5 < found.priors.variance[2, 0, 0] < 2
    np.testing.assert_allclose(found.priors.noise[0], 1, atol=0.1)
    everybody = np.linalg.lstsq(
        np.concatenate([p.inputs for p in peers]),
        np.concatenate([p.targets for p in peers]),
        rcond=None,
    )[0]
    np.testing.assert_allclose(found.pooled[:, 0], everybody, atol=0.01)


def test_who_is_contrary_is_not_listened_to() -> None:
    """Six alike and six contrary peers: what is found from chosen ones is nearer than what is found from all."""
    centre = np.array([1.0, 1.0, 1.0])
    peers = planted(6, 80, centre, np.zeros(3)) + planted(6, 80, -centre, np.zeros(3))
    own = planted(1, 30, centre, np.zeros(3))[0]
    found = driven(find_priors(all_seen(own), SQUARED, 12), asks_here(peers, SQUARED))
    assert found.tau[0, 6:].sum() < 0.2
    everybody, chosen = np.abs(found.priors.mean[:, :, 0] - centre[:, None]).max(0)
    assert chosen < 0.5 < everybody


@pytest.mark.parametrize("peers", [12, 120], ids=["by Gram matrices", "by what was told"])
def test_whom_is_found_among_those_who_told_everywhere(peers: int) -> None:
    """One that gave no gradient once has no weight, and the others have the weights of its absence."""
    random = np.random.default_rng(1)
    whole, without = NearestMixture(3, peers), NearestMixture(3, peers - 1)
    for look in range(6):
        own = random.normal(size=5)
        theirs = own + np.linspace(0.3, 3, peers)[:, None] * random.normal(size=(peers, 5))
        ours = own + 0.1 * random.normal(size=(3, 5))
        without.look(np.delete(theirs, 1, 0), ours)
        theirs[1, 2] = np.nan if look == 3 else theirs[1, 2]
        whole.look(theirs, ours)
    found, expected = whole.weights(), without.weights()
    assert (found[:, 1] == 0).all()
    np.testing.assert_allclose(np.delete(found, 1, 1), expected, atol=1e-9)
    nobody = NearestMixture(3, peers)
    nobody.look(np.full((peers, 5), np.nan), np.zeros((3, 5)))
    np.testing.assert_allclose(nobody.weights(), 1 / peers)


def test_the_weights_of_many_are_those_of_a_plain_quadratic_program() -> None:
    """Each view's, from the running mean of Gram matrices, over the last four points."""
    random = np.random.default_rng(2)
    peers, views, found = 40, 2, list[Array]()
    judged, gram = NearestMixture(views, peers), np.zeros((views, peers + 1, peers + 1))
    for look in range(7):
        theirs, ours = random.normal(size=(peers, 3)), random.normal(size=(views, 3))
        judged.look(theirs, ours)
        for view in range(views):
            lacking = np.vstack([np.zeros(3), theirs]) - ours[view]
            now = 0.9 * lacking @ lacking.T + 0.1 * np.diag(np.square(lacking).sum(1))
            gram[view] = 0.7 * gram[view] + 0.3 * now if look else now
        if look >= 3:
            kappa = np.array([simplex_minimum(each)[1:] for each in gram])
            found.append(kappa / kappa.sum(1, keepdims=True))
    tau = np.mean(found, axis=0)
    tau[tau < 0.25 / peers] = 0
    np.testing.assert_allclose(judged.weights(), tau / tau.sum(1, keepdims=True), atol=1e-9)


def test_one_exchange_with_a_liar_moves_no_more_than_is_stated() -> None:
    """Whatever a peer of weight τ sends, μ moves by at most 2·2·5 τ √v and v by 26 τ v and 50 τ² v more."""
    priors = Priors(np.zeros((2, 1, 1)), np.full((2, 1, 1), 0.3), np.ones(1))
    ask = asked(priors)
    honest = ask.answer(planted(1, 30, np.zeros(2), np.zeros(2))[0])
    question, most = PriorQuestion(priors, np.full((1, 10), 0.1)), FARTHEST * np.sqrt(0.3)

    def moved(last: Array) -> Priors:
        numbers = np.stack([honest] * 9 + [last])
        return maximised(priors, Heard().answer(question, ask, numbers), question.weights)

    without = moved(honest)
    for lie in (1e12, -1e12, 3.0, -3.0):
        with_it = moved(np.full_like(honest, lie))
        assert np.abs(with_it.mean - without.mean).max() <= RELAXED * 2 * 0.1 * most
        assert (
            np.abs(with_it.variance).max()
            <= without.variance.max() + 0.1 * 26 * 0.3 + most**2 * 0.1
        )
        # residuals too: the noise grows by no more than its bound
        assert with_it.noise[0] <= without.noise[0] + 26 * priors.noise[0]


def test_what_a_peer_tells_is_that_of_a_plain_loop() -> None:
    """Mode, width, loss, gradient and curvature by parameter, against sums row by row and numerical slopes."""
    rows = Rows(RANDOM.normal(size=(40, 2)), np.eye(3)[RANDOM.integers(0, 3, 40)])
    priors = Priors(RANDOM.normal(size=(2, 2, 3)) / 3, np.full((2, 2, 3), 0.5), np.ones(2))
    ask = asked(priors, "gradient curvature posterior", "softmax")
    numbers = ask.answer(rows)
    assert numbers.shape == ask.shape
    assert np.abs(numbers).max() <= 1
    told = ask.read(numbers)
    assert ask.gradients == 2 * 4
    np.testing.assert_array_equal(told.share, 1)

    def loss(w: Array) -> float:
        total = 0.0
        for x, y in zip(rows.inputs, rows.targets, strict=True):
            s = x @ w
            total += np.log(np.exp(s).sum()) - s @ y
        return float(total / len(rows.inputs))

    at = most_probable(rows, SOFTMAX, priors, tolerance=1e-9, iterations=200)
    for p in range(2):
        mean, step = priors.mean[:, p], 1e-4
        np.testing.assert_allclose(told.loss[p], loss(mean))
        np.testing.assert_allclose(told.first[:, p], at[:, p] - mean, atol=0.01)
        np.testing.assert_allclose(told.second, np.square(told.first), atol=1e-12)
        for i in np.ndindex(2, 3):
            e = np.zeros((2, 3))
            e[i] = step
            slope = (loss(mean + e) - loss(mean - e)) / (2 * step)
            bend = (loss(mean + e) - 2 * loss(mean) + loss(mean - e)) / step**2
            np.testing.assert_allclose(told.gradient[i[0], p, i[1]], slope, atol=1e-7)
            np.testing.assert_allclose(told.curvature[i[0], p, i[1]], bend, atol=1e-6)


def test_sums_are_all_that_is_used() -> None:
    """The sum of what peers of any sizes send reads as the means over all examples, and over users."""
    peers = [*planted(1, 50, np.ones(2), np.ones(2)), *planted(1, 20, np.ones(2), np.ones(2))]
    priors = Priors(np.zeros((2, 1, 1)), np.ones((2, 1, 1)), np.ones(1))
    scaling = Scaling.none(2, 1)
    ask = EStep("squared", scaling, priors, "gradient posterior", examples=50)
    sums = ask.read((ask.answer(peers[0]) + ask.answer(peers[1])) / 2)
    x, y = (np.concatenate(each) for each in zip(*(rows[:2] for rows in peers), strict=True))
    np.testing.assert_allclose(sums.gradient[:, 0] / sums.share[0], -(x.T @ y) / 70)
    np.testing.assert_allclose(sums.loss / sums.share, np.square(y).mean() / 2)
    alone = [asked(priors).read(asked(priors).answer(rows)) for rows in peers]
    np.testing.assert_allclose(sums.first, (alone[0].first + alone[1].first) / 2)


def test_a_peer_that_dies_counts_as_it_last_did_until_it_is_back() -> None:
    peers = planted(3, 50, np.ones(2), np.ones(2))
    weights, heard = np.full((1, 3), 1 / 3), Heard()
    before = Priors(np.full((2, 1, 1), 0.2), np.ones((2, 1, 1)), np.ones(1))
    after = Priors(np.full((2, 1, 1), 0.3), np.full((2, 1, 1), 0.8), np.ones(1))
    first = np.stack([asked(before).answer(rows) for rows in peers])
    whole = heard.answer(PriorQuestion(before, weights), asked(before), first)
    later = np.stack([asked(after).answer(rows) for rows in peers])
    gone = later.copy()
    gone[1] = np.nan
    given = heard.answer(PriorQuestion(after, weights), asked(after), gone)
    assert whole.answered == given.answered == 1
    mode = asked(before).read(first[1]).first + before.mean
    expected = (
        asked(after).read(later[0]).first + (mode - after.mean) + asked(after).read(later[2]).first
    ) / 3
    np.testing.assert_allclose(given.sums.first, expected)
    back = heard.answer(PriorQuestion(after, weights), asked(after), later)
    np.testing.assert_allclose(
        back.sums.first, sum(asked(after).read(one).first for one in later) / 3
    )
    # one that was never there is left out
    alone = Heard().answer(PriorQuestion(after, weights), asked(after), gone)
    np.testing.assert_allclose(alone.answered, 2 / 3)


def test_the_pooled_model_is_that_of_those_who_are_there() -> None:
    """One of three is gone after some exchanges: what is found is the least squares of the two others."""
    peers = planted(3, 200, np.ones(3), np.full(3, 0.5))
    own = planted(1, 20, np.ones(3), np.zeros(3))[0]
    ask, count = asks_here(peers, SQUARED), 0
    others = asks_here([*peers[:2], Rows(np.zeros((0, 3)), np.zeros((0, 1)))], SQUARED)

    def leaving(question: PriorQuestion) -> PriorAnswer:
        nonlocal count
        count += 1
        return ask(question) if count <= 4 else others(question)

    found = driven(find_priors(all_seen(own), SQUARED, 3), leaving)
    x, y = (np.concatenate(each) for each in zip(*(rows[:2] for rows in peers[:2]), strict=True))
    left = np.linalg.lstsq(x, y, rcond=None)[0]
    np.testing.assert_allclose(found.pooled[:, 0], left, atol=0.01)


def test_bad_questions_are_told() -> None:
    fine = asked(Priors(np.zeros((2, 1, 1)), np.ones((2, 1, 1)), np.ones(1)))
    assert fine.wrong() is None
    for change in (
        {"told": "rows"},
        {"told": ""},
        {"family": "cauchy"},
        {"examples": np.nan},
        {"scaling": Scaling.none(3, 1)},
        {"priors": fine.priors._replace(variance=np.zeros((2, 1, 1)))},
        {"priors": fine.priors._replace(mean=np.full((2, 1, 1), np.inf))},
        {"priors": Priors(np.zeros((2, 33, 1)), np.ones((2, 33, 1)), np.ones(33))},
        {"priors": Priors(np.zeros((0, 1, 1)), np.ones((0, 1, 1)), np.ones(1))},
    ):
        assert replace(fine, **change).wrong(), change


def test_a_prior_that_nobody_answered_stays() -> None:
    priors = Priors(np.full((2, 1, 1), 0.7), np.full((2, 1, 1), 0.2), np.ones(1))
    kept = maximised(priors, PriorAnswer(zeros(2, 1), np.zeros(1)), np.full((1, 3), 1 / 3))
    for a, b in zip(kept, priors, strict=True):
        np.testing.assert_array_equal(a, b)


def test_pooled_and_joint_models_are_least_squares_with_ridges() -> None:
    """The peers' rows, and these beside the own ones at each weight, with the own intercept beside the common one."""
    centre = np.array([1.0, -0.5, 2.0])
    users = planted(3, 60, centre, np.full(3, 0.3)) + planted(1, 12, centre + 1, np.zeros(3))
    for user in users:
        user.inputs[:, 2] = 1  # the intercept's column; targets are whatever they are
    *peers, own = users
    found = driven(find_priors(all_seen(own), SQUARED, 3), asks_here(peers, SQUARED))
    x, y = (np.concatenate(each) for each in zip(*(rows[:2] for rows in peers), strict=True))
    pooled = np.linalg.solve(x.T @ x / len(x) + RIDGE * np.eye(3), x.T @ y / len(x))
    np.testing.assert_allclose(found.pooled[:, 0], pooled, rtol=0, atol=1e-7)
    mine, n = np.column_stack([own.inputs, np.ones(12)]), 12
    for j, times in enumerate(TIMES):
        everybody = np.column_stack([x, np.zeros(len(x))])
        ridge = np.diag([RIDGE * (1 + times)] * 3 + [1 / (INTERCEPT * n)])
        moments = mine.T @ mine / n + times * everybody.T @ everybody / len(x) + ridge
        w = np.linalg.solve(moments, mine.T @ own.targets / n + times * everybody.T @ y / len(x))
        w[2] += w[3]
        np.testing.assert_allclose(found.joint[:, 0, j], w[:3], rtol=0, atol=1e-7)


def test_the_noise_is_the_mean_residual_and_stays_where_none_came() -> None:
    priors = Priors(np.zeros((2, 2, 1)), np.ones((2, 2, 1)), np.array([3.0, 5.0]))
    told = zeros(2, 2)._replace(residual=np.array([0.1, 0.0]), share=np.array([0.4, 0.4]))
    new = maximised(priors, PriorAnswer(told, np.ones(2)), np.full((2, 3), 1 / 3))
    np.testing.assert_allclose(new.noise, [0.1 / 0.4, 5.0])
    exact = told._replace(residual=np.array([1e-9, 0.0]))
    new = maximised(priors, PriorAnswer(exact, np.ones(2)), np.full((2, 3), 1 / 3))
    np.testing.assert_allclose(new.noise, [1e-6, 5.0])


def test_means_are_over_the_examples_of_those_who_answered() -> None:
    told = zeros(2, 2)._replace(
        share=np.array([0.25, 0.0]), loss=np.array([0.5, 0.0]), gradient=np.full((2, 2, 1), 3.0)
    )
    loss, gradient, share = _means(PriorAnswer(told, np.ones(2)))
    np.testing.assert_array_equal(loss, [2.0, np.inf])
    np.testing.assert_array_equal(gradient[:, 0, 0], [12.0, 12.0])
    np.testing.assert_array_equal(share, told.share)


def test_few_peers_are_weighed_alike() -> None:
    """For each of two views, of all rows and of half."""
    peers = planted(FEWEST_PEERS - 1, 50, np.array([1.0, 1.0]), np.array([2.0, 0.0]))
    (rows,) = planted(1, 20, np.array([1.0, 1.0]), np.zeros(2))
    seen = np.column_stack([np.ones(20), np.arange(20) % 2])
    own = OwnRows(rows, seen, seen.sum(0), np.zeros((1, 2)), rows, np.zeros(20))
    found = driven(find_priors(own, SQUARED, len(peers)), asks_here(peers, SQUARED))
    np.testing.assert_allclose(found.tau, np.full((2, len(peers)), 1 / len(peers)))


def test_nobody_is_preferred_where_nobody_is_better_than_none() -> None:
    for kappa, expected in (
        ([1.0, 0.0, 0.0], [0.5, 0.5]),
        ([0.0, 0.0, 0.0], [0.5, 0.5]),
        ([0.6, 0.4, 0.0], [1.0, 0.0]),
    ):
        np.testing.assert_array_equal(_of_peers(np.array(kappa)), np.array(expected))


def test_where_two_are_chosen_their_variances_are_three_tenths_of_everybodys() -> None:
    """Two who are as user 0 is, to the last digit of what can be told, and four who are not."""
    centre = np.array([1.0, 1.0, 1.0])
    peers = planted(2, 300, centre, np.zeros(3)) + planted(4, 300, -3 * centre, np.zeros(3))
    own = planted(1, 60, centre, np.zeros(3))[0]
    found = driven(find_priors(all_seen(own), SQUARED, 6), asks_here(peers, SQUARED))
    assert found.tau[0, :2].sum() == pytest.approx(1)
    everybody, chosen = found.priors.variance[:, :, 0].T
    np.testing.assert_allclose(chosen, 0.3 * everybody)


def test_each_loss_is_descended_by_steps_of_its_own() -> None:
    """One step is a third of what is right; another is too long by far, and is quartered until it helps."""
    aims, bends, visited = np.array([2.0, -1.0]), np.array([0.33, 10.0]), list[Any]()

    def evaluated(x: Any) -> Generator[PriorQuestion, PriorAnswer, tuple[Any, Any, Any]]:
        yield from ()
        visited.append(x[0, :, 0].copy())
        away = x[0, :, 0] - aims
        return bends * away**2 / 2, (bends * away)[None, :, None], np.ones(2)

    units, start = Units(np.eye(1), np.ones(1)), np.ones((2, 1, 1, 1))
    search = _descend(evaluated, np.zeros((1, 2, 1)), units, start, 9)
    with pytest.raises(StopIteration) as ended:
        next(search)
    np.testing.assert_allclose(ended.value.value[0, :, 0], aims, atol=1e-6)
    steps = np.array(visited)
    np.testing.assert_allclose(steps[:2], np.array([[0.0, 0.0], [0.66, -10.0]]))
    np.testing.assert_allclose(steps[2], np.array([2.0, -2.5]))
    np.testing.assert_allclose(steps[3, 1], -0.625)
