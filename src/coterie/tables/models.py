"""The models that the command line offers, how it finds one's own, and the loss for a kind of target."""

import importlib
import io
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.arguments import shown
from coterie.data import Preparation
from coterie.errors import FileError, ModelError, did_you_mean
from coterie.evaluation.losses import PerExample
from coterie.mixture.served import MixedPredictions, Predictor
from coterie.recording import files
from coterie.recording.checkpoint import tensors_in
from coterie.trees.tensors import Trees
from coterie.users.user import Loss

Factory: TypeAlias = Callable[[int, int], nn.Module]
"""A function of the numbers of inputs and outputs that makes a model."""


def linear(n_inputs: int, n_outputs: int) -> nn.Module:
    """Return a linear model."""
    return nn.Sequential(nn.Flatten(), nn.Linear(n_inputs, n_outputs))


def mlp(n_inputs: int, n_outputs: int, hidden: int = 64) -> nn.Module:
    """Return a network with one hidden layer."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(n_inputs, hidden), nn.ReLU(), nn.Linear(hidden, n_outputs)
    )


BUILT_IN: dict[str, Factory] = {"linear": linear, "mlp": mlp}
"""The models that are no code of one's own."""


def build(model: str | Factory, n_inputs: int, n_outputs: int) -> nn.Module:
    """Return a model by name.

    "linear", "mlp", or "module.path:factory" for a function of one's own.

    The function is called with the numbers of inputs and outputs, and found as Python finds
    modules, the current folder included. In Python the function itself may be given.
    """
    make = _found(model) if isinstance(model, str) else model
    if not callable(make) or isinstance(make, nn.Module):
        raise ModelError(
            "a model is made by a function of the numbers of inputs and outputs, got"
            f" {shown(model)}"
        )
    try:
        made = make(n_inputs, n_outputs)
    except Exception as error:
        call = f"{shown(model)}({n_inputs}, {n_outputs})"
        raise ModelError(
            f"{call}, which makes the model, raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(made, nn.Module):
        raise ModelError(f"{model} must return a torch.nn.Module, got {type(made).__name__}")
    return made


def _found(name: str) -> Factory:
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, colon, factory = name.partition(":")
    if not colon:
        raise ModelError(
            f"unknown model {name!r}; choose linear, mlp, or module.path:factory{did_you_mean(name, BUILT_IN)}"
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return cast("Factory", getattr(importlib.import_module(module), factory))
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"the model {name!r} cannot be found: {error}; name it as module.path:factory"
        ) from error


def loss_of(preparation: Preparation) -> Loss:
    """Return the loss for a target of this kind, in which rows count by their weights where they have any."""
    classes = preparation.kind == "classification"
    if preparation.class_weights:
        return nn.CrossEntropyLoss(torch.tensor(preparation.class_weights))
    if preparation.weights is None:
        return functional.cross_entropy if classes else functional.mse_loss
    each = _weighted_cross_entropy if classes else _weighted_squares
    plain = functional.cross_entropy if classes else functional.mse_loss
    return PerExample(each, weights=_weight, plain=plain)


def _weight(targets: Mapping[str, Tensor]) -> Tensor:
    return targets["weight"]


def _weighted_cross_entropy(outputs: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
    return targets["weight"] * functional.cross_entropy(outputs, targets["value"], reduction="none")


def _weighted_squares(outputs: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
    return targets["weight"] * (outputs - targets["value"]).square().mean(-1)


ABOUT, PARAMETERS = "model.json", "model.pt"
MOST = 2**30
"""How many bytes the parameters of a built-in model may have."""
REMEDY = "train it again: `coterie train` with `--resume` writes it anew from the last checkpoint"


@dataclass(frozen=True)
class About:
    """What `model.json` says."""

    model: str  # "linear", "mlp", or "module.path:factory"
    n_inputs: int
    n_outputs: int
    parameters: str  # the SHA-256 of `model.pt`
    mixes: tuple[str, ...] = ()  # of `MixedPredictions`: the model of each part
    family: str = ""
    predictors: int = 0

    def made(self, name: str | Factory) -> nn.Module:
        """Return a model of this kind, with `name` in the place of one that is of one's own."""
        parts = [
            Trees.sized(each, self.n_inputs, self.n_outputs)
            if isinstance(each, str) and _is_trees(each)
            else build(each if each in BUILT_IN else name, self.n_inputs, self.n_outputs)
            for each in self.mixes or [name]
        ]
        if not self.mixes:
            return parts[0]
        every = [Predictor(parts[index % len(parts)]) for index in range(self.predictors)]
        return MixedPredictions(every, [1.0] * len(every), self.family)


def save_model(folder: Path, model: nn.Module, name: str, n_inputs: int, n_outputs: int) -> None:
    """Write a model's parameters, and then what it is.

    A folder without the latter holds no finished model.

    A part of `MixedPredictions` that is neither this model nor linear has an attribute `saved_as`:
    the name of the built-in model that it is.
    """
    buffer = io.BytesIO()
    torch.save({key: value.clone().cpu() for key, value in model.state_dict().items()}, buffer)
    with buffer.getbuffer() as body:
        files.write(folder / PARAMETERS, body)
        about = replace(about_of(model, name, n_inputs, n_outputs), parameters=files.sha256(body))
    files.write_json(folder / ABOUT, asdict(about))


def about_of(model: nn.Module, name: str, n_inputs: int, n_outputs: int) -> About:
    """Return what a model is, but for its parameters: `made` gives one like it."""
    about = About(getattr(model, "saved_as", name), n_inputs, n_outputs, "")
    if not isinstance(model, MixedPredictions):
        return about
    mixes = tuple(
        getattr(part, "saved_as", "linear" if _is_linear(part) else name) for part in model.parts
    )
    return replace(about, mixes=mixes, family=model.family, predictors=len(model.weights))


def _is_trees(name: str) -> bool:
    """Say whether a name is that of `Trees` of some size."""
    return name.startswith("trees:")


def _is_built_in(name: str) -> bool:
    """Say whether a model of this name runs no code of one's own."""
    return name in BUILT_IN or _is_trees(name)


def _is_linear(part: nn.Module) -> bool:
    """Say whether a part of a mixture is what `linear` makes."""
    return [type(each) for each in part.modules()] == [nn.Sequential, nn.Flatten, nn.Linear]


def load_model(folder: Path, model: str | None = None) -> nn.Module:
    """Return the model of a folder; damage is a `FileError`.

    A folder may come from anybody, so the code of a model of one's own is named here, as
    `module.path:factory`, and never taken from the folder.
    """
    about = _about(folder)
    own_code = [each for each in about.mixes or [about.model] if not _is_built_in(each)]
    if model is None and own_code:
        raise ModelError(
            f"the model in {folder} is {own_code[0]!r}, which would run code; if you trust it, name"
            " it: `--model module.path:factory`, or `model=` in Python"
        )
    name = model or about.model
    data = files.read(folder / PARAMETERS, REMEDY, most=MOST if _is_built_in(name) else files.MOST)
    if files.sha256(data) != about.parameters:
        raise FileError(
            f"{folder / PARAMETERS} is damaged (truncated or altered), or not what {ABOUT}"
            f" describes; {REMEDY}"
        )
    try:
        if _is_built_in(name) and 2 * (numbers := _n_numbers(about, name)) > len(data):
            raise ValueError(f"{numbers} numbers do not fit into its {len(data)} bytes")  # noqa: TRY301  # see below
        made = about.made(name)
        made.load_state_dict(tensors_in(data))
    except ModelError:
        raise
    except Exception as error:  # a folder may come from anybody, so anything may be wrong with it
        remedy = f"name the model that it was trained with, not {model!r}" if model else REMEDY
        raise ModelError(
            f"{folder / PARAMETERS} does not fit the model {name!r}: {error}; {remedy}"
        ) from error
    return made


def _n_numbers(about: About, name: str) -> int:
    """Return how many numbers a model has, without making it: a folder may tell of any size."""
    with torch.device("meta"):
        made = about.made(name)
    return sum(int(value.numel()) for value in made.state_dict().values())


def check_finished(folder: Path) -> None:
    """Refuse a folder without a finished model."""
    if not (folder / ABOUT).exists():
        raise FileError(
            f"{folder} holds no finished model: there is no {folder / ABOUT}; run `coterie train`"
        )


def _about(folder: Path) -> About:
    check_finished(folder)
    path = folder / ABOUT
    plain = files.read_json(path, REMEDY, ("model", "n_inputs", "n_outputs", "parameters"))
    try:
        return About(
            *(
                str(plain["model"]),
                int(plain["n_inputs"]),
                int(plain["n_outputs"]),
                str(plain["parameters"]),
            ),
            tuple(str(each) for each in plain.get("mixes", ())),
            str(plain.get("family", "")),
            int(plain.get("predictors", 0)),
        )
    except (TypeError, ValueError) as error:
        raise FileError(
            f"{path} must have whole numbers of inputs and outputs ({error}); {REMEDY}"
        ) from error
