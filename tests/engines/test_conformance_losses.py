"""What every engine must do with losses that are no plain mean, and with data sets read batch by batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from tests.support.model_cases import (
    BATCH,
    CASES,
    SEED,
    TAU,
    Case,
    close,
    make_model,
    make_users,
    plain_gradient,
    some_point,
)
from torch import Tensor, nn
from torch.nn import functional as f
from torch.utils.data import Dataset

import coterie
from coterie.engines.engine import MakeEngine

# Losses whose mean is not over all examples: what one batch shows need not hold for the next.


def padded_users(case: Case, pads: Mapping[str, Sequence[int]]) -> list[coterie.User]:
    users = make_users(case, (8, 8, 8, 5))
    made = []
    for user in users:
        inputs, targets = user.batch(8, seed=0, step=0)
        targets = targets.clone()
        targets[list(pads.get(user.name, ()))] = -100
        made.append(coterie.User(user.name, inputs, targets))
    return made


@pytest.mark.parametrize(
    "loss",
    [
        f.cross_entropy,
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(label_smoothing=0.2),
        lambda output, targets: 2 * f.cross_entropy(output, targets),
    ],
)
@pytest.mark.parametrize("mine", [(), (0, 3)])
def test_ignored_targets(make_engine: MakeEngine, loss: Any, mine: Sequence[int]) -> None:
    users = padded_users(CASES["mlp"], {"me": mine, "peer 1": (0, 1, 5), "peer 3": (4,)})
    model = make_model(CASES["mlp"])
    engine = make_engine(model, loss, users[0], users[1:], batch_size=BATCH, seed=SEED)
    weights = {"peer 1": 0.5, "peer 2": 0.2, "peer 3": 0.3}
    x = some_point(model)
    wanted = [plain_gradient(model, loss, user, x, 0)[0] for user in users]
    average = torch.stack([w * g for w, g in zip(weights.values(), wanted[1:], strict=True)]).sum(0)
    for rows in (False, True):
        g = engine.gradients(x, 0, weights, rows)
        close(g.own, wanted[0])
        close(g.average(weights)[0], average)


@pytest.mark.filterwarnings("ignore:a batch of 'peer 1' has nothing to learn from")
def test_a_peer_all_of_whose_targets_are_ignored(make_engine: MakeEngine) -> None:
    users = padded_users(CASES["mlp"], {"peer 1": range(8)})
    model = make_model(CASES["mlp"])
    engine = make_engine(model, f.cross_entropy, users[0], users[1:], batch_size=BATCH, seed=SEED)
    x, weights = some_point(model), {"peer 1": 0.5, "peer 2": 0.5}
    wanted = [plain_gradient(model, f.cross_entropy, user, x, 0)[0] for user in users]
    average, answered = engine.gradients(x, 0, weights).average(weights)
    assert not wanted[1].any()  # torch's gradient is 0, though the loss is NaN
    close(average, 0.5 * wanted[2])
    assert answered == 1


def test_ignored_targets_of_another_index(make_engine: MakeEngine) -> None:
    users, model = make_users(CASES["mlp"], (20, 30, 9)), make_model(CASES["mlp"])
    loss = nn.CrossEntropyLoss(ignore_index=2)
    engine = make_engine(model, loss, users[0], users[1:], batch_size=BATCH, seed=SEED)
    x, weights = some_point(model), {"peer 1": 0.25, "peer 2": 0.75}
    for step in range(4):
        wanted = [plain_gradient(model, loss, user, x, step)[0] for user in users]
        peers = engine.gradients(x, step, weights).peers
        assert peers is not None
        close(peers, 0.25 * wanted[1] + 0.75 * wanted[2])


def test_class_weights_that_the_first_batch_does_not_show(make_engine: MakeEngine) -> None:
    inputs, _ = make_users(CASES["mlp"])[0].batch(6, seed=0, step=0)
    me = coterie.User("me", inputs, torch.tensor([0, 1, 0, 1, 1, 0]))  # classes of weight 1
    peer = coterie.User("peer 1", inputs, torch.tensor([2, 1, 2, 0, 2, 2]))
    loss = nn.CrossEntropyLoss(torch.tensor([1.0, 1.0, 9.0], dtype=torch.float64))
    model = make_model(CASES["mlp"])
    engine = make_engine(model, loss, me, [peer], batch_size=BATCH, seed=SEED)
    x = some_point(model)
    peers = engine.gradients(x, 0, {"peer 1": 1.0}).peers
    assert peers is not None
    close(peers, plain_gradient(model, loss, peer, x, 0)[0])


def test_a_sum_that_the_first_batch_does_not_show(make_engine: MakeEngine) -> None:
    me = coterie.User("me", torch.ones(1, 2).double(), torch.ones(1, 1).double())
    peer = coterie.User("a", torch.ones(5, 2).double(), torch.zeros(5, 1).double())
    loss, model = nn.MSELoss(reduction="sum"), nn.Linear(2, 1).double()
    x = torch.tensor([1.0, 2.0, 3.0]).double()
    peers = (
        make_engine(model, loss, me, [peer], batch_size=8, seed=0).gradients(x, 0, {"a": 1.0}).peers
    )
    assert peers is not None
    assert peers.tolist() == [60.0, 60.0, 60.0]  # 5 · 2 · (1 + 2 + 3)


def test_targets_of_several_dimensions(make_engine: MakeEngine) -> None:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Unflatten(1, (3, 4))).double()
    users = [
        coterie.User(
            "me" if not k else f"peer {k}",
            torch.randn(n, 6, generator=generator).double(),
            torch.randint(3, (n, 4), generator=generator).masked_fill_(
                torch.rand(n, 4, generator=generator) < 0.3, -100
            ),
        )
        for k, n in enumerate((9, 8, 5))
    ]
    engine = make_engine(model, f.cross_entropy, users[0], users[1:], batch_size=BATCH, seed=SEED)
    x, weights = some_point(model), {"peer 1": 0.5, "peer 2": 0.5}
    wanted = [plain_gradient(model, f.cross_entropy, user, x, 1)[0] for user in users]
    for rows in (False, True):
        g = engine.gradients(x, 1, weights, rows)
        close(g.own, wanted[0])
        close(g.average(weights)[0], 0.5 * (wanted[1] + wanted[2]))


@pytest.mark.parametrize("sizes", [(1, 6, 6), (2, 6, 6), (9, 1, 6)])
@pytest.mark.parametrize("name", ["mlp", "examples that mix"])
def test_users_with_one_example(make_engine: MakeEngine, name: str, sizes: Sequence[int]) -> None:
    case = CASES[name]
    users, model = make_users(case, sizes), make_model(case)
    engine = make_engine(model, case.loss, users[0], users[1:], batch_size=BATCH, seed=SEED)
    x, weights = some_point(model), {"peer 1": 0.5, "peer 2": 0.5}
    wanted = [plain_gradient(model, case.loss, user, x, 0)[0] for user in users]
    g = engine.gradients(x, 0, weights)
    close(g.own, wanted[0])
    close(g.average(weights)[0], 0.5 * (wanted[1] + wanted[2]))


# Data sets that are read batch by batch.


class Noisy(Dataset[tuple[Tensor, int]]):
    def __init__(self, user: coterie.User) -> None:
        self.inputs, self.targets = user.batch(len(user), seed=0, step=0)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.inputs[index] + 0.1 * torch.randn(6), int(self.targets[index])


@pytest.mark.parametrize("name", ["mlp", "batch norm", "dropout"])
def test_datasets_with_random_transforms(make_engine: MakeEngine, name: str) -> None:
    case = CASES[name]
    users = [coterie.User.from_dataset(user.name, Noisy(user)) for user in make_users(case)]
    model = make_model(case)
    engine = make_engine(model, case.loss, users[0], users[1:], batch_size=BATCH, seed=SEED)
    x = some_point(model)
    for rows in (False, True):
        wanted = [plain_gradient(model, case.loss, user, x, 3)[0] for user in users]
        g = engine.gradients(x, 3, TAU, rows)
        close(g.own, wanted[0])
        close(
            g.average(TAU)[0],
            torch.stack([t * w for t, w in zip(TAU.values(), wanted[1:], strict=True)]).sum(0),
        )
