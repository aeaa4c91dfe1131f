"""Is the default for tables, linear models and trees mixed, as good as the best of its parts?

    coterie --import benchmarks/r_tables.py bench --data DIR --sets heart,school,r-exam
        --methods sklearn-alone,sklearn-forest,sklearn-trees,mixture,mixture-trees --users 8 --out bench
    python benchmarks/trees.py bench
    python benchmarks/trees.py --sets heart,school,r-exam --data DIR --users 2
    python benchmarks/trees.py --rows 200000 --columns 50 --users 8 [--own 0]

By condition the mean over sets of `mixture-trees` less each rival, ± the standard error between
sets: accuracy, or −RMSE in standard deviations; then the log loss of sets with classes (less is
better). "Alone" is in every cell (a set and a condition) the better of the strong linear model and
the forest by the mean score, known in hindsight. Last, the cells where the default is worse, or
better, than that by three standard errors over users. It reads the cells that are done.

With `--sets`: the same default with other trees (`--variants`: "and peers weighted by τ",
"sklearn-trees" and so on), on the same users: each set's scores, and means over sets of the score
less that of the default, and of the log loss or squared error.

Without either: processor seconds of all of coterie's tree candidates, folds included, beside one
fit of scikit-learn's `HistGradientBoostingRegressor` on the pooled table with the user as a
category, in one run. User 0 has as many of the rows as each peer, or `--own`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import r_tables  # noqa: F401  # registers its sets
from sklearn.ensemble import HistGradientBoostingRegressor

from coterie.benchmark import tasks
from coterie.benchmark.sets import SETS, load
from coterie.benchmark.tools import TOOLS, Tool, closed_form
from coterie.mixture.candidates import Candidates, OwnRows, folds_of
from coterie.mixture.families import SQUARED, Family
from coterie.mixture.fit import asks_here, driven, linear_candidates
from coterie.mixture.posterior import Rows
from coterie.mixture.scaling import Scaling
from coterie.trees.boosting import Growth
from coterie.trees.tree_candidates import boosted, candidates

OURS = "mixture-trees"
ALONE = ["sklearn-alone", "sklearn-forest"]
RIVALS = [*ALONE, "sklearn-trees", "mixture"]
CELL = ["set", "condition"]


def and_chosen(own: Any, peers: Any, family: Family, folds: Any) -> list[Candidates]:
    """Return the default's candidates, and trees in which peers count by τ.

    It is that of the linear models, found without each fold.
    """
    mine, theirs = Rows(*own), [Rows(*each) for each in peers]
    scaling = Scaling.of(mine.inputs, mine.targets, family, intercept=True)
    rows = OwnRows.of(scaling.rows(*mine), family, whole=True, folds=folds)
    asks = asks_here([scaling.clipped(scaling.rows(*each)) for each in theirs], family)
    found, _ = driven(linear_candidates(rows, family, scaling, len(peers)), asks)
    tau = None if found is None else found.tau
    more = boosted(own, peers, family, folds, kinds={"trees, chosen peers": 1.0}, tau=tau)
    return [*candidates(own, peers, family, folds), *more]


def grown(trees: Any = True, **growing: Any) -> Tool:
    """Return the default for tables with other trees."""
    return Tool("", functools.partial(closed_form, trees=trees, **growing), strengths=(1.0,))


VARIANTS = {
    OURS: grown(),
    "three levels, rate .15": grown(growth=Growth(depth=3, rate=0.15)),
    "and a personal last layer": grown(layer=True),
    "and peers weighted by τ": grown(and_chosen),
    "sklearn-trees": TOOLS["sklearn-trees"],
}
"""What `--sets` compares."""


def rows_of(folder: Path) -> pd.DataFrame:
    """Return a row for each user and method; users that a method has not done are left out."""
    lines = [json.loads(path.read_text()) for path in sorted(folder.glob("cells/**/*.json"))]
    rows = pd.DataFrame(lines).query("model == 'linear'")
    rows["score"] = rows["score"].astype(float)
    return rows


def paired(rows: pd.DataFrame, value: str) -> pd.DataFrame:
    """Return a row for each user, a column for each method; Alone's is the better in the cell."""
    wide = rows.pivot_table(index=[*CELL, "user", "seed"], columns="method", values=value)
    return wide[[OURS, *RIVALS]].dropna()


def told(differences: Any) -> str:
    """Return a mean and its standard error between sets."""
    return f"{differences.mean():+.3f} ± {differences.sem():.3f}"


def cost(rows: int, columns: int, users: int, own: int) -> None:
    """Print what trees of many rows cost."""
    random = np.random.default_rng(0)
    x, user = random.normal(size=(rows, columns)), np.arange(rows) * users // rows
    if own:
        user = np.append(
            np.zeros(own, int), 1 + np.arange(rows - own) * (users - 1) // (rows - own)
        )
    y = x[:, 0] * x[:, 1] + np.sin(2 * x[:, 2]) + 0.3 * user + 0.5 * random.normal(size=rows)
    parts = [(x[user == k], y[user == k, None]) for k in range(users)]
    folds = folds_of(parts[0][1], 4, 0, classes=False)
    began = time.process_time()
    candidates(parts[0], parts[1:], SQUARED, folds)
    ours, began = time.process_time() - began, time.process_time()
    HistGradientBoostingRegressor(categorical_features=[columns]).fit(np.column_stack([x, user]), y)
    plain = time.process_time() - began
    print(
        f"{rows} × {columns} rows, {users} users, {len(folds)} own rows: {ours:.1f} s, "
        f"HistGradientBoostingRegressor {plain:.1f} s, {ours / plain:.2f} times"
    )


def growths(sets: list[str], users: int, data: Path, variants: list[str]) -> None:
    """Print what the default reaches with trees that grow in other ways, beside plain boosting."""
    tools = {name: VARIANTS[name] for name in dict.fromkeys([OURS, *variants])}
    names = {f"{name}, loss": name for name in tools}
    rows = []
    for name, condition in itertools.product(sets, tasks.CONDITIONS):
        people, known = load(SETS[name], data), SETS[name]
        few = {"own_examples": known.own_examples, "most_peers": known.most_peers}
        for user in tasks.candidates(people, known.own_examples)[:users]:
            task = tasks.task_of(people, user, condition=condition, **few)
            found = {method: tool.outcome(task) for method, tool in tools.items()}
            scores = {method: one.score for method, one in found.items()}
            losses = {loss: found[method].loss for loss, method in names.items()}
            rows.append({"set": name, "condition": condition, **scores, **losses})
            print(rows[-1], flush=True)
    means = pd.DataFrame(rows).groupby(["condition", "set"]).mean()
    print(means[list(tools)].round(3).to_string())
    for condition in tasks.CONDITIONS:
        some = means.loc[condition]
        print(f"{condition} ({len(some)} sets), less the default:")
        for method in [*tools, *names]:
            ours = OURS + ", loss" * (method in names)
            print(f"  {method}: {told(some[method] - some[ours])}")


def main() -> None:
    """Print the comparison of a folder of `coterie bench`, or what trees cost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?")
    for name, default in {"rows": 200_000, "columns": 50, "users": 8, "own": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sets", default="")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--data", type=Path)
    asked = parser.parse_args()
    if asked.sets:
        growths(asked.sets.split(","), asked.users, asked.data, asked.variants.split(","))
        return
    if asked.folder is None:
        cost(asked.rows, asked.columns, asked.users, asked.own)
        return
    rows = rows_of(asked.folder)
    scores, losses = (paired(rows, value) for value in ("score", "loss"))
    better: Any = scores.groupby(CELL)[ALONE].mean().idxmax(axis=1)
    for table in (scores, losses):
        table["Alone"] = [
            row[better[where[:2]]]
            for where, row in zip(table.index, table.to_dict("records"), strict=True)
        ]
    classes = set(rows[rows["metric"] == "accuracy"]["set"])
    losses = losses[losses.index.get_level_values("set").isin(classes)]
    for title, table in {"score": scores, "log loss": losses}.items():
        means = table.groupby(CELL).mean()
        print(f"{OURS}, {title}, less")
        for condition in sorted(set(means.index.get_level_values("condition"))):
            some = means.xs(condition, level="condition")
            against = {name: told(some[OURS] - some[name]) for name in ["Alone", *RIVALS]}
            words = "; ".join(f"{name} {said}" for name, said in against.items())
            print(f"  {condition} ({len(some)} sets): {words}")
    by_cell = (scores[OURS] - scores["Alone"]).groupby(CELL)
    change = pd.DataFrame({"mean": by_cell.mean(), "error": by_cell.sem(), "users": by_cell.size()})
    ratio = change["mean"] / change["error"].where(change["error"] > 0)
    for word, cells in {"worse": change[ratio < -3], "better": change[ratio > 3]}.items():
        print(f"{word} than Alone by three standard errors in {len(cells)} of {len(change)} cells")
        if word == "worse":
            print(cells.round(4).to_string() if len(cells) else "")


if __name__ == "__main__":
    main()
