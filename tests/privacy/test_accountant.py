"""The accountant against others: the exact ε of a Gaussian, Microsoft's, Rényi's, dp-accounting's own defaults."""

from __future__ import annotations

import math

import pytest
from tests.support.accountants import by_prv, by_renyi, exact_gaussian
from tests.support.adaptive_sizes import delta_reached

from coterie.errors import CoterieError, KnobError
from coterie.privacy import accountant
from coterie.privacy.accountant import (
    LEAST_NOISE,
    MAX_KINDS,
    MOST_NOISE,
    Budget,
    Event,
    epsilon_of,
    least_noise,
    merged,
)
from coterie.privacy.privacy import LEAST_DELTA, Privacy


@pytest.mark.parametrize(
    ("noise", "count", "delta"), [(1.0, 1, 1e-5), (5.0, 50, 1e-4), (20.0, 100, 1e-6)]
)
def test_without_sampling_it_is_the_gaussians_own(noise: float, count: int, delta: float) -> None:
    ours = epsilon_of({Event(1.0, noise): count}, delta)
    assert ours == pytest.approx(exact_gaussian(noise, count, delta), rel=5e-3)


@pytest.mark.parametrize(
    ("rate", "noise", "count", "delta"),
    [(0.01, 1.0, 1000, 1e-5), (0.1, 2.0, 200, 1e-4), (0.3, 1.0, 1, 1e-3)],
)
def test_with_sampling_it_is_what_another_accountant_says(
    rate: float, noise: float, count: int, delta: float
) -> None:
    ours = epsilon_of({Event(rate, noise): count}, delta)
    assert ours == pytest.approx(by_prv(rate, noise, count, delta), rel=1e-2)


def test_it_is_what_dp_accounting_says_of_the_same_events() -> None:
    dp = pytest.importorskip("dp_accounting")
    from dp_accounting.pld import PLDAccountant

    theirs = PLDAccountant()
    theirs.compose(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(2.0)), 50)
    theirs.compose(dp.GaussianDpEvent(9.0), 3)
    ours = epsilon_of({Event(0.1, 2.0): 50, Event(1.0, 9.0): 3}, 1e-5)
    # which tells losses apart more finely
    assert ours == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-3)
    assert epsilon_of({}, 1e-5) == 0


def test_a_budget_allows_as_many_as_cost_no_more() -> None:
    budget, event, other = Budget(1.0, 1e-5), Event(1.0, 20.0), Event(1.0, 30.0)
    most = budget.most({}, event, at_least=1000)
    assert exact_gaussian(20.0, most, 1e-5) <= 1.0 < exact_gaussian(20.0, most + 2, 1e-5)
    assert all(budget.most({event: n}, event, n + 1) >= n + 1 for n in range(most))
    assert budget.most({event: most}, event, most + 1) == most
    fewer = budget.most({other: most}, event, most)
    assert 0 < fewer < most, "what else was spent counts too"


def test_the_least_noise_is_just_enough() -> None:
    noise = least_noise(1.0, 10, 2.0, 1e-5)
    assert 1.96 < exact_gaussian(noise, 10, 1e-5) <= 2.0
    with pytest.raises(CoterieError, match="no noise lets"):
        least_noise(1.0, 10**12, 1e-9, 1e-12)


@pytest.mark.parametrize(
    ("rate", "noise"), [(0, 1), (1.1, 1), (math.nan, 1), (0.5, 0), (0.5, math.nan), (0.5, 0.01)]
)
def test_no_other_events_are_there(rate: float, noise: float) -> None:
    with pytest.raises(KnobError, match=r"`rate`|`noise`"):
        Event(rate, noise)


@pytest.mark.parametrize("noise", [LEAST_NOISE, MOST_NOISE])
def test_the_ends_of_the_range_are_in_it(noise: float) -> None:
    assert Event(1.0, noise).noise == noise


def test_a_loss_that_fits_into_no_memory_is_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean loss of one of these is (rate/noise)²/2, 1/32."""
    monkeypatch.setattr(accountant, "NO_PROMISE", 2.0)
    event, delta = Event(0.5, 2.0), 1.25e-5
    assert epsilon_of({event: 63}, delta) < 100
    assert epsilon_of({event: 64}, delta) < 100
    assert epsilon_of({event: 65}, delta) == math.inf
    assert epsilon_of({Event(1.0, 1.0): 3, Event(0.5, 4.0): 63}, delta) < 100
    assert epsilon_of({Event(1.0, 1.0): 3, Event(0.5, 4.0): 65}, delta) == math.inf


@pytest.mark.parametrize(
    "events",
    [{Event(0.01, 1.0): 1000}, {Event(0.01 * k, 2.0): 10 for k in range(1, MAX_KINDS + 1)}],
)
def test_no_delta_is_so_small_that_the_accountant_has_lost_it(events: dict[Event, int]) -> None:
    """Rényi divergences give a looser bound, of which no tail is left away; below, it would be the tighter one."""
    assert epsilon_of(events, LEAST_DELTA) < by_renyi(events, LEAST_DELTA)
    assert epsilon_of(events, LEAST_DELTA / 100) > by_renyi(events, LEAST_DELTA / 100)
    with pytest.raises(KnobError, match=r"`delta` must lie in \[1e-12, 1\)"):
        Privacy(4.0, LEAST_DELTA / 2, 1.0)


def test_the_promise_in_the_docs_lasts_as_long_as_they_say() -> None:
    lasts = [by_prv(32 / 1000, 1.0, count, 1e-5) for count in (370, 378)]
    assert lasts[0] < 4.0 < lasts[1]
    assert Budget(4.0, 1e-5).most({}, Event(32 / 1000, 1.0), at_least=10_000) == 374


@pytest.mark.parametrize("most", [1, 2, 5])
def test_kinds_that_are_merged_cost_no_less_and_keep_their_number(most: int) -> None:
    rates = {0.1: 8.0, 0.11: 4.0, 0.2: 2.0, 0.21: 2.0, 0.5: 9.0, 1.0: 9.0}
    events = {Event(rate, noise): k + 1 for k, (rate, noise) in enumerate(rates.items())}
    found = merged(events, most)
    assert len(found) == most
    assert found.total() == sum(events.values())
    assert epsilon_of(events, 1e-5) < epsilon_of(found, 1e-5)
    assert merged(events) == events, "few kinds stay as they are"


def test_the_nearest_rates_become_alike_one_after_the_other() -> None:
    events = {Event(rate, 2.0): k for k, rate in enumerate((0.01, 0.1, 0.5, 0.55, 1.0), 1)}
    first = {Event(0.01, 2.0): 1, Event(0.1, 2.0): 2, Event(0.55, 2.0): 7, Event(1.0, 2.0): 5}
    assert merged(events, 4) == first
    assert merged(events, 3) == {Event(0.01, 2.0): 1, Event(0.1, 2.0): 2, Event(1.0, 2.0): 12}
    assert merged(events, 5) == merged(events) == events


def test_kinds_that_become_alike_are_all_counted() -> None:
    events = {Event(0.1, 2.0): 1, Event(0.2, 1.0): 2, Event(0.2, 2.0): 4}
    assert merged(events, 2) in (
        {Event(0.1, 2.0): 1, Event(0.2, 1.0): 6},
        {Event(0.2, 1.0): 3, Event(0.2, 2.0): 4},
    )
    assert merged(events, 1) == {Event(0.2, 1.0): 7}


def test_what_is_added_up_holds_for_one_size_and_not_for_sizes_chosen_by_what_was_seen() -> None:
    """What `batch_size` of a `Privacy` prevents: with two gradients, user 0 gains a quarter of δ."""
    epsilon, delta, most = 1.5, 1e-3, 2
    kinds = [Event(1.0, 2.61), Event(0.01, 0.4294)]  # the least noise for two of a kind
    alone = [delta_reached(epsilon, delta, [kind], most) for kind in kinds]
    assert all(0.9 * delta < reached <= delta for reached in alone)
    assert delta_reached(epsilon, delta, kinds, most) > 1.25 * delta
