"""Rows by layer against each user's own gradient by plain autograd, for every kind of layer and way to use it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as f

import coterie
from coterie.engines.in_process.by_layer import Gram, Rows
from coterie.engines.in_process.reused_memory import ReusedMemory
from coterie.gradients.parameters import Parameters

Make = Callable[[], nn.Module]


class Fed(nn.Module):
    """A few layers, and what is done with them."""

    def __init__(self, do: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.do = do
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output."""
        return self.do(self, inputs)


def after(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.LazyLinear(2))


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2))
    model[2].weight = model[0].weight
    return model


def partly_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    for p in (*model[0].parameters(), model[2].weight, model[4].bias):
        p.requires_grad = False
    return model


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    model[0].register_forward_hook(lambda _, inputs, output: output**2)
    model[1].register_forward_pre_hook(lambda _, inputs: (inputs[0].sin(),))
    return model


def in_half(model: Any, inputs: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        found: Tensor = model.two(model.one(inputs).tanh())
    return found.to(inputs)


KNOWN: dict[str, tuple[Make, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 2), (5,)),
    "linear, no bias": (lambda: nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 2)), (5,)),
    "linear, sequences": (lambda: after(nn.Linear(5, 4)), (3, 5)),
    "linear, sequences of sequences": (lambda: after(nn.Linear(5, 4)), (2, 3, 5)),
    "linear, folded sequences": (
        lambda: Fed(
            lambda m, x: m.two(m.one(x.flatten(0, 1)).tanh().unflatten(0, (-1, 3)).sum(1)),
            one=nn.Linear(5, 4),
            two=nn.Linear(4, 2),
        ),
        (3, 5),
    ),
    "conv1d": (lambda: after(nn.Conv1d(2, 4, 3, stride=2, padding=1, dilation=2)), (2, 11)),
    "conv2d": (lambda: after(nn.Conv2d(2, 4, 3)), (2, 6, 7)),
    "conv2d, stride and dilation": (lambda: after(nn.Conv2d(2, 4, (3, 2), (2, 1), (1, 2), (1, 2))), (2, 7, 6)),
    "conv2d, stride that leaves a rest": (lambda: after(nn.Conv2d(2, 4, 2, 3)), (2, 7, 8)),
    "conv2d, groups": (lambda: after(nn.Conv2d(4, 6, 3, groups=2, padding=1)), (4, 5, 5)),
    "conv2d, a group each": (lambda: after(nn.Conv2d(3, 6, 3, groups=3)), (3, 5, 5)),
    "conv2d, one by one": (lambda: after(nn.Conv2d(3, 4, 1, bias=False)), (3, 4, 4)),
    "conv2d, same": (lambda: after(nn.Conv2d(2, 4, (4, 3), padding="same", dilation=(1, 2))), (2, 6, 7)),
    "conv2d, valid": (lambda: after(nn.Conv2d(2, 4, 3, padding="valid")), (2, 6, 7)),
    "conv2d, circular": (lambda: after(nn.Conv2d(2, 4, 3, padding=(1, 2), padding_mode="circular")), (2, 6, 7)),
    "conv2d, reflected": (lambda: after(nn.Conv2d(2, 4, 3, 2, padding=2, padding_mode="reflect")), (2, 6, 7)),
    "conv1d, same, replicated": (
        lambda: after(nn.Conv1d(2, 4, 4, padding="same", padding_mode="replicate")),
        (2, 9),
    ),
    "conv3d": (lambda: after(nn.Conv3d(2, 3, 2, stride=(1, 2, 1), padding=1)), (2, 4, 5, 3)),
    "group norm": (lambda: after(nn.Sequential(nn.Conv2d(2, 6, 3), nn.GroupNorm(3, 6))), (2, 5, 6)),
    "group norm, flat": (
        lambda: nn.Sequential(nn.Linear(5, 6), nn.GroupNorm(2, 6, eps=0.1), nn.Linear(6, 2)),
        (5,),
    ),
    "group norm, first": (lambda: after(nn.GroupNorm(2, 4)), (4, 5)),
    "layer norm": (lambda: nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6, eps=0.1), nn.Linear(6, 2)), (5,)),
    "layer norm, two dimensions": (lambda: after(nn.LayerNorm((3, 4), bias=False)), (2, 3, 4)),
    "layer norm, sequences": (lambda: after(nn.LayerNorm(4)), (2, 3, 4)),
    "embedding": (lambda: after(nn.Embedding(7, 3)), (-7, 4)),
    "embedding, padded": (lambda: after(nn.Embedding(7, 3, padding_idx=2)), (-7, 4)),
    "embedding, twice": (
        lambda: Fed(
            lambda m, x: m.out(m.e(x).sum(1) * m.e(x.flip(1)[:, :1])[:, 0]),
            e=nn.Embedding(7, 3),
            out=nn.Linear(3, 2),
        ),
        (-7, 4),
    ),
    "in place": (
        lambda: nn.Sequential(
            nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 4), nn.ELU(inplace=True), nn.Linear(4, 2)
        ),
        (6,),
    ),
    "residual": (
        lambda: Fed(
            lambda m, x: m.out(x + m.two(m.one(x).tanh())),
            one=nn.Linear(6, 6),
            two=nn.Linear(6, 6),
            out=nn.Linear(6, 2),
        ),
        (6,),
    ),
    "called twice": (
        lambda: Fed(lambda m, x: m.out(m.one(m.one(x).tanh())), one=nn.Linear(6, 6), out=nn.Linear(6, 2)),
        (6,),
    ),
    "tied": (tied, (6,)),
    "not called": (lambda: Fed(lambda m, x: m.one(x), one=nn.Linear(6, 2), other=nn.Linear(6, 2)), (6,)),
    "called in vain": (
        lambda: Fed(
            lambda m, x: m.one(x) + m.two(x).detach() + 0 * m.two(x[:1]).sum().detach(),
            one=nn.Linear(6, 2),
            two=nn.Linear(6, 2),
        ),
        (6,),
    ),
    "once in vain": (lambda: Fed(lambda m, x: m.one(x) + m.one(2 * x).detach(), one=nn.Linear(6, 2)), (6,)),
    "cut off": (
        lambda: Fed(lambda m, x: m.two(m.one(x).detach()) + m.one(x), one=nn.Linear(6, 2), two=nn.Linear(2, 2)),
        (6,),
    ),
    "partly frozen": (partly_frozen, (6,)),
    "hooks of its own": (hooked, (6,)),
}


class Subclass(nn.Linear):
    """A layer that does something else."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output."""
        return f.linear(inputs, self.weight.square(), self.bias)


class Own(nn.Module):
    """A parameter of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 2), nn.Parameter(torch.tensor([0.5, 2.0]))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output."""
        out: Tensor = self.layer(inputs) * self.scale
        return out


def zeroed(model: nn.Module) -> nn.Module:
    """Let the last layer be zero, so that at first no gradient comes through it."""
    with torch.no_grad():
        for p in list(model.parameters())[-2:]:
            p.zero_()
    return model


UNKNOWN: dict[str, tuple[Make, tuple[int, ...]]] = {
    "a weight used elsewhere": (
        lambda: Fed(
            lambda m, x: m.out(f.linear(m.one(x).tanh(), m.one.weight)), one=nn.Linear(6, 6), out=nn.Linear(6, 2)
        ),
        (6,),
    ),
    "the same, at first unseen": (
        lambda: zeroed(
            Fed(
                lambda m, x: m.out(f.linear(m.one(x).tanh(), m.one.weight)),
                one=nn.Linear(6, 6),
                out=nn.Linear(6, 2),
            )
        ),
        (6,),
    ),
    "a weight in the output": (lambda: Fed(lambda m, x: m.one(x) + m.one.weight.sum(), one=nn.Linear(6, 2)), (6,)),
    "time first": (
        lambda: Fed(
            lambda m, x: m.two(m.one(x.transpose(0, 1)).tanh().sum(0)), one=nn.Linear(5, 4), two=nn.Linear(4, 2)
        ),
        (4, 5),
    ),
    "a parameter of its own": (Own, (6,)),
    "a subclass": (lambda: nn.Sequential(Subclass(6, 4), nn.Linear(4, 2)), (6,)),
    "by keyword": (lambda: Fed(lambda m, x: m.one(input=x), one=nn.Linear(6, 2)), (6,)),
    "weight norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), nn.Linear(4, 2)),
        (6,),
    ),
    "transposed": (lambda: after(nn.ConvTranspose2d(2, 3, 2)), (2, 4, 4)),
    "attention": (
        lambda: Fed(
            lambda m, x: m.out(m.a(x, x, x)[0].sum(1)),
            a=nn.MultiheadAttention(4, 2, batch_first=True),
            out=nn.Linear(4, 2),
        ),
        (3, 4),
    ),
    "embedding of bounded length": (lambda: after(nn.Embedding(7, 3, max_norm=1.0)), (-7, 4)),
    "embedding by frequency": (lambda: after(nn.Embedding(7, 3, scale_grad_by_freq=True)), (-7, 4)),
}


def case(name: str, known: bool = True) -> tuple[nn.Module, tuple[int, ...]]:
    make, shape = (KNOWN if known else UNKNOWN)[name]
    torch.manual_seed(1)
    model = make().double()
    with torch.no_grad():
        model(some_inputs(2, shape))  # lazy layers
    return model, shape


def some_inputs(n: int, shape: tuple[int, ...]) -> Tensor:
    """Return random inputs; a negative first size means so many kinds of tokens."""
    if shape[0] < 0:
        return torch.randint(-shape[0], (n, *shape[1:]))
    return torch.randn(n, *shape, dtype=torch.float64)


def make_users(shape: tuple[int, ...], sizes: Sequence[int]) -> list[coterie.User]:
    torch.manual_seed(2)
    return [
        coterie.User(f"user {k}", some_inputs(n, shape), torch.randn(n, 2, dtype=torch.float64))
        for k, n in enumerate(sizes)
    ]


def plain(model: nn.Module, x: Tensor, users: Sequence[coterie.User], batch: int) -> Tensor:
    """Return each user's gradient at x, in a loop."""
    model = copy.deepcopy(model)
    Parameters(model).load(x)
    trained = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for user in users:
        inputs, targets = user.batch(batch, seed=0, step=3)
        found = torch.autograd.grad(f.mse_loss(model(inputs), targets), trained, materialize_grads=True)
        rows.append(torch.cat([gradient.flatten() for gradient in found]))
    return torch.stack(rows)


def asked(engine: coterie.InProcess, x: Tensor) -> Tensor:
    rows = engine.gradients(x, 3, dict.fromkeys(engine.names, 1 / len(engine.names)), rows=True).rows
    assert rows is not None
    return rows


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def check(model: nn.Module, shape: tuple[int, ...], sizes: Sequence[int], batch: int, way: str) -> None:
    users = make_users(shape, sizes)
    engine = coterie.InProcess(model, f.mse_loss, users[0], users[1:], batch_size=batch)
    assert engine.describe()["rows"].startswith(way) == (way == "by layer")
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
        assert engine.describe()["rows"] != "by layer"
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
    engine.passes.per_example = lambda *_: 1 / 0  # type: ignore[assignment]
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
    assert engine.describe()["rows"] == "by layer"
    found, wanted = asked(engine, x), plain(model, x, users[1:], 4)
    assert float((found - wanted).norm() / wanted.norm()) < 0.02


def test_a_user_that_is_not_finite_spoils_nobody_else() -> None:
    model, shape = case("group norm")
    users = make_users(shape, [6] * 5)
    wanted = plain(model, Parameters(model).vector(), users[1:], 4)
    users[2].examples.inputs.fill_(math.nan)  # type: ignore[attr-defined]
    engine = coterie.InProcess(model, f.mse_loss, users[0], users[1:], batch_size=4)
    g = engine.gradients(Parameters(model).vector(), 3, dict.fromkeys(engine.names, 0.25), rows=True)
    assert g.left_out == {"user 2": "not finite"}
    assert g.rows is not None
    close(g.rows, wanted[[0, 2, 3]])


# Products.


@pytest.mark.parametrize("name", ["conv2d, groups", "tied", "once in vain", "not called"])
def test_products_without_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, shape = case(name)
    users = make_users(shape, [6, 5, 2, 6, 2])
    engine = coterie.InProcess(model, f.mse_loss, users[0], users[1:], batch_size=4)
    x = engine.passes.parameters.vector() + 0.1
    origin = torch.randn(len(x), dtype=torch.float64)
    differences = plain(model, x, users, 4) - origin
    monkeypatch.setattr(engine.passes, "rows", None)
    monkeypatch.setattr(Rows, "__init__", None)
    close(engine.gram(x, 3, origin), differences @ differences.T)


def test_products_hold_one_parameter_at_a_time() -> None:
    parameters = Parameters(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)))
    gram = Gram(parameters, torch.zeros(1, parameters.size), torch.zeros(parameters.size), users=4)
    for name in parameters.named:
        gram.memory_for(name).fill_(1.0)
        assert list(gram._held) == [name]
        gram.complete(name)
    assert gram.products[1:, 1:].eq(parameters.size).all()
    assert not gram.products[0].any()


@pytest.mark.parametrize("way", ["mapped", "loop"])
def test_products_of_other_models(way: str) -> None:
    between: nn.Module = nn.Dropout(0.0) if way == "mapped" else nn.BatchNorm1d(6)
    model = nn.Sequential(nn.Linear(6, 6), between, Own()).double()
    users = make_users((6,), [6, 5, 2, 6, 2])
    engine = coterie.InProcess(model, f.mse_loss, users[0], users[1:], batch_size=4)
    assert engine.passes.by_layer is None
    x = engine.passes.parameters.vector() + 0.1
    differences = plain(model, x, users, 4) - 0.5
    buffers = [buffer.clone() for buffer in model.buffers()]
    close(engine.gram(x, 3, torch.full_like(x, 0.5)), differences @ differences.T)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))


# Memory.


def test_rows_that_are_held_are_not_written_over() -> None:
    model, shape = case("linear")
    users = make_users(shape, [6] * 5)
    engine = coterie.InProcess(model, f.mse_loss, users[0], users[1:], batch_size=4)
    x = engine.passes.parameters.vector()
    first = asked(engine, x)
    kept, part = first.clone(), first[1:2]
    places = {first.data_ptr()}
    del first
    for _ in range(3):
        places.add(asked(engine, x + 1).data_ptr())
    assert torch.equal(part[0], kept[1])
    assert len(places) == 2  # one that is held, one used again and again


def test_room_of_another_size_lets_the_old_go() -> None:
    room, like = ReusedMemory(), torch.zeros((), dtype=torch.bfloat16)
    small = room.empty((2, 2), like)
    assert (small.shape, small.dtype) == ((2, 2), torch.bfloat16)
    large = room.empty((3, 3), like)
    del small
    assert room.empty((3, 3), like).data_ptr() != large.data_ptr()
    assert len(room._kept) == 2  # the two large ones; one of them free
    assert room.empty((0, 3), like).shape == (0, 3)
