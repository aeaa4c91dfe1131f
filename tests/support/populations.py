"""Made-up users of a benchmark's data set, and the parts of their tasks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
from tests.support.examples import everything

from coterie.benchmark.tasks import Population, SetTask, task_of
from coterie.users.examples import Examples


def people(
    n_users: int = 5, n: int = 40, *, regression: bool = False, as_table: bool = False
) -> Population:
    """Make users whose first feature is the number of the row, so that every example can be known again."""
    rng = np.random.default_rng(0)
    rows = n_users * n
    inputs = np.column_stack([np.arange(rows), rng.normal(size=(rows, 2))])
    targets = inputs[:, 1] + 3.0 if regression else rng.permutation(np.arange(rows) % 4)
    owners = np.repeat([f"user {k}" for k in range(n_users)], n)
    held: Any = (
        pd.DataFrame(inputs, columns=list("abc"))
        if as_table
        else torch.tensor(inputs, dtype=torch.float32)
    )
    return Population(held, targets, owners, n_classes=0 if regression else 4)


def parts(task: SetTask) -> dict[str, Examples]:
    assert task.me.validation is not None
    assert task.me.test is not None
    return {"own": task.me.examples, "validation": task.me.validation, "test": task.me.test}


def rows_of(examples: Examples) -> list[int]:
    return [int(row) for row in everything(examples)[0][:, 0]]


def make(source: Population, condition: str = "honest", seed: int = 0) -> SetTask:
    return task_of(source, "user 1", own_examples=12, most_peers=10, condition=condition, seed=seed)
