"""The page of a run: what stands on it is what the record has, and its sentences agree."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.records import configuration
from tests.support.regressions import users_with_validation
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import coterie
from coterie.recording import End, Point, Record, UserSummary
from coterie.recording.result import Comparison, Difference
from coterie.reporting.page import Section, write_page
from coterie.reporting.run_page import interval, write_run_page
from coterie.reporting.verdict import ADVICE, DOUBT, HEADLINES, difference, judged
from coterie.reporting.whom import peer_shares
from coterie.theory.estimates import Estimates, Measured, PeerEstimates


def text_of(page: Path) -> list[str]:
    """Return the pieces of text of a page, without its markup."""
    body = page.read_text(encoding="utf-8").split("<body>")[1]
    pieces = re.split(r"<[^>]*>", re.sub(r"<svg.*?</svg>", "", body, flags=re.DOTALL))
    return [" ".join(html.unescape(piece).split()) for piece in pieces if piece.strip()]


FOUND = {
    "better": ("Better than alone", "Use this model, and keep the peers."),
    "unclear": (
        "No clear difference to training alone",
        "Either model will do; to know, test on more rows, or repeat the splits.",
    ),
    "worse": (
        "Worse than alone",
        "Do not use this model: train alone, or leave out peers that do harm.",
    ),
}
"""What a stranger reads in ten seconds: the first and the last sentence; the claim is between them."""


@pytest.mark.parametrize("finding", FOUND)
def test_the_first_screen_says_in_three_sentences_what_was_found_and_what_to_do(
    tmp_path: Path, finding: str
) -> None:
    difference_of = {"better": 0.5, "unclear": 1.0, "worse": 2.0}[finding]
    loss = Difference(ours=difference_of, alone=1.0, error=0.05, less_is_better=True)
    compared = Comparison(on="200 test examples", examples=200, measures={"loss": loss})
    record = Record(configuration(me=UserSummary(name="Ge: neva", examples=12, test=200)))
    record.finish(End(step=1, best_step=1, comparison=compared, test={"loss": difference_of}))
    text = text_of(write_run_page(tmp_path / "page.html", record))
    claim = {
        "better": "The model for Ge: neva is better than one trained alone.",
        "unclear": "It is not clear whether the model for Ge: neva is better or worse than one"
        " trained alone.",
        "worse": "The model for Ge: neva is worse than one trained alone.",
    }[finding]
    headline, advice = FOUND[finding]
    assert text[1:4] == [headline, claim, advice], "after the title"
    assert "chance" not in " ".join(text[:4])


def test_the_three_sentences_are_written_down() -> None:
    text = Path(__file__).parents[2].joinpath("docs", "training.md").read_text(encoding="utf-8")
    for finding, headline in HEADLINES.items():
        assert f"| *{headline}.* | {ADVICE[finding]} |" in text
    assert f"*{DOUBT}*" in text


@pytest.mark.parametrize("splits", [0, 1])
def test_a_line_leaves_out_the_mark_exactly_where_the_verdict_is_clear(splits: int) -> None:
    seen = set()
    for n in (3, 6, 10, 200):
        for errors in (0.5, 1.9, 2.1, 2.5, 4.0, 12.0):
            one = Difference(ours=1.0 - 0.1 * errors, alone=1.0, error=0.1, less_is_better=True)
            compared = Comparison(
                on="rows", examples=n, measures={"loss": one}, splits=n if splits else 0
            )
            line = interval("loss", one, None, compared)
            assert line.reach is not None
            clear = not line.reach[0] <= 0 <= line.reach[1]
            assert clear == (judged("Geneva", compared).finding != "unclear")
            seen.add(clear)
    assert len(seen) == 2


def test_the_page_of_a_run(tmp_path: Path) -> None:
    users = users_with_validation()
    model = nn.Linear(20, 1).double()
    for rule in (coterie.WeightedAveraging("auto"), coterie.AdaptiveAveraging(), coterie.Alone()):
        run = coterie.train(model, mse_loss, users[0], users[1:], rule, steps=20, guard="held-out")
        page = run.report(tmp_path / "report.html")
        text, source = text_of(page), page.read_text(encoding="utf-8")
        assert "<svg" in source
        assert ("Hessian gap δ_k" in text) == isinstance(rule, coterie.WeightedAveraging)
        compared = run.record.end.comparison is not None
        assert ("Leaderboard" in text) == (compared or isinstance(rule, coterie.AdaptiveAveraging))
        for line in run.summary().splitlines():
            assert line.removeprefix("what to do: ") in text
        if (comparison := run.record.end.comparison) is not None:
            for one in comparison.measures.values():
                assert {difference(one), f"{one.ours:.4g}", f"{one.alone:.4g}"} <= set(text)
        for peer in peer_shares(run.record.configuration, run.record.end):
            assert peer.name in text
            assert not peer.share or f"{peer.share:.1%}" in text
        assert not any(word in source for word in ("<script", 'src="', "@import", "http"))


def test_the_page_of_a_closed_form_says_how_much_follows_peers_and_draws_no_steps(
    tmp_path: Path,
) -> None:
    me, peer = (coterie.User(f"{n} rows", *examples(n, n, 1.0, classes=True)) for n in (12, 60))
    run = coterie.train(
        nn.Linear(4, 2), cross_entropy, me, [peer], coterie.Mixture(), measure=False
    )
    text = " ".join(text_of(run.report(tmp_path / "report.html")))
    board = run.record.end.account["leaderboard"]
    own = sum(board[kind]["weight"] for kind in ("constant", "alone") if kind in board)
    assert f"Models that follow peers have {1 - own:.1%} of the weight in it" in text
    assert f"those of the own rows alone {own:.1%}." in text
    assert not any(
        name in text for name in ("Learning curves", "Weights over the run", "optimizer")
    )


def test_who_has_no_weights_is_not_drawn_as_if_nobody_were_heard(tmp_path: Path) -> None:
    users, model = users_with_validation(), nn.Linear(20, 1).double()
    for method, draws in ((coterie.methods.FedAvg(2), False), (coterie.methods.FedFomo(2), True)):
        run = coterie.train(
            model, mse_loss, users[0], users[1:], method, lr=1e-3, steps=4, guard="off"
        )
        page = run.report(tmp_path / "report.html")
        assert any(told.startswith("4 rounds; ") for told in text_of(page))
        assert ", 4 rounds of SGD(lr=0.001)" in run.summary()
        told = "FedAvg(local_steps=2) does not say how much it listens to each peer: it gives them no weights."
        assert (told in text_of(page)) is not draws
        assert ("whom the model listens to" in page.read_text(encoding="utf-8")) is draws


def test_what_private_peers_promise_stands_beside_them(tmp_path: Path) -> None:
    record = Record(configuration(rule="WeightedAveraging(alpha=0.5)", peers={"a": 1, "b": 2}))
    told = {"epsilon": 4.0, "delta": 1e-5, "clip": 1.0, "spent": 1.83, "noise": 0.1}
    record.finish(End(step=9, best_step=9, promises={"a": told}))
    text = text_of(write_run_page(tmp_path / "report.html", record))
    assert {"promises for each example", "ε = 4 at δ = 1e-05; 1.83 spent"} <= set(text)
    assert (
        "private: a promises ε = 4 at δ = 1e-05 for each example; spent over all its runs: 1.83"
        in text
    )


def test_a_weight_and_an_absence_in_most_steps_do_not_contradict_each_other(tmp_path: Path) -> None:
    record = Record(configuration(peers={"bern": 40, "basel": 40, "chur": 40}, steps=1500))
    gone = {"bern": {"no answer": 1392}, "chur": {"no answer": 3}}
    tau = {"bern": 0.49, "basel": 0.41, "chur": 0.1}
    record.finish(End(step=1500, best_step=1500, tau=tau, left_out=gone, test={"loss": 0.25}))
    text = " ".join(text_of(write_run_page(tmp_path / "page.html", record)))
    assert "bern 0.49 (in the 108 steps in which it was there), basel 0.41" in text
    assert (
        "left out in most steps: no answer in 1392 steps: its weight is of the steps in which it"
        " was there" in text
    )
    assert "left out at times: no answer in 3 steps" in text


def test_left_out_peers_stand_with_the_reason(tmp_path: Path) -> None:
    record = Record(
        configuration(rule="WeightedAveraging(alpha=0.5)", peers={"a": 1, "b": 2, "c": 3})
    )
    record.add(Point(step=9, own_loss=0.5))
    left_out = {"a": {"no answer": 2}, "b": {"not finite": 20}}
    record.finish(
        End(step=20, best_step=20, tau={"a": 1.0, "c": 0.0}, left_out=left_out, test={"loss": 0.25})
    )
    text = text_of(write_run_page(tmp_path / "page.html", record))
    assert "left out at times: no answer in 2 steps" in text
    assert "not finite in 20 steps" in text
    assert "by the rule's knobs" in text
    assert "0.25" in text


def test_a_small_weight_is_not_told_as_none(tmp_path: Path) -> None:
    record = Record(configuration(rule="AdaptiveAveraging()", peers={"large": 3000, "small": 1}))
    record.finish(End(step=20, best_step=20, tau={"large": 3000 / 3001, "small": 1 / 3001}))
    text = text_of(write_run_page(tmp_path / "page.html", record))
    assert text[text.index("small") + 1] == "below 0.1%"
    assert "most weight among peers: large 1, small 0.00033" in text


def test_the_theory_claims_no_more_than_measured_biases_allow(tmp_path: Path) -> None:
    one, none = Measured(1.0, 0.0), Measured(0.0, 0.0)
    peer = PeerEstimates(
        noise=one, bias_floor=Measured(0.0, 0.2), bias_growth=none, hessian_gap=none
    )
    estimates = Estimates(
        loss=1.0, gradient=one, noise=one, smoothness=one, pl=1.0, peers={"a": peer}
    )
    asked = {"rule": "WeightedAveraging(alpha=0.5)", "peers": {"a": 9}, "steps": 100}
    record = Record(configuration(**asked, estimates=estimates.to_plain()))
    record.finish(End(step=100, best_step=100))
    text = " ".join(text_of(write_run_page(tmp_path / "page.html", record)))
    # α = 1/2; with ζ² = 2 · .04 instead of 0 the cost over Alone's is (1 − α)² + α²(1 + ζ²T) = 2.5
    assert "with all two standard errors larger the speedup of WGA is 0.4." in text


def test_many_peers_are_added_up(tmp_path: Path) -> None:
    names = dict.fromkeys((f"peer {k}" for k in range(40)), 5)
    record = Record(configuration(rule="WeightedAveraging(alpha=0.5)", peers=names))
    record.finish(End(step=20, best_step=20, tau=dict.fromkeys(names, 1 / 40)))
    text = text_of(write_run_page(tmp_path / "page.html", record))
    assert text[text.index("26 more") + 1] == "65.0%"


def test_what_is_not_ours_is_escaped(tmp_path: Path) -> None:
    page = write_page(
        tmp_path / "page.html", "A title", [Section("Result", ["a < b"], [[{"loss": "<b>"}]])]
    )
    assert "a &lt; b" in page.read_text(encoding="utf-8")
    record = Record(
        configuration(rule="WeightedAveraging(alpha=0.5)", peers={"<script>": 1, "b": 2})
    )
    record.finish(End(step=20, best_step=20, tau={"<script>": 1.0}))
    assert "<script>" not in write_run_page(tmp_path / "page.html", record).read_text(
        encoding="utf-8"
    )


# ---------------------------------------------------------------------------------------------------------------
# No two sentences of a page disagree.

BETTER = re.compile(
    r"\b(better|helped|pays|outperforms|improves?|gains?|times the speed|fewer steps)\b", re.I
)
WORSE = re.compile(r"\b(worse|hurts?|harm(s|ed)?|does not pay|loses)\b", re.I)


def examples(n: int, seed: int, slope: float, classes: bool) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 4, generator=drawn)
    outputs = slope * inputs[:, 0] - inputs[:, 1] + torch.randn(n, generator=drawn)
    return inputs, (outputs > 0).long() if classes else outputs[:, None]


def light_runs() -> Iterator[coterie.Run]:
    """Yield 30 runs: peers alike, unlike, contrary; classes, numbers; rules; with and without held-out sets."""
    rules: list[tuple[Any, dict[str, Any]]] = [
        (coterie.AdaptiveAveraging(), {"guard": "auto"}),
        (coterie.AdaptiveAveraging(), {"guard": "held-out"}),
        (coterie.WeightedAveraging(0.7), {"guard": "held-out"}),
        (coterie.BiasCorrection("auto", "auto"), {"guard": "held-out"}),
        (coterie.WeightedAveraging("auto"), {"guard": "off"}),
    ]
    for seed, slope in enumerate((1.0, 0.3, -1.0)):
        for classes in (True, False):
            for number, (rule, options) in enumerate(rules):
                held_out: dict[str, Any] = {"validation": examples(20, 2 + seed, 1.0, classes)}
                if (seed + number) % 3:
                    held_out["test"] = examples(60, 3 + seed, 1.0, classes)
                if options["guard"] == "auto" and not classes:
                    held_out.pop("validation")
                me = coterie.User("me", *examples(8, 1 + seed, 1.0, classes), **held_out)
                peers = [
                    coterie.User(f"peer {k}", *examples(30, 10 + k, slope, classes))
                    for k in range(3)
                ]
                torch.manual_seed(seed)
                model, loss = (
                    nn.Linear(4, 2 if classes else 1),
                    cross_entropy if classes else mse_loss,
                )
                yield coterie.train(
                    model, loss, me, peers, rule, lr=0.05, steps=12, seed=seed, **options
                )


def test_no_two_sentences_of_a_page_disagree(tmp_path: Path) -> None:
    findings = set()
    for run in light_runs():
        said = run.verdict
        findings.add(said.finding)
        assert run.summary().splitlines()[0] == said.sentence == run.record.end.verdict
        others = [
            piece
            for piece in text_of(run.report(tmp_path / "page.html"))
            if piece != said.advice and not said.sentence.startswith(piece.removesuffix("."))
        ]
        others += run.summary().splitlines()[2:]
        headline, *rest = [
            piece for piece in others if BETTER.search(piece) or WORSE.search(piece)
        ] or [""]
        allowed = {
            "better": "Better than alone",
            "worse": "Worse than alone",
            "mixed": "Better in one measure",
        }
        assert headline.startswith(allowed.get(said.finding, headline))
        assert {
            piece for piece in rest if "leaves out the mark; right of it is better" not in piece
        } == set(), said.sentence
    assert {"better", "unclear", "alone", "unknown"} <= findings


@pytest.mark.parametrize("finding", ["better", "worse"])
def test_the_words_that_must_agree_are_found(finding: str) -> None:
    assert (BETTER if finding == "better" else WORSE).search(f"collaboration was {finding}")
