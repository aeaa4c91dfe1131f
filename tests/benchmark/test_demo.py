"""The demonstration: methods by the step size that validation chooses, and what is concluded from them."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.benchmark.demo import METHODS, RATES, Result, compared, conclusion, results, whom
from coterie.rules import RULES


def result(method: str, seed: int, accuracy: float, loss: float, **weights: float) -> Result:
    return Result(method, seed, 0.01, 1.0, accuracy, loss, [0, 1], [2.0, 1.0], weights)


def test_the_first_result_is_the_default_at_one_of_the_step_sizes() -> None:
    first = next(results(me=3, own_examples=30, seeds=1, steps=4))
    assert first.method == "adaptive"
    assert first.lr in RATES
    assert len(first.steps) == len(first.curve)
    assert set(METHODS) <= set(RULES)  # names that the command line knows


def test_the_conclusion_is_of_the_default_beside_alone_paired_by_seed() -> None:
    rng = np.random.default_rng(0)
    level, gain = rng.normal(0.8, 0.1, 8), rng.normal(0.1, 0.02, 8)
    rows = [result("alone", s, level[s], 1 - level[s]) for s in range(8)]
    rows += [result("adaptive", s, level[s] + gain[s], 1 - level[s] - gain[s]) for s in range(8)]
    rows += [result("adaptive", 8, 0.0, 9.0)]  # stopped before alone had this seed
    one = compared(rows, "adaptive").measures["accuracy"]
    assert one.difference == pytest.approx(gain.mean())
    assert one.error == pytest.approx(gain.std(ddof=1) / np.sqrt(8))
    said = conclusion(rows, 3)
    assert said.finding == "better"
    assert said.sentence.startswith(
        "The model for writer 3 by `adaptive`, the default rule, is better"
    )
    assert "on the test examples of 8 seeds" in said.sentence
    assert conclusion([row for row in rows if row.seed < 2], 3).sentence.endswith(
        "; 2 seeds are too few to be sure."
    )


def test_whom_is_the_mean_over_seeds() -> None:
    rows = [
        result("adaptive", 0, 1.0, 0.0, a=0.25, b=0.75),
        result("adaptive", 1, 1.0, 0.0, b=1.0),
        result("bc", 0, 1, 0, a=1),
    ]
    assert [(bar.name, bar.value) for bar in whom(rows)] == [("b", 0.875), ("a", 0.125)]
