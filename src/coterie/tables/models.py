"""The models that the command line offers, how it finds one's own, and the loss for a kind of target."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import TypeAlias, cast

from torch import Tensor, nn
from torch.nn import functional

from coterie.arguments import shown
from coterie.data import Preparation
from coterie.errors import ModelError
from coterie.evaluation.losses import PerExample
from coterie.users.user import Loss

Factory: TypeAlias = Callable[[int, int], nn.Module]
"""A function of the numbers of inputs and outputs that makes a model."""


def linear(n_inputs: int, n_outputs: int) -> nn.Module:
    """Return a linear model."""
    return nn.Sequential(nn.Flatten(), nn.Linear(n_inputs, n_outputs))


def mlp(n_inputs: int, n_outputs: int, hidden: int = 64) -> nn.Module:
    """Return a network with one hidden layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(n_inputs, hidden), nn.ReLU(), nn.Linear(hidden, n_outputs))


BUILT_IN: dict[str, Factory] = {"linear": linear, "mlp": mlp}
"""The models that are no code of one's own."""


def build(model: str | Factory, n_inputs: int, n_outputs: int) -> nn.Module:
    """Return a model by name: "linear", "mlp", or "module.path:factory" for a function of one's own.

    The function is called with the numbers of inputs and outputs, and found as Python finds modules, the
    current folder included. In Python the function itself may be given.
    """
    make = _found(model) if isinstance(model, str) else model
    if not callable(make) or isinstance(make, nn.Module):
        raise ModelError(f"a model is made by a function of the numbers of inputs and outputs, got {shown(model)}")
    try:
        made = make(n_inputs, n_outputs)
    except Exception as error:
        call = f"{shown(model)}({n_inputs}, {n_outputs})"
        raise ModelError(f"{call}, which makes the model, raised {type(error).__name__}: {error}") from error
    if not isinstance(made, nn.Module):
        raise ModelError(f"{model} must return a torch.nn.Module, got {type(made).__name__}")
    return made


def _found(name: str) -> Factory:
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, colon, factory = name.partition(":")
    if not colon:
        raise ModelError(f"unknown model {name!r}; choose linear, mlp, or module.path:factory")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return cast("Factory", getattr(importlib.import_module(module), factory))
    except (ImportError, AttributeError) as error:
        raise ModelError(f"the model {name!r} cannot be found: {error}; name it as module.path:factory") from error


def loss_of(preparation: Preparation) -> Loss:
    """Return the loss for a target of this kind, in which rows count by their weights where they have any."""
    classes = preparation.kind == "classification"
    if preparation.weights is None:
        return functional.cross_entropy if classes else functional.mse_loss
    return PerExample(_weighted_cross_entropy if classes else _weighted_squares, weights=_weight)


def _weight(targets: Mapping[str, Tensor]) -> Tensor:
    return targets["weight"]


def _weighted_cross_entropy(outputs: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
    return targets["weight"] * functional.cross_entropy(outputs, targets["value"], reduction="none")


def _weighted_squares(outputs: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
    return targets["weight"] * (outputs - targets["value"]).square().mean(-1)
