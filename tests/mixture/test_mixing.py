"""Candidates that are not linear beside those that are: what is served is what was told."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import stdtrit
from scipy.stats import ttest_1samp
from torch import nn

from coterie.mixture.candidates import Candidates
from coterie.mixture.families import FAMILIES, SOFTMAX, SQUARED, Array, Family
from coterie.mixture.fit import Fitted, fit_here
from coterie.mixture.mixing import MixtureEntry, mean_difference, mix, mixed, without_small
from coterie.mixture.served import MixedPredictions, Predictor, linear_model
from coterie.tables.models import load_model, save_model


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, outputs))


def behind_tanh(at: Array) -> nn.Module:
    """Return the model whose last layer has these parameters."""
    layer = nn.Linear(at.shape[0], at.shape[1], bias=False)
    layer.weight.data = torch.from_numpy(at.T).float()
    return nn.Sequential(nn.Flatten(), nn.Tanh(), layer)


@pytest.mark.parametrize("family", list(FAMILIES.values()), ids=lambda family: family.name)
def test_the_module_served_gives_the_outputs_that_were_judged(family: Family) -> None:
    """Its predictions are the mean of all candidates' by w ∝ π exp(−Σ loss), but for parts of nearly nothing."""
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    x, k = random.normal(size=(40, 3)), 3
    y = (
        random.integers(0, 3, size=(40, k)).astype(float)
        if family.name != "softmax"
        else np.eye(3)[x.argmax(1)]
    )
    y = (y > 1).astype(float) if family.name == "logistic" else y
    one, two = network(3, k), network(3, k)
    parameters = random.normal(size=(4, 5, k)) * 0.1

    def outputs(module: nn.Module) -> Array:
        numbers: Array = module(torch.from_numpy(x).float()).detach().double().numpy()
        return numbers

    linear = np.stack([x @ parameters[:3, j] + parameters[3, j] for j in range(5)], 1)
    nets = [Predictor(one), Predictor(one, 2.0), Predictor(two)]
    given = np.stack([outputs(each.model) / each.temperature for each in nets], 1)
    last = random.normal(size=(3, 2, k)) * 0.1
    hidden = np.stack([np.tanh(x) @ last[:, j] for j in range(2)], 1)
    blocks = [
        Candidates("alone", linear, parameters=parameters, alone=True),
        Candidates("net", given, predictors=nets),
        Candidates("layer", hidden, parameters=last, behind=behind_tanh),
    ]
    found = mix(family, y, np.arange(40) % 4, blocks, held_out=np.zeros((0, k)))
    served = found.served.model(family, intercept=True)
    assert isinstance(served, MixedPredictions)
    total = family.losses(np.concatenate([linear, given, hidden], 1), y[:, None]).sum(0)

    def likely(total: Array) -> Array:
        total = total / (2 * total.min() / (40 * k)) if family is SQUARED else total
        raw: Array = np.exp(-(total - total.min()) / 2)  # π is the same for all
        raw /= raw.sum()
        return raw

    w = without_small(likely(total), np.array([0] * 5 + [1, 1, 2, 3, 3]))
    link = family.predict
    mean = w[:5].sum() * link(np.einsum("j,njk->nk", w[:5], linear) / w[:5].sum())
    mean = mean + np.einsum("j,njk->nk", w[5:8], link(given))
    mean = mean + w[8:].sum() * link(np.einsum("j,njk->nk", w[8:], hidden) / w[8:].sum())
    np.testing.assert_allclose(link(outputs(served)), mean, rtol=1e-4, atol=1e-6)
    assert found.served.weight == pytest.approx(1)
    assert sum(entry.weight for entry in found.entries.values()) == pytest.approx(1)
    layer = found.entries["layer"].model(family, intercept=True)
    share = likely(total[8:])
    np.testing.assert_allclose(
        link(outputs(layer)),
        link(np.einsum("j,njk->nk", share, hidden)),
        rtol=1e-4,
        atol=1e-6,
    )


def test_a_single_model_is_the_most_probable() -> None:
    y = np.tile([[0.9], [1.1]], (4, 1))
    net = nn.Linear(1, 1)
    blocks = [
        Candidates("constant", np.zeros((8, 1, 1)), parameters=np.zeros((2, 1, 1)), alone=True),
        Candidates("net", np.ones((8, 1, 1)), predictors=[Predictor(net)]),
    ]
    found = mix(SQUARED, y, np.arange(8) % 2, blocks, single=True)
    assert found.served.model(SQUARED, intercept=True) is net
    np.testing.assert_allclose(found.served.losses, 0.01)


def test_others_join_a_fit_and_small_parts_are_left_out() -> None:
    random = np.random.default_rng(0)
    users = [(random.normal(size=(n, 2)), random.integers(0, 2, n)) for n in (40, 60, 60)]
    bad, good = network(2, 2), network(2, 2)
    sure = 8.0 * np.eye(2)[users[0][1]][:, None]

    def others(folds: Array) -> list[Candidates]:
        assert folds.shape == (40,)
        return [
            Candidates(
                "nets",
                np.concatenate([sure, -sure], 1),
                predictors=[Predictor(good), Predictor(bad)],
            )
        ]

    fitted = fit_here(*users[0], users[1:], SOFTMAX, 2, others=others)
    assert fitted.entries["nets"].weight > 0.9
    assert [each.model for _, each in fitted.served.others] == [good]


def test_a_mixture_is_saved_loaded_and_trained_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    parts = [
        Predictor(network(3, 2), 1.5),
        Predictor(linear_model(np.ones((4, 2)), intercept=True)),
    ]
    model = MixedPredictions(parts, [0.3, 0.7], "softmax")
    save_model(tmp_path, model, "mlp", 3, 2)
    x = torch.randn(7, 3)
    again = load_model(tmp_path)
    torch.testing.assert_close(again(x), model(x))
    optimizer, losses = torch.optim.SGD(again.parameters(), lr=0.1), []
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(again(x), torch.zeros(7, dtype=torch.long))
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_a_rows_weights_are_found_without_its_fold() -> None:
    """Other targets in one fold change what is told of the rows of every other fold, and of none of its own."""
    random, folds = np.random.default_rng(0), np.arange(12) % 4
    outputs, targets = random.normal(size=(12, 3, 1)), random.normal(size=(12, 1))
    other = np.where(folds[:, None] == 1, targets + 2, targets)
    prior = np.full(3, 1 / 3)
    before, after = (mixed(SQUARED, outputs, y, folds, prior) for y in (targets, other))
    changed = (before.outputs != after.outputs)[:, 0]
    np.testing.assert_array_equal(changed, folds != 1)
    assert (before.weights != after.weights).any()


def test_of_each_fold_the_loss_of_the_mixture_without_it_is_known() -> None:
    """By hand: weights from the blind losses of the other folds, outputs of the models without the fold."""
    random, folds = np.random.default_rng(0), np.arange(12) % 3
    by_fold, targets = random.normal(size=(3, 12, 4, 1)), random.normal(size=(12, 1))
    blind = by_fold[folds, np.arange(12)]
    about: dict[str, Any] = {"parameters": np.zeros((2, 2, 1)), "by_fold": by_fold[:, :, :2]}
    blocks = [
        Candidates("alone", blind[:, :2], alone=True, **about),
        Candidates("other", blind[:, 2:], **about | {"by_fold": by_fold[:, :, 2:]}),
    ]
    found = mix(SQUARED, targets, folds, blocks)
    for q in range(3):
        total = np.square(blind - targets[:, None])[folds != q, :, 0].sum(0)
        w = np.exp(-(total - total.min()) / (total.min() / 8) / 4)
        served = by_fold[q, :, :, 0] @ (w / w.sum())
        expected = np.square(served - targets[:, 0]).mean()
        np.testing.assert_allclose(found.served.of_folds[q], expected, rtol=1e-9)
    without = mix(SQUARED, targets, folds, [blocks[0], replace(blocks[1], by_fold=None)])
    assert without.served.of_folds.size == 0
    np.testing.assert_array_equal(without.served.losses, found.served.losses)


def test_an_interval_leaves_out_as_many_on_either_side_of_skewed_losses() -> None:
    """Means of 20 rows of which few have most of the sum; Student's t leaves out many more above."""
    random, mean = np.random.default_rng(0), math.exp(0.5)
    rows = random.lognormal(size=(2000, 20))
    ends = np.array([mean_difference(each, 4, np.zeros(4))[1:] for each in rows])
    plain = np.array([ttest_1samp(each, 0).confidence_interval() for each in rows])
    covered, by_t = (((e[:, 0] <= mean) & (mean <= e[:, 1])).mean() for e in (ends, plain))
    assert covered > 0.9 > by_t
    assert (mean > ends[:, 1]).mean() < 0.75 * (mean > plain[:, 1]).mean()


def test_models_of_folds_that_differ_widen_an_interval_by_the_jackknifes_variance() -> None:
    changes, moved = np.tile([-1.0, 1.0], 10), np.array([0.1, -0.1, 0.2, 0.0])
    rows, of_folds = changes.var(ddof=1) / 20, 3 / 4 * 4 * moved.var()
    low, high = mean_difference(changes, 4, moved)[1:]
    reach = stdtrit(19, 0.975) * math.sqrt(rows + 5 * of_folds)
    np.testing.assert_allclose([low, high], [-reach, reach])
    assert mean_difference(changes, 4, moved + 3) == pytest.approx((0, low, high))


@pytest.mark.parametrize("family", [SOFTMAX, SQUARED], ids=lambda family: family.name)
def test_a_constant_is_served_where_own_rows_speak_for_it(family: Family) -> None:
    """Twenty to one: 2.94 nats in all; of squares, 40 halves of the logarithm's first order."""

    def entry(losses: Array) -> MixtureEntry:
        return MixtureEntry(1.0, losses, np.zeros((2, 1)))

    guess = entry(np.ones(40))
    nats = math.log(0.95 / 0.05) / 40 * (2 if family.is_squared else 1)
    for more, constant in ((0.99 * nats, False), (1.01 * nats, True), (-1.0, False)):
        mixture = entry(np.linspace(0, 2, 40) + more)  # as far apart as rows may be
        lines = {"constant": guess}
        fitted = Fitted.of(mixture, mixture, lines, np.zeros(0), folds=4, family=family)
        assert fitted.is_constant is constant
        assert fitted.served is (guess if constant else mixture)
