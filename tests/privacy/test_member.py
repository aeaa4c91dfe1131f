"""A peer of masked sums: what it consents to, and what another process needs to go on in its place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.errors import KnobError, MaskError
from coterie.privacy.keys import Giving, Identity
from coterie.privacy.masks import (
    LEAST_UNITS,
    MAX_ROUND,
    Agreement,
    Member,
    check_margin,
    total,
)
from coterie.privacy.sums import COARSEST, LARGEST, SumsOnly

SITES = ("a", "b", "c")
EQUAL = dict.fromkeys(SITES, 1 / 3)


def members(**settings: Any) -> dict[str, Member]:
    return {site: Member(Identity(site), SumsOnly(), **settings) for site in SITES}


def known(**settings: Any) -> dict[str, Member]:
    """Return members that know each other's keys."""
    identities = {site: Identity(site) for site in SITES}
    prints = {site: identity.fingerprint for site, identity in identities.items()}
    return {
        site: Member(identity, SumsOnly(keys=prints), **settings)
        for site, identity in identities.items()
    }


def told(people: dict[str, Member], **changes: Any) -> dict[str, Any]:
    offers = {site: one.offer() for site, one in people.items()}
    return {"weights": EQUAL, "largest": LARGEST, "offers": offers} | changes


def test_what_it_gives_it_says_in_its_offer() -> None:
    plain = Member(Identity("a"), SumsOnly(), masked_only=False)
    masked, strict = members()["a"], known()["a"]
    assert [one.giving for one in (plain, masked, strict)] == list(Giving)
    assert [one.offer()["giving"] for one in (plain, masked, strict)] == [
        "PLAIN",
        "MASKED",
        "KNOWN_KEYS",
    ]


def test_rounds_go_up_and_each_is_for_one_part() -> None:
    people = members()
    one = people["a"]
    assert one.kept() == {"offered": None, "joined": None, "last": None, "round": -1}
    with pytest.raises(MaskError, match="joined no sum"):
        one.next_round(0)
    message = told(people)
    for each in people.values():
        each.join(message)
    with pytest.raises(MaskError, match="not steps of its own"):
        one.next_round(0, work=object())
    for number in (0, 1, 5, MAX_ROUND - 1):
        assert one.next_round(number).site == "a"
        for wrong in (number, number - 1, -1, True, float(number + 1), None, MAX_ROUND):
            with pytest.raises(MaskError, match="larger than the last"):
                one.next_round(wrong)
    one.join(told(people))
    assert one.next_round(0).site == "a", "in a new agreement keys are new, and so are rounds"


def test_only_the_key_that_it_has_offered_last() -> None:
    people = members()
    old = told(people)
    message = told(people)
    with pytest.raises(MaskError, match="has not offered this key"):
        people["a"].join(old)
    with pytest.raises(MaskError, match="has not offered this key"):
        people["a"].join(message)  # a key is good for one agreement, taken or not
    stranger = Member(Identity("d"), SumsOnly())
    stranger.offer()
    with pytest.raises(MaskError, match="has not offered this key"):
        stranger.join(message)
    with pytest.raises(MaskError, match="joined no sum"):
        people["a"].next_round(0)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"weights": {"a": 0.4, "b": 0.3, "c": 0.3}}, "unequal weights"),
        ({"largest": LARGEST / 1.01}, "largest entry of a sum must lie in"),
        ({"largest": COARSEST * 1.01}, "largest entry of a sum must lie in"),
        ({"weights": {"a": 0.9, "b": 0.05, "c": 0.05}}, "it gives sums of at least 3 peers"),
        ({"noise": 1.0}, "does not split its noise"),
    ],
)
def test_what_it_does_not_consent_to(changes: dict[str, Any], why: str) -> None:
    people = members()
    with pytest.raises(MaskError, match=why):
        people["a"].join(told(people, **changes))
    for largest in (LARGEST, COARSEST):
        people["a"].join(told(members() | {"a": people["a"]}, largest=largest))
        people["a"]._last = None


def test_one_with_noise_may_have_another_weight_and_any_largest_entry() -> None:
    people = members(private=True)
    weights = {"a": 0.4, "b": 0.3, "c": 0.3}
    people["a"].join(told(people, weights=weights, largest=COARSEST * 10))


def test_who_gives_more_freely_does_not_count() -> None:
    """Two that give masked sums only and one that gives its own gradients are no sum of three."""
    people = members()
    people["c"] = Member(Identity("c"), SumsOnly(), masked_only=False)
    message = told(people)
    with pytest.raises(MaskError, match="'c' does not give masked sums only, and does not count"):
        people["a"].join(message)
    people["c"].join(message)  # it gives more freely itself
    strict, loose = known(), members()
    mixed = {"a": strict["a"], "b": strict["b"], "c": loose["c"]}
    mixed["c"].identity = strict["c"].identity
    with pytest.raises(MaskError, match="'c' does not know the others' keys, and does not count"):
        mixed["a"].join(told(mixed))
    with pytest.raises(MaskError, match="is not the one known here"):
        strict["a"].join(told(strict | {"b": loose["b"]}))


def test_noise_is_split_by_all_or_by_nobody() -> None:
    people = known(margin=1, private=True)
    with pytest.raises(MaskError, match="it splits its noise"):
        people["a"].join(told(people))
    with pytest.raises(MaskError, match="margin of 0 sites, and it asks for 1"):
        people["a"].join(told(people, noise=1.0, margin=0))
    people["a"].join(told(people, noise=1.0, margin=1))
    people["b"].join(told(people, noise=1.0, margin=2))


def test_noise_that_would_be_rounded_away_is_refused() -> None:
    people = known(margin=1, private=True)
    unit = Agreement(EQUAL, LARGEST, {}, noise=1.0, margin=1).units_of_noise
    people["a"].join(told(people, noise=1.01 * LEAST_UNITS / unit, margin=1))
    with pytest.raises(MaskError, match="would be rounded away"):
        people["b"].join(told(people, noise=0.99 * LEAST_UNITS / unit, margin=1))


def test_in_a_job_sites_are_lost_and_nothing_else_changes() -> None:
    four = {site: Member(Identity(site), SumsOnly()) for site in "abcd"}
    weights = dict.fromkeys("abcd", 0.25)
    four["a"].join(told(four, weights=weights))
    three = {site: four[site] for site in "abc"}
    four["a"].join(told(three, weights=dict.fromkeys("abc", 0.25)))
    for changes, why in (
        ({"weights": weights}, "sites may be lost, not join"),
        ({"weights": dict.fromkeys("abcd", 0.2)}, "sites may be lost, not join"),
        ({"weights": dict.fromkeys("abc", 0.25), "largest": 20.0}, "the largest entry"),
    ):
        who = {site: four[site] for site in changes["weights"]}  # type: ignore[attr-defined]
        with pytest.raises(MaskError, match=why):
            four["a"].join(told(who, **changes))
    four["b"].identity = Identity("b")
    with pytest.raises(MaskError, match="keeps the key that it is known by"):
        four["a"].join(told(three, weights=dict.fromkeys("abc", 0.25)))


def test_another_process_goes_on() -> None:
    """With the same masks, the same last round and the same agreement; and with a key that is offered."""
    people = members()
    message = told(people)
    for one in people.values():
        one.join(message)
    people["a"].next_round(3)
    other = Member(people["a"].identity, SumsOnly())
    other.go_on(people["a"].kept())
    with pytest.raises(MaskError, match="larger than the last"):
        other.next_round(3)
    masks = [other.next_round(4), *(people[site].next_round(4) for site in "bc")]
    parts = [each.masked(np.full(2, 3.0), b"x") for each in masks]
    agreed = Agreement.read(message)
    np.testing.assert_allclose(total(parts, agreed), 3.0, atol=1e-6)
    offered = told(people)
    third = Member(people["a"].identity, SumsOnly())
    third.go_on(people["a"].kept())
    with pytest.raises(MaskError, match="the largest entry of a sum stays"):
        third.join(offered | {"largest": 20.0})
    third.go_on(people["a"].kept())
    third.join(offered)
    with pytest.raises(MaskError, match="larger than the last"):
        third.next_round(-1)
    third.next_round(0)
    new = Member(people["a"].identity, SumsOnly())
    new.go_on({})
    assert new.kept() == {"offered": None, "joined": None, "last": None, "round": -1}
    with pytest.raises(MaskError, match="joined no sum"):
        new.next_round(0)


@pytest.mark.parametrize(
    ("margin", "sums", "why"),
    [
        (0, None, "with too little noise"),
        (0, SumsOnly(), "user 0 could be all of them"),
        (3, SumsOnly(keys={"b": "x"}), "must be less than `peers` of a sum, 3, got 3"),
    ],
)
def test_a_margin_needs_sites_that_are_known(margin: int, sums: SumsOnly | None, why: str) -> None:
    with pytest.raises(KnobError, match=why):
        check_margin(margin, sums)
    check_margin(None, sums)
    check_margin(2, SumsOnly(keys={"b": "x"}))
    if sums is not None:
        with pytest.raises(KnobError, match=why):
            Member(Identity("a"), sums, margin)
