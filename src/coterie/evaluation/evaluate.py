"""The loss, the metrics and the errors of a model on a set of examples; and two models compared on it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from coterie.errors import attributing_errors_to
from coterie.evaluation.losses import as_loss, known_per_example, on_device
from coterie.evaluation.metrics import Metric, less_is_better, metrics_of
from coterie.recording.result import Comparison, Difference
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
            with attributing_errors_to("the model, in evaluation mode,"):
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
    with attributing_errors_to("the loss"):
        values = {"loss": float(loss(outputs, targets))}
    for name, metric in metrics.items():
        with attributing_errors_to(f"the metric {name!r}"):
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
        with attributing_errors_to("the data set that the model is evaluated on"):
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


GROUPS = 100
"""Into how many groups at most examples are put for the jackknife.

A metric is computed once without each.
"""


def compare(
    model: nn.Module,
    alone: nn.Module,
    loss: Loss,
    examples: Examples,
    metrics: Mapping[str, Metric] | None = None,
    *,
    on: str,
) -> Comparison:
    """Compare a model with one trained alone on examples, in all metrics and in loss.

    A metric may be any function of the whole set, so its standard error is that of the jackknife
    over examples; for a mean, such as the accuracy, that is the usual one. The error of the loss is
    over the examples' losses.

    Args:
        model: the model that is served.
        alone: the one trained alone.
        loss: the mean loss of a batch from (output, target).
        examples: on which the two are compared.
        metrics: by name; the usual one for the loss when None.
        on: what examples these are, in words.

    Example:
        >>> from coterie.users.examples import InMemory
        >>> models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
        >>> for each, slope in zip(models, (1.0, 3.0)):
        ...     _ = nn.init.constant_(each.weight, slope)
        >>> data = InMemory(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [2.0]]))
        >>> comparison = compare(*models, nn.functional.mse_loss, data, on="2 test examples")
        >>> {name: round(each.difference, 2) for name, each in comparison.measures.items()}
        {'rmse': -3.16, 'loss': -10.0}
    """
    if metrics is None:
        output, targets, _ = outputs_on(model, examples)[0]
        metrics = metrics_of(loss, output, targets)
    ours, of_alone = (evaluate(each, loss, examples, metrics) for each in (model, alone))
    measured = {name: metric for name, metric in metrics.items() if name in ours}
    errors = _metric_errors(model, alone, examples, measured)
    change = example_losses(model, loss, examples) - example_losses(alone, loss, examples)
    errors["loss"] = paired_error(change)
    measures = {
        name: Difference(
            ours=ours[name],
            alone=of_alone[name],
            error=error,
            less_is_better=less_is_better(name, metrics.get(name)),
        )
        for name, error in errors.items()
    }
    return Comparison(on=on, examples=len(examples), measures=measures)


def constant_loss(
    model: nn.Module, loss: Loss, training: Examples, examples: Examples
) -> float | None:
    """Return the mean loss on examples of the constant output that is best on training examples.

    None where outputs are not a row of numbers an example, or the loss has no gradient by them.

    Example:
        >>> from coterie.users.examples import InMemory
        >>> data = InMemory(torch.zeros(4, 1), torch.tensor([[0.0], [2.0], [0.0], [2.0]]))
        >>> round(constant_loss(nn.Linear(1, 1), nn.functional.mse_loss, data, data), 3)
        1.0
    """
    known, judged = (whole_of(outputs_on(model, each)) for each in (training, examples))
    if known is None or judged is None:
        return None
    (output, targets), (_, asked) = known, judged
    if not isinstance(output, Tensor) or output.ndim != 2:
        return None
    if not isinstance(targets, Tensor) or not isinstance(asked, Tensor):
        return None
    with seeded(0, "constant", 0):  # a loss may draw
        return _best_constant(output, targets, asked, loss)


def _best_constant(output: Tensor, targets: Tensor, asked: Tensor, loss: Loss) -> float | None:
    """Return the loss on targets asked for of the constant that is best on others; see `constant_loss`."""
    constant = torch.zeros(1, output.shape[1], dtype=torch.float64, requires_grad=True)
    try:
        optimizer = torch.optim.LBFGS([constant], max_iter=50, line_search_fn="strong_wolfe")

        def objective() -> Tensor:
            optimizer.zero_grad()
            # a little ridge: a class that is missing is not impossible
            mean = (
                loss(constant.expand(len(output), -1), _like(targets))
                + 1e-3 * constant.square().sum()
            )
            torch.autograd.backward(mean)
            return mean

        optimizer.step(objective)  # type: ignore[no-untyped-call]  # torch does not type it
        with torch.no_grad():
            n = len(asked)
            found = float(loss(constant.expand(n, -1), _like(asked)))
    except (RuntimeError, ValueError, TypeError, IndexError):
        return None
    return found if math.isfinite(found) else None


def _like(targets: Tensor) -> Tensor:
    return targets.double() if targets.is_floating_point() else targets


def paired_error(change: Tensor) -> float:
    """Return the standard error of the mean of examples' differences; infinite for one example."""
    return float(change.std()) / math.sqrt(len(change)) if len(change) > 1 else math.inf


def _metric_errors(
    model: nn.Module, alone: nn.Module, examples: Examples, metrics: Mapping[str, Metric]
) -> dict[str, float]:
    """Return the standard error of the difference of each metric."""
    if not metrics:
        return {}
    wholes = [whole_of(outputs_on(each, examples)) for each in (model, alone)]
    if None in wholes or not all(
        has_rows(output, len(examples)) for output, _ in filter(None, wholes)
    ):
        return dict.fromkeys(metrics, math.nan)  # outputs of which no example can be left out

    def difference(metric: Metric, kept: Tensor) -> float:
        parts = [mapped(lambda leaf: leaf[kept], whole) for whole in wholes]
        ours, of_alone = (float(metric(*part)) for part in parts)
        return ours - of_alone

    return {
        name: _jackknife(partial(difference, metric), len(examples))
        for name, metric in metrics.items()
    }


def _jackknife(value: Callable[[Tensor], float], n: int) -> float:
    """Return the standard error of a function of a mask over examples, by leaving out one group after another."""
    if n < 2:
        return math.inf
    groups = min(n, GROUPS)
    group = torch.arange(n) % groups
    try:
        without = torch.tensor([value(group != g) for g in range(groups)], dtype=torch.float64)
    except (
        ValueError,
        RuntimeError,
        ZeroDivisionError,
    ):  # a metric that some of the examples do not allow
        return math.nan
    return math.sqrt((groups - 1) / groups * float((without - without.mean()).square().sum()))
