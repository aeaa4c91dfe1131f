"""The metrics of a table's model: in the units of the target, and by the weights of the rows."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from coterie.data import Preparation
from coterie.errors import KnobError
from coterie.evaluation.metrics import METRICS, Metric, binary_accuracy, kind_of, less_is_better


@dataclass(frozen=True)
class TableMetric:
    """A registered metric of outputs and targets as a table's users have them."""

    name: str
    centre: float = 0.0
    scale: float = 1.0

    def __call__(self, outputs: Tensor, targets: Any) -> float:
        """Return the metric in the units of the table's target."""
        metric = METRICS[self.name]
        weighted = isinstance(targets, Mapping)
        values = targets["value"] if weighted else targets
        if values.is_floating_point():
            outputs, values = (self.centre + self.scale * each.double() for each in (outputs, values))
        if weighted and "weights" in inspect.signature(metric).parameters:
            return metric(outputs, values, weights=targets["weight"])  # type: ignore[call-arg]  # as it says itself
        return metric(outputs, values)

    @property
    def less_is_better(self) -> bool:
        """Whether a smaller value is better."""
        return less_is_better(self.name)


def _fits(metric: Metric, preparation: Preparation) -> bool:
    """Say whether a metric is for such targets; a model of a table has an output for each class, not one logit."""
    return kind_of(metric) in (None, preparation.kind) and metric is not binary_accuracy


def metrics_of(preparation: Preparation, names: Sequence[str] = ()) -> dict[str, Metric]:
    """Return the named metrics and last the usual one, accuracy or the root mean squared error.

    A metric of classes where the target is a number is refused, and one of numbers where it is a class.
    """
    usual = "accuracy" if preparation.kind == "classification" else "rmse"
    for name in names:
        if not _fits(METRICS[name], preparation):
            fitting = [one for one in METRICS if _fits(METRICS[one], preparation)]
            raise KnobError(f"`{name}` is no metric for {preparation.kind}; choose among {', '.join(fitting)}")
    units = (
        {} if preparation.kind == "classification" else {"centre": preparation.centre, "scale": preparation.scale}
    )
    return {name: TableMetric(name, **units) for name in dict.fromkeys((*names, usual))}
