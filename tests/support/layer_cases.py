"""Every kind of layer and way to use it, and each user's gradient by plain autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f

import coterie
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
        output: Tensor = model.two(model.one(inputs).tanh())
    return output.to(inputs)


KNOWN: dict[str, tuple[Make, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 2), (5,)),
    "linear, no bias": (
        lambda: nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 2)),
        (5,),
    ),
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
    "conv2d, stride and dilation": (
        lambda: after(nn.Conv2d(2, 4, (3, 2), (2, 1), (1, 2), (1, 2))),
        (2, 7, 6),
    ),
    "conv2d, stride that leaves a rest": (lambda: after(nn.Conv2d(2, 4, 2, 3)), (2, 7, 8)),
    "conv2d, groups": (lambda: after(nn.Conv2d(4, 6, 3, groups=2, padding=1)), (4, 5, 5)),
    "conv2d, a group each": (lambda: after(nn.Conv2d(3, 6, 3, groups=3)), (3, 5, 5)),
    "conv2d, one by one": (lambda: after(nn.Conv2d(3, 4, 1, bias=False)), (3, 4, 4)),
    "conv2d, same": (
        lambda: after(nn.Conv2d(2, 4, (4, 3), padding="same", dilation=(1, 2))),
        (2, 6, 7),
    ),
    "conv2d, valid": (lambda: after(nn.Conv2d(2, 4, 3, padding="valid")), (2, 6, 7)),
    "conv2d, circular": (
        lambda: after(nn.Conv2d(2, 4, 3, padding=(1, 2), padding_mode="circular")),
        (2, 6, 7),
    ),
    "conv2d, reflected": (
        lambda: after(nn.Conv2d(2, 4, 3, 2, padding=2, padding_mode="reflect")),
        (2, 6, 7),
    ),
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
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6, eps=0.1), nn.Linear(6, 2)),
        (5,),
    ),
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
            nn.Linear(6, 5),
            nn.ReLU(inplace=True),
            nn.Linear(5, 4),
            nn.ELU(inplace=True),
            nn.Linear(4, 2),
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
        lambda: Fed(
            lambda m, x: m.out(m.one(m.one(x).tanh())), one=nn.Linear(6, 6), out=nn.Linear(6, 2)
        ),
        (6,),
    ),
    "tied": (tied, (6,)),
    "not called": (
        lambda: Fed(lambda m, x: m.one(x), one=nn.Linear(6, 2), other=nn.Linear(6, 2)),
        (6,),
    ),
    "called in vain": (
        lambda: Fed(
            lambda m, x: m.one(x) + m.two(x).detach() + 0 * m.two(x[:1]).sum().detach(),
            one=nn.Linear(6, 2),
            two=nn.Linear(6, 2),
        ),
        (6,),
    ),
    "once in vain": (
        lambda: Fed(lambda m, x: m.one(x) + m.one(2 * x).detach(), one=nn.Linear(6, 2)),
        (6,),
    ),
    "cut off": (
        lambda: Fed(
            lambda m, x: m.two(m.one(x).detach()) + m.one(x),
            one=nn.Linear(6, 2),
            two=nn.Linear(2, 2),
        ),
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
            lambda m, x: m.out(f.linear(m.one(x).tanh(), m.one.weight)),
            one=nn.Linear(6, 6),
            out=nn.Linear(6, 2),
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
    "a weight in the output": (
        lambda: Fed(lambda m, x: m.one(x) + m.one.weight.sum(), one=nn.Linear(6, 2)),
        (6,),
    ),
    "time first": (
        lambda: Fed(
            lambda m, x: m.two(m.one(x.transpose(0, 1)).tanh().sum(0)),
            one=nn.Linear(5, 4),
            two=nn.Linear(4, 2),
        ),
        (4, 5),
    ),
    "a parameter of its own": (Own, (6,)),
    "a subclass": (lambda: nn.Sequential(Subclass(6, 4), nn.Linear(4, 2)), (6,)),
    "by keyword": (lambda: Fed(lambda m, x: m.one(input=x), one=nn.Linear(6, 2)), (6,)),
    "weight norm": (
        lambda: nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), nn.Linear(4, 2)
        ),
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
        gradients = torch.autograd.grad(
            f.mse_loss(model(inputs), targets), trained, materialize_grads=True
        )
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return torch.stack(rows)


def asked(engine: coterie.InProcess, x: Tensor) -> Tensor:
    rows = engine.gradients(
        x, 3, dict.fromkeys(engine.names, 1 / len(engine.names)), rows=True
    ).rows
    assert rows is not None
    return rows


def close(given: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(given, wanted, rtol=1e-10, atol=1e-12)
