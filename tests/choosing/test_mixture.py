"""`Mixture` in a run: the numbers of the closed form, an honest record, another rule where it cannot serve."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import RidgeCV
from torch import nn

import coterie
from coterie.choosing.mixture import family_of
from coterie.engines import PrivatePeers
from coterie.engines.peer.linear_rows import linear_of
from coterie.mixture.families import SOFTMAX, SQUARED, Family
from coterie.mixture.fit import fit_here
from coterie.privacy.privacy import Privacy
from coterie.training.train import default_rule
from coterie.users.sampling import random_key

QUIET: dict[str, Any] = {"measure": False, "progress": False}


def users(
    n: int = 24, classes: int = 0, **held_out: object
) -> tuple[coterie.User, list[coterie.User]]:
    random = torch.Generator().manual_seed(0)
    truth = torch.randn(4, max(1, classes), generator=random)

    def examples(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(rows, 4, generator=random)
        outputs = inputs @ truth + torch.randn(rows, max(1, classes), generator=random)
        return inputs, outputs.argmax(1) if classes else outputs

    me = coterie.User("me", *examples(n), **held_out)  # type: ignore[arg-type]
    return me, [coterie.User(f"peer {k}", *examples(60)) for k in range(4)]


def weights(model: nn.Module | None) -> tuple[np.ndarray, np.ndarray]:
    """Return coefficients and intercepts of a linear model."""
    assert isinstance(model, nn.Linear)
    return model.weight.detach().numpy().T, model.bias.detach().numpy()


@pytest.mark.parametrize(("classes", "family"), [(0, SQUARED), (3, SOFTMAX)])
def test_a_run_serves_the_closed_form(classes: int, family: Family) -> None:
    me, peers = users(classes=classes)
    loss = nn.functional.cross_entropy if classes else nn.functional.mse_loss
    run = coterie.train(nn.Linear(4, max(1, classes)), loss, me, peers, coterie.Mixture(), **QUIET)

    def numbers(user: coterie.User) -> tuple[np.ndarray, np.ndarray]:
        x, y = user.examples.take(torch.arange(len(user)))
        return x.double().numpy(), y.numpy()

    seed = random_key(0, "me/folds") % 2**32
    fitted = fit_here(
        *numbers(me), [numbers(peer) for peer in peers], family, max(1, classes), seed=seed
    )
    for model, entry in ((run.model, fitted.served), (run.alone, fitted.alone)):
        slopes, base = weights(model)
        np.testing.assert_allclose(slopes, entry.parameters[:-1], rtol=1e-5)
        np.testing.assert_allclose(base, entry.parameters[-1], rtol=1e-5, atol=1e-6)


def test_it_does_not_depend_on_how_gradients_would_be_followed() -> None:
    """Initial weights, step size, batch size and number of steps do not matter."""
    me, peers = users()
    models = [nn.Linear(4, 1) for _ in range(2)]
    settings: list[dict[str, Any]] = [{"lr": 0.1, "steps": 3, "batch_size": 2}, {}]
    runs = [
        coterie.train(model, nn.functional.mse_loss, me, peers, coterie.Mixture(), **QUIET, **some)
        for model, some in zip(models, settings, strict=True)
    ]
    np.testing.assert_array_equal(weights(runs[0].model)[0], weights(runs[1].model)[0])


def test_the_record_has_the_leaderboard_and_a_verdict_without_a_test_set() -> None:
    me, peers = users()
    run = coterie.train(
        nn.Linear(4, 1), nn.functional.mse_loss, me, peers, coterie.Mixture(), **QUIET
    )
    account = run.record.end.account
    assert {"served", "constant", "alone", "pooled", "hierarchical"} <= set(account["leaderboard"])
    assert account["exchanges"] <= 60
    assert (
        "24 own examples, each by models that were fitted and mixed without it"
        in run.record.end.verdict
    )
    assert "a mixture is served" in run.summary()


def test_validation_examples_are_evidence_and_not_fitted_to() -> None:
    """Validation examples of another truth move the weights; their number moves nothing else."""
    me, peers = users()
    inputs = torch.randn(60, 4)
    contrary = (
        inputs,
        -(me.examples.take(torch.arange(1))[1][0] + inputs.sum(1, keepdim=True) * 3),
    )
    judged = users(validation=contrary)[0]
    loss = nn.functional.mse_loss
    one, two = (
        coterie.train(nn.Linear(4, 1), loss, each, peers, coterie.Mixture(), **QUIET)
        for each in (me, judged)
    )
    assert not np.array_equal(weights(one.model)[0], weights(two.model)[0])
    boards = [run.record.end.account["leaderboard"] for run in (one, two)]
    assert boards[0]["constant"]["loss"] == pytest.approx(boards[1]["constant"]["loss"])


def test_another_model_or_loss_is_trained_by_gradients() -> None:
    me, peers = users()
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    run = coterie.train(
        network, nn.functional.mse_loss, me, peers, coterie.Mixture(), steps=4, **QUIET
    )
    assert (
        run.record.configuration.choice["sentence"]
        == "trained by gradient steps: the model is not one `nn.Linear`"
    )
    assert run.step == 4
    run = coterie.train(
        nn.Linear(4, 1), nn.functional.l1_loss, me, peers, coterie.Mixture(), steps=4, **QUIET
    )
    assert "the loss is not" in run.record.configuration.choice["sentence"]


def test_what_is_linear() -> None:
    assert linear_of(nn.Sequential(nn.Flatten(), nn.Linear(2, 1))) is not None
    frozen = nn.Linear(2, 1)
    frozen.bias.requires_grad = False
    assert linear_of(frozen) is None
    assert linear_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))) is None
    assert linear_of(nn.Sequential(nn.Linear(2, 1), nn.Dropout())) is None


def test_which_losses_are_known() -> None:
    assert family_of(nn.MSELoss()) is SQUARED
    assert family_of(nn.CrossEntropyLoss(weight=torch.ones(2))) is None
    assert family_of(nn.CrossEntropyLoss(ignore_index=0)) is None
    assert family_of(nn.BCEWithLogitsLoss(pos_weight=torch.ones(1))) is None
    assert family_of(nn.functional.nll_loss) is None
    assert family_of(nn.MSELoss(reduction="sum")) is None
    assert family_of(coterie.per_example(lambda output, target: (output - target).square())) is None


def test_one_own_example_and_nobody_else() -> None:
    me, peers = users(n=1)
    run = coterie.train(
        nn.Linear(4, 1), nn.functional.mse_loss, me, peers, coterie.Mixture(), **QUIET
    )
    assert np.isfinite(weights(run.model)[0]).all()


# The default.


def planted(
    seed: int, stranger: bool
) -> tuple[coterie.User, list[coterie.User], np.ndarray[Any, Any]]:
    """Return users who differ in one of 8 coefficients: 40 own rows, 8 peers of 200; and the own coefficients."""
    random = np.random.default_rng(seed)
    centre, spread = random.normal(size=8), np.array([0.05] * 7 + [1.0])
    users, own = [], np.zeros(8)
    for k, n in enumerate([40] + [200] * 8):
        truth = (-centre if stranger and not k else centre) + spread * random.normal(size=8)
        own = own if k else truth
        x = random.normal(size=(n, 8))
        y = (x @ truth + random.normal(size=n))[:, None]
        users.append(coterie.User(f"user {k}", torch.tensor(x).float(), torch.tensor(y).float()))
    return users[0], users[1:], own


@pytest.mark.parametrize(("stranger", "most"), [(False, 0.4), (True, 1.1)])
def test_with_nothing_set_it_is_better_than_a_ridge_by_cross_validation(
    stranger: bool, most: float
) -> None:
    ours, ridge = [], []
    for seed in range(10):
        me, peers, truth = planted(seed, stranger)
        run = coterie.train(nn.Linear(8, 1), nn.functional.mse_loss, me, peers)
        assert "Mixture(), 8 peers, in closed form by 39 exchanges" in run.summary()
        ours.append(np.square(next(run.model.parameters()).detach().numpy()[0] - truth).sum())
        inputs, targets = me.batch(40, seed=0, step=0)
        plain = RidgeCV(np.logspace(-3, 3, 13)).fit(inputs.numpy(), targets.numpy()[:, 0])
        ridge.append(np.square(plain.coef_ - truth).sum())
    assert np.mean(ours) <= most * np.mean(ridge)


@pytest.mark.parametrize(
    "settings", [{"lr": 0.1}, {"steps": 20}, {"optimizer": torch.optim.SGD, "lr": 0.01}]
)
def test_who_describes_steps_gets_them(settings: dict[str, Any]) -> None:
    me, peers, _ = planted(0, stranger=False)
    settings = {"steps": 3} | settings if "lr" in settings else settings
    run = coterie.train(
        nn.Linear(8, 1), nn.functional.mse_loss, me, peers, measure=False, **settings
    )
    assert run.record.configuration.rule.startswith("AdaptiveAveraging(")


def test_peers_elsewhere_are_asked_for_e_steps_and_private_ones_for_gradients() -> None:
    """What an engine's peers answer is found out once it is open; a private peer promises noise on all it gives."""
    me, peers, _ = planted(0, stranger=False)
    base = coterie.RunSpec(nn.Linear(8, 1), nn.functional.mse_loss, me, peers)
    promise = Privacy(epsilon=4.0, delta=1e-3, clip=1.0)
    private = partial(PrivatePeers, privacy={peers[2].name: promise}, gradients=10)
    for make, why in ((coterie.InProcess, None), (private, f"{peers[2].name}: it promises")):
        spec = replace(base, engine=make)
        assert isinstance(default_rule(spec), coterie.Mixture)
        engine = make(base.model, base.loss, me, peers, batch_size=8, seed=0)
        choice = coterie.Mixture().choose(spec, engine, {}, None)
        assert (choice is None) == (why is None)
        if choice is not None:
            assert isinstance(choice.rule, coterie.AdaptiveAveraging)
            assert f"trained by gradient steps: {why}" in choice.account["sentence"]
