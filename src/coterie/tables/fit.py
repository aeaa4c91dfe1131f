"""From a table to a personal model in a folder."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.arguments import SEED
from coterie.choosing.measuring import before_training
from coterie.data import TableTask, from_table
from coterie.errors import FileError, KnobError
from coterie.evaluation.metrics import less_is_better
from coterie.learners.spec import RunSpec
from coterie.recording.claim import claimed
from coterie.recording.result import Comparison, Difference
from coterie.reporting.page import Section
from coterie.reporting.verdict import asks_nobody, difference, serves_alone, verdict
from coterie.tables import models
from coterie.tables.calibration import save_calibration
from coterie.tables.everyone import is_everyone
from coterie.tables.models import save_model
from coterie.tables.report import (
    class_shares,
    contributed,
    left_out_section,
    metrics_of,
    warn_of_imbalance,
    write_report,
)
from coterie.theory.estimates import Estimates
from coterie.training.algorithm import Followed
from coterie.training.run import Run, Stopped
from coterie.training.train import train
from coterie.users.sampling import one_thread

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


def fit(
    task: TableTask,
    rule: Followed,
    model: str,
    out: Path,
    *,
    again: Sequence[Callable[[], tuple[TableTask, Followed]]] = (),
    metrics: Sequence[str] = (),
    contributions: bool = False,
    seed: int = 0,
    **settings: Any,
) -> Run | None:
    """Train by a rule, and write model, preparation, record and a page; None after Ctrl-C.

    A model trained alone is kept beside it (the guard), so that the run can be compared with it on
    the test rows.

    Args:
        task: the users, from `coterie.data.from_table`.
        rule: how gradients become a direction.
        model: "linear", "mlp", or "module.path:factory".
        out: the folder to write.
        again: make the same users with user 0's rows split in another way, and the rule for them.
            The verdict is then on the mean of all splits; what is served is the model of the first.
        metrics: names in `METRICS`; the verdict is made by the first, and by the loss. Accuracy, or
            the root mean squared error, comes last, and first where nothing is named.
        contributions: write what each peer adds to contributions.json, and on the page.
        seed: what the initial weights and the batches depend on; in the k-th other split, seed + k.
        settings: passed on to `coterie.train`: steps, lr, batch_size, device, resume, engine, …
    """
    if is_everyone(out):
        raise FileError(f"{out} holds models of several users (`--me all`); name another folder")
    warn_of_imbalance(class_shares([task.me], task.preparation), task.preparation)
    everything: dict[str, Any] = {"model": model, "metrics": metrics, "seed": seed, **settings}
    with claimed(out):
        run = _train(task, rule, out, **everything)
        if run.stopped is Stopped.CTRL_C:
            return None
        try:
            task.preparation.save(out)
            save_model(out, run.model, model, task.n_inputs, task.n_outputs)
            save_calibration(out, run, task.preparation)
            splits = [Split.of(run)] if again else []
            for other in _others(again, out, **everything):
                if other.stopped is Stopped.CTRL_C:
                    return None
                splits.append(Split.of(other))
            more = [left_out_section(task.left_out)] if task.left_out else []
            more += [judge_over_splits(run, splits)] if splits else []
            if contributions:
                more.append(contributed(run.contributions(), out))
            shares = class_shares([task.me], task.preparation)
            about = task.preparation, task.target, task.test_rows
            write_report(out, run, *about, shares=shares, more=more)
        except FileError as error:
            raise FileError(
                f"{error}. The model is trained: `--resume` will write it then", run
            ) from error
    return run


def _others(
    again: Sequence[Callable[[], tuple[TableTask, Followed]]],
    out: Path,
    *,
    seed: int,
    **settings: Any,
) -> Iterator[Run]:
    """Yield the runs of the other splits, each in a folder of its own."""
    settings |= {"trackers": (), "measure": False}
    for k, make in enumerate(again, 1):
        yield _train(*make(), out / FOLDER / f"{k + 1:02d}", seed=seed + k, **settings)


def _train(
    task: TableTask,
    rule: Followed,
    out: Path,
    *,
    model: str,
    metrics: Sequence[str],
    seed: int,
    **settings: Any,
) -> Run:
    reported = metrics_of(task.preparation, metrics, class_shares([task.me], task.preparation))
    with one_thread(), torch.random.fork_rng(devices=[]):  # nobody else's draws are changed
        torch.manual_seed(SEED("seed", seed))
        made = models.build(model, task.n_inputs, task.n_outputs)
    loss = models.loss_of(task.preparation)
    return train(
        made, loss, task.me, task.peers, rule, out=out, seed=seed, metrics=reported, **settings
    )


def measured(
    data: Path, *, user_column: str, target: str, me: str, model: str, steps: int, **table: Any
) -> Estimates:
    """Return noise, bias and curvature of a table's users, as a run would measure them before its first step.

    `table` is what else `from_table` takes.
    """
    named = {"--user-column": user_column, "--target": target, "--me": me}
    if missing := [name for name, value in named.items() if not value]:
        raise KnobError(f"`--data` needs `{missing[0]}` too")
    task = from_table(data, user_column=user_column, target=target, me=me, **table)
    torch.manual_seed(0)
    made = models.build(model, task.n_inputs, task.n_outputs)
    spec = RunSpec(
        made, models.loss_of(task.preparation), task.me, task.peers, steps=steps
    ).prepared()
    return before_training(spec.in_process(), spec)
