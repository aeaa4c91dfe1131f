"""The formula by plain numbers, and what `BiasCorrection` makes of its knobs."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import coterie
from coterie.errors import KnobError
from coterie.rules.formula import combined, corrected_step, followed

OWN, PEERS, C = 0.75, -2.0, 1.25
GRID = list(itertools.product((0.0, 0.3, 1.0), (0.0, 0.2, 1.0), (0.0, 0.5, 1.0), (0.25, 1.0)))


def one(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


@pytest.mark.parametrize(("alpha", "beta", "w", "a"), GRID)
def test_both_lines_are_those_of_the_paper(alpha: float, beta: float, w: float, a: float) -> None:
    direction, following = corrected_step(
        *(one(value) for value in (OWN, PEERS, C)),
        alpha=alpha,
        beta=beta,
        correction=w,
        answered=a,
    )
    seen = PEERS - OWN + (1 - a) * C
    assert direction.item() == pytest.approx((1 - alpha) * OWN + alpha * (PEERS - w * a * C))
    assert following.item() == pytest.approx((1 - beta) * C + beta * seen)


def test_what_is_not_said_is_no_correction_and_an_answer_of_all() -> None:
    own, peers, c = one(OWN), one(PEERS), one(C)
    average = (OWN + PEERS) / 2
    assert combined(own, peers, 0.5).item() == combined(own, peers, 0.5, c).item() == average
    assert combined(own, peers, 0.5, None, 1.0).item() == average
    assert combined(own, peers, 0.5, one(math.nan), 0.0).item() == average
    direction, following = corrected_step(own, peers, c, alpha=0.5, beta=0.5, correction=1.0)
    assert direction.item() == average - C / 2
    assert following.item() == followed(c, own, peers, 0.5).item() == (C + PEERS - OWN) / 2


def test_what_it_is_given_stays_as_it_is() -> None:
    own, peers, c = one(OWN), one(PEERS), one(C)
    corrected_step(own, peers, c, alpha=0.5, beta=0.5, correction=1.0, answered=0.5)
    assert (own.item(), peers.item(), c.item()) == (OWN, PEERS, C)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("answered", [1.0, 0.5])
def test_runs_in_rows_have_knobs_of_their_own(device: str, answered: float) -> None:
    """On a GPU by one kernel if all answered: the same as number by number."""
    rows = [((0.3, 0.2), (OWN, PEERS, C)), ((0.9, 0.6), (C, OWN, PEERS))]
    alpha, beta, own, peers, c = (
        torch.tensor(column, dtype=torch.float64, device=device)[:, None]
        for column in zip(*(knobs + numbers for knobs, numbers in rows), strict=True)
    )
    found = corrected_step(own, peers, c, alpha=alpha, beta=beta, correction=0.5, answered=answered)
    for place, ((a, b), numbers) in enumerate(rows):
        expected = corrected_step(
            *map(one, numbers), alpha=a, beta=b, correction=0.5, answered=answered
        )
        assert [each[place].item() for each in found] == pytest.approx(
            [each.item() for each in expected], rel=1e-12
        )


@pytest.mark.parametrize("start", ["first", "zero"])
@pytest.mark.parametrize("warm_up", [True, False, None])
def test_c_over_three_steps(start: str, warm_up: bool | None) -> None:
    """Half of the peers in the second step; in the first the bias is known at once, or 0."""
    how = {} if warm_up is None else {"warm_up": warm_up}
    rule = coterie.BiasCorrection(0.5, 0.1, start=start, **how)  # type: ignore[arg-type]
    state, c, seen = rule.init(one(0.0)), 0.0, 0
    assert rule.repeats(state) == (start == "zero")
    for peers, a in ((3.0, 1.0), (2.0, 0.5), (-1.0, 0.0), (5.0, 1.0)):
        complete = a * peers + (1 - a) * OWN
        direction, state = rule(coterie.Gradients(one(OWN), one(complete), answered=a), state)
        if a:
            c = (complete - OWN) / a if start == "first" and not seen else c
            beta = 0.1 if warm_up is False else max(0.1, 1 / (seen + 1))
            expected = 0.5 * OWN + 0.5 * (complete - a * c)
            c, seen = (1 - beta) * c + beta * (complete - OWN + (1 - a) * c), seen + 1
        else:
            expected = OWN
        assert direction.item() == pytest.approx(expected)
        assert state["c"].item() == pytest.approx(c)
        assert state["seen"] == seen
        assert rule.repeats(state)


def test_the_true_bias_is_taken_off_for_who_answered() -> None:
    rule = coterie.OracleCorrection(0.5, lambda x: 0 * x + 4.0)
    g = coterie.Gradients(one(OWN), one(PEERS), answered=0.5, x=one(0.0))
    direction, state = rule(g, rule.init(one(0.0)))
    assert direction.item() == 0.5 * OWN + 0.5 * (PEERS - 0.5 * 4.0)
    assert state == {"step": 1, "weight": 0.25}


def test_knobs_may_be_auto_and_nothing_else_may() -> None:
    assert coterie.BiasCorrection("auto", "auto").alpha == "auto"
    for wrong in ({"alpha": 1.5}, {"beta": -0.5}, {"correction": 2.0}, {"correction": "auto"}):
        with pytest.raises(KnobError, match=f"`{next(iter(wrong))}` must"):
            coterie.BiasCorrection(**{"alpha": 0.5, "beta": 0.5} | wrong)
    with pytest.raises(KnobError, match="`start` must"):
        coterie.BiasCorrection(0.5, 0.5, start="mean")  # type: ignore[arg-type]
