"""What is served: one linear model, or one module that mixes the predictions of several."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, logsigmoid

from coterie.mixture.families import Array


class Predictor(NamedTuple):
    """A model that can be served: its outputs are divided by a temperature.

    Candidates that differ in nothing but the temperature name the same module: it is then asked
    once.
    """

    model: nn.Module
    temperature: float = 1.0


class Constant(nn.Module):
    """The same outputs for every row.

    Example:
        >>> Constant(torch.tensor([0.5, 2.0]))(torch.zeros(3, 4, 4)).shape
        torch.Size([3, 2])
    """

    saved_as = "constant"

    def __init__(self, outputs: Tensor) -> None:
        super().__init__()
        self.outputs = nn.Parameter(outputs.clone())

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """Return the outputs for a batch of inputs."""
        rows = (each for each in (*inputs, *named.values()) if isinstance(each, Tensor))
        # a copy: what `expand` gives of a parameter asks for gradients where nothing should
        return self.outputs.expand(len(next(rows)), -1).clone()


class MixedPredictions(nn.Module):
    """One module whose predictions are a weighted mean of those of several: Σ w p(· | x).

    Outputs are in the form that the loss expects: logarithms of the mixed probabilities for cross
    entropy, their log odds for binary cross entropy, the logarithm of the mixed mean for counts,
    and the mixed mean for numbers. Its parameters are those of its parts, so that it can be trained
    on; weights and temperatures are buffers, and `state_dict` holds all of them.

    Args:
        predictors: at least one; a module that several name is held once.
        weights: of each; they are divided by their sum.
        family: the name of the loss's family: "softmax", "logistic", "squared" or "poisson".

    Example:
        >>> one, other = nn.Linear(1, 2), nn.Linear(1, 2)
        >>> both = MixedPredictions([Predictor(one), Predictor(other, 2.0)], [0.25, 0.75], "softmax")
        >>> x = torch.randn(5, 1)
        >>> mean = 0.25 * one(x).softmax(-1) + 0.75 * (other(x) / 2).softmax(-1)
        >>> bool(torch.allclose(both(x).exp(), mean))
        True
    """

    weights: Tensor
    temperatures: Tensor
    which: Tensor

    def __init__(
        self, predictors: Sequence[Predictor], weights: Sequence[float], family: str
    ) -> None:
        super().__init__()
        if len(predictors) != len(weights) or not predictors:
            raise ValueError("every predictor has a weight, and there is at least one")
        if family not in _MIXED:
            raise ValueError(f"family is one of {', '.join(_MIXED)}, got {family!r}")
        distinct = list({id(one.model): one.model for one in predictors}.values())
        self.parts = nn.ModuleList(distinct)
        self.family = family
        place = {id(part): index for index, part in enumerate(distinct)}
        shares = torch.as_tensor(list(weights), dtype=torch.float64)
        self.register_buffer("weights", (shares / shares.sum()).float())
        self.register_buffer(
            "temperatures", torch.tensor([float(one.temperature) for one in predictors])
        )
        self.register_buffer("which", torch.tensor([place[id(one.model)] for one in predictors]))

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """Return the outputs of the mixture for a batch of inputs."""
        outputs = torch.stack([part(*inputs, **named) for part in self.parts])[self.which]
        shape = (-1, *[1] * (outputs.ndim - 1))
        weights, temperatures = (
            each.to(outputs).reshape(shape) for each in (self.weights, self.temperatures)
        )
        mixed: Tensor = _MIXED[self.family](outputs / temperatures, weights)
        return mixed


def _softmax(outputs: Tensor, weights: Tensor) -> Tensor:
    return torch.logsumexp(log_softmax(outputs, -1) + weights.log(), 0)


def _logistic(outputs: Tensor, weights: Tensor) -> Tensor:
    yes, no = (torch.logsumexp(logsigmoid(each) + weights.log(), 0) for each in (outputs, -outputs))
    return yes - no


def _poisson(outputs: Tensor, weights: Tensor) -> Tensor:
    return torch.logsumexp(outputs + weights.log(), 0)


def _squared(outputs: Tensor, weights: Tensor) -> Tensor:
    return (outputs * weights).sum(0)


_MIXED = {
    **{"softmax": _softmax, "logistic": _logistic, "poisson": _poisson, "squared": _squared},
    "loss": _squared,  # of one
}


def mixed_outputs(family: str, outputs: Array, weights: Array) -> Array:
    """Return the outputs of mixtures of J predictions, (n, K), from theirs, (n, J, K), and weights (n, J)."""
    stacked = torch.from_numpy(outputs).movedim(1, 0)
    shares = torch.from_numpy(weights).movedim(1, 0)
    mixed: Array = _MIXED[family](stacked, shares[..., None]).numpy()
    return mixed


def linear_model(parameters: Array, *, intercept: bool) -> nn.Sequential:
    """Return a linear model of parameters (D, K), the intercept last.

    Example:
        >>> linear_model(torch.ones(3, 2).numpy(), intercept=True)
        Sequential(
          (0): Flatten(start_dim=1, end_dim=-1)
          (1): Linear(in_features=2, out_features=2, bias=True)
        )
    """
    columns = len(parameters) - intercept
    layer = nn.Linear(columns, parameters.shape[1], bias=intercept, device="meta")
    layer = layer.to_empty(device="cpu")  # drawn from no generator
    give(layer, parameters)
    return nn.Sequential(nn.Flatten(), layer)


def give(layer: nn.Linear, parameters: Array) -> None:
    """Give a layer parameters (D, K), the intercept last."""
    numbers = torch.from_numpy(parameters).to(layer.weight)
    with torch.no_grad():
        layer.weight.copy_(numbers[: layer.in_features].T)
        if layer.bias is not None:
            layer.bias.copy_(numbers[layer.in_features])
