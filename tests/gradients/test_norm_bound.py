"""The norm bound: what is too long is left out of its step and counted, and nothing else is changed."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import coterie
from coterie.engines.attacks import Attacked, Scaled
from coterie.errors import KnobError
from coterie.gradients.gradients import Gradients
from coterie.gradients.norm_bound import GROWTH, NormBound, long_rows


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("n", [3, 4, 7, 10])
def test_rows_are_compared_with_the_median_and_the_own(n: int) -> None:
    rows = numbers(n, 5) * torch.logspace(-1.5, 1.5, n, dtype=torch.float64).unsqueeze(1)
    for scale in (0.01, 10.0):
        own = scale * numbers(5, seed=1)
        lengths = [math.sqrt(sum(v * v for v in row)) for row in rows.tolist()]
        bound = 2 * max(statistics.median_low(lengths), math.sqrt(sum(v * v for v in own.tolist())))
        assert long_rows(rows, own, 2.0).tolist() == [length > bound for length in lengths]


def test_fewer_than_half_cannot_move_the_bound() -> None:
    good = numbers(6, 5)
    for size in (1e-9, 10.0, 1e30):
        rows = torch.cat([good, size * numbers(4, 5, seed=1)])
        too_long = long_rows(rows, torch.zeros(5, dtype=torch.float64), 3.0)
        assert not too_long[:6].any()
        assert too_long[6:].all() == (size > 1)


def test_sums_are_compared_with_those_before() -> None:
    """Against plain floats; several runs at once as each by itself."""
    sizes = np.exp(np.random.default_rng(0).normal(0, 0.5, (3, 80)))
    sizes[0, 0] = sizes[1, 30] = sizes[2, 40:60] = 50.0
    together = NormBound(torch.tensor([3.0, 3.0, 2.0]), torch.zeros(3, 4))
    longest = [0.0, 0.0, 0.0]
    direction = torch.tensor([0.5, -0.5, 0.5, 0.5])
    for t in range(80):
        sums = torch.tensor(sizes[:, t : t + 1], dtype=torch.float32) * direction
        too_long = together.long_sums(0.1 * torch.ones(3, 1) * direction, sums)
        for run, factor in enumerate((3.0, 3.0, 2.0)):
            size, before = float(sizes[run, t]), longest[run]
            assert bool(too_long[run]) == (before > 0 and size > factor * max(before, 0.1)), (
                run,
                t,
            )
            longest[run] = max(before, min(size, GROWTH * before)) if before else size


def test_what_is_too_long_gives_its_weight_back() -> None:
    own, rows = torch.ones(2), torch.tensor([[1.0, 0.0], [0.0, 1.0], [-40.0, 0.0]])
    weights = {"a": 0.25, "b": 0.25, "c": 0.5}
    g = Gradients(own, rows=rows, names=("a", "b", "c"))
    as_sum, as_rows = (NormBound(3.0, own).kept(g, weights, rows=rows) for rows in (False, True))
    assert as_sum.peers is not None
    assert torch.equal(as_sum.peers, torch.tensor([0.75, 0.75]))  # .25 a + .25 b + .5 own
    assert as_sum.answered == as_rows.answered == 0.5
    assert as_rows.names == ("a", "b")
    assert (
        as_rows.left_out
        == as_sum.left_out
        == {"c": "more than 3 times as long as the median of all"}
    )
    untouched = NormBound(100.0, own).kept(g, weights, rows=True)
    assert untouched is g


def test_a_sum_that_is_too_long_leaves_user_0_alone() -> None:
    own, weights = torch.ones(2), {"a": 0.5, "b": 0.5}
    bound = NormBound(3.0, own)
    first = bound.kept(Gradients(own, torch.tensor([100.0, 0.0])), weights, rows=False)
    assert first.answered == 1  # nothing to compare it with
    later = bound.kept(Gradients(own, torch.tensor([-400.0, 0.0])), weights, rows=False)
    assert later.answered == 0
    assert list(later.left_out) == ["a", "b"]
    rule = coterie.BiasCorrection(0.5, 0.1)
    state = rule(first, rule.init(own))[1]
    direction, after = rule(later, state)
    assert torch.equal(direction, own)
    assert torch.equal(after["c"], state["c"])


def test_two_rows_have_no_median() -> None:
    """With less than three, the mean of the rows is compared with those before, as sums are."""
    own, weights = torch.ones(2), {"a": 0.5, "b": 0.5}
    bound, rows = NormBound(3.0, own), torch.tensor([[1.0, 0.0], [100.0, 0.0]])
    two = Gradients(own, rows=rows, names=("a", "b"), answered=1.0)
    assert bound.kept(two, weights, rows=True) is two
    later = replace(two, rows=10 * rows)
    for as_rows in (True, False):
        found = bound.kept(later, weights, rows=as_rows)
        assert (found.answered, set(found.left_out)) == (0, {"a", "b"})
        assert found.rows is None or found.rows.shape == (0, 2)
    summed = bound.kept(two, weights, rows=False)
    assert summed.peers is not None
    assert summed.peers.tolist() == [50.5, 0.0]


def test_nothing_too_long_is_the_plain_sum() -> None:
    own, rows = torch.ones(2), torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]])
    g = Gradients(own, rows=rows, names=("a", "b", "c"))
    found = NormBound(3.0, own).kept(g, dict.fromkeys("abc", 1 / 3), rows=False)
    assert found.rows is None
    assert found.peers is not None
    torch.testing.assert_close(found.peers, torch.ones(2))


def test_what_a_captured_step_asks_is_what_another_is_told() -> None:
    own, rows = torch.ones(2), torch.tensor([[1.0, 0.0], [0.0, 1.0], [-40.0, 0.0]])
    g = Gradients(own, rows=rows, names=("a", "b", "c"))
    assert bool(NormBound(3.0, own).exceeded(g))
    assert not bool(NormBound(100.0, own).exceeded(g))
    two, none = {"rows": rows[:2], "names": ("a", "b")}, {"rows": None, "names": ()}
    for before, after in (
        (two, two | {"rows": rows[1:]}),
        (none | {"peers": rows[0]}, none | {"peers": 40 * rows[0]}),
    ):
        bound = NormBound(3.0, own)
        first, second = (replace(g, answered=1.0, **each) for each in (before, after))
        assert not bool(bound.exceeded(first)), "there is nothing to compare it with"
        assert bool(bound.exceeded(second))
    nobody = replace(g, rows=rows[:0], names=(), answered=0.0)
    assert not bool(NormBound(3.0, own).exceeded(nobody))


def test_as_long_as_the_bound_is_not_too_long() -> None:
    own = torch.zeros(2)
    bound, sums = NormBound(3.0, own), [torch.tensor([size, 0.0]) for size in (1.0, 3.0, 3.5)]
    assert [bool(bound.long_sums(own, each)) for each in sums] == [False, False, True]
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.0], [3.0, 0.0]])
    assert not long_rows(rows, own, 3.0).any()


@pytest.mark.parametrize("wrong", [math.inf, math.nan])
def test_after_a_sum_that_is_no_number_the_next_is_the_first(wrong: float) -> None:
    own, bound = torch.zeros(2), NormBound(3.0, torch.zeros(2))
    assert bool(bound.long_sums(own, torch.tensor([wrong, 0.0]))) == math.isinf(wrong)
    assert not bool(bound.long_sums(own, torch.tensor([100.0, 0.0])))
    assert bool(bound.long_sums(own, torch.tensor([301.0, 0.0])))


def users(n: int = 5, spike: float = -1.0) -> tuple[coterie.User, list[coterie.User]]:
    """Return users one of whom has a wrong example of another size, which is drawn now and then."""
    made = []
    for k in range(n + 1):
        inputs = numbers(40, 4, seed=k).float()
        targets = (inputs[:, 0] > 0).long()
        if k == 1:
            inputs[7] *= -spike
        held = numbers(30, 4, seed=100 + k).float()
        made.append(
            coterie.User(f"u{k}", inputs, targets, validation=(held, (held[:, 0] > 0).long()))
        )
    return made[0], made[1:]


def trained(me: coterie.User, peers: list[coterie.User], **options: Any) -> coterie.Run:
    torch.manual_seed(0)
    rule = options.pop("rule", coterie.BiasCorrection(0.5, 0.1))
    plain: dict[str, Any] = {
        "optimizer": torch.optim.SGD,
        "lr": 0.1,
        "steps": 40,
        "batch_size": 4,
        "guard": "off",
    }
    return coterie.train(
        nn.Linear(4, 2), cross_entropy, me, peers, rule, measure=False, **plain | options
    )


def vector(run: coterie.Run) -> Tensor:
    return nn.utils.parameters_to_vector(run.model.parameters()).detach()


def test_nothing_changes_where_nothing_is_too_long() -> None:
    for engine in (coterie.InProcess, partial(attacked, names=[], factor=1.0)):
        bounded, free = (trained(*users(), engine=engine, norm_bound=b) for b in (20.0, None))
        assert not bounded.record.end.left_out
        assert torch.equal(vector(bounded), vector(free))


def attacked(*problem: Any, names: list[str], factor: float, **settings: Any) -> Attacked:
    return Attacked(coterie.InProcess(*problem, **settings), names, Scaled(factor))


@pytest.mark.parametrize(
    ("rule", "factor"),
    [
        (coterie.WeightedAveraging(0.5), -10.0),
        (coterie.WeightedAveraging(0.5), 1e6),
        (coterie.BiasCorrection(0.5, 0.1), 1e6),
    ],
)
def test_attackers_do_not_destroy_a_run(rule: coterie.Rule, factor: float) -> None:
    """Two of five peers: the loss stays near that of a run in which all are honest; unbounded it does not."""
    engine = partial(attacked, names=["u1", "u3"], factor=factor)
    honest = trained(*users(), rule=rule)
    bounded, free = (trained(*users(), rule=rule, engine=engine, norm_bound=b) for b in (3.0, None))
    losses = [run.record.points[-1].validation["loss"] for run in (honest, bounded, free)]
    assert losses[1] < losses[0] + 0.05
    assert losses[2] > losses[0] + 0.2
    assert {"u1", "u3"} <= set(bounded.record.end.left_out)


def test_a_spike_in_one_example_is_survived_however_steps_are_taken() -> None:
    """Step by step, captured and with other runs: the same run, which the spike does not destroy."""
    me, peers = users(spike=1e4)
    plain = trained(me, peers)
    assert (
        sum(plain.record.end.left_out["u1"].values())
        == sum(plain.record.end.left_out["u2"].values())
        > 0
    )
    captured = trained(me, peers, capture=True)
    assert torch.equal(vector(captured), vector(plain))
    assert captured.record.end.left_out == plain.record.end.left_out
    torch.manual_seed(0)
    spec = coterie.RunSpec(
        *(nn.Linear(4, 2), cross_entropy, me, peers, coterie.BiasCorrection(0.5, 0.1)),
        optimizer=torch.optim.SGD,
        lr=0.1,
        steps=40,
        batch_size=4,
    )
    many, free = coterie.train_many([spec, replace(spec, norm_bound=None)])
    torch.testing.assert_close(vector(many), vector(plain), rtol=1e-4, atol=1e-5)
    assert "too long" in many.record.configuration.runs
    assert free.record.configuration.runs == "one program of 2"
    last = [run.record.points[-1].validation["loss"] for run in (plain, free)]
    assert last[1] > last[0] + 0.2


def test_it_resumes_to_the_same_bits(tmp_path: Any) -> None:
    whole = trained(*users(spike=1e4))
    trained(*users(spike=1e4), out=tmp_path, hooks=[lambda step: step.step == 23])
    resumed = trained(*users(spike=1e4), out=tmp_path, resume=True)
    assert torch.equal(vector(resumed), vector(whole))
    assert resumed.record.end.left_out == whole.record.end.left_out
    assert resumed.record.end.absent == whole.record.end.absent


@pytest.mark.parametrize("wrong", [0.5, math.nan, -3])
def test_a_bound_below_one_is_refused(wrong: float) -> None:
    with pytest.raises(KnobError, match="norm_bound"):
        trained(*users(), norm_bound=wrong)


def test_a_number_that_the_default_rule_would_not_use_is_refused() -> None:
    with pytest.raises(
        KnobError, match="`norm_bound` as a number is for rules such as `WeightedAveraging`"
    ):
        trained(*users(), rule=None, norm_bound=5.0)
