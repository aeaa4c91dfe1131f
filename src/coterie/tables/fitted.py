"""What training from a table gave: the personal model beside the one trained alone, and the verdict."""

import math
from dataclasses import dataclass
from typing import Any

from coterie.data import TableTask
from coterie.errors import DataError
from coterie.evaluation.evaluate import example_errors
from coterie.reporting.verdict import verdict_on_test_set
from coterie.training.run import Run


@dataclass(frozen=True)
class Fitted:
    """A personal model and the one trained alone, on the same rows with the same settings."""

    task: TableTask
    run: Run  # by the rule asked for
    alone: Run  # by `Alone`

    @property
    def metric(self) -> str:
        """The name of what is reported: accuracy, or the root mean squared error in the target's units."""
        return "accuracy" if self.task.preparation.kind == "classification" else "rmse"

    def difference(self) -> tuple[float, float]:
        """Return the test metric with peers less that of Alone, and its standard error, paired by example."""
        if self.task.me.test is None:
            raise DataError("a task from a table has a test set")
        test, scale = self.task.me.test, self.task.preparation.scale
        ours, theirs = (example_errors(run.model, test, scale) for run in (self.run, self.alone))
        if self.metric == "accuracy":
            change = theirs - ours
        else:  # the delta method: how each example moves either root of the mean
            change = ours / (2 * ours.mean().sqrt()) - theirs / (2 * theirs.mean().sqrt())
        error = float(change.std()) / math.sqrt(len(change)) if len(change) > 1 else math.nan
        return self.run.test[self.metric] - self.alone.test[self.metric], error

    def table(self) -> list[dict[str, Any]]:
        """Return a row for the rule and one for Alone."""
        return [
            {
                "rule": run.record.configuration.rule,
                f"test {self.metric}": f"{run.test[self.metric]:.4g}",
                "test loss": f"{run.test['loss']:.4g}",
                "best step": run.best_step,
            }
            for run in (self.run, self.alone)
        ]

    def sentence(self) -> str:
        """Say whether collaboration helped."""
        return verdict_on_test_set(self.metric, *self.difference(), self.run.record.configuration.me.test)
