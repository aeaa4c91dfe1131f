"""Several splits of a user's rows, and the verdict on their mean."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from coterie.errors import KnobError
from coterie.evaluation.metrics import less_is_better
from coterie.recording.result import Comparison, Difference
from coterie.reporting.page import Section
from coterie.reporting.verdict import asks_nobody, difference, serves_alone, verdict
from coterie.training.run import Run

FOLDER = "splits"
"""Holds the runs of the splits after the first, each with its record."""


@dataclass(frozen=True)
class Split:
    """What came of one split.

    Every measure of the model served beside that of the model trained alone.
    """

    served: str  # "alone", or "with peers"
    measures: Mapping[str, Difference]
    seconds: float = 0.0  # that its run took
    constant: float | None = None  # the loss of a constant on its test rows, where it is known

    @classmethod
    def of(cls, run: Run) -> "Split":
        """Return what came of a run; where Alone is served the two are the same."""
        end = run.record.end
        if end.comparison is not None and not end.comparison.splits:
            return cls("with peers", end.comparison.measures, end.seconds, end.constant)
        if not serves_alone(end) and not asks_nobody(run.record.configuration):
            remedy = "leave out `--no-guard`, or `--repeats`"
            raise KnobError(
                "`--repeats` compares with a model trained alone, but there is none beside;"
                f" {remedy}"
            )
        metrics = [name for name in end.test if name != "loss"]
        measures = {
            name: Difference(
                ours=end.test[name],
                alone=end.test[name],
                error=0.0,
                less_is_better=less_is_better(name),
            )
            for name in (*metrics, "loss")
        }
        return cls("alone", measures, end.seconds, end.constant)


def judge_over_splits(run: Run, splits: Sequence[Split]) -> Section:
    """Let the mean over splits make the verdict of the first split's run.

    Return the splits as part of a page.
    """
    record, me = run.record, run.record.configuration.me
    comparison = over_splits(splits, me.test, int(me.examples) + me.validation)
    constants = [split.constant for split in splits if split.constant is not None]
    end = replace(
        record.end,
        comparison=comparison,
        constant=float(np.mean(constants)) if len(constants) == len(splits) else None,
        seconds=sum(split.seconds for split in splits),
    )
    record.finish(replace(end, verdict=verdict(record.configuration, end).sentence))
    rows = [
        {
            "split": str(k),
            "served": split.served,
            **{name: difference(one) for name, one in split.measures.items()},
        }
        for k, split in enumerate(splits, 1)
    ]
    rows.append(
        {
            "split": "mean",
            "served": "",
            **{name: difference(one) for name, one in comparison.measures.items()},
        }
    )
    text = [
        "The model served is that of the first split, and the numbers of its test rows are those of"
        " this split alone; the verdict and the time are of all splits. In each the rows are split"
        " anew, with other initial weights and batches, and all is chosen again. The error of a"
        " single split is over its test rows; that of the mean allows for the overlap of the"
        " splits."
    ]
    return Section("The splits, against training alone", text, [rows], folded=True)


def over_splits(splits: Sequence[Split], test: int, rest: int) -> Comparison:
    """Return the mean over splits, with a standard error that allows for their overlap.

    The same rows are in many splits, so that the mean over J splits varies more than their spread s
    shows. Its standard error is s √(1/J + n_test / n_rest) (Nadeau and Bengio 2003), which is exact
    where a difference depends on the test rows alone.

    Args:
        splits: two or more.
        test: how many rows a split tests on.
        rest: how many rows it trains and chooses with.

    Example:
        >>> each = [Split("with peers", {"loss": Difference(ours=v, alone=1.0, error=0.1, less_is_better=True)})
        ...     for v in (0.7, 0.8, 0.9)]
        >>> mean = over_splits(each, test=20, rest=80).measures["loss"]
        >>> round(mean.difference, 3), round(mean.error, 4)
        (-0.2, 0.0764)
    """
    measures = {}
    for name, first in splits[0].measures.items():
        each = [split.measures[name] for split in splits]
        spread = float(np.std([one.difference for one in each], ddof=1))
        error = spread * math.sqrt(1 / len(splits) + test / rest)
        ours, alone = (
            float(np.mean([getattr(one, side) for one in each])) for side in ("ours", "alone")
        )
        measures[name] = Difference(
            ours=ours, alone=alone, error=error, less_is_better=first.less_is_better
        )
    on = f"{len(splits)} random splits with {test} test rows each"
    return Comparison(on=on, examples=len(splits), measures=measures, splits=len(splits))
