"""What engines share: steps of a user's own, what answers hold, and evidence, one number after the other."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie.engines.engine import (
    Answers,
    Capabilities,
    LocalWork,
    PeerEvidence,
    Question,
    combined,
    require,
)
from coterie.errors import KnobError

NAN = math.nan


def test_an_engine_can_do_nothing_but_rows_unless_it_says_so() -> None:
    can = Capabilities()
    assert can.rows
    assert not (can.rows_at_hand)
    assert not (can.own_points)
    assert not (can.local)
    assert not (can.same_bits)
    assert not (can.batch_dependent)
    assert not (can.many_points)
    assert not (can.local_work)
    assert (can.batch_size, can.sketch, can.examples, can.noise) == (None, None, {}, {})
    assert can.not_captured
    assert can.rows_not_captured
    assert can.not_stacked
    assert can.no_e_steps


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("add", [None, 0.25])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_steps_of_ones_own_are_plain_descent(count: int, add: float | None, decay: float) -> None:
    """Of f_k(x) = (k + 1) x²/2, from two points at once and from each by itself."""
    added = None if add is None else torch.tensor([[add], [2 * add]])
    work = LocalWork(count, 0.1, added, decay)
    points = torch.tensor([[1.0], [-2.0]])

    def gradient(x: Tensor, k: int) -> Tensor:
        return (k + 1) * x

    found = work.followed(points, gradient, slice(None))
    for place, start in enumerate((1.0, -2.0)):
        x, total = start, 0.0
        for k in range(count):
            direction = (k + 1) * x + (add or 0.0) * (place + 1) + decay * x
            x, total = x - 0.1 * direction, total + direction
        assert found[place].item() == pytest.approx(total, rel=1e-5)
        assert work.followed(points[place], gradient, place).item() == pytest.approx(
            total, rel=1e-5
        )
        for at in (place, [place]):
            alone = work.at(at)
            assert (alone.count, alone.lr, alone.decay) == (count, 0.1, decay)
            assert alone.add is None if add is None else alone.add is not None
            assert alone.followed(points[place], gradient).item() == pytest.approx(total, rel=1e-5)
    assert (LocalWork(1, 0.1).at(0).add, LocalWork(1, 0.1).decay) == (None, 0.0)


GIVEN = {
    (0, 0): torch.tensor([1.0, 2.0]),
    (0, 2): torch.tensor([NAN, 0.0]),
    (1, 1): torch.tensor([-4.0, 8.0]),
    (1, 2): torch.tensor([0.5, math.inf]),
    (1, 0): torch.tensor([2.0, 2.0]),
}
WEIGHTS = torch.tensor([[0.5, NAN, 0.5], [0.25, 0.5, 0.25]], dtype=torch.float64)


def test_sums_are_of_what_is_finite() -> None:
    answers = Answers.of(Question(torch.zeros(2, 2), 0, WEIGHTS), GIVEN, "abc")
    assert answers.sums is not None
    assert answers.sums.tolist() == [[0.5, 1.0], [-1.5, 4.5]]
    assert answers.answered.tolist() == [0.5, 0.75]
    assert answers.left_out == {"c": "not finite"}
    assert (answers.rows, answers.losses, answers.judged) == (None, None, None)


def test_rows_that_are_not_there_are_no_numbers() -> None:
    answers = Answers.of(Question(torch.zeros(2, 2), 0, WEIGHTS, rows=True), GIVEN, "abc")
    assert answers.sums is None
    assert answers.rows is not None
    assert answers.rows.shape == (2, 3, 2)
    for point in range(2):
        for peer in range(3):
            row = GIVEN.get((point, peer))
            if row is None or not row.isfinite().all():
                assert answers.rows[point, peer].isnan().all()
            else:
                assert answers.rows[point, peer].tolist() == row.tolist()
    assert answers.answered.tolist() == [0.5, 0.75]


def test_an_e_step_is_answered_in_one_row() -> None:
    points = torch.zeros(3, 7)
    e_step: Any = SimpleNamespace(shape=(4, 5))
    form = Question(points, 0, WEIGHTS, e_step=e_step).form
    assert (form.shape, form.dtype) == ((1, 20), torch.float64)
    assert Question(points, 0, WEIGHTS).form is points


def test_a_question_is_of_sums_at_points_unless_it_says_so() -> None:
    plain = Question(torch.zeros(2, 7), 0, WEIGHTS)
    assert (plain.rows, plain.sketched, plain.own, plain.each) == (False, 0, (), ())
    assert (plain.work, plain.batch_size, plain.e_step) == (None, None, None)


def test_what_an_engine_cannot_do_is_refused_for_whom_it_is() -> None:
    able: Any = SimpleNamespace(
        capabilities=Capabilities(own_points=True, local=True, local_work=True, not_captured=None)
    )
    unable: Any = SimpleNamespace(capabilities=Capabilities(rows=False))
    for what in ("rows", "own_points", "local", "local_work", "capture"):
        if what == "rows":
            assert require(able, what, "the rule") is able
        else:  # it says so, and has no methods
            with pytest.raises(TypeError, match="says that it has"):
                require(able, what, "the rule")
        with pytest.raises(KnobError, match="the rule needs"):
            require(unable, what, "the rule")


def test_rows_are_combined_as_by_loops() -> None:
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 4, 5, generator=random, dtype=torch.float64)
    weights = torch.rand(3, 4, generator=random, dtype=torch.float64)
    for spoiled in (False, True):
        if spoiled:
            rows[1, 2, 3], rows[2, 0] = math.inf, NAN
        before = rows.clone()
        sums, present = combined(rows, weights)
        for p in range(3):
            there = [k for k in range(4) if rows[p, k].isfinite().all()]
            assert present[p].item() == pytest.approx(sum(weights[p, k].item() for k in there))
            for j in range(5):
                expected = math.fsum((weights[p, k] * rows[p, k, j]).item() for k in there)
                assert sums[p, j].item() == pytest.approx(expected)
        assert torch.equal(rows.nan_to_num(7.0), before.nan_to_num(7.0))


def test_evidence_knows_what_length_is_usual() -> None:
    """The lower median of those who answered, or user 0's length where that is longer."""
    theirs = torch.tensor([[[3.0, 4.0], [0.0, 1.0], [6.0, 8.0]]] * 2)
    evidence = PeerEvidence(theirs, torch.tensor([[0.0, 2.0], [9.0, 12.0]]))
    lengths, usual = evidence.lengths()
    assert lengths.tolist() == [[5.0, 1.0, 10.0]] * 2
    assert usual.tolist() == [5.0, 15.0]
    nobody = torch.zeros(2, 3, dtype=torch.bool)
    assert evidence.without(nobody) is evidence
    without = evidence.without(torch.tensor([[True, False, True], [False, False, False]]))
    assert without.theirs[0].isnan().any(1).tolist() == [True, False, True]
    assert torch.equal(without.theirs[1], theirs[1])
    assert without.lengths()[1].tolist() == [2.0, 15.0]
    assert torch.equal(evidence.theirs, theirs)
