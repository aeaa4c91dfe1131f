"""The loss, the metrics and the errors of a model on a set of examples."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from coterie.errors import blaming
from coterie.evaluation.losses import as_loss, known_per_example, on_device
from coterie.evaluation.metrics import Metric, metrics_of
from coterie.users.examples import Examples
from coterie.users.sampling import seeded
from coterie.users.trees import (
    Tree,
    called,
    each_row,
    form,
    has_rows,
    joined,
    mapped,
    n_rows,
    split,
)
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

    Transforms and models that draw random numbers draw the same ones every time. Metrics get what
    the model gives. Where that has not one row an example, loss and metrics are means over chunks,
    by their numbers of examples.

    Args:
        model: the model; its mode is restored afterwards.
        loss: the mean loss of a batch from (output, target).
        examples: the set.
        metrics: by name, computed over the whole set; when None the usual one for the loss, such as
            accuracy.
        chunk: how many examples go through the model at a time.

    Example:
        >>> from coterie.users.examples import InMemory
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.ones_(model.weight)
        >>> data = InMemory(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [4.0]]))
        >>> evaluate(model, nn.functional.mse_loss, data)
        {'loss': 2.0, 'rmse': 1.4142135623730951}
    """
    device = next(model.parameters()).device
    loss = on_device(as_loss(loss), device)
    # a loss may draw, too
    with torch.no_grad(), evaluation_mode(model), seeded(0, "evaluation", 0, device):
        parts = outputs_on(model, examples, chunk)
        if (whole := whole_of(parts)) is not None:
            return scores(*whole, loss, metrics)
        by_chunk = [
            (scores(output, targets, loss, metrics), n / len(examples))
            for output, targets, n in parts
        ]
        return {
            name: sum(each[name] * share for each, share in by_chunk) for name in by_chunk[0][0]
        }


def outputs_on(
    model: nn.Module, examples: Examples, chunk: int = 1024
) -> list[tuple[Any, Tree, int]]:
    """Return outputs of a model in evaluation mode, targets and numbers of examples, of a set chunk by chunk."""
    device = next(model.parameters()).device
    with torch.no_grad(), evaluation_mode(model), seeded(0, "evaluation", 0, device):
        parts = []
        for x, y in _chunks(examples, chunk, device):
            with blaming("the model, in evaluation mode,"):
                parts.append((called(model, x), y, n_rows(x)))
        return parts


def whole_of(parts: Sequence[tuple[Any, Tree, int]]) -> tuple[Any, Tree] | None:
    """Return the outputs and targets of all chunks where they can be joined, with one row an example; else None."""
    if len(parts) > 1:
        if not all(has_rows(output, n) and has_rows(targets, n) for output, targets, n in parts):
            return None
        if len({(form(output), form(targets)) for output, targets, _ in parts}) > 1:
            return None
    outputs, targets, _ = zip(*parts, strict=True)
    return joined(outputs), joined(targets)


def scores(
    outputs: Any, targets: Tree, loss: Loss, metrics: Mapping[str, Metric] | None = None
) -> dict[str, float]:
    """Return the mean loss and the metrics of the outputs on a whole set."""
    metrics = metrics_of(loss, outputs, targets) if metrics is None else metrics
    with blaming("the loss"):
        values = {"loss": float(loss(outputs, targets))}
    for name, metric in metrics.items():
        with blaming(f"the metric {name!r}"):
            values[name] = float(metric(outputs, targets))
    return values


def example_losses(
    model: nn.Module, loss: Loss, examples: Examples, *, chunk: int = 1024
) -> Tensor:
    """Return the loss of each example, as if it were a batch of its own, with the model in evaluation mode.

    It is 0 where there is nothing to learn from, all targets of an example being ignored.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    loss = on_device(as_loss(loss), device)
    with torch.no_grad(), evaluation_mode(model), seeded(0, "evaluation", 0, device):
        chunks = _chunks(examples, chunk, device)
        return torch.cat([_losses(model, loss, x, y).double().cpu() for x, y in chunks])


def _losses(model: nn.Module, loss: Loss, inputs: Tree, targets: Tree) -> Tensor:
    """Return the loss of each of these examples.

    Mapped over the outputs where possible, else one by one.
    """
    n = n_rows(inputs)
    known = known_per_example(loss)

    def single(output: Any, target: Tree) -> Tensor:
        return loss(mapped(_as_batch, output), mapped(_as_batch, target))

    outputs = called(model, inputs)
    if not has_rows(outputs, n):  # cannot be split by example
        pairs = zip(split(inputs, [1] * n), split(targets, [1] * n), strict=True)
        each = torch.stack([loss(called(model, x), y) for x, y in pairs])
    else:
        try:
            each = vmap(single)(outputs, targets)
        except (RuntimeError, ValueError):  # `vmap` cannot map this loss
            pairs = zip(each_row(outputs, n), each_row(targets, n), strict=True)
            each = torch.stack([single(output, target) for output, target in pairs])
    counts = None if known is None else known.counts(targets)
    return each if counts is None else torch.where(counts == 0, 0.0, each)


def _as_batch(row: Tensor) -> Tensor:
    return row[None]


def _chunks(examples: Examples, size: int, device: torch.device) -> Iterator[list[Tree]]:
    """Yield the inputs and targets of all examples on a device, at most `size` at a time."""
    for indices in torch.split(torch.arange(len(examples)), size):
        with blaming("the data set that the model is evaluated on"):
            taken = examples.take(indices)
        yield [mapped(lambda leaf: leaf.to(device), tree) for tree in taken]


def example_errors(model: nn.Module, examples: Examples, scale: float = 1.0) -> Tensor:
    """Return the error of each example under a model in evaluation mode; see `errors_of`."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    inputs, targets = examples.take(torch.arange(len(examples)))
    with torch.no_grad(), evaluation_mode(model):
        return errors_of(model(inputs.to(device)).to(targets.device), targets, scale)


def errors_of(outputs: Tensor, targets: Tensor, scale: float = 1.0) -> Tensor:
    """Return the error of each example.

    1 for a wrong class, 0 for the right one, or the squared error of numbers.

    Differences of numbers are multiplied by `scale`, the size of one unit of the target.
    """
    if targets.is_floating_point():
        difference: Tensor = scale * (outputs.double() - targets.double())
        return difference.square().flatten(1).mean(1)
    wrong: Tensor = (outputs.argmax(1) != targets).double()
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
