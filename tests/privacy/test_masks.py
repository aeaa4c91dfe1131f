"""Sums that hide their parts: they are right to rounding, a part alone is noise, what does not fit is an error."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from scipy import stats
from tests.support.masked import fixed_keys

from coterie.errors import MaskError
from coterie.privacy.keys import Identity, Offer, shared_secret
from coterie.privacy.masks import CHUNK, Agreement, Masks, digest_of, total, whole_numbers


def p_value(words: np.ndarray[Any, Any]) -> float:
    """Return how likely such numbers are where all are equally likely: their bytes, and the numbers as a whole."""
    bytes_alike = float(stats.chisquare(np.bincount(words.view(np.uint8), minlength=256)).pvalue)
    return min(bytes_alike, float(stats.kstest(words / 2**32, "uniform").pvalue))


@pytest.mark.parametrize("n", [2, 3, 10])
def test_a_sum_is_that_of_its_parts(n: int) -> None:
    rng = np.random.default_rng(n)
    weights = rng.dirichlet(np.ones(n)).tolist()
    agreed, masks = fixed_keys(n, weights=weights)
    for step in range(20):
        rows = rng.normal(scale=0.1, size=(n, 50)).astype(np.float32)
        found = total(
            [m.masked(row, b"%d" % step) for m, row in zip(masks, rows, strict=True)], agreed
        )
        np.testing.assert_allclose(
            found, np.array(weights) @ rows.astype(np.float64), atol=2 * n / agreed.scale
        )


def test_the_largest_entries_do_not_wrap_around() -> None:
    agreed, masks = fixed_keys(10, largest=3.0)
    for sign in (1.0, -1.0):
        parts = [each.masked(np.full(5, sign * 3.0), b"") for each in masks]
        np.testing.assert_allclose(total(parts, agreed), sign * 3.0, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1e300, 2e8])
def test_what_cannot_be_added_spoils_the_sum(bad: float) -> None:
    """All of the part is noise, without one word of the masks' sum, whatever the other entries are."""
    agreed, masks = fixed_keys(3)
    gradient = np.zeros(40_000)
    parts = [each.masked(gradient, b"") for each in masks[1:]]
    gradient[5] = bad
    parts.append(masks[0].masked(gradient, b""))
    assert p_value(np.asarray(sum(parts), np.uint32)) > 1e-6
    with pytest.raises(MaskError, match="was not finite"):
        total(parts, agreed)


@pytest.mark.parametrize("part_of_a_unit", [0.0, 0.1, 0.25, 0.5])
def test_the_steps_of_rounding_tell_nothing_of_one_site(part_of_a_unit: float) -> None:
    """Where units are as coarse as entries, mean and variance of a part are the same at every place in a step.

    Without dither the part of a site is a step function of its entry, and user 0 finds the step by
    bisection.
    """
    agreed, masks = fixed_keys(2, largest=2.0**31)
    entry = np.full(200_000, 2 * (7 + part_of_a_unit) / agreed.scale)  # τ is 1/2
    step = 2 * entry / agreed.scale
    found = (
        total([masks[0].masked(entry, b"x"), masks[1].masked(0 * entry, b"x")], agreed)
        * agreed.scale
    ).round()
    assert abs(found.mean() - (7 + part_of_a_unit)) < 6 * np.sqrt(0.5 / len(step))
    assert abs(found.var() - 0.5) < 0.01  # 1/4 of each site, where rounding alone has from 0 to 1/4


def test_no_part_is_cut() -> None:
    """The sum is right, however large parts are, and where the sum is too large it says so."""
    agreed, masks = fixed_keys(3)
    rows = np.array([[3e7, 4000.0], [-3e7, -3990.0], [6.0, 5.0]])
    parts = [each.masked(row, b"") for each, row in zip(masks, rows, strict=True)]
    np.testing.assert_allclose(total(parts, agreed), [2.0, 5.0], atol=1e-6)
    parts = [each.masked(np.array([20.0], np.float32), b"") for each in masks]
    with pytest.raises(MaskError, match="beyond 16"):
        total(parts, agreed)
    with pytest.raises(MaskError, match="of floating-point numbers"):
        masks[0].masked(np.array([20], np.int16), b"")


@pytest.mark.parametrize("n", [3, 10])
def test_a_message_alone_is_noise(n: int) -> None:
    """With fixed keys, so that it cannot fail by chance: each site's message, what two of a site differ by, and
    every sum of some of them, as ranks pass it on."""
    agreed, masks = fixed_keys(n)
    gradient = np.linspace(-1, 1, 40_000)
    assert p_value(whole_numbers(gradient, 1 / n, agreed)) < 1e-9, "the test can fail"
    sent = [each.masked(gradient, b"step 0") for each in masks]
    passed = list(itertools.accumulate(sent))[:-1]
    again = masks[0].masked(gradient, b"step 1") - sent[0]
    assert min(p_value(words) for words in (*sent, *passed, again)) > 1e-3


def test_long_gradients_are_masked_in_chunks() -> None:
    """The stream goes on from chunk to chunk: no two have one mask, and the sum is right to the last number."""
    agreed, masks = fixed_keys(3)
    rows = np.random.default_rng(0).normal(size=(3, 2 * CHUNK + 5))
    parts = [m.masked(row, b"x") for m, row in zip(masks, rows, strict=True)]
    np.testing.assert_allclose(total(parts, agreed), rows.mean(0), atol=6 / agreed.scale)
    zeros = masks[0].masked(np.zeros(2 * CHUNK), b"x")
    assert p_value(zeros[:CHUNK] - zeros[CHUNK : 2 * CHUNK]) > 1e-3


def test_parts_of_different_questions_are_noise_together() -> None:
    agreed, masks = fixed_keys(3)
    zeros = np.zeros(200_000)
    parts = [each.masked(zeros, b"x" if k else b"another x") for k, each in enumerate(masks)]
    assert p_value(parts[0] + parts[1] + parts[2]) > 1e-6
    with pytest.raises(MaskError, match="do not cancel"):
        total(parts, agreed)
    with pytest.raises(MaskError, match="do not cancel"):
        total(parts[1:], agreed)


def test_masks_of_another_agreement_do_not_cancel() -> None:
    """The same keys with another τ, as from a lead who tells sites different things."""
    made = {site: Identity(site).offer() for site in "abc"}
    offers = {site: offer for site, (_, offer) in made.items()}
    told = [
        Agreement(dict(zip("abc", w, strict=True)), 16.0, offers)
        for w in ([0.4, 0.3, 0.3], [0.3, 0.4, 0.3])
    ]
    parts = [Masks(s, made[s][0], told[s == "c"]).masked(np.zeros(200_000), b"") for s in "abc"]
    assert p_value(parts[0] + parts[1] + parts[2]) > 1e-6
    with pytest.raises(MaskError, match="do not cancel"):
        total(parts, told[0])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"x": np.zeros(2)}, {"x": np.zeros(2, np.float32)}),
        ({"x": np.zeros(2)}, {"x": np.zeros((1, 2))}),
        ({"x": np.zeros(2)}, {"x": np.array([0.0, -0.0])}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 1}, {"a": True}),
        ({"a": "b", "c": "d"}, {"a": "b', 'c': 'd"}),
        ({"a": {"b": 1}}, {"a": {}, "b": 1}),
        ({"a": None}, {}),
    ],
)
def test_different_questions_have_different_digests(one: Any, other: Any) -> None:
    assert digest_of(one) != digest_of(other)


def test_a_key_is_taken_from_its_site_only() -> None:
    _, offer = Identity("a").offer()
    stolen = Identity("b").offer()[1].message() | {"key": offer.key.hex()}
    for site, message in {
        "b": stolen,
        "a": offer.message() | {"site": "b"},
        "c": offer.message(),
    }.items():
        with pytest.raises(MaskError, match=f"the key of '{site}' is not"):
            Offer.read(site, message)
    weak = Offer("a", bytes(32), offer.identity, offer.signature)
    with pytest.raises(MaskError, match="is not one"):
        shared_secret(Identity("b").offer()[0], weak)
