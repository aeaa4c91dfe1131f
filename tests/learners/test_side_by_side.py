"""Many runs at once: one program against the plain loop, and the loop against ordinary training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.many_runs import from_disk, my_loss
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import coterie
from coterie.gradients.parameters import Parameters
from coterie.learners.side_by_side import ELEMENTWISE, Batched, OneByOne, side_by_side, why_one_by_one
from coterie.learners.spec import RunSpec

Users = Callable[..., list[coterie.User]]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.03),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.03),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def problem(users: list[coterie.User], model: nn.Module, **changed: Any) -> RunSpec:
    settings: dict[str, Any] = {
        "optimizer": torch.optim.Adam(model.parameters(), lr=0.03),
        "steps": 6,
        "batch_size": 4,
    } | changed
    return RunSpec(model, settings.pop("loss", cross_entropy), users[0], users[1:], **settings)


def folds(n: int, count: int = 3) -> Tensor:
    """Return which examples each of `count` runs sees; fold sizes differ where `count` does not divide `n`."""
    return torch.arange(n) % count != torch.arange(count)[:, None]


def some_weights(runs: int, peers: int) -> Tensor:
    weights = torch.rand(runs, 1 + peers, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights[0, 1:] = 0.0  # one run is Alone
    weights[-1, 0] = 0.0  # and one without the own gradient
    return weights / weights.sum(1, keepdim=True)


@pytest.mark.parametrize("batch_size", [3, 100])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_program_is_the_plain_loop(make_users: Users, kind: str, batch_size: int) -> None:
    users, model = make_users((13, 16, 9, 5)), network()
    posed = problem(users, model, optimizer=OPTIMIZERS[kind](model.parameters()), batch_size=batch_size)
    seen, weights = folds(13), some_weights(3, 3)
    together, apart = side_by_side(posed, seen), OneByOne(posed, seen)
    assert isinstance(together, Batched)
    for _ in range(6):
        torch.testing.assert_close(together.grams(), apart.grams(), rtol=1e-9, atol=1e-12)
        together.advance(weights)
        apart.advance(weights)
        torch.testing.assert_close(together.x, apart.x, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        together.held_out_losses(), apart.held_out_losses(), rtol=1e-9, atol=1e-12, equal_nan=True
    )
    assert torch.equal(together.held_out_losses().isnan(), seen)


@pytest.mark.parametrize("n_classes", [3, None])
def test_a_run_is_what_train_gives_on_the_examples_it_sees(make_users: Users, n_classes: int | None) -> None:
    users, loss = make_users(n_classes=n_classes), cross_entropy if n_classes else mse_loss
    model = network() if n_classes else nn.Linear(3, 1).double()
    halving = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)  # noqa: E731
    posed = problem(users, model, loss=loss, scheduler=halving)
    seen, weights = folds(12), some_weights(3, 3)
    runs = side_by_side(posed, seen)
    for _ in range(6):
        runs.advance(weights)
    inputs, targets = users[0].examples.take(torch.arange(12))
    for x, kept, (own, *peers) in zip(runs.x, seen, weights.tolist(), strict=True):
        me = coterie.User("me", inputs[kept], targets[kept])
        rule: coterie.Rule = coterie.Alone()
        if sum(peers):
            tau = {user.name: weight / sum(peers) for user, weight in zip(users[1:], peers, strict=True)}
            rule = coterie.WeightedAveraging(1 - own, tau)
        settings = {"steps": 6, "lr": 0.03, "batch_size": 4, "scheduler": halving, "progress": False}
        run = coterie.train(model, loss, me, users[1:], rule, **settings)  # type: ignore[arg-type]
        torch.testing.assert_close(x, Parameters(run.model).vector(), rtol=1e-9, atol=1e-12)


def test_gram_matrices_are_of_what_each_gradient_lacks(make_users: Users) -> None:
    users, model = make_users(), nn.Linear(3, 3).double()
    seen = folds(12, 2)
    grams = side_by_side(problem(users, model, batch_size=100), seen).grams()
    inputs, targets = users[0].examples.take(torch.arange(12))

    def gradient(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat(
            [g.flatten() for g in torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))]
        )

    for gram, kept in zip(grams, seen, strict=True):
        batches = [(inputs[kept], targets[kept]), *(u.examples.take(torch.arange(len(u))) for u in users[1:])]
        lacking = torch.stack([gradient(*batch) for batch in batches]) - gradient(inputs[~kept], targets[~kept])
        torch.testing.assert_close(gram, lacking @ lacking.T)


def test_runs_may_start_anywhere_and_groups_of_parameters_are_kept(make_users: Users) -> None:
    users, model = make_users(), network()
    groups = [{"params": [p], "lr": 0.1 / (i + 1)} for i, p in enumerate(model.parameters())]
    posed = problem(users, model, optimizer=torch.optim.SGD(groups, lr=1.0, momentum=0.5))
    starts = torch.randn(3, Parameters(model).size, dtype=torch.float64)
    together, apart = (side_by_side(posed, folds(12), starts=starts), OneByOne(posed, folds(12), starts))
    assert torch.equal(together.x, starts)
    for _ in range(3):
        together.advance(some_weights(3, 3))
        apart.advance(some_weights(3, 3))
    torch.testing.assert_close(together.x, apart.x, rtol=1e-9, atol=1e-12)
    assert not posed.made_optimizer.state
    assert torch.equal(Parameters(model).vector(), Parameters(network()).vector())  # what was passed is untouched


def test_what_cannot_be_one_program_goes_one_by_one_and_says_why(make_users: Users) -> None:
    users, model = make_users(), network()
    assert why_one_by_one(problem(users, model)) is None
    assert "mean over examples" in (why_one_by_one(problem(users, model, loss=my_loss)) or "")
    normalised = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    assert "buffers" in (why_one_by_one(problem(users, normalised)) or "")
    dropout = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3)).double()
    assert "random" in (why_one_by_one(problem(users, dropout)) or "")
    matrices = torch.optim.Adafactor(model.parameters())
    assert "Adafactor" in (why_one_by_one(problem(users, model, optimizer=matrices)) or "")
    read = [from_disk(users[0]), *users[1:]]
    assert "in memory" in (why_one_by_one(problem(read, model)) or "")
    for posed in (problem(users, model, loss=my_loss), problem(users, normalised), problem(read, model)):
        runs = side_by_side(posed, folds(12))
        assert isinstance(runs, OneByOne)
        before = copy.deepcopy(runs.grams())
        assert torch.equal(runs.grams(), before)  # looking moves nothing
        runs.advance(some_weights(3, 3))
        assert bool(runs.grams().isfinite().all())
        assert torch.equal(runs.held_out_losses().isnan(), folds(12))


def test_examples_read_one_by_one_train_as_those_in_memory(make_users: Users) -> None:
    users, model = make_users(), network()
    read = [from_disk(users[0]), *users[1:]]
    runs = [side_by_side(problem(each, model), folds(12)) for each in (users, read)]
    for run in runs:
        run.advance(some_weights(3, 3))
    torch.testing.assert_close(runs[0].x, runs[1].x, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_elementwise_optimizers_are(name: str) -> None:
    """Two parameters in one tensor step as each does by itself."""
    generator = torch.Generator().manual_seed(0)
    start, slopes = (torch.randn(2, 4, generator=generator) for _ in range(2))
    kind = getattr(torch.optim, name)
    whole, *rows = ([x.clone().requires_grad_()] for x in (start, *start))
    for parameters, slope in zip((whole, *rows), (slopes, *slopes), strict=True):
        optimizer = kind(parameters)
        for scale in (1.0, -2.0, 0.5):
            parameters[0].grad = scale * slope
            optimizer.step()
    np.testing.assert_allclose(whole[0].detach(), torch.stack([row[0].detach() for row in rows]), rtol=1e-6)
