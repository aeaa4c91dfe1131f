"""Measure the theory's constants on a table, without training."""

from pathlib import Path
from typing import Any

import torch

from coterie.choosing.measuring import before_training
from coterie.data import from_table
from coterie.errors import KnobError
from coterie.learners.spec import RunSpec
from coterie.tables import models
from coterie.theory.estimates import Estimates


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
    spec = RunSpec(made, models.loss_of(task.preparation), task.me, task.peers, steps=steps).prepared()
    return before_training(spec.in_process(), spec)
