"""Clipped sums against a plain loop; noise and samples have the distribution that is stated."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from coterie.errors import KnobError
from coterie.privacy import Privacy
from coterie.privacy.clipping import clipped_sum, noisy
from coterie.privacy.randomness import normals, poisson_sample, uniforms


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
    assert stats.kstest(normals(20_000).numpy(), "norm").pvalue > 1e-6
    assert not torch.equal(normals(4), normals(4))


def test_every_example_takes_part_by_itself() -> None:
    samples = torch.zeros(4000, 10, dtype=torch.float64)
    for sample in samples:
        sample[poisson_sample(10, 0.3)] = 1
    assert samples.mean(0).sub(0.3).abs().max() < 5 * math.sqrt(0.21 / 4000)
    sizes = samples.sum(1)
    assert float(sizes.var()) == pytest.approx(10 * 0.21, rel=0.2), "the size of a sample is random too"
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
def test_what_promises_nothing_is_refused(wrong: dict[str, float], name: str) -> None:
    with pytest.raises(KnobError, match=f"`{name}`"):
        Privacy(**({"epsilon": 1.0, "delta": 1e-5, "clip": 1.0} | wrong))


def test_delta_must_be_small_for_so_many_examples() -> None:
    with pytest.raises(KnobError, match="1/100"):
        Privacy(1.0, 0.01, 1.0, 1.0).check(100, None)
    with pytest.raises(KnobError, match="`noise` must be given"):
        Privacy(1.0, 0.001, 1.0).check(100, None)
