"""The peers' weights, fitted to user 0's gradient."""

import numpy as np
import torch

from coterie.choosing.adaptive.weights import (
    FACTORED,
    FittedWeights,
    PeerWeights,
    WithoutOutliers,
)
from coterie.engines.engine import Answers, PeerEvidence
from coterie.theory.quadratic import NoisyQuadratic, Quadratic


def test_a_peer_that_points_the_other_way_has_no_weight() -> None:
    fitted = FittedWeights(2)
    fitted.add(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), own=torch.tensor([1.0, 0.1]))
    assert fitted.tau().tolist() == [1.0, 0.0]


def test_where_nobody_counts_weights_are_equal_among_those_who_answered() -> None:
    fitted, away = FittedWeights(3), [torch.nan, torch.nan]
    fitted.add(torch.tensor([[-1.0, 0.0], [-1.0, 0.1], away]), own=torch.tensor([1.0, 0.0]))
    assert fitted.kappa[-1].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert fitted.tau().tolist() == [0.5, 0.5, 0.0]


def test_the_gram_matrix_of_long_gradients_is_that_of_double_precision() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, own = (
        torch.randn(3, 100_001, generator=generator),
        torch.randn(100_001, generator=generator),
    )
    fitted = FittedWeights(3)
    fitted.add(rows, own)
    lacking = torch.cat([torch.zeros(1, 100_001), rows]).double() - own.double()
    np.testing.assert_allclose(fitted.gram, (lacking @ lacking.T).numpy(), rtol=1e-5)


def private_rows(
    noise: list[float], bias: list[float], d: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gradients of peers that are off user 0's by `bias`, each with noise of a norm, and user 0's own."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.zeros(d)
    own[0] = 1.0
    rows = own.repeat(len(noise), 1)
    rows[:, 1] += torch.tensor(bias)
    rows += torch.tensor(noise)[:, None] / d**0.5 * torch.randn(len(noise), d, generator=generator)
    return rows, own


def fitted_to(
    noise: list[float], bias: list[float], *, known: bool, steps: int = 100, d: int = 400
) -> list[float]:
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
    known, not_known = (
        fitted_to([4.0] * 4, [0.0, 0.0, 2.0, 2.0], known=known) for known in (True, False)
    )
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


def test_pooled_has_weights_where_all_who_answered_were_too_long_at_the_end() -> None:
    """Two attackers, each at another trunk, and a third peer that never answers: nothing is divided by zero."""
    engine = NoisyQuadratic(Quadratic(1, 0, noise=0), [Quadratic(1, 0, noise=0)] * 3).engine()
    weights = PeerWeights(engine, 24, 12, 1, n_folds=2)
    theirs = torch.tensor([[[1.0], [1.0], [torch.nan]]] * 2)
    evidence = PeerEvidence(theirs, torch.ones(2, 1))
    longest = torch.full((2,), 10.0)
    for far in ([False] * 3, [True, True, False]):
        weights.fit(WithoutOutliers(evidence, {}, longest, np.array([far] * 2), np.ones(2)))
    assert weights.fork()
    assert weights.by_size.tolist() == [0.5, 0.5, 0.0]


def test_without_a_bound_no_gradient_is_too_long() -> None:
    """Nor where most of the peers' gradients, and user 0's, are zero."""
    theirs = torch.tensor([[[0.0], [0.0], [3.0]]])
    answers = Answers(None, torch.ones(1), {}, judged=PeerEvidence(theirs, torch.zeros(1, 1)))
    near = WithoutOutliers.of(answers, torch.zeros(1), bounded=False, names=["a", "b", "c"])
    assert not near.outlier.any()
    assert not near.left_out


def test_many_peers_are_weighed_by_factors_as_by_gram_matrices() -> None:
    generator = torch.Generator().manual_seed(0)
    many = FACTORED + 40
    by_factors, by_gram = FittedWeights(many), FittedWeights(many)
    by_gram._to_gram()
    for look in range(25):  # more and more columns: in the end it has to be a Gram matrix
        rows, own = torch.randn(many, 4, generator=generator), torch.randn(4, generator=generator)
        by_factors.add(rows + own, own)
        by_gram.add(rows + own, own)
        np.testing.assert_allclose(by_factors.weights, by_gram.weights, atol=1e-7)
        assert bool(by_factors.factors) == (look < 15)
    np.testing.assert_allclose(by_factors.gram, by_gram.gram, atol=1e-5)
    np.testing.assert_allclose(by_factors.tau(), by_gram.tau(), atol=1e-7)


def test_a_peer_that_is_missing_among_many_keeps_its_weight_about() -> None:
    generator = torch.Generator().manual_seed(0)
    fitted, own = FittedWeights(FACTORED), torch.ones(3)
    for look in range(4):
        rows = own + torch.randn(FACTORED, 3, generator=generator)
        rows[0] = torch.nan if look % 2 else own
        fitted.add(rows, own)
    assert fitted.factors
    assert fitted.weights.argmax() == 0
    again = FittedWeights(FACTORED)
    again.load_state_dict(fitted.state_dict())
    for each in (fitted, again):
        each.add(own + torch.randn(FACTORED, 3, generator=generator.manual_seed(1)), own)
    np.testing.assert_array_equal(again.weights, fitted.weights)
