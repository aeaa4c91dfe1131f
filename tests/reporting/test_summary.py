"""The summary of a run, from records that were made for it."""

from __future__ import annotations

import math
from dataclasses import replace

from tests.support.records import configuration

from coterie.recording import Comparison, Difference, End, GuardDecision, Point, Record, Traffic
from coterie.reporting.summary import beside_alone, summary
from coterie.reporting.verdict import judged
from coterie.reporting.whom import peer_shares


def test_a_run_that_was_stopped_with_nothing_held_out() -> None:
    record = Record(
        configuration(alone=True, optimizer="Adam(lr=0.1)", not_measured="no gradient can be used")
    )
    record.add(Point(step=10, own_loss=0.5))
    record.finish(
        End(
            step=12,
            best_step=12,
            stopped="Ctrl-C",
            left_out={"a": {"not finite": 2, "no answer": 1}},
        )
    )
    assert summary(record, weight=0.25) == [
        "The model for me was trained alone: no peer was asked.",
        "Alone(), 1 peer, 12 steps of Adam(lr=0.1)",
        "stopped by Ctrl-C at step 12 of 20",
        "nothing held out for validation: the model is the last one",
        "weight on peers in the last step: 0.25",
        "constants not measured: no gradient can be used",
        "left out: a in 3 steps",
    ]


def test_one_of_a_thing_is_told_as_one() -> None:
    me = replace(configuration().me, test=1)
    record = Record(replace(configuration(), me=me))
    record.finish(
        End(
            step=1,
            best_step=1,
            test={"loss": 0.6},
            tau={"a": 1.0},
            left_out={"a": {"no answer": 1}},
        )
    )
    lines = summary(record)
    assert lines[1].partition(" of ")[0].endswith(", 1 peer, 1 step")
    assert {"test: loss 0.6 (1 example)", "left out: a in 1 step"} < set(lines)
    assert (
        peer_shares(record.configuration, record.end)[0].reason
        == "left out at times: no answer in 1 step"
    )
    one = Difference(ours=0.5, alone=0.4, error=math.nan, less_is_better=True)
    few = judged("me", Comparison(on="1 test example", examples=1, measures={"loss": one}))
    assert few.sentence.endswith("; 1 example is too few to be sure.")


def test_the_numbers_are_those_of_the_model_served() -> None:
    record = Record(configuration(rule="WeightedAveraging(alpha=0.5)"))
    guard = GuardDecision(served="alone", difference=0.1, error=0.01)
    measures = {"validation": {"loss": 0.4, "accuracy": 0.8}, "test": {"loss": 0.6}}
    record.finish(End(step=20, best_step=5, guard=guard, tau={"a": 1.0}, **measures))  # type: ignore[arg-type]  # fits
    alone, _, best, test = summary(record, weight=0.5)  # which is not that of what is served
    assert alone.startswith("me gets the model trained without peers: ")
    assert best == "best at step 5 by validation loss: loss 0.4, accuracy 0.8"
    assert test == "test: loss 0.6 (5 examples)"
    assert beside_alone(record) == [{"": "test loss", "served": "0.6"}]


def test_bytes_and_seconds_are_told_where_something_travelled() -> None:
    record = Record(configuration(alone=True))
    mine = Traffic(
        bytes_sent=2_000_000, bytes_received=3_500_000, seconds_waiting=1.25, seconds_computing=0.5
    )
    record.finish(End(step=20, best_step=20, traffic={"me": mine, "a": Traffic(rounding=0.004)}))
    assert summary(record)[-1] == (
        "sent 2 MB and received 3.5 MB; computed for 0.5 s, waited for the peers for 1.25 s; rounded on the way by "
        "0.004 at most"
    )
    record.finish(End(step=20, best_step=20, traffic={"me": replace(mine, seconds_computing=0.0)}))
    # not timed
    assert summary(record)[-1] == "sent 2 MB and received 3.5 MB; waited for the peers for 1.25 s"
