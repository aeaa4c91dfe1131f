"""What user 0 receives: which answers are kept, and what becomes of the weight of the others."""

from __future__ import annotations

import math

import pytest
import torch

import coterie
from coterie.errors import KnobError
from coterie.gradients.gradients import (
    add_up,
    by_name,
    complete,
    keep_finite,
    present,
    weighted_sum,
)
from coterie.gradients.parameters import FiniteLater, is_finite

OWN = torch.tensor([1.0, 2.0, 4.0])


@pytest.mark.parametrize(
    ("values", "finite"),
    [
        ([1.0, -1.0], True),
        ([math.nan, 1.0], False),
        ([math.inf, -math.inf], False),
        ([1.0, -math.inf], False),
        ([3e38, 3e38], True),  # only the sum overflows
        ([], True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_is_finite(values: list[float], finite: bool, dtype: torch.dtype) -> None:
    vector = (
        torch.tensor(values).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
        if finite
        else torch.tensor(values)
    )
    assert is_finite(vector.to(dtype)) == finite


def test_sums_and_names_in_small_numbers() -> None:
    own, four, eight = torch.tensor([8.0]), torch.tensor([4.0]), torch.tensor([8.0])
    assert weighted_sum(own, four[None], [0.5]) == (torch.tensor([6.0]), 0.5)
    arriving = [("a", four), ("b", eight)]
    assert add_up(torch.zeros(1), arriving, {"a": 0.25, "b": 0.75}) == (
        torch.tensor([7.0]),
        1.0,
        {},
    )
    assert complete(own, torch.tensor([0.0]), 0.0) == (own, 0.0)
    assert (present([0.1] * 10), present([0.1] * 5)) == (1.0, 0.5)
    assert by_name(torch.tensor([1.0, 2.0]), ("a", "b"), ("b", "c", "a")).tolist() == [2, 0, 1]
    assert not FiniteLater(torch.tensor([1.0, math.nan])).read()
    rows, names, left_out = keep_finite(torch.tensor([[1.0], [math.inf]]), ("a", "b"))
    assert (rows.tolist(), names, left_out) == ([[1.0]], ("a",), {"b": "not finite"})


def test_nobody_answers() -> None:
    rows, names = OWN.new_empty(0, 3), ()
    average, answered = weighted_sum(OWN, rows, [])
    assert torch.equal(average, OWN)
    assert answered == 0
    average, answered = coterie.Gradients(own=OWN, rows=rows, names=names, answered=0.0).average()
    assert torch.equal(average, OWN)
    assert answered == 0


def test_a_missing_weight_goes_to_the_own_gradient() -> None:
    rows = torch.tensor([[8.0, 0.0, 0.0], [0.0, 8.0, 0.0]])
    average, answered = weighted_sum(OWN, rows, [0.25, 0.25])
    assert average.tolist() == [2.0 + 0.5, 2.0 + 1.0, 2.0]
    assert answered == 0.5
    g = coterie.Gradients(own=OWN, rows=rows, names=("a", "b"), answered=0.5)
    # equal weights of four peers, of whom two answered
    assert g.average()[0].tolist() == average.tolist()
    assert g.average({"a": 0.25, "b": 0.25, "c": 0.5})[0].tolist() == average.tolist()


def test_weights_that_sum_to_one_but_for_rounding_leave_nothing_over() -> None:
    weights = [1 / 49] * 49
    assert sum(weights) != 1, "from Python 3.12 on, too, which rounds a sum once"
    average, answered = weighted_sum(torch.full((1,), 1e30), torch.ones(49, 1), weights)
    assert answered == 1
    assert float(average) == pytest.approx(1.0)


def test_what_is_returned_is_not_the_own_gradient_itself() -> None:
    average, _ = complete(OWN, torch.zeros(3), 0.0)
    average += 1
    assert OWN.tolist() == [1, 2, 4]


def test_keep_finite_keeps_the_order() -> None:
    rows = torch.tensor([[1.0], [math.nan], [3.0], [math.inf], [5.0]])
    kept, names, left_out = keep_finite(rows, "abcde")
    assert kept.flatten().tolist() == [1, 3, 5]
    assert names == ("a", "c", "e")
    assert left_out == {"b": "not finite", "d": "not finite"}


def test_given_peers_come_before_rows() -> None:
    g = coterie.Gradients(
        own=OWN, peers=torch.zeros(3), rows=torch.ones(1, 3), names=("a",), answered=0.75
    )
    average, answered = g.average({"a": 1.0})
    assert not average.any()
    assert answered == 0.75


def test_nothing_given() -> None:
    with pytest.raises(KnobError, match="needs `Gradients"):
        coterie.Gradients(own=OWN).average()
