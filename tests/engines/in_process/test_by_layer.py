"""Rows by layer against each user's own gradient by plain autograd, for every kind of layer and way to use it."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.support.layer_cases import (
    KNOWN,
    UNKNOWN,
    Fed,
    asked,
    case,
    close,
    in_half,
    make_users,
    plain,
)
from tests.support.model_cases import way_of_rows
from torch import Tensor, nn
from torch.nn import functional as f

import coterie
from coterie.evaluation.losses import PerExample
from coterie.gradients.parameters import Parameters


def check(
    model: nn.Module, shape: tuple[int, ...], sizes: Sequence[int], batch: int, way: str
) -> None:
    users = make_users(shape, sizes)
    engine = coterie.InProcess(model, f.mse_loss, users[0], users[1:], batch_size=batch)
    assert way_of_rows(engine) == way
    x = engine.passes.parameters.vector() + 0.1
    close(asked(engine, x), plain(model, x, users[1:], batch))
    shared = engine.passes.parameters.share()  # as in training
    close(asked(engine, shared), plain(model, shared, users[1:], batch))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", KNOWN)
def test_each_layer(name: str) -> None:
    check(*case(name), sizes=[6, 6, 6, 6, 6], batch=4, way="by layer")


@pytest.mark.parametrize(
    "name", ["linear, sequences", "conv2d, circular", "group norm", "embedding, padded", "tied"]
)
def test_users_of_different_sizes_and_of_one_example(name: str) -> None:
    check(*case(name), sizes=[6, 1, 5, 3, 1, 5, 2], batch=5, way="by layer")
    check(*case(name), sizes=[1, 1, 1, 1, 1], batch=1, way="by layer")


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_had_by_layer_is_had_otherwise(name: str) -> None:
    for size in (6, 1):
        torch.manual_seed(0)
        model, shape = case(name, known=False)
        users = make_users(shape, [size] * 12)
        engine = coterie.InProcess(model, f.mse_loss, users[0], users[1:], batch_size=4)
        assert way_of_rows(engine) != "by layer"
        x = engine.passes.parameters.vector() + 0.1
        close(asked(engine, x), plain(model, x, users[1:], 4))


def test_the_model_is_left_as_it_was() -> None:
    model, shape = case("conv2d, groups")
    users = make_users(shape, [6] * 5)
    engine = coterie.InProcess(model, f.mse_loss, users[0], users[1:], batch_size=4)
    before = copy.deepcopy(model.state_dict())
    asked(engine, engine.passes.parameters.vector() + 0.1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks or module._backward_hooks for module in model.modules())


def test_hooks_are_gone_after_a_failure() -> None:
    model, shape = case("linear")
    users = make_users(shape, [6] * 5)
    engine = coterie.InProcess(model, f.mse_loss, users[0], users[1:], batch_size=4)
    batches = engine.sampler.draw(engine.names, 0)[1]
    assert way_of_rows(engine) == "by layer"
    engine.passes.per_example = PerExample(lambda *_: 1 / 0)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        engine.passes.rows(engine.passes.parameters.vector(), batches)
    assert not model._forward_hooks


def test_one_pass_serves_all_and_memory_bounds_how_many() -> None:
    model, shape = case("conv2d")
    users = make_users(shape, [8] * 10)
    engine = coterie.InProcess(model, f.mse_loss, users[0], users[1:], batch_size=4)
    x, sizes = engine.passes.parameters.vector() + 0.1, list[int]()
    whole = asked(engine, x)
    model.register_forward_hook(lambda _, inputs, output: sizes.append(len(inputs[0])))
    asked(engine, x)
    assert sorted(sizes) == [4, 36]  # user 0's batch, and nine users' together
    row = engine.passes.parameters.size * 8
    held = 4 * 8 * (2 * 6 * 7 + 4 * 4 * 5)  # what the two layers take in, for four examples
    engine.passes.memory = 3 * (row + held)
    sizes.clear()
    close(asked(engine, x), whole)
    assert sorted(sizes) == [4, 12, 12, 12]
    engine.passes.memory = 1
    sizes.clear()
    close(asked(engine, x), whole)
    assert sizes == [4] * 10


def test_other_peers_are_asked_in_turn() -> None:
    """Users of different sizes stand in another order in a pass than they were asked in."""
    model, shape = case("linear, sequences")
    users = make_users(shape, [6, 2, 5, 2, 5, 3])
    engine = coterie.InProcess(model, f.mse_loss, users[0], users[1:], batch_size=5)
    x = engine.passes.parameters.vector() + 0.1
    wanted = plain(model, x, users[1:], 5)
    for chosen in ([0, 1, 2, 3], [3, 2, 1, 0], [4, 1, 0, 3], [0, 1, 2, 3]):
        rows = engine.gradients(x, 3, {engine.names[k]: 0.25 for k in chosen}, rows=True).rows
        assert rows is not None
        close(rows, wanted[chosen])


def test_a_compiled_model_is_watched_as_it_is() -> None:
    """Layers inside a compiled program cannot be watched."""
    model, shape = case("linear")
    users = make_users(shape, [6] * 5)
    engine = coterie.InProcess(model, f.mse_loss, users[0], users[1:], batch_size=4)
    x = engine.passes.parameters.share()
    batches = engine.sampler.draw(engine.names, 3)[1]
    engine.passes._forward = lambda _: 1 / 0
    close(engine.passes.rows(x, batches), plain(model, x, users[1:], 4))


def test_a_mapped_pass_is_cut_too() -> None:
    model, shape = case("a parameter of its own", known=False)
    users = make_users(shape, [8] * 25)
    engine = coterie.InProcess(model, f.mse_loss, users[0], users[1:], batch_size=4)
    whole = asked(engine, engine.passes.parameters.vector() + 0.1)
    mapped, sizes = engine.passes.mapped, list[int]()

    def noting(x: Tensor, batch: Any, rows: Tensor) -> None:
        sizes.append(len(rows))
        mapped(x, batch, rows)

    engine.passes.mapped = noting  # type: ignore[method-assign]
    engine.passes.memory = 10 * engine.passes.parameters.size * 8
    close(asked(engine, engine.passes.parameters.vector() + 0.1), whole)
    assert sizes == [10, 10]  # the last four are few enough to be taken one by one


def test_half_precision_inside_the_model() -> None:
    model = Fed(in_half, one=nn.Linear(6, 40), two=nn.Linear(40, 2))
    users = [coterie.User(f"{k}", torch.randn(6, 6), torch.randn(6, 2)) for k in range(5)]
    engine = coterie.InProcess(model, f.mse_loss, users[0], users[1:], batch_size=4)
    x = engine.passes.parameters.vector()
    assert way_of_rows(engine) == "by layer"
    rows, wanted = asked(engine, x), plain(model, x, users[1:], 4)
    assert float((rows - wanted).norm() / wanted.norm()) < 0.02


def test_a_user_that_is_not_finite_spoils_nobody_else() -> None:
    model, shape = case("group norm")
    users = make_users(shape, [6] * 5)
    wanted = plain(model, Parameters(model).vector(), users[1:], 4)
    users[2].examples.inputs.fill_(math.nan)  # type: ignore[attr-defined]
    engine = coterie.InProcess(model, f.mse_loss, users[0], users[1:], batch_size=4)
    g = engine.gradients(
        Parameters(model).vector(), 3, dict.fromkeys(engine.names, 0.25), rows=True
    )
    assert g.left_out == {"user 2": "not finite"}
    assert g.rows is not None
    close(g.rows, wanted[[0, 2, 3]])


# Memory.


def test_it_is_tried_in_full_precision_where_rows_are_first_wanted() -> None:
    cast: list[bool] = []

    class Noting(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            cast.append(torch.is_autocast_enabled("cpu"))
            return inputs.relu()

    users = [coterie.User(f"{k}", torch.randn(6, 3), torch.randn(6, 2)) for k in range(4)]
    options = coterie.ForwardOptions(autocast=torch.bfloat16)
    model = nn.Sequential(nn.Linear(3, 4), Noting(), nn.Linear(4, 2))
    engine = coterie.InProcess(model, f.mse_loss, users[0], users[1:], forward_options=options)
    assert "by_layer" not in vars(engine.passes)  # nobody has asked for rows
    cast.clear()
    with torch.no_grad():
        assert way_of_rows(engine) == "by layer"
    assert len(cast) > 0
    assert not any(cast)
    asked(engine, engine.passes.parameters.vector())
    assert cast[-1]
