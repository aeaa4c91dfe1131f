"""The models of the benchmark go through the engine's fast ways."""

from __future__ import annotations

import pytest
import torch
from tests.support.model_cases import way_of_rows

from coterie.benchmark.sets.user_set import MODELS, Elman, Recurrent, cnn
from coterie.engines.in_process.engine import InProcess
from coterie.users.user import User


@pytest.mark.parametrize("name", list(MODELS))
def test_every_model_goes_through_the_engine_in_one_pass(name: str) -> None:
    recurrent = name in ("rnn", "gru")
    inputs = torch.randint(0, 10, (12, 7)) if recurrent else torch.rand(12, 1, 8, 8)
    targets = torch.randint(0, 10, (12, 7) if recurrent else (12,))
    users = [User(user, inputs, targets) for user in ("me", "a", "b")]
    engine = InProcess(MODELS[name](64, 10), torch.nn.functional.cross_entropy, users[0], users[1:])
    rows = "vmap" if name == "gru" else "by layer"  # whose weights are no layer's
    assert (engine.describe()["average"], way_of_rows(engine)) == ("one pass", rows)


def test_outputs_have_a_number_for_every_class() -> None:
    assert cnn(64, 10)(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert Elman(4)(torch.zeros(2, 4), torch.zeros(2, 4)).shape == (2, 4)
    assert Recurrent(5, Elman(32))(torch.zeros(2, 7, dtype=torch.long)).shape == (2, 5, 7)
