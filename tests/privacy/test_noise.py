"""Clipped sums against a plain loop; noise and samples have the distribution that is stated."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import torch
from scipy import stats

from coterie.errors import KnobError
from coterie.privacy import Privacy
from coterie.privacy.noise import (
    CHUNK,
    clipped_sum,
    noisy,
    normals,
    normals_of,
    poisson_sample,
    uniforms,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_clipped_sum_is_a_plain_loops(dtype: torch.dtype) -> None:
    rows = torch.randn(20, 5, generator=torch.Generator().manual_seed(0), dtype=dtype)
    rows[3], rows[4, 2], rows[5, 0], rows[6] = 0, math.nan, math.inf, 1e30
    expected = [0.0] * 5
    for row in rows.tolist():
        length = math.hypot(*row)
        if math.isfinite(length):
            share = min(1.0, 1.5 / length) if length else 1.0
            expected = [total + share * value for total, value in zip(expected, row, strict=True)]
    torch.testing.assert_close(clipped_sum(rows, 1.5), torch.tensor(expected, dtype=torch.float64))
    for row in rows:
        assert float(clipped_sum(row[None], 1.5).norm()) <= 1.5 * (1 + 1e-12)


def test_noise_is_normal_and_of_the_stated_size() -> None:
    n = 100_000
    noise = noisy(torch.full((n,), 3.0), clip=0.5, noise=4.0) - 3.0
    assert abs(float(noise.mean())) < 5 * 2.0 / math.sqrt(n)
    assert float(noise.std()) == pytest.approx(2.0, rel=5 / math.sqrt(2 * n))
    drawn = torch.cat([chunk.clone() for chunk in normals(3 * CHUNK)])
    assert stats.kstest(drawn.numpy(), "norm").pvalue > 1e-6
    assert len(set(drawn.tolist())) == 3 * CHUNK, "no part of the stream comes twice"
    assert not torch.equal(next(normals(4)), next(normals(4))), "nor a key"


def test_noise_is_made_of_the_stream_that_the_standard_says() -> None:
    """RFC 8439, 2.3.2's key with a nonce of zeros, written out here in plain numbers."""
    key = bytes(range(32))
    half = CHUNK // 2
    stream = b"".join(chacha20_block(key, counter) for counter in (0, half // 8))
    radii, angles = (
        [((word >> 11) + 1) / 2**53 for word in struct.unpack("<8Q", stream[64 * k : 64 * k + 64])]
        for k in (0, 1)
    )
    expected = [
        math.sqrt(-2 * math.log(u)) * math.cos(2 * math.pi * v)
        for u, v in zip(radii, angles, strict=True)
    ]
    assert next(normals_of(key, CHUNK))[:8].tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.cuda
def test_noise_for_a_gpu_is_there_and_as_large() -> None:
    noise = noisy(torch.zeros(3 * CHUNK + 77, device="cuda"), clip=0.5, noise=4.0)
    assert noise.is_cuda
    assert float(noise.std()) == pytest.approx(2.0, rel=0.05)


@pytest.mark.cuda
def test_a_gpu_makes_the_hosts_numbers_of_the_same_stream() -> None:
    key, n = bytes(range(32)), 2 * CHUNK + 77
    host = [chunk.clone() for chunk in normals_of(key, n)]
    (there,) = normals_of(key, n, torch.device("cuda"))
    torch.testing.assert_close(there.cpu(), torch.cat(host), rtol=1e-12, atol=1e-12)


def chacha20_block(key: bytes, counter: int) -> bytes:
    """Return a block of the stream by the steps of RFC 8439."""
    words = [
        0x61707865,
        0x3320646E,
        0x79622D32,
        0x6B206574,
        *struct.unpack("<8I", key),
        counter,
        0,
        0,
        0,
    ]
    state = words.copy()

    def rotated(value: int, by: int) -> int:
        return (value << by | value >> (32 - by)) & 0xFFFFFFFF

    def quarter(a: int, b: int, c: int, d: int) -> None:
        for into, other, turned, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            state[into] = (state[into] + state[other]) & 0xFFFFFFFF
            state[turned] = rotated(state[turned] ^ state[into], by)

    for _ in range(10):
        for k in range(4):
            quarter(k, 4 + k, 8 + k, 12 + k)
        for k in range(4):
            quarter(k, 4 + (k + 1) % 4, 8 + (k + 2) % 4, 12 + (k + 3) % 4)
    return struct.pack("<16I", *((a + b) & 0xFFFFFFFF for a, b in zip(state, words, strict=True)))


def test_every_example_takes_part_by_itself() -> None:
    samples = torch.zeros(4000, 10, dtype=torch.float64)
    for sample in samples:
        sample[poisson_sample(10, 0.3)] = 1
    assert samples.mean(0).sub(0.3).abs().max() < 5 * math.sqrt(0.21 / 4000)
    sizes = samples.sum(1)
    assert float(sizes.var()) == pytest.approx(10 * 0.21, rel=0.2), (
        "the size of a sample is random too"
    )
    assert stats.kstest(uniforms(20_000).numpy(), "uniform").pvalue > 1e-6


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        *(({"epsilon": value}, "epsilon") for value in (0, -1, math.nan, math.inf, "2", True)),
        *(({"delta": value}, "delta") for value in (0, 1, -0.1, math.nan)),
        *(({"clip": value}, "clip") for value in (0, math.nan, math.inf, -1.0)),
        *(({"noise": value}, "noise") for value in (0, math.nan, math.inf, -1.0, 0.001)),
    ],
)
def test_what_promises_nothing_is_refused(wrong: dict[str, Any], name: str) -> None:
    with pytest.raises(KnobError, match=f"`{name}`"):
        Privacy(**({"epsilon": 1.0, "delta": 1e-5, "clip": 1.0} | wrong))


def test_delta_must_be_small_for_so_many_examples() -> None:
    with pytest.raises(KnobError, match="1/100"):
        Privacy(1.0, 0.01, 1.0, 1.0).check(100, None)
    with pytest.raises(KnobError, match="`noise` must be given"):
        Privacy(1.0, 0.001, 1.0).check(100, None)
