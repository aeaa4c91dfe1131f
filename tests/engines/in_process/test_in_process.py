"""How users share passes in one process."""

from __future__ import annotations

import pytest
from tests.support.model_cases import (
    BATCH,
    CASES,
    SEED,
    Case,
    make_model,
    make_users,
    some_point,
)

import coterie
from coterie.gradients.parameters import Parameters

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@every_case
def test_each_case_goes_the_way_it_should(case: Case) -> None:
    users = make_users(case)
    engine = coterie.InProcess(make_model(case), case.loss, users[0], users[1:], batch_size=BATCH, seed=SEED)
    told = engine.describe()
    assert told["average"].startswith(case.average)
    assert told["rows"].startswith(case.rows)


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
