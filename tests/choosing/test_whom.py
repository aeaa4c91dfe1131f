"""The peers' weights, fitted to user 0's gradient."""

import numpy as np
import torch

from coterie.choosing.whom import FittedWeights


def test_a_peer_that_points_the_other_way_has_no_weight() -> None:
    fitted = FittedWeights(2)
    fitted.add(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), own=torch.tensor([1.0, 0.1]))
    assert fitted.tau().tolist() == [1.0, 0.0]


def private_rows(noise: list[float], bias: list[float], d: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gradients of peers that are off user 0's by `bias`, each with noise of a norm, and user 0's own."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.zeros(d)
    own[0] = 1.0
    rows = own.repeat(len(noise), 1)
    rows[:, 1] += torch.tensor(bias)
    rows += torch.tensor(noise)[:, None] / d**0.5 * torch.randn(len(noise), d, generator=generator)
    return rows, own


def fitted_to(noise: list[float], bias: list[float], *, known: bool, steps: int = 100, d: int = 400) -> list[float]:
    fitted = FittedWeights(len(noise), steps)
    added = np.square(noise) if known else None
    for seed in range(12):
        fitted.add(*private_rows(noise, bias, d, seed), added)
    return [float(weight) for weight in fitted.tau()]


def test_a_noisy_unbiased_peer_is_worth_more_than_a_biased_one_and_less_than_a_quiet_one() -> None:
    """Over 100 steps noise of norm 3 leaves .3, which is less than a bias of 1."""
    known = fitted_to([3.0, 0.1], [0.0, 1.0], known=True)
    assert known[0] > 0.6 > fitted_to([3.0, 0.1], [0.0, 1.0], known=False)[0]
    quiet, noisy = fitted_to([2.0, 3.0], [0.0, 0.0], known=True)
    assert 0 < noisy < quiet


def test_equal_noise_does_not_hide_who_is_wrong() -> None:
    known, not_known = (fitted_to([4.0] * 4, [0.0, 0.0, 2.0, 2.0], known=known) for known in (True, False))
    assert sum(known[2:]) < 0.5 * sum(not_known[2:])


def test_no_more_noise_is_believed_than_there_is() -> None:
    """A peer that claims to be all noise is not taken for an unbiased one."""
    fitted = FittedWeights(2, 100)
    rows, own = torch.tensor([[1.0, 0.1], [-3.0, 0.0]]), torch.tensor([1.0, 0.0])
    fitted.add(rows, own, np.array([0.0, 1e9]))
    assert fitted.tau()[0] == 1.0


def test_without_noise_nothing_changes() -> None:
    rows, own = private_rows([1.0, 2.0], [0.0, 1.0], 50, seed=0)
    one, other = FittedWeights(2, 10), FittedWeights(2)
    one.add(rows, own, np.zeros(2))
    other.add(rows, own)
    assert np.array_equal(one.tau(), other.tau())
