"""The models that the command line offers, and the loss for a kind of target."""

from __future__ import annotations

from typing import Literal

import pandas as pd
import pytest

from coterie.data import Preparation
from coterie.tables.models import build, linear, loss_of, mlp


def test_the_models_have_their_sizes() -> None:
    assert sum(p.numel() for p in linear(3, 2).parameters()) == 8
    assert sum(p.numel() for p in mlp(3, 2).parameters()) == 386
    assert str(build("linear", 3, 2)) == str(linear(3, 2))
    assert [type(layer).__name__ for layer in build("linear", 3, 2).children()] == [
        "Flatten",
        "Linear",
    ]


@pytest.mark.parametrize(
    ("kind", "name"), [("classification", "cross_entropy"), ("regression", "mse_loss")]
)
def test_the_loss_is_that_of_the_kind_of_target(
    kind: Literal["classification", "regression"], name: str
) -> None:
    rows = pd.DataFrame({"age": [1.0, 2.0], "ill": [0, 1]})
    preparation = Preparation.fit(rows[["age"]], rows["ill"], rows["ill"], kind, ())
    assert getattr(loss_of(preparation), "__name__", "") == name
