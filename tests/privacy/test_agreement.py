"""What sites agree on before a sum: what is read from a message, and what of it is refused."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import pytest
from tests.support.masked import fixed_keys

from coterie.errors import MaskError
from coterie.privacy import masks
from coterie.privacy.keys import Identity
from coterie.privacy.masks import MAX_SITES, Agreement, Masks, _triangular, digest_of, revealed

WEIGHTS: dict[str, Any] = {"a": 0.5, "b": 0.25, "c": 0.25}


def message(**changes: Any) -> dict[str, Any]:
    """Return a message that says all there is to say, but for some changes."""
    offers = {site: Identity(site).offer()[1].message() for site in WEIGHTS}
    return {"weights": WEIGHTS, "largest": 16.0, "offers": offers} | changes


def test_what_is_said_is_read() -> None:
    said = message(noise=0.5, margin=2)
    agreed = Agreement.read(said)
    assert agreed.message() == said
    assert agreed.digest == Agreement.read(said).digest
    assert (agreed.noise, agreed.margin) == (0.5, 2)
    least = Agreement.read(message())
    assert (least.noise, least.margin) == (0.0, 0)
    assert least.share_of("a") is None
    assert least.digest != agreed.digest


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"weights": None}, "from 2 to 1000 sites"),
        ({"weights": {"a": 1.0}}, "from 2 to 1000 sites"),
        ({"weights": {str(k): 1.0 for k in range(MAX_SITES + 1)}}, "from 2 to 1000 sites"),
        ({"weights": {1: 0.5, "b": 0.5}}, "positive numbers by site"),
        *(
            ({"weights": WEIGHTS | {"a": wrong}}, "positive numbers by site")
            for wrong in (0.0, -1.0, math.nan, math.inf, 1e-30, 1e30, True, "1", None)
        ),
        *(
            ({"largest": wrong}, "largest entry of a sum must be a positive number")
            for wrong in (0, -1.0, math.inf, "16", None, True)
        ),
        *(({"noise": wrong}, "noise of a sum") for wrong in (-1.0, math.nan, "0", True, None)),
        *(({"margin": wrong}, "margin of a sum") for wrong in (-1, 3, 1.0, True, None)),
        ({"offers": None}, "every site of a sum must have a key"),
        ({"offers": {}}, "every site of a sum must have a key"),
        ({"weights": WEIGHTS | {"d": 0.1}}, "every site of a sum must have a key"),
    ],
)
def test_what_is_no_agreement_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(MaskError, match=why):
        Agreement.read(message(**changes))


def test_two_sites_may_not_be_one() -> None:
    identity = Identity("a")
    both = [identity.offer()[1] for _ in range(2)]
    offers = message()["offers"] | {"a": both[0].message()}
    identity.site = "b"
    offers["b"] = identity.offer()[1].message()
    with pytest.raises(MaskError, match="two sites of a sum have the same key"):
        Agreement.read(message(offers=offers))
    nothing: tuple[Any, ...] = ({}, None, "x")
    for wrong in nothing:
        with pytest.raises(MaskError, match="from 2 to 1000 sites"):
            Agreement.read(wrong)


@pytest.mark.parametrize("noise", [0.0, 0])
def test_noise_may_be_none(noise: float) -> None:
    assert Agreement.read(message(noise=noise)).noise == 0.0


def test_shares_of_noise_add_up() -> None:
    """n − m of n sites have the whole variance together; τ times a site's own is its part of it."""
    agreed = Agreement(WEIGHTS, 16.0, {}, noise=0.3, margin=1)
    shares = {site: agreed.share_of(site) for site in WEIGHTS}
    for site, share in shares.items():
        assert share is not None
        assert share.of_sum * WEIGHTS[site] == pytest.approx(0.3)
        assert 2 * (share.added * WEIGHTS[site]) ** 2 == pytest.approx(0.3**2)
        assert (share.sites, share.margin) == (3, 1)
    assert agreed.scale == 2**31 / (4 * 16)
    assert agreed.units_of_noise == pytest.approx(0.3 * 2**31 / 64 / math.sqrt(2))
    half = Agreement({site: weight / 2 for site, weight in WEIGHTS.items()}, 16.0, {})
    assert half.scale == 2 * agreed.scale


def test_a_sum_has_no_more_than_was_agreed() -> None:
    agreed, made = fixed_keys(3, largest=2.0)
    for entry, is_right in ((2.0, True), (2.0 * (1 + 1e-4), False), (-2.0 * (1 + 1e-4), False)):
        words = np.zeros(5, np.uint32)
        words[0] = np.int64(round(entry * agreed.scale)).astype(np.uint32)
        if is_right:
            np.testing.assert_allclose(revealed(words, agreed), [2.0], rtol=1e-6)
        else:
            with pytest.raises(MaskError, match="beyond 2"):
                revealed(words, agreed)
    for place in range(1, 1 + masks.N_CHECKS):
        words = np.zeros(1 + masks.N_CHECKS, np.uint32)
        words[place] = 1
        with pytest.raises(MaskError, match="do not cancel"):
            revealed(words, agreed)
    part = made[0].masked(np.zeros(3), b"")
    assert part.shape == (3 + masks.N_CHECKS,)
    assert masks.N_CHECKS >= 4, "a wrong sum passes with a chance of 2⁻¹²⁸ at most"


def test_the_dither_is_that_of_two_halves() -> None:
    words = np.array([0, 2**32 - 1, 2**16 - 1, (2**16 - 1) << 16, 2**15], np.uint32)
    expected = [-1.0, 1.0, 0.0, 0.0, 2**15 / (2**16 - 1) - 1]
    np.testing.assert_allclose(_triangular(words), expected, atol=1e-12)


def test_masks_go_one_way_at_one_site_and_the_other_way_at_the_other() -> None:
    """Without the dither the part of a site is known: τ g, and the mask of each pair added or taken off."""
    _agreed, made = fixed_keys(3)
    parts = [each.masked(np.zeros(4), b"x")[-masks.N_CHECKS :].astype(np.int64) for each in made]
    assert not (np.sum(parts, 0) % 2**32).any()
    assert all(part.any() for part in parts)
    alone = Masks("site 0", None, Agreement({"site 0": 1.0}, 16.0, {}))
    assert not alone.masked(np.zeros(4), b"x")[-masks.N_CHECKS :].any()


def test_a_digest_is_the_same_for_every_version() -> None:
    words = b"dict 2:" + b"str 3:'a'" + b"int 1:1" + b"str 3:'b'" + b"array <f8 (2,):" + bytes(16)
    assert digest_of({"b": np.zeros(2), "a": 1}) == hashlib.sha256(words).digest()


def test_a_question_is_hashed_to_a_depth() -> None:
    deep: Any = {"x": 1}
    for _ in range(masks.MAX_DEPTH - 1):
        deep = {"x": deep}
    assert digest_of(deep) != digest_of({"x": 1})
    with pytest.raises(MaskError, match="plain data, got a dict"):
        digest_of({"x": deep})
    for wrong in ([1], {1: 2}, np.array(["a"]), np.array([1j]), object()):
        with pytest.raises(MaskError, match="a request must be plain data"):
            digest_of(wrong)
    for right in (np.zeros(2, bool), np.zeros(2, np.int8), np.zeros(2, np.uint8), "a", None, 1.5):
        assert len(digest_of(right)) == 32
