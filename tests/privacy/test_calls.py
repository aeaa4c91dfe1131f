"""Sealed calls between two sites: what opens, what does not, and how often."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coterie.errors import MaskError
from coterie.privacy import calls
from coterie.privacy.calls import Calls
from coterie.privacy.keys import Identity


def met(job: str = "job", **known: dict[str, str]) -> dict[str, Calls]:
    """Return sites that have met; `known` are the fingerprints that a site knows."""
    sites = {name: Calls(Identity(name), job, known.get(name)) for name in ("a", "b", "c")}
    for one in sites.values():
        one.meet({name: other.offer for name, other in sites.items()})
    return sites


def test_who_has_met_calls_and_replies() -> None:
    sites = met()
    for k in range(3):
        number, sealed = sites["a"].call("b", b"question %d" % k)
        assert number == k + 1
        assert b"question" not in sealed
        assert sites["b"].take("a", number, sealed) == b"question %d" % k
        answer = sites["b"].answer("a", number, b"reply %d" % k)
        assert sites["a"].reply("b", number, answer) == b"reply %d" % k


def test_a_call_opens_for_whom_it_is_meant_only_and_as_what_it_is() -> None:
    sites, others = met(), met("another job")
    number, sealed = sites["a"].call("b", b"x")
    wrong: list[Callable[[], bytes]] = [
        lambda: sites["c"].take("a", number, sealed),
        lambda: sites["b"].take("c", number, sealed),
        lambda: sites["b"].take("a", number + 1, sealed),
        lambda: sites["b"].take("a", -1, sealed),
        lambda: sites["b"].take("a", 2**96, sealed),
        lambda: sites["b"].take("a", number, sealed[:-1] + bytes([sealed[-1] ^ 1])),
        lambda: sites["b"].take("a", number, b""),
        lambda: sites["b"].reply("a", number, sealed),
        lambda: sites["a"].take("b", number, sealed),
        lambda: others["b"].take("a", number, sealed),
    ]
    for opens in wrong:
        with pytest.raises(MaskError, match="is not one"):
            opens()
    with pytest.raises(MaskError, match="'nobody' has no key in this job"):
        sites["a"].call("nobody", b"x")
    assert sites["b"].take("a", number, sealed) == b"x"


def test_the_same_words_in_another_job_are_other_bytes() -> None:
    """The name of the job is in what keys are signed for, and in what calls are bound to."""
    one, other = Identity("a", bytes(32)), Identity("b", bytes(31) + b"\x01")
    first = Calls(one, "job 1")
    found, refused = Calls(other, "job 2").meet({"a": first.offer})
    assert (found, list(refused)) == ({}, ["a"])
    assert "not signed" in refused["a"]


def test_a_number_is_taken_once_and_may_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "WINDOW", 4)
    sites = met()
    sealed = dict(sites["a"].call("b", b"%d" % k) for k in range(1, 41))

    def taken(number: int) -> bool:
        try:
            return sites["b"].take("a", number, sealed[number]) == b"%d" % number
        except MaskError:
            return False

    assert [taken(number) for number in (5, 3, 5, 3, 1, 2)] == [
        True,
        True,
        False,
        False,
        False,
        True,
    ]
    assert all(taken(number) for number in range(6, 31))
    assert sites["b"]._taken["a"] == {27, 28, 29, 30}, "it remembers no more than it must"
    assert not any(taken(number) for number in range(1, 31))
    assert taken(35)
    assert [taken(number) for number in (31, 32, 33, 34, 35)] == [False, True, True, True, False]


def test_who_is_another_than_the_one_known_is_left_out() -> None:
    identities = {name: Identity(name) for name in "abc"}
    known = {"b": identities["b"].fingerprint}
    everybody = Calls(identities["a"], "job", known)
    for me, expected in (
        (everybody, {"b", "c"}),
        (Calls(identities["a"], "job", known, strangers=False), {"b"}),
    ):
        offers = {name: Calls(identities[name], "job").offer for name in "abc"}
        found, refused = me.meet(offers)
        assert set(found) == expected
        assert found["b"] == known["b"]
        assert set(refused) == {"b", "c"} - expected
        assert [me.knows(name) for name in "abc"] == [False, True, "c" in expected]
    liar = Calls(Identity("b"), "job").offer
    found, refused = Calls(identities["a"], "job", known).meet({"b": liar})
    assert (found, list(refused)) == ({}, ["b"])
    assert "is not the one known here" in refused["b"]


def test_who_has_a_key_in_a_job_keeps_it() -> None:
    identity = Identity("b")
    me, b = Calls(Identity("a"), "job"), Calls(identity, "job")
    assert list(me.meet({"b": b.offer})[0]) == ["b"]
    assert list(me.meet({"b": b.offer})[0]) == ["b"], "the same one may come again"
    found, refused = me.meet({"b": Calls(identity, "job").offer})
    assert (found, refused) == ({}, {"b": "'b' has another key in this job"})
    b.meet({"a": me.offer})
    number, sealed = b.call("a", b"x")
    assert me.take("b", number, sealed) == b"x"


@pytest.mark.parametrize("offers", [None, [], "b", {1: {}}, {"a": {}}])
def test_what_is_no_offer_of_another_is_passed_over(offers: object) -> None:
    assert Calls(Identity("a"), "job").meet(offers) == ({}, {})
