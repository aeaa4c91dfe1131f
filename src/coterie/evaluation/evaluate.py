"""The loss, the metrics and the errors of a model on a set of examples."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from coterie.evaluation.metrics import Metric, metrics_for
from coterie.users.examples import Examples
from coterie.users.sampling import seeded
from coterie.users.user import Loss


def evaluate(
    model: nn.Module,
    loss: Loss,
    examples: Examples,
    metrics: Mapping[str, Metric] | None = None,
    *,
    chunk: int = 1024,
) -> dict[str, float]:
    """Return the mean loss and the metrics of a model, in evaluation mode, on a set of examples.

    Transforms and models that draw random numbers draw the same ones every time. Where an output is not a tensor,
    the loss is the mean over chunks, and there are no metrics.

    Args:
        model: the model; its mode is restored afterwards.
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
    with torch.no_grad(), evaluation_mode(model):
        outputs, targets = outputs_on(model, examples, chunk)
        if not isinstance(outputs[0], Tensor):  # outputs of an unknown form cannot be joined
            sums = (float(loss(o, t)) * len(t) for o, t in zip(outputs, targets, strict=True))
            return {"loss": sum(sums) / len(examples)}
        return scores(torch.cat(outputs), torch.cat(targets), loss, metrics)


def outputs_on(model: nn.Module, examples: Examples, chunk: int = 1024) -> tuple[list[Any], list[Tensor]]:
    """Return the outputs of a model, in evaluation mode, on a set of examples, and the targets, in chunks."""
    device = next(model.parameters()).device
    outputs, targets = [], []
    with torch.no_grad(), evaluation_mode(model), seeded(0, "evaluation", 0, device):
        for x, y in _chunks(examples, chunk, device):
            outputs.append(model(x))
            targets.append(y)
    return outputs, targets


def scores(
    outputs: Tensor, targets: Tensor, loss: Loss, metrics: Mapping[str, Metric] | None = None
) -> dict[str, float]:
    """Return the mean loss and the metrics of the outputs on a whole set."""
    metrics = metrics_for(loss) if metrics is None else metrics
    return {"loss": float(loss(outputs, targets))} | {
        name: float(metric(outputs, targets)) for name, metric in metrics.items()
    }


def example_losses(model: nn.Module, loss: Loss, examples: Examples, *, chunk: int = 1024) -> Tensor:
    """Return the loss of each example, as if it were a batch of its own, with the model in evaluation mode."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with torch.no_grad(), evaluation_mode(model), seeded(0, "evaluation", 0, device):
        chunks = _chunks(examples, chunk, device)
        return torch.cat([_losses(model, loss, x, y).double().cpu() for x, y in chunks])


def _losses(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each of these examples: mapped over the outputs where possible, else one by one."""

    def single(output: Tensor, target: Tensor) -> Tensor:
        return loss(output[None], target[None])

    outputs = model(inputs)
    if not isinstance(outputs, Tensor) or len(outputs) != len(targets):  # cannot be split by example
        pairs = zip(torch.split(inputs, 1), torch.split(targets, 1), strict=True)
        return torch.stack([loss(model(x), y) for x, y in pairs])
    try:
        each: Tensor = vmap(single)(outputs, targets)
    except (RuntimeError, ValueError):  # `vmap` cannot map this loss
        each = torch.stack([single(output, target) for output, target in zip(outputs, targets, strict=True)])
    return each


def _chunks(examples: Examples, size: int, device: torch.device) -> Iterator[list[Tensor]]:
    """Yield the inputs and targets of all examples on a device, at most `size` at a time."""
    for indices in torch.split(torch.arange(len(examples)), size):
        yield [tensor.to(device) for tensor in examples.take(indices)]


def example_errors(model: nn.Module, examples: Examples, scale: float = 1.0) -> Tensor:
    """Return the error of each example: 1 for a wrong class, 0 for the right one, or the squared error of numbers.

    Differences of numbers are multiplied by `scale`, the size of one unit of the target.
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
    """Put a model in evaluation mode inside the block, and give every module its own mode back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
