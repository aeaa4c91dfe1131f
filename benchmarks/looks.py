"""By what should adaptive averaging choose where to stop, if the loss is that of classes? Three measures compared.

    python benchmarks/looks.py [--data DIR] [--sets digits] [--models linear,mlp] [--users 8]

Users of a set are user 0 in turn, with the examples, peers and conditions of `coterie bench`, but
without validation examples. The same run is judged by −log p, where p is what it gave the true
class; by 1 − √p, which the library takes; and by 1 − p. *Served* is the difference in accuracy to
the last point of a run by `Alone`, paired by user, ± one standard error; *alone* the same of the
model trained alone beside it, stopped by the same measure; *loss* the difference in the loss of
what is served. A user is *harmed* if its accuracy is below that last point's by more than two
binomial standard errors. The tables of `r_tables` can be named, too; `--sets r-classes` is all of
those with classes.
"""

from __future__ import annotations

import argparse
from unittest import mock

import numpy as np
import r_tables  # so that its sets can be named
import torch
from users_in_turn import options, problem_of, users_of

import coterie
from coterie.benchmark.conditions import CONDITIONS
from coterie.benchmark.sets import SETS
from coterie.choosing.adaptive import evaluations, stopping
from coterie.evaluation.evaluate import example_errors, example_losses

MEASURES = {
    "−log p": np.asarray,
    "1 − √p": stopping.hellinger,
    "1 − p": lambda losses: -np.expm1(-losses),
}


def scores(
    name: str, condition: str, me: str, settings: argparse.Namespace
) -> dict[str, tuple[float, float]]:
    """Return accuracy and loss of each model on a user's test examples, and under `error` that of its accuracy."""
    task, model = problem_of(name, me, settings.data, settings.model, condition)
    task.me.validation, loss = None, torch.nn.functional.cross_entropy
    test = task.me.test
    if test is None:
        raise AssertionError("a task has test examples")

    def score(served: torch.nn.Module | None) -> tuple[float, float]:
        if served is None:
            raise AssertionError("a model is trained alone beside every run")
        losses = example_losses(served, loss, test)
        return 1 - float(example_errors(served, test, 1.0).mean()), float(losses.mean())

    common = {"lr": settings.lr, "steps": settings.steps, "batch_size": SETS[name].batch_size}
    train = {**common, "progress": False, "measure": False}
    measured = {
        "last": score(
            coterie.train(model, loss, task.me, task.peers, coterie.Alone(), **train).model
        )
    }
    for measure, distance in MEASURES.items():
        with mock.patch.object(evaluations, "hellinger", distance):
            run = coterie.train(model, loss, task.me, task.peers, **train)
        measured |= {measure: score(run.model), f"{measure}, alone": score(run.alone)}
    accuracy = measured["last"][0]
    return measured | {"error": (max(accuracy * (1 - accuracy) / len(test), 1e-9) ** 0.5, 0.0)}


def rows(label: str, by_user: list[dict[str, tuple[float, float]]]) -> list[str]:
    """Return a line of the table for each measure."""
    table = {column: np.array([user[column] for user in by_user]) for column in by_user[0]}
    lines = []
    for measure in MEASURES:
        change = table[measure] - table["last"]
        beside = table[f"{measure}, alone"] - table["last"]
        harmed = int((change[:, 0] < -2 * table["error"][:, 0]).sum())
        shown = " | ".join(map(_mean, (change[:, 0], beside[:, 0], change[:, 1])))
        lines.append(f"| {label} | {measure} | {shown} | {harmed} of {len(change)} |")
    return lines


def _mean(values: np.ndarray) -> str:
    error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.nan
    return f"{values.mean():+.3f} ± {error:.3f}"


def main() -> None:
    """Print the table."""
    parser = options(__doc__)
    parser.add_argument("--models", default="linear,mlp")
    parser.add_argument("--conditions", default=",".join(CONDITIONS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.01)
    settings = parser.parse_args()
    of_classes = [f"r-{name}" for name, table in r_tables.TABLES.items() if table.classes]
    settings.sets = settings.sets.replace("r-classes", ",".join(of_classes))
    torch.set_num_threads(1)
    print(
        "| model, condition | chosen by | served | alone | loss | harmed |\n|---|---|---|---|---|---|"
    )
    for model in settings.models.split(","):
        chosen = argparse.Namespace(**(vars(settings) | {"model": model}))
        for condition in settings.conditions.split(","):
            by_user = [
                scores(name, condition, me, chosen)
                for name in settings.sets.split(",")
                for me in users_of(name, settings)
            ]
            print("\n".join(rows(f"{model}, {condition}", by_user)), flush=True)


if __name__ == "__main__":
    main()
