"""The demonstration: methods by the step size that validation chooses."""

from __future__ import annotations

from coterie.benchmark.demo import RATES, results


def test_the_first_result_is_alone_at_one_of_the_step_sizes() -> None:
    first = next(results(me=3, own_examples=30, seeds=1, steps=2))
    assert first.method == "Alone"
    assert first.lr in RATES
