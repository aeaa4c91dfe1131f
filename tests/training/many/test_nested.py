"""Many runs of nested examples and weighted losses: each is the run that `train` gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.many_runs import assert_same
from torch import Tensor, nn

import coterie


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 3), nn.Linear(1, 3)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.left(left)) + self.right(right)
        return out


def some_users(ignored: bool) -> list[coterie.User]:
    generator = torch.Generator().manual_seed(0)
    users = []
    for k, name in enumerate(("me", "a", "b")):
        x = torch.randn(14 + k, 3, generator=generator, dtype=torch.float64)
        y = x.argmax(1)
        y[:3] = torch.tensor([0, 1, 2])
        if ignored:
            y[4::5] = -100
        inputs = {"left": x[:, :2], "right": x[:, 2:]}
        held = ({key: value[:5] for key, value in inputs.items()}, y[:5])
        users.append(coterie.User(name, inputs, y, validation=held, test=held))
    return users


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 4.0, 0.3], dtype=torch.float64)])
def test_runs_of_nested_examples(ignored: bool, weight: Tensor | None) -> None:
    torch.manual_seed(0)
    me, *peers = some_users(ignored)
    loss: Any = nn.CrossEntropyLoss(weight)
    base = coterie.RunSpec(Two().double(), loss, me, peers, steps=12, batch_size=5, lr=0.05)
    rules = [coterie.Alone(), coterie.WeightedAveraging(0.3), coterie.BiasCorrection(0.5, 0.1)]
    specs = [replace(base, rule=rule, seed=seed) for rule in rules for seed in (0, 1)]
    for run, spec in zip(coterie.train_many(specs), specs, strict=True):
        assert run.record.configuration.runs == "one program of 6"
        how: dict[str, Any] = {"steps": 12, "batch_size": 5, "lr": 0.05, "seed": spec.seed}
        single = coterie.train(
            spec.model, loss, spec.me, spec.peers, spec.rule, **how, guard="off", measure=False
        )
        assert_same(run, single)
