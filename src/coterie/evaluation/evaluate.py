"""The loss and the metric of a model on held-out examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import vmap

from coterie.users.examples import Examples
from coterie.users.sampling import seeded
from coterie.users.user import Loss

Metric: TypeAlias = Callable[[Any, Tensor], float]
"""A number from a model's outputs on a whole set and the targets."""


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Return the share of examples whose largest output is the target's class.

    Example:
        >>> accuracy(torch.tensor([[2.0, 1.0], [0.0, 3.0]]), torch.tensor([0, 0]))
        0.5
    """
    return float((outputs.argmax(1) == targets).double().mean())


def binary_accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Return the share of examples whose logit has the sign that the 0/1 target asks for.

    Example:
        >>> binary_accuracy(torch.tensor([-1.0, 2.0]), torch.tensor([0.0, 0.0]))
        0.5
    """
    return float(((outputs > 0) == (targets > 0.5)).double().mean())


def rmse(outputs: Tensor, targets: Tensor) -> float:
    """Return the root of the mean squared error.

    Example:
        >>> rmse(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0]))
        1.4142135623730951
    """
    return math.sqrt(float((outputs.double() - targets.double()).square().mean()))


def metrics_for(loss: Loss) -> dict[str, Metric]:
    """Return the metric that people read beside this loss; none for a loss of one's own.

    Example:
        >>> metrics_for(nn.functional.mse_loss) == {"rmse": rmse}
        True
    """
    f = nn.functional
    if loss in (f.cross_entropy, f.nll_loss) or isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return {"accuracy": accuracy}
    if loss is f.binary_cross_entropy_with_logits or isinstance(loss, nn.BCEWithLogitsLoss):
        return {"accuracy": binary_accuracy}
    squared = nn.MSELoss | nn.L1Loss | nn.SmoothL1Loss | nn.HuberLoss
    if loss in (f.mse_loss, f.l1_loss, f.smooth_l1_loss, f.huber_loss) or isinstance(loss, squared):
        return {"rmse": rmse}
    return {}


def evaluate(
    model: nn.Module,
    loss: Loss,
    examples: Examples,
    metrics: Mapping[str, Metric] | None = None,
    *,
    chunk: int = 1024,
) -> dict[str, float]:
    """Return the mean loss and the metrics of a model, in evaluation mode, on a set of examples.

    Whatever draws random numbers (a transform, a model) draws the same ones every time.

    Args:
        model: the model; its mode is restored after.
        loss: the mean loss of a batch from (output, target).
        examples: the set.
        metrics: by name, computed over the whole set; `metrics_for(loss)` when None.
        chunk: how many examples go through the model at a time.

    Example:
        >>> from coterie.users.examples import InMemory
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.ones_(model.weight)
        >>> data = InMemory(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [4.0]]))
        >>> evaluate(model, nn.functional.mse_loss, data)
        {'loss': 2.0, 'rmse': 1.4142135623730951}
    """
    metrics = metrics_for(loss) if metrics is None else metrics
    device = next(model.parameters()).device
    outputs, targets = [], []
    with torch.no_grad(), evaluation_mode(model), seeded(0, "evaluation", 0, device):
        for indices in torch.split(torch.arange(len(examples)), chunk):
            x, y = (tensor.to(device) for tensor in examples.take(indices))
            outputs.append(model(x))
            targets.append(y)
        if not isinstance(outputs[0], Tensor):  # of an unknown form: the mean over chunks, and no metric
            sums = (float(loss(o, t)) * len(t) for o, t in zip(outputs, targets, strict=True))
            return {"loss": sum(sums) / len(examples)}
        return scores(torch.cat(outputs), torch.cat(targets), loss, metrics)


def scores(
    outputs: Tensor, targets: Tensor, loss: Loss, metrics: Mapping[str, Metric] | None = None
) -> dict[str, float]:
    """Return the mean loss and the metrics of the outputs on a whole set.

    Example:
        >>> scores(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [4.0]]), nn.functional.mse_loss)
        {'loss': 2.0, 'rmse': 1.4142135623730951}
    """
    metrics = metrics_for(loss) if metrics is None else metrics
    found = {"loss": float(loss(outputs, targets))}
    return found | {name: float(metric(outputs, targets)) for name, metric in metrics.items()}


def losses(model: nn.Module, loss: Loss, examples: Examples, *, chunk: int = 1024) -> Tensor:
    """Return the loss of each example, as if it were a batch of its own, with the model in evaluation mode.

    Example:
        >>> from coterie.users.examples import InMemory
        >>> data = InMemory(torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [0.0]]))
        >>> losses(nn.Identity(), nn.functional.mse_loss, data)
        tensor([1., 4.], dtype=torch.float64)
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def single(output: Tensor, target: Tensor) -> Tensor:
        return loss(output[None], target[None])

    found = []
    with torch.no_grad(), evaluation_mode(model), seeded(0, "evaluation", 0, device):
        for indices in torch.split(torch.arange(len(examples)), chunk):
            inputs, targets = (tensor.to(device) for tensor in examples.take(indices))
            output = model(inputs)
            if not isinstance(output, Tensor) or len(output) != len(targets):  # cannot be cut by example
                pairs = zip(torch.split(inputs, 1), torch.split(targets, 1), strict=True)
                each = torch.stack([loss(model(i), t) for i, t in pairs])
            else:
                try:
                    each = vmap(single)(output, targets)
                except (RuntimeError, ValueError):  # a loss that cannot be mapped
                    each = torch.stack([single(o, t) for o, t in zip(output, targets, strict=True)])
            found.append(each.double().cpu())
    return torch.cat(found)


def errors(model: nn.Module, examples: Examples, scale: float = 1.0) -> Tensor:
    """Return what each example costs: 1 for a wrong class, or its squared error in the units of `scale`.

    Args:
        model: one output a class, or one number, for targets of that kind.
        examples: the set.
        scale: what a unit of the target stands for.

    Example:
        >>> from coterie.users.examples import InMemory
        >>> data = InMemory(torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [0.0]]))
        >>> errors(nn.Identity(), data, scale=10.0)
        tensor([100., 400.], dtype=torch.float64)
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    inputs, targets = examples.take(torch.arange(len(examples)))
    with torch.no_grad(), evaluation_mode(model):
        outputs: Tensor = model(inputs.to(device)).to(targets.device)
    if targets.is_floating_point():
        return (scale * (outputs.double() - targets.double())).square().flatten(1).mean(1)
    wrong = (outputs.argmax(1) != targets).double()
    return wrong.flatten(1).mean(1) if wrong.ndim > 1 else wrong


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode inside, and every module back in the mode it had after."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
