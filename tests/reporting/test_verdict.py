"""The verdict on a run, from records that were made for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from scipy import stats
from tests.support.records import configuration
from tests.support.regressions import TRUTH, users_with_validation
from torch import nn
from torch.nn.functional import mse_loss

import coterie
from coterie.everyone.gains import COUNTED
from coterie.recording import Comparison, Configuration, Difference, End, GuardDecision
from coterie.reporting.verdict import (
    ADVICE,
    DOUBT,
    HEADLINES,
    Finding,
    Verdict,
    chance,
    serves_alone,
    verdict,
)
from coterie.reporting.whom import listened_to

ASKED = configuration(rule="WeightedAveraging(alpha=0.5)")
ON = "40 test examples that neither was chosen by"


def end(**changed: Any) -> End:
    return End(**{"step": 20, "best_step": 20, **changed})


def compared(accuracy: tuple[float, float], loss: tuple[float, float], examples: int = 40) -> End:
    """Return the end of a run whose differences to Alone, with their standard errors, are these."""
    measures = {
        "accuracy": Difference(
            ours=0.5 + accuracy[0], alone=0.5, error=accuracy[1], less_is_better=False
        ),
        # reported, not judged by
        "other": Difference(ours=9.0, alone=0.0, error=0.1, less_is_better=True),
        "loss": Difference(ours=0.5 + loss[0], alone=0.5, error=loss[1], less_is_better=True),
    }
    return end(comparison=Comparison(on=ON, examples=examples, measures=measures))


@pytest.mark.parametrize(
    ("accuracy", "loss", "finding"),
    [
        ((0.1, 0.02), (-0.1, 0.02), "better"),
        ((0.1, 0.02), (-0.01, 0.02), "better"),
        ((0.0, 0.0), (-0.07, 0.027), "better"),  # the loss tells what the accuracy does not
        ((-0.01, 0.02), (0.1, 0.02), "worse"),
        ((0.1, 0.02), (0.1, 0.02), "mixed"),
        ((0.04, 0.02), (-0.04, 0.02), "unclear"),  # two standard errors, but two measures
        ((0.0, 0.0), (0.0, 0.0), "unclear"),
        ((float("nan"), float("nan")), (-0.1, float("inf")), "unclear"),
    ],
)
def test_both_measures_count(
    accuracy: tuple[float, float], loss: tuple[float, float], finding: str
) -> None:
    assert verdict(ASKED, compared(accuracy, loss)).finding == finding


def test_every_finding_has_its_words() -> None:
    findings = set(get_args(Finding))
    assert findings == set(HEADLINES) == set(ADVICE) == set(COUNTED)


def test_the_sentences() -> None:
    assert verdict(ASKED, compared((0.1, 0.02), (-0.125, 0.05))).sentence == (
        "The model for me is better than one trained alone: accuracy +0.100 ± 0.020, loss -0.125 ± 0.050 on 40 "
        "test examples that neither was chosen by (one standard error, paired); chance alone would show as much in "
        "less than 1 of 1000 such comparisons."
    )
    assert verdict(ASKED, compared((0.0, 0.02), (0.01, 0.02))).sentence == (
        "It is not clear whether the model for me is better or worse than one trained alone: accuracy +0.000 ± "
        "0.020, loss +0.010 ± 0.020 on 40 test examples that neither was chosen by (one standard error, paired); "
        "clear would be 0.047 in accuracy, 0.047 in loss."
    )
    mixed = verdict(ASKED, compared((0.1, 0.02), (0.1, 0.02))).sentence
    assert mixed.startswith(
        "The model for me is better than one trained alone in accuracy and worse in loss: "
    )


def test_verdicts_by_chance_are_as_rare_as_told() -> None:
    """Where there is no difference, better or worse is said in at most one of twenty comparisons."""
    rng = np.random.default_rng(0)
    for n in (4, 12, 100):
        drawn = rng.normal(size=(4000, 2, n))
        drawn[:, 1] = drawn[:, 1] ** 3
        means, errors = drawn.mean(2), drawn.std(2, ddof=1) / np.sqrt(n)
        wrong = 0
        for mean, error in zip(means, errors, strict=True):
            said = verdict(ASKED, compared((mean[0], error[0]), (mean[1], error[1]), n))
            wrong += said.finding != "unclear"
        assert wrong / len(means) < 0.06


def test_chance_against_another_formula() -> None:
    changes = np.random.default_rng(1).normal(0.2, 1, 30)
    one = Difference(
        ours=changes.mean(),
        alone=0.0,
        error=changes.std(ddof=1) / np.sqrt(30),
        less_is_better=False,
    )
    assert chance(one, 30) == pytest.approx(stats.ttest_1samp(changes, 0).pvalue)
    alike = Difference(
        ours=1.0, alone=0.0, error=0.0, less_is_better=False
    )  # every example has the same difference
    assert chance(alike, 6) == stats.binomtest(6, 6).pvalue


def test_the_model_trained_alone_is_named_where_it_is_served() -> None:
    guard = GuardDecision(served="alone", difference=0.5, error=0.1)
    assert verdict(ASKED, end(guard=guard)) == Verdict(
        "alone",
        "me gets the model trained without peers: on 6 validation examples the collaborative model was not better "
        "(loss +0.50 ± 0.10).",
    )
    board = {"served": {"weight": 1.0}, "alone": {"weight": 1.0}}
    early = verdict(ASKED, end(account={"leaderboard": board}))
    assert early.finding == "alone"
    assert early.sentence.endswith("no model that followed peers was judged.")
    for kind, asks_nobody in (("pooled", False), ("forest, alone", True), ("constant", True)):
        mixed = board | {"alone": {"weight": 0.4}, kind: {"weight": 0.6}}
        assert serves_alone(end(account={"leaderboard": mixed})) is asks_nobody
    nobody = configuration(rule="WeightedAveraging(alpha='auto')", choice={"alpha": 0.0, "tau": {}})
    assert (
        verdict(nobody, end(comparison=compared((0.0, 0.0), (0.0, 0.0)).comparison)).finding
        == "alone"
    )
    assert (
        verdict(configuration(alone=True), end()).sentence
        == "The model for me was trained alone: no peer was asked."
    )


@pytest.mark.parametrize(
    ("best", "alone", "said"),
    [(5, 5, ""), (5, 0, "The model trained alone was never"), (0, 0, "Neither was ever")],
)
def test_models_that_training_made_no_better_are_told(best: int, alone: int, said: str) -> None:
    decision = GuardDecision(served="collaborative", difference=0.0, error=0.0, alone_step=alone)
    found = compared((0.1, 0.02), (-0.2, 0.03))
    sentence = verdict(configuration(), replace(found, best_step=best, guard=decision)).sentence
    told = f" {said} better than before its first step: steps may be too long, try a lower `lr`."
    assert sentence.endswith(told) if said else "first step" not in sentence


@pytest.mark.parametrize("start", [-1.0, 0.5])
def test_an_untrained_model_is_not_served_without_a_word(start: float) -> None:
    """One that is worse than a constant at the start, and one that is better."""
    users = users_with_validation()
    long: dict[str, Any] = {
        "optimizer": torch.optim.SGD,
        "lr": 9.0,
        "steps": 8,
        "progress": False,
    }  # the loss grows in every step
    model = nn.Linear(20, 1).double()
    with torch.no_grad():
        model.weight.copy_(start * TRUTH)
    alone, wga = coterie.Alone(), coterie.WeightedAveraging(0.5)
    found = dict.fromkeys((alone, wga), ("constant", "It was never"))
    if start > 0:
        found = {alone: ("alone", "It was never"), wga: ("unclear", "Neither was ever")}
    for rule, (finding, which) in found.items():
        run = coterie.train(model, mse_loss, users[0], users[1:], rule, **long)
        assert all(map(torch.equal, run.model.parameters(), model.parameters()))
        told = f" {which} better than before its first step: steps may be too long, try a lower"
        assert run.verdict.finding == finding
        assert run.verdict.sentence.endswith(f"{told} `lr`.")


def test_without_a_test_set_the_account_of_adaptive_averaging_tells() -> None:
    account = {"leaderboard": {"pooled": {"weight": 0.9}}, "out_of_fold": 0.5, "error": 0.1}
    account |= {"difference": -0.5, "low": -0.75, "high": -0.25}
    said = verdict(ASKED, end(account=account))
    assert said.finding == "better"
    told = "loss -0.50 ± 0.10, by 95 % between -0.75 and -0.25, on 12 own examples, each by models"
    assert told in said.sentence
    assert verdict(ASKED, end(account={**account, "high": 0.1})).finding == "unclear"
    tested = compared((0.0, 0.1), (0.0, 0.1))
    assert (
        verdict(
            ASKED, End(step=1, best_step=1, account=account, comparison=tested.comparison)
        ).finding
        == "unclear"
    )


def test_a_model_that_may_be_no_better_than_a_constant_is_not_advised() -> None:
    constant = {"weight": 0.0, "loss": 0.6, "difference": -0.1, "low": -0.25, "high": 0.05}
    account: dict[str, Any] = {"leaderboard": {"pooled": {"weight": 0.9}, "constant": constant}}
    account |= {"out_of_fold": 0.5, "error": 0.1, "difference": -0.5, "low": -0.75, "high": -0.25}
    said = verdict(ASKED, end(account=account))
    assert (said.finding, said.advice) == ("better", DOUBT)
    assert said.sentence.endswith("held out in turn, loss -0.1, by 95 % between -0.25 and +0.05.")
    constant["high"] = -0.01
    assert verdict(ASKED, end(account=account)).advice == ADVICE["better"]


def test_what_is_not_known() -> None:
    off = configuration(rule="WeightedAveraging(alpha=0.5)", guard="off")
    assert verdict(off, end()).sentence == (
        "Whether the model for me is better than one trained alone is not known: no model was trained alone beside "
        "it (guard off)."
    )
    assert verdict(off, end(stopped="Ctrl-C")).sentence.endswith(
        "not known: the run was stopped by Ctrl-C."
    )


def test_peers_with_most_weight_and_with_none_are_named() -> None:
    names = dict.fromkeys("abcdefghij", 9)
    asked: Configuration = configuration(peers=names)

    def who(tau: dict[str, float]) -> str:
        return listened_to(asked, end(tau=tau))

    assert who(dict.fromkeys(names, 0.1)) == ""
    assert who({"a": 0.6, "b": 0.3, **dict.fromkeys("cdefghij", 0.0125)}) == (
        "most weight among peers: a 0.6, b 0.3, c 0.013"
    )
    assert who({"a": 1.0}) == "most weight among peers: a 1; no weight: b, c, d, e, f and 4 more"
    assert who(dict.fromkeys("abcd", 0.25)) == "no weight: e, f, g, h, i, j"
