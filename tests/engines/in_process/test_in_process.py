"""How users share passes in one process."""

from __future__ import annotations

import pytest
import torch
from tests.support.model_cases import (
    BATCH,
    CASES,
    SEED,
    Case,
    make_model,
    make_users,
    some_point,
    way_of_rows,
)
from torch import Tensor, nn

import coterie
from coterie.gradients.parameters import Parameters

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@every_case
def test_each_case_goes_the_way_it_should(case: Case) -> None:
    users = make_users(case)
    engine = coterie.InProcess(
        make_model(case), case.loss, users[0], users[1:], batch_size=BATCH, seed=SEED
    )
    told = engine.describe()
    assert told["average"].startswith(case.average)
    assert told["rows"].startswith("loop") == (case.rows == "loop")
    assert way_of_rows(engine) == case.rows


@pytest.mark.parametrize("name", ["mlp", "cnn", "lstm", "loss with item", "class weights"])
@pytest.mark.parametrize("n_peers", [1, 3, 9])
def test_the_average_takes_two_passes(name: str, n_peers: int) -> None:
    case = CASES[name]
    users = make_users(case, [20, 5, 33, *[16] * 9][: n_peers + 1])
    model = make_model(case)
    engine = coterie.InProcess(model, case.loss, users[0], users[1:], batch_size=BATCH, seed=SEED)
    passes: list[int] = []
    model.register_forward_hook(lambda *_: passes.append(1))
    x = Parameters(model).share()
    for point in (x, some_point(model)):
        passes.clear()
        engine.gradients(point, 0, {user.name: 1 / n_peers for user in users[1:]})
        assert len(passes) == 2
        passes.clear()
        engine.gradients(point, 0, {})
        assert len(passes) == 1


class Block(nn.Module):
    """A layer that is passed twice, under one name, or under two."""

    def __init__(self, *, names: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        if names == 2:
            self.again = self.layer

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.last(self.layer(torch.tanh(self.layer(inputs))))
        return result


@pytest.mark.parametrize(
    "rule",
    [
        coterie.WeightedAveraging(0.5),
        coterie.AdaptiveAveraging(),
        coterie.rules.similarity.CosineSimilarity(0.5),
    ],
)
def test_a_layer_that_has_two_names_is_trained_as_if_it_had_one(rule: coterie.Rule) -> None:
    """`functional_call` would put the values of a pass in the place of the parameters of such a layer."""
    generator = torch.Generator().manual_seed(0)
    users = [
        coterie.User(
            name, torch.randn(9, 4, generator=generator), torch.randn(9, 1, generator=generator)
        )
        for name in ("me", "a", "b")
    ]
    one, two = (
        coterie.train(
            Block(names=n), nn.functional.mse_loss, users[0], users[1:], rule, lr=0.03, steps=6
        )
        for n in (1, 2)
    )
    assert torch.equal(Parameters(one.model).vector(), Parameters(two.model).vector())
    tied = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    assert Parameters(tied).tied == {"2.weight": "0.weight"}
    assert Parameters(Block(names=2)).tied == {}
