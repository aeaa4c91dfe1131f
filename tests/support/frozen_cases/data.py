"""Draws, evaluation, data sets and tables."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tests.support.frozen_cases.cases import Parts, case, flat, parts_of
from tests.support.frozen_cases.library import draws_of, evaluate, make, table_runs, told_of
from tests.support.frozen_cases.problems import LOSSES, MODELS, a_run, labelled, network, users
from tests.support.frozen_cases.rules import PLAIN, ROWS
from torch import Tensor
from torch.nn import functional as f
from torch.utils.data import Dataset


class Jittered(Dataset[Any]):
    """Examples with noise drawn whenever they are looked at."""

    def __init__(self, n: int, seed: int) -> None:
        self.inputs, self.targets = labelled(n, seed)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index] + 0.1 * torch.rand(5), self.targets[index]


def the_rest() -> None:
    """Add draws, evaluation, data sets and tables."""

    @case("draws")
    def _() -> Parts:
        everyone = users()
        results = {
            f"{user.name}, {size}, {seed}, {step}": flat(draws_of(user, size, seed, step))
            for user in everyone
            for size, seed, step in ((4, 0, 0), (9, 5, 1), (50, -1, 10**6))
        }
        return parts_of({}, **results)

    @case("evaluate")
    def _() -> Parts:
        results = {}
        for model, (_, kind) in MODELS.items():
            me = users(kind=kind, validation=30)[0]
            loss = LOSSES.get(kind, f.cross_entropy)
            results[model] = evaluate(network(model), loss, me)
            results[f"{model}, in chunks"] = evaluate(network(model), loss, me, chunk=7)
        more = {"largest": lambda outputs, targets: float(outputs.abs().max())}
        results["a metric"] = evaluate(
            network(), f.cross_entropy, users(validation=9)[0], metrics=more
        )
        return parts_of({}, **results)

    @case("data sets", draws=True)
    def _() -> Any:
        names = {"me": (12, 3), "a": (17, 4), "b": (8, 5)}
        everyone = [make("dataset user", name, Jittered(*about)) for name, about in names.items()]
        return {
            name: a_run(rule(()), everyone=everyone)
            for name, rule in (PLAIN | ROWS).items()
            if "tau" not in name
        }

    @case("metrics and callbacks")
    def _() -> Parts:
        told: list[list[float]] = []
        more: dict[str, Any] = {
            "metrics": {"spread": lambda outputs, targets: float(outputs.std())}
        }

        def tell(step: Any) -> None:
            told.append(told_of(step))

        more["callbacks"] = [tell]
        run = a_run(PLAIN["correction"](()), everyone=users(validation=9), **more)
        return parts_of({"run": run}, told=told)

    for kind in ("classification", "regression"):
        for model in ("linear", "mlp"):

            @case(f"table: {kind}, {model}", draws=True)
            def _(kind: str = kind, model: str = model) -> Parts:
                return of_table(kind, model)


def of_table(kind: str, model: str) -> Parts:
    """Return what comes of a table with numbers, categories and gaps."""
    random = np.random.default_rng(3)
    n = 150
    numbers = random.standard_normal((n, 3))
    who = np.resize(["north", "south", "east"], n)
    y = numbers @ [1.0, -1.0, 0.5] + (who == "south") + 0.3 * random.standard_normal(n)
    frame = pd.DataFrame(numbers, columns=list("uvw")).assign(
        who=who, colour=np.resize(["red", "blue"], n)
    )
    frame.loc[::11, "v"] = np.nan
    frame["y"] = y if kind == "regression" else np.where(y > 0, "yes", "no")
    task: dict[str, Any] = {
        "user_column": "who",
        "target": "y",
        "me": "north",
        "own_examples": 20,
        "seed": 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        frame.to_csv(Path(folder) / "table.csv", index=False)
        runs, predictions, difference = table_runs(
            Path(folder) / "table.csv",
            make("averaging", 0.6),
            model,
            Path(folder) / "run",
            task,
            seed=4,
            steps=12,
            lr=0.05,
        )
    if kind == "classification":
        predictions["prediction"] = predictions["prediction"] == "yes"
    columns = {name: predictions[name].to_numpy(dtype=float) for name in predictions}
    return parts_of(runs, predictions=columns, difference=difference)
