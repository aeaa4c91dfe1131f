"""The verdict on a run, from records that were made for it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.records import configuration

from coterie.recording import End, GuardDecision, Record
from coterie.reporting.verdict import verdict


def record(end: dict[str, Any] | None = None, **asked: Any) -> Record:
    made = Record(configuration(**{"rule": "WeightedAveraging(alpha=0.5)", **asked}))
    made.finish(End(**{"step": 20, "best_step": 20, **(end or {})}))
    return made


@pytest.mark.parametrize(
    ("difference", "word"),
    [(-0.5, "helped"), (0.5, "hurt"), (-0.19, "made no clear difference"), (0.19, "made no clear difference")],
)
def test_the_guard_decides_beyond_two_standard_errors(difference: float, word: str) -> None:
    guard = GuardDecision(served="collaborative", difference=difference, error=0.1)
    assert verdict(record({"guard": guard})) == (
        f"collaboration {word}: validation loss {difference:+.3g} ± 0.1 against alone (6 examples, one standard "
        "error, paired); the model trained with peers is served"
    )


def test_the_model_trained_alone_is_named_where_it_is_served() -> None:
    guard = GuardDecision(served="alone", difference=0.5, error=0.1)
    assert verdict(record({"guard": guard})).endswith("the model trained alone is served")


def account(difference: float | None) -> dict[str, Any]:
    known = {} if difference is None else {"difference": difference, "error": 0.1}
    return {"path": "branch", "sentence": "what the account says", **known}


def test_the_account_decides_where_there_is_no_guard_and_claims_only_what_it_knows() -> None:
    assert verdict(record({"account": account(-0.5)})) == "collaboration helped: what the account says"
    unclear = verdict(record({"account": account(-0.1)}))
    assert unclear == "collaboration made no clear difference: what the account says"
    assert verdict(record({"account": account(None)})) == "what the account says"


def test_the_guard_goes_before_the_account() -> None:
    guard = GuardDecision(served="alone", difference=0.5, error=0.1)
    assert verdict(record({"guard": guard, "account": account(-0.5)})).startswith("collaboration hurt")


def test_without_either_nothing_is_known() -> None:
    assert verdict(record(guard="off: 6 validation examples, fewer than 100")) == (
        "whether collaboration helped is not known: guard off: 6 validation examples, fewer than 100"
    )
    assert verdict(record(alone=True)) == "trained alone"


def test_peers_with_most_weight_and_with_none_are_named() -> None:
    names = dict.fromkeys("abcdefghij", 9)

    def who(tau: dict[str, float]) -> str:
        return verdict(record({"tau": tau}, alone=True, peers=names)).removeprefix("trained alone")

    assert who(dict.fromkeys(names, 0.1)) == ""
    assert who({"a": 0.6, "b": 0.3, **dict.fromkeys("cdefghij", 0.0125)}) == (
        "; most weight among peers: a 0.6, b 0.3, c 0.013"
    )
    assert who({"a": 1.0}) == "; most weight among peers: a 1; left out: b, c, d, e, f and 4 more"
    assert who(dict.fromkeys("abcd", 0.25)) == "; left out: e, f, g, h, i, j"
