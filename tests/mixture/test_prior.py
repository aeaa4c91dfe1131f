"""EM from sums: against a plain loop, against planted users, and against peers that lie."""

import numpy as np

from coterie.mixture.families import SQUARED, Array
from coterie.mixture.fit import asks_here, driven
from coterie.mixture.peer import FARTHEST, Posterior, bounded, posterior
from coterie.mixture.posterior import Priors, Rows
from coterie.mixture.prior import (
    EXCHANGES,
    POOLED,
    RELAXED,
    Answer,
    Question,
    find_priors,
    maximised,
)

RANDOM = np.random.default_rng(0)


def planted(users: int, rows: int, centre: Array, spread: Array) -> list[Rows]:
    """Return users of a linear regression whose coefficients are drawn around a centre."""
    made = []
    for _ in range(users):
        x = RANDOM.normal(size=(rows, len(centre)))
        truth = centre + spread * RANDOM.normal(size=len(centre))
        made.append(Rows(x, (x @ truth + RANDOM.normal(size=rows))[:, None]))
    return made


def test_the_m_step_is_that_of_a_plain_loop() -> None:
    tau = np.array([0.5, 0.3, 0.2])
    modes, variances, mean, variance = RANDOM.normal(size=3), np.array([0.1, 0.2, 0.05]), 0.4, 1.5
    sums = Posterior.of(np.zeros((1, 7)), 1, 1)
    first = sum(t * (x - mean) for t, x in zip(tau, modes, strict=True))
    given = sums._replace(
        first=np.full((1, 1, 1), first),
        second=np.full(
            (1, 1, 1), sum(t * (x - mean) ** 2 for t, x in zip(tau, modes, strict=True))
        ),
        variance=np.full((1, 1, 1), float(tau @ variances)),
    )
    priors = Priors(np.full((1, 1, 1), mean), np.full((1, 1, 1), variance), np.ones(1))
    new = maximised(priors, Answer(given, np.ones(1)), tau[None])
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
    asked = []
    ask = asks_here(peers, SQUARED)

    def counting(question: Question) -> Answer:
        asked.append(question)
        return ask(question)

    found = driven(find_priors(own, SQUARED, np.ones((20, 1)), np.full(40, 100.0)), counting)
    assert len(asked) == POOLED + EXCHANGES <= 60
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
    found = driven(
        find_priors(own, SQUARED, np.ones((30, 1)), np.full(12, 80.0)), asks_here(peers, SQUARED)
    )
    assert found.tau[0, 6:].sum() < 0.2
    everybody, chosen = np.abs(found.priors.mean[:, :, 0] - centre[:, None]).max(0)
    assert chosen < 0.5 < everybody


def test_one_exchange_with_a_liar_moves_no_more_than_is_stated() -> None:
    """Whatever a peer of weight τ sends, μ moves by at most 2·5 τ √v and v by 26 τ v more than without it."""
    priors = Priors(np.zeros((2, 1, 1)), np.full((2, 1, 1), 0.3), np.ones(1))
    honest = posterior(planted(1, 30, np.zeros(2), np.zeros(2))[0], SQUARED, priors)
    weights = np.full((1, 10), 0.1)
    most = FARTHEST * np.sqrt(0.3)
    for lie in (1e12, -1e12, 3.0, -3.0):
        sent = bounded(
            honest._replace(
                **dict.fromkeys(("first", "second", "variance"), np.full((2, 1, 1), lie))
            ),
            priors,
        )
        results = []
        for last in (honest, sent):
            flat = 0.9 * honest.flat() + 0.1 * last.flat()
            results.append(maximised(priors, Answer(Posterior.of(flat, 2, 1), np.ones(1)), weights))
        without, with_it = results
        assert np.abs(with_it.mean - without.mean).max() <= RELAXED * 2 * 0.1 * most
        assert (
            np.abs(with_it.variance).max()
            <= without.variance.max() + 0.1 * 26 * 0.3 + most**2 * 0.1
        )


def test_sums_are_all_that_is_used() -> None:
    """Peers of equal weight may be swapped for two that answer with their mean: nothing changes."""
    peers = planted(2, 50, np.ones(2), np.ones(2))
    priors = Priors(np.zeros((2, 1, 1)), np.ones((2, 1, 1)), np.ones(1))
    given = [posterior(rows, SQUARED, priors) for rows in peers]
    mean = Posterior(*((a + b) / 2 for a, b in zip(*given, strict=True)))
    each = asks_here(peers, SQUARED)(Question(priors, np.full((1, 2), 0.5))).sums
    np.testing.assert_allclose(each.flat(), mean.flat())
    np.testing.assert_allclose(Posterior.of(mean.flat(), 2, 1).first, mean.first)


def test_a_prior_that_nobody_answered_stays() -> None:
    priors = Priors(np.full((2, 1, 1), 0.7), np.full((2, 1, 1), 0.2), np.ones(1))
    nothing = Posterior(*np.zeros((4, 2, 1, 1)), *np.zeros((3, 1)))
    kept = maximised(priors, Answer(nothing, np.zeros(1)), np.full((1, 3), 1 / 3))
    for a, b in zip(kept, priors, strict=True):
        np.testing.assert_array_equal(a, b)
