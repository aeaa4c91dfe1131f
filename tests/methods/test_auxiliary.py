"""AuxMom and AuxMVR: plain loops over batches, and what they converge to."""

from __future__ import annotations

import pytest
import torch
from tests.support.exact_users import EXACT
from tests.support.least_squares import PROBLEM, START, N, weights_of
from torch import Tensor

from coterie.methods import AuxMom, AuxMVR

BATCH = 4


def helped(x: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Return g_0 and the mean of the others' gradients at a point."""
    rows = [PROBLEM.gradient(k, x, step, BATCH) for k in range(N)]
    return rows[0], sum(rows[2:], rows[1]) / (N - 1)


@pytest.mark.parametrize("recursive", [False, True])
def test_it_equals_a_plain_loop(recursive: bool) -> None:
    lr, rounds, count, a = 0.02, 4, 3, 0.3
    run = PROBLEM.train(
        (AuxMVR if recursive else AuxMom)(count, a), rounds=rounds, lr=lr, batch_size=BATCH
    )
    x, before, m, step = START.clone(), START.clone(), START * 0, 0
    for t in range(rounds):
        own, h = helped(x, step)
        own_before, h_before = helped(before, step)
        if t == 0:
            m = own - h
        elif recursive:
            m = own - h + (1 - a) * (m - (own_before - h_before))
        else:
            m = (1 - a) * m + a * (own - h)
        before, y = x, x
        for k in range(count):
            y = y - lr * (helped(y, step + 1 + k)[1] + m)
        x, step = y, step + 1 + count
    torch.testing.assert_close(weights_of(run), x, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "method", [AuxMom(1, 0.5), AuxMom(4, 0.5), AuxMVR(1, 0.5), AuxMVR(4, 0.5)], ids=repr
)
def test_it_converges_to_the_own_optimum(method: AuxMom) -> None:
    """A fixed point has h(y) + m = 0 along the round and m = ∇f_0 − h at its start: ∇f_0 = 0, for every K."""
    x = EXACT.play(method, rounds=4000, lr=0.02)[0]
    torch.testing.assert_close(x, PROBLEM.optima[0], rtol=0, atol=1e-6)
