"""The weights of candidates and the error of a mean, one number after the other."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from coterie.mixture.candidates import Candidates
from coterie.mixture.families import SOFTMAX, SQUARED, Family
from coterie.mixture.mixing import (
    LEAST,
    error_of,
    halves,
    mean_difference,
    mix,
    mixed,
    weights_of,
    without_small,
)


def by_hand(
    total: list[float], rows: tuple[float, int], prior: list[float], family: Family, heat: float
) -> list[float]:
    """π exp(−Σ loss/T), where a squared loss is divided by the best candidate's noise."""
    count, k = rows
    if not count:
        total = [0.0] * len(prior)
    elif family is SQUARED:
        noise = 2 * min(total) / (count * k)
        total = [each / noise for each in total]
    best = min(total)
    raw = [
        pi * math.exp(-(each - best) / heat) if math.isfinite(each) else 0.0
        for pi, each in zip(prior, total, strict=True)
    ]
    return [each / sum(raw) for each in raw]


@pytest.mark.parametrize("family", [SQUARED, SOFTMAX], ids=["squared", "softmax"])
@pytest.mark.parametrize("count", [0.0, 1.0, 7.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_weights_are_those_of_the_formula(family: Family, count: float, temperature: float) -> None:
    total, prior = [1.5, 0.75, math.inf, 1.25], [0.5, 0.2, 0.2, 0.1]
    found = weights_of(np.array(total), count, 2, np.array(prior), family, temperature=temperature)
    expected = by_hand(total, (count, 2), prior, family, temperature)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_a_loss_that_is_no_number_has_no_weight() -> None:
    found = weights_of(np.array([math.nan, 1.0]), 3, 1, np.array([0.9, 0.1]), SOFTMAX)
    assert found.tolist() == [0.0, 1.0]
    exact = weights_of(np.array([0.0, 1.0]), 3, 1, np.array([0.5, 0.5]), SQUARED)
    assert exact.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_weights_of_a_mixture_are_those_of_the_losses_of_all_rows(temperature: float) -> None:
    """Of own rows, and of further ones that no candidate saw."""
    random = np.random.default_rng(0)
    outputs, targets = random.normal(size=(9, 3, 2)), random.normal(size=(9, 2))
    prior, further = [0.5, 0.3, 0.2], [0.4, 1.2, 0.1]
    total = [
        math.fsum((outputs[i, j, k] - targets[i, k]) ** 2 / 2 for i in range(9) for k in range(2))
        for j in range(3)
    ]
    for more, count in (([0.0] * 3, 0), (further, 4)):
        of_all = [a + b for a, b in zip(total, more, strict=True)]
        expected = by_hand(of_all, (9 + count, 2), prior, SQUARED, temperature)
        given = None if not count else (np.array(further), count)
        found = mixed(
            *(SQUARED, outputs, targets, np.arange(9) % 3, np.array(prior)),
            further=given,
            temperature=temperature,
        )
        np.testing.assert_allclose(found.weights, expected, rtol=1e-12)
    one = mixed(SQUARED, outputs, targets, np.arange(9) % 3, np.array(prior), single=True)
    best = int(np.argmax(by_hand(total, (9, 2), prior, SQUARED, 2.0)))
    assert one.weights.tolist() == [float(j == best) for j in range(3)]


def test_one_that_is_not_finite_anywhere_counts_for_nothing() -> None:
    outputs, targets = np.zeros((6, 2, 1)), np.full((6, 1), 0.1)
    outputs[2, 0] = math.nan
    found = mixed(SQUARED, outputs, targets, np.arange(6) % 2, np.full(2, 0.5))
    assert found.weights.tolist() == [0.0, 1.0]
    assert np.isfinite(found.outputs).all()


def test_shares_of_models_that_are_small_go_to_the_others() -> None:
    exactly = np.array([LEAST, 1 - LEAST])
    np.testing.assert_array_equal(without_small(exactly, np.array([1, 2])), exactly)
    less = np.array([LEAST * 0.99, 1 - LEAST * 0.99])
    np.testing.assert_array_equal(without_small(less, np.array([1, 2])), [0, 1])
    together = np.array([LEAST / 2, LEAST / 2, 1 - LEAST])
    np.testing.assert_allclose(without_small(together, np.array([0, 0, 1])), together)
    np.testing.assert_allclose(without_small(together, np.array([-1, -1, 1])), together)
    many = np.full(250, 1 / 250)
    np.testing.assert_allclose(without_small(many, np.arange(250)), many)
    few = np.array([0.004, *[0.001] * 996])
    np.testing.assert_array_equal(without_small(few, np.arange(997)), [1, *[0] * 996])


def test_half_of_the_prior_is_alones() -> None:
    np.testing.assert_allclose(halves(np.array([True, True, False])), [0.25, 0.25, 0.5])
    np.testing.assert_allclose(halves(np.array([True, True])), [0.5, 0.5])


@pytest.mark.parametrize("n", [0, 1, 2, 3, 12])
@pytest.mark.parametrize("folds", [1, 2, 5])
def test_the_interval_of_a_mean_is_students_with_a_larger_error(n: int, folds: int) -> None:
    """Its ends are where Hall's polynomial of the mean over its error has Student's quantiles."""
    changes = np.random.default_rng(n).normal(size=n)
    said = mean_difference(changes, folds)
    mean = changes.mean() if n else 0.0
    assert said.difference == pytest.approx(mean)
    if n < 2:
        assert (said.low, said.high) == (said.difference, said.difference)
        return
    spread = math.sqrt(sum((each - mean) ** 2 for each in changes) / (n - 1))
    error = spread * math.sqrt(1 / n) * math.sqrt(1 + 4 / max(1, folds - 1))
    assert error_of(changes, folds) == pytest.approx(error)
    cubes = stats.skew(changes, bias=False) * spread**3 if n > 2 else 0.0
    skewness = cubes / n**2 / error**3
    for end, quantile in ((said.low, 0.975), (said.high, 0.025)):
        t = (mean - end) / error
        transformed = t + skewness * t**2 / 3 + skewness**2 * t**3 / 27 + skewness / 6
        assert transformed == pytest.approx(stats.t.ppf(quantile, n - 1))
    assert error_of(np.full(n, 0.5), folds) == 0.0


def test_every_entry_has_its_share_and_its_own_mixture() -> None:
    """Three blocks of linear candidates, of which two ask no peer, and rows that none has seen."""
    random = np.random.default_rng(1)
    x, y = random.normal(size=(12, 2)), random.normal(size=(12, 1))
    folds = np.arange(12) % 3
    blocks = []
    for kind, many, alone in (("a", 2, True), ("b", 3, True), ("c", 1, False)):
        parameters = random.normal(size=(3, many, 1))
        outputs = np.einsum("nd,djk->njk", np.column_stack([x, np.ones(12)]), parameters)
        blocks.append(
            Candidates(
                kind, outputs, held_out=outputs[:4] + 0.1, parameters=parameters, alone=alone
            )
        )
    found = mix(SQUARED, y, folds, blocks, held_out=y[:4], temperature=1.5)
    total = [
        float(np.square(block.outputs[:, j] - y).sum() / 2)
        + float(np.square(block.held_out[:, j] - y[:4]).sum() / 2)  # type: ignore[index]
        for block in blocks
        for j in range(block.many)
    ]
    prior = [0.1] * 5 + [0.5]
    weights = by_hand(total, (16, 1), prior, SQUARED, 1.5)
    shares = {"a": sum(weights[:2]), "b": sum(weights[2:5]), "c": weights[5]}
    assert list(found.entries) == list(shares)
    for kind, share in shares.items():
        assert found.entries[kind].weight == pytest.approx(share)
        assert found.entries[kind].others == ()
    assert found.alone.weight == pytest.approx(shares["a"] + shares["b"])
    every = np.concatenate([block.parameters for block in blocks], 1)
    served = np.einsum("j,djk->dk", np.array(weights), every)
    np.testing.assert_allclose(found.served.parameters, served, rtol=1e-10)
    np.testing.assert_allclose(found.entries["c"].parameters, blocks[2].parameters[:, 0])  # type: ignore[index]
    without = found.entries["c"].losses
    np.testing.assert_allclose(without, np.square(blocks[2].outputs[:, 0] - y)[:, 0])
    with pytest.raises(ValueError, match="needs outputs for the validation rows"):
        mix(SQUARED, y, folds, [Candidates("d", blocks[0].outputs, alone=True)], held_out=y[:4])
