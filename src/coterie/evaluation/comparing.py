"""A model beside the one trained alone, on the same examples.

Every number with its paired standard error.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from coterie.evaluation.evaluate import evaluate, example_losses, outputs_on, whole_of
from coterie.evaluation.metrics import Metric, less_is_better, metrics_of
from coterie.recording.result import Comparison, Difference
from coterie.users.examples import Examples
from coterie.users.sampling import seeded
from coterie.users.trees import has_rows, mapped
from coterie.users.user import Loss

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
