"""Users and models, from NumPy's generator, which is the same everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tests.support.frozen_cases.library import Users, is_method, make, train
from torch import Tensor, nn
from torch.nn import functional as f
from torch.optim import SGD

NAMES = ("me", "a", "b", "c", "d", "e", "f")
TAU = {"a": 0.5, "b": 0.2, "d": 0.3}


def normal(*shape: int, seed: int) -> Tensor:
    """Return standard normal numbers."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def labelled(
    n: int, seed: int, *, shift: float = 0.0, kind: str = "classes"
) -> tuple[Tensor, Tensor]:
    """Return examples: what decides of their targets is shifted from user to user."""
    shape = {"images": (n, 1, 5, 5), "series": (n, 4, 3)}.get(kind, (n, 5))
    inputs = normal(*shape, seed=seed)
    truth = normal(inputs[0].numel(), 3, seed=7) + shift * normal(
        inputs[0].numel(), 3, seed=seed + 1
    )
    scores = inputs.flatten(1) @ truth + 0.5 * normal(n, 3, seed=seed + 2)
    if kind == "numbers":
        return inputs.float(), scores[:, :1].float()
    if kind == "binary":
        return inputs.float(), (scores[:, :1] > 0).float()
    targets = scores.argmax(1)
    targets[:3] = torch.arange(3)  # everybody has every class
    if kind == "tokens":
        return (inputs * 2 + 5).round().long().clamp(0, 10), targets
    return inputs.float(), targets


def users(
    sizes: Sequence[int] = (20, 26, 7, 15, 21),
    *,
    kind: str = "classes",
    validation: int = 0,
    shift: float = 0.4,
    dtype: torch.dtype | None = None,
) -> list[Any]:
    """Return user 0, with a test set, and its peers, one of them smaller than a batch."""

    def some(n: int, seed: int, by: float) -> tuple[Tensor, Tensor]:
        inputs, targets = labelled(n, seed, shift=by, kind=kind)
        if dtype is None:
            return inputs, targets
        return inputs.to(dtype), targets.to(dtype) if targets.is_floating_point() else targets

    held_out = {"validation": some(validation, 91, 0.0)} if validation else {}
    me = make("user", NAMES[0], *some(sizes[0], 11, 0.0), test=some(12, 92, 0.0), **held_out)
    others = zip(NAMES[1:], sizes[1:], strict=False)
    return [
        me,
        *(make("user", name, *some(n, 20 + 10 * k, shift)) for k, (name, n) in enumerate(others)),
    ]


def spoiled(examples: tuple[Tensor, Tensor], *rows: int) -> tuple[Tensor, Tensor]:
    """Return examples with inputs that are not numbers, which batches hold now and then."""
    inputs, targets = examples
    inputs[list(rows)] = float("nan")
    return inputs, targets


def with_bad_peer(*rows: int) -> list[Any]:
    """Return users one of whom has gradients that are not finite at some steps."""
    everyone = users()
    return [
        everyone[0],
        make("user", "a", *spoiled(labelled(26, 20, shift=0.4), *(rows or (5,)))),
        *everyone[2:],
    ]


class Tied(nn.Module):
    """A layer used twice, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.frozen, self.out = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.other = nn.Linear(5, 5)
        self.other.weight = self.twice.weight
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.frozen(self.twice(torch.tanh(self.twice(inputs)))))
        output: Tensor = self.out(torch.tanh(self.other(hidden)))
        return output


class Tokens(nn.Module):
    """An embedding, a norm, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.out = nn.Embedding(11, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.out(self.norm(self.table(inputs)).mean(1))
        return output


class Recurrent(nn.Module):
    """A layer whose formula nobody wrote down."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.RNNCell(3, 4), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs.new_zeros(len(inputs), 4)
        for k in range(inputs.shape[1]):
            hidden = self.cell(inputs[:, k], hidden)
        output: Tensor = self.out(hidden)
        return output


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def _cnn(*more: nn.Module) -> nn.Module:
    # No bias: before a norm its gradient would be rounding, which Adam makes as long as any.
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), *more, nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "linear": (lambda: nn.Linear(5, 3), "classes"),
    "mlp": (_mlp, "classes"),
    "regression": (lambda: nn.Linear(5, 1), "numbers"),
    "binary": (lambda: nn.Linear(5, 1), "binary"),
    "tied": (Tied, "classes"),
    "conv": (lambda: _cnn(nn.GroupNorm(2, 4)), "images"),
    "batch norm": (lambda: _cnn(nn.BatchNorm2d(4)), "images"),
    "batch norm, dropout": (lambda: _cnn(nn.BatchNorm2d(4), nn.Dropout(0.3)), "images"),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 3)),
        "classes",
    ),
    "tokens": (Tokens, "tokens"),
    "recurrent": (Recurrent, "series"),
}
"""By name, how a model is made and the kind of its examples."""


def network(name: str = "mlp", seed: int = 3) -> nn.Module:
    """Return a model whose parameters do not depend on torch's generator."""
    model = MODELS[name][0]()
    with torch.no_grad():
        for k, parameter in enumerate(model.parameters()):
            centre = (
                parameter if isinstance(norm_of(model, parameter), nn.Module) else torch.zeros(())
            )
            scale = 0.5 if parameter.ndim > 1 else 0.1
            parameter.copy_(centre + scale * normal(*parameter.shape, seed=100 * seed + k).float())
    return model


def norm_of(model: nn.Module, parameter: Tensor) -> nn.Module | None:
    """Return the norm that a parameter is of, which begins at 1 or 0; None for other layers."""
    norms = [
        module
        for module in model.modules()
        if isinstance(module, nn.GroupNorm | nn.LayerNorm | nn.BatchNorm2d)
    ]
    return next(
        (module for module in norms if any(parameter is p for p in module.parameters())), None
    )


LOSSES: dict[str, Any] = {"numbers": f.mse_loss, "binary": f.binary_cross_entropy_with_logits}


def a_run(rule: Any, model: str = "mlp", everyone: Users | None = None, **options: Any) -> Any:
    """Return a run by a rule, or by a function of the users that gives one; small, and the same every time."""
    kind = MODELS[model][1]
    everyone = users(kind=kind) if everyone is None else everyone
    made = network(model)
    plain: dict[str, Any] = {
        "optimizer": SGD,
        "lr": 0.1,
        "steps": 8,
        "batch_size": 9,
        "evaluate_every": 3,
    }
    options = plain | {"measure": False, "guard": "off", "seed": 5} | options
    if is_method(rule):
        options.pop("optimizer")
    options = {
        name: value(made) if name == "optimizer of" else value for name, value in options.items()
    }
    if "optimizer of" in options:
        options["optimizer"] = options.pop("optimizer of")
        options.pop("lr")
    if callable(options.get("prepare")):
        made = options.pop("prepare")(made)
    return train(made, LOSSES.get(kind, f.cross_entropy), everyone, rule, **options)


def falling(step: int) -> float:
    """Return a knob that falls with the steps."""
    return 0.9 / (1 + 0.3 * step)
