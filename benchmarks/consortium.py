"""The consortium of examples/consortium.py: adaptive averaging beside a fixed weight and training alone.

    python benchmarks/consortium.py [--data DIR] [--seeds 3] [--conditions honest,one-wrong]

Each of the four hospitals is user 0 in turn, with 40 rows to learn from, others for each seed; the
other three are sites with their first caps, which answer `Remote` in this process, with no network
between. *One wrong*: one of the three has `ill` the wrong way round. Shown are test accuracies,
paired differences ± one standard error, and the weight of the wrong site. DIR holds the
`processed.*.data` files of the UCI Heart Disease set; without it tables of the same shape are made
up.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import coterie
from coterie.engines.in_process.passes import Passes
from coterie.engines.peer import Caps, Peer
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.sites import LocalSites
from coterie.tables import models

RULES: dict[str, Any] = {
    "alone": coterie.Alone(),
    "alpha 0.5": coterie.WeightedAveraging(0.5),
    "adaptive": coterie.AdaptiveAveraging(),
}
OPTIONS: dict[str, Any] = {
    "lr": 0.01,
    "steps": 150,
    "batch_size": 40,
    "progress": False,
    "measure": False,
}


def example() -> Any:
    """Return examples/consortium.py as a module."""
    path = Path(__file__).parent.parent / "examples" / "consortium.py"
    spec = importlib.util.spec_from_file_location("consortium", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["consortium"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def scores(table: pd.DataFrame, me: str, wrong: str | None, seed: int) -> dict[str, float]:
    """Return the test accuracy of each rule, and the weight on the wrong site."""
    if wrong is not None:
        at = table["hospital"] == wrong
        table = table.assign(ill=np.where(at, 1 - table["ill"], table["ill"]))
    columns = ["cp", "restecg", "slope", "thal"]
    task = coterie.data.from_table(
        table,
        user_column="hospital",
        target="ill",
        me=me,
        categorical=columns,
        own_examples=40,
        seed=seed,
    )
    torch.manual_seed(seed)
    model, loss = (
        models.build("linear", task.n_inputs, task.n_outputs),
        models.loss_of(task.preparation),
    )
    measured: dict[str, float] = {}
    for name, rule in RULES.items():
        passes = Passes(models.build("linear", task.n_inputs, task.n_outputs), loss)
        held = {peer.name: Peer(peer, passes, Caps(None, 10, 16)) for peer in task.peers}
        engine = partial(Remote, sites=LocalSites(held), names=list(held))
        run = coterie.train(model, loss, task.me, [], rule, engine=engine, seed=seed, **OPTIONS)
        measured[name] = run.test["accuracy"]
        if name == "adaptive" and wrong is not None:
            measured["wrong"] = run.record.end.account["tau"].get(wrong, 0.0)
    return measured


def main() -> None:
    """Print a line for each condition."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--conditions", default="honest,one-wrong")
    settings = parser.parse_args()
    torch.set_num_threads(1)
    tables = example().hospitals(settings.data)
    whole = pd.concat(
        [table.assign(hospital=name) for name, table in tables.items()], ignore_index=True
    )
    print(
        "| | "
        + " | ".join(RULES)
        + " | adaptive − alpha 0.5 | adaptive − alone | on the wrong site |"
    )
    print("|---" * (len(RULES) + 4) + "|")
    for condition in settings.conditions.split(","):
        rows = []
        for seed in range(settings.seeds):
            for me in tables:
                others = [name for name in tables if name != me]
                rows.append(
                    scores(whole, me, others[seed % 3] if condition != "honest" else None, seed)
                )
        table = {name: np.array([row[name] for row in rows]) for name in rows[0]}
        changes = (table["adaptive"] - table[name] for name in ("alpha 0.5", "alone"))
        shown = [f"{table[name].mean():.3f}" for name in RULES]
        shown += [f"{c.mean():+.3f} ± {c.std(ddof=1) / len(c) ** 0.5:.3f}" for c in changes]
        shown.append(
            f"mean {table['wrong'].mean():.1%}, most {table['wrong'].max():.1%}"
            if "wrong" in table
            else ""
        )
        print(f"| {condition} | " + " | ".join(shown) + " |", flush=True)


if __name__ == "__main__":
    main()
