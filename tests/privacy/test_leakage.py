"""The attacks of `benchmarks/leakage.py` in a short form: they work on plain gradients, and not on private ones."""

from __future__ import annotations

import leakage
import pytest
import torch
from inversion import alike, by_algebra
from membership import told_apart
from torch import nn

pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: the extra `privacy`")
VIEWS = {view.name: view for view in leakage.VIEWS}


def test_one_input_is_read_from_the_gradient_of_a_linear_layer() -> None:
    torch.manual_seed(0)
    layer, inputs = nn.Linear(12, 5), torch.rand(1, 12)
    weight, bias = torch.autograd.grad(layer(inputs).square().sum(), [layer.weight, layer.bias])
    torch.testing.assert_close(by_algebra(weight, bias, 1)[0], inputs[0])


def test_inputs_are_taken_apart_where_they_are_independent() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(3, 1000, generator=generator) ** 8
    mixed = torch.randn(20, 3, generator=generator) @ inputs
    assert bool((alike(by_algebra(mixed, mixed.sum(1), 3), inputs).max(0).values > 0.98).all())


@pytest.mark.parametrize(("kind", "images"), [("algebra", 8), ("search", 2)])
def test_a_row_of_one_example_gives_it_away_and_a_private_one_does_not(
    kind: str, images: int
) -> None:
    job = leakage.Job("digits", None, kind, 1, images=images, iterations=60)
    plain, private = (leakage.reconstructed(job, VIEWS[name]) for name in ("row", "ε = 0.5"))
    assert plain["rates"] == [1.0] * images
    assert private["rates"] == [0.0] * images


def test_members_are_found_by_plain_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leakage, "STEPS", 6)
    area, found = leakage.membership("digits", None, VIEWS["row"], 0)["products"]
    assert area > 0.65
    assert found > 0.05
    area, found = leakage.membership("digits", None, VIEWS["ε = 0.5"], 0)["products"]
    assert area < 0.65
    assert found < 0.15


def test_scores_are_told_apart_as_counted_by_hand() -> None:
    members, others = torch.tensor([5.0, 3.0, 1.0, 1.0]), torch.tensor([4.0, 1.0, 0.0, 0.0])
    assert told_apart(members, others, false=0.25) == ((4 + 3 + 2.5 + 2.5) / 16, 0.5)
    assert told_apart(members, others, false=0.0) == (0.75, 0.25)
