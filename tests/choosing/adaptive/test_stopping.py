"""When to stop and which path to serve, by hand."""

import math

import numpy as np
import pytest
import torch

from coterie.choosing.adaptive.account import sentence
from coterie.choosing.adaptive.stopping import (
    Candidate,
    Resampled,
    best_path,
    best_paths,
    hellinger,
    skewed_error,
    standard_error,
)


def test_a_look_that_is_better_on_every_example_is_always_the_best() -> None:
    table = np.array([[1.0, 2.0], [0.5, 1.0]])
    assert Resampled(np.array([0, 1]), seed=0).frequencies(table).tolist() == [0.0, 1.0]


def test_the_path_of_least_mean_loss_is_served() -> None:
    assert (
        best_path({"alone": np.array([2.0, 1.0]), "branch": np.ones(2), "pooled": np.zeros(2)})
        == "pooled"
    )


def test_the_standard_error_of_a_mean() -> None:
    assert standard_error([0.0, 2.0]) == 1.0


def test_the_error_of_skewed_losses_covers_their_mean() -> None:
    """Of log-normal numbers e^z, z of variance 2, the mean is known: e."""
    rng, truth = np.random.default_rng(0), math.e
    covers = dict.fromkeys((skewed_error, standard_error), 0)
    for _ in range(300):
        losses = np.exp(math.sqrt(2) * rng.normal(size=30))
        for error in covers:
            covers[error] += abs(losses.mean() - truth) <= 2 * error(losses)
    assert covers[skewed_error] > covers[standard_error] + 10
    assert covers[skewed_error] > 0.84 * 300
    assert skewed_error(np.ones(8)) == 0.0


def test_the_distance_to_what_was_true_is_hellingers() -> None:
    """By its definition, ½ Σ (√p_i − √q_i)², from predictions of four classes."""
    predicted = (
        torch.randn(50, 4, generator=torch.Generator().manual_seed(0)).double().mul(3).softmax(1)
    )
    classes = torch.arange(50) % 4
    true = torch.nn.functional.one_hot(classes, 4).double()
    by_definition = 0.5 * (predicted.sqrt() - true.sqrt()).square().sum(1)
    losses = torch.nn.functional.nll_loss(predicted.log(), classes, reduction="none").numpy()
    np.testing.assert_allclose(hellinger(losses), by_definition, atol=1e-12)
    assert np.isfinite(hellinger(np.array([-1e9, 1e9]))).all()  # a loss that is no −log p


def test_one_sure_mistake_does_not_stop_a_path_that_learns() -> None:
    """At the last look 39 of 40 examples are right, and one is wrong for sure: −log p is higher than before."""
    before, after = torch.full((40,), 2.0), torch.tensor([0.05] * 39 + [160.0])
    assert after.mean() > before.mean()
    paths = {"alone": Candidate()}
    for step, losses in enumerate((before, after)):
        paths["alone"].add(step, torch.tensor([float(step)]), losses, losses, losses)
    folds = np.arange(40) % 2
    by_loss = Resampled(folds, seed=0).choose(paths, nested=True)
    resampled = Resampled(folds, seed=0, distance=hellinger)
    by_distance = resampled.choose(paths, nested=True)
    assert by_loss.frequencies["alone"][0] > 0.5
    assert by_distance.frequencies["alone"].tolist() == [0.0, 1.0]
    served, alone = resampled.told(
        by_distance, paths, lambda point: (after if point == 1 else before).numpy()
    )
    np.testing.assert_allclose(served, after)  # what is told is the loss
    np.testing.assert_allclose(alone, after)


@pytest.mark.parametrize("last", [math.inf, math.nan])
def test_a_look_with_a_loss_that_is_not_finite_is_never_the_best(last: float) -> None:
    """It is right on 39 of 40 examples, and 1 − √p alone would count the last one as no more than 1."""
    paths = {"alone": Candidate()}
    for step, losses in enumerate((torch.full((40,), 1.0), torch.tensor([0.01] * 39 + [last]))):
        paths["alone"].add(step, torch.tensor([float(step)]), losses, losses, losses)
    resampled = Resampled(np.arange(40) % 2, seed=0, distance=hellinger)
    with_the_last = (resampled.counts[:, -1] > 0).mean()  # in the other resamples it is not seen
    frequencies = resampled.choose(paths, nested=True).frequencies["alone"]
    assert frequencies.tolist() == pytest.approx([with_the_last, 1 - with_the_last])


def test_no_more_is_said_than_is_known() -> None:
    said = "the model trained alone is served: following peers was not better on own examples that were held out"
    account = {"path": "alone", "folds": 3, "looks": {"alone": {}, "branch": {}, "pooled": {}}}
    assert sentence(account, 0) == said
    # both judge
    assert sentence(account | {"difference": 0.0}, 20) == f"{said} and 20 validation examples"


def test_what_is_said_of_alone_agrees_with_the_numbers() -> None:
    account = {
        "path": "pooled",
        "stop": {"first": 3, "last": 3},
        "crossed_loss": 0.5,
        "crossed_error": 0.1,
    }
    account |= {"chosen_by": "1 − √p", "alone_crossed_loss": 0.7}
    assert sentence(account, 0).endswith(
        "Alone's, 0.7, looks worse than it is where examples are few"
    )
    account["alone_crossed_loss"] = 0.4
    assert sentence(account, 0).endswith("Alone's is 0.4, but in 1 − √p it was behind")
    account["chosen_by"] = "loss"
    assert sentence(account, 0).endswith("Alone's is 0.4, but before that correction it was behind")


def test_the_path_without_each_example_is_that_of_the_others() -> None:
    rng = np.random.default_rng(0)
    scores = {name: rng.random(7) for name in ("alone", "branch", "pooled")}
    one_by_one = [
        best_path({name: np.delete(each, i) for name, each in scores.items()}) for i in range(7)
    ]
    assert best_paths(scores).tolist() == one_by_one
    assert len(set(one_by_one)) > 1
    assert best_paths({"alone": np.ones(3)}).tolist() == ["alone"] * 3


D, FOLDS = 6, np.arange(30) % 3


def ridge(
    inputs: np.ndarray, targets: np.ndarray, towards: np.ndarray, strength: float
) -> np.ndarray:
    """Return the least squares solution drawn towards a point, which is that of early stopping."""
    gram = inputs.T @ inputs + strength * len(inputs) * np.eye(D)
    return towards + np.linalg.solve(gram, inputs.T @ (targets - inputs @ towards))


def told_and_fresh(seed: int, spread: float) -> tuple[float, float, float]:
    """Return the loss told of what is served, its fresh loss, and what the best mean loss seen would have told."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=D)
    inputs = rng.normal(size=(30, D))
    targets = inputs @ truth + rng.normal(size=30)
    # the peers' solution, which no own example has had a part in
    peers = truth + spread * rng.normal(size=D)

    def losses(point: np.ndarray) -> np.ndarray:
        return np.asarray((inputs @ point - targets) ** 2)

    paths = {"alone": Candidate(), "branch": Candidate(), "pooled": Candidate()}
    for look, strength in enumerate((3.0, 1.0, 0.3, 0.1, 0.03, 0.0)):
        for name, towards in (("alone", np.zeros(D)), ("branch", peers)):
            full = ridge(inputs, targets, towards, strength)
            parts = [
                ridge(inputs[kept], targets[kept], towards, strength)
                for kept in np.arange(3)[:, None] != FOLDS
            ]
            blind = np.stack([losses(point) for point in parts])
            crossed = blind[FOLDS, np.arange(30)]
            noted = (crossed, crossed + losses(full) - blind.mean(0), losses(full))
            paths[name].add(look, torch.from_numpy(full), *map(torch.from_numpy, noted))
        at_peers = torch.from_numpy(losses(peers))
        paths["pooled"].add(look, torch.from_numpy(peers), at_peers, at_peers, at_peers)
    resampled = Resampled(FOLDS, seed)
    chosen = resampled.choose(paths, nested=True)
    served, _ = resampled.told(chosen, paths, lambda point: losses(point.numpy()))
    point = paths[chosen.path].mean_point(chosen.frequencies[chosen.path]).numpy()
    naive = min(path.table().mean(1).min() for path in paths.values())
    return float(served.mean()), float(1 + np.square(point - truth).sum()), float(naive)


@pytest.mark.parametrize("spread", [0.1, 0.4, 3.0])
def test_what_is_told_is_honest_both_ways(spread: float) -> None:
    """Related peers, half-related ones and strangers: neither too low for having been chosen nor much too high.

    Within two standard errors of 120 repetitions, and a twentieth: few examples leave it a little
    too high.
    """
    told, fresh, naive = np.array([told_and_fresh(seed, spread) for seed in range(120)]).T
    off = told - fresh
    error = off.std(ddof=1) / math.sqrt(len(off))
    assert error < 0.05
    assert -2 * error <= off.mean() <= 2 * error + 0.05
    if spread == 0.4:  # the best of all looks seen is too good to be true
        naive_off = naive - fresh
        assert naive_off.mean() < -2 * naive_off.std(ddof=1) / math.sqrt(len(off))
