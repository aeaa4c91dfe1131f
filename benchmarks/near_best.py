"""How often a method is near the best, and how often it could be: an oracle that knows another seed's best method.

Near the best: the best of the contenders in a set and condition, or behind it by no more than one
standard error of their paired difference over users. The best of many is partly the luckiest, so
that nobody is near it everywhere. How much is luck is seen from one seed's results judged by
another's: the oracle serves, in each set and condition, the method that was the best there with the
other seed, on the same users.

    coterie bench --data DIR --users 8 --seeds 2 --out bench
    python benchmarks/near_best.py bench/results.parquet

Contenders are all methods, the plain tools too, but the other form of adaptive averaging; then
those that know nothing in hindsight, that is without the four fixed α.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from coterie.benchmark.tools import TOOLS

FORMS = ("adaptive", "mixture", "mixture-trees")
"""What is counted beside the plain tools."""
PLACE = ["set", "condition"]


def near_best(scores: pd.DataFrame, method: str, contenders: Sequence[str]) -> bool:
    """Say whether a method is near the best of the contenders, by scores with a row a user."""
    measured = scores.dropna(axis="columns")  # plain tools do not fit every set
    values = {
        name: measured[name].to_numpy(float) for name in {*contenders, method} if name in measured
    }
    best = max(
        (name for name in contenders if name in values), key=lambda name: float(values[name].mean())
    )
    behind = values[best] - values[method]
    error = behind.std(ddof=1) / np.sqrt(len(behind)) if len(behind) > 1 else 0.0
    return bool(behind.mean() <= error + 1e-12)


def counted(scores: pd.DataFrame, method: str, contenders: Sequence[str]) -> int:
    """Count the sets and conditions where a method is near the best."""
    everybody = sorted({*contenders, method})
    return sum(
        near_best(some, method, everybody)
        for _, some in scores.groupby(PLACE)
        if some[method].notna().all()
    )


def by_oracle(known: pd.DataFrame, scores: pd.DataFrame, contenders: Sequence[str]) -> int:
    """Count the sets and conditions where the method that was the best with known scores is near the best."""
    best = {
        place: str(some[list(contenders)].mean().idxmax()) for place, some in known.groupby(PLACE)
    }
    return sum(near_best(some, best[place], contenders) for place, some in scores.groupby(PLACE))


def main() -> None:
    """Count, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "results", type=Path, help="results.parquet of `coterie bench` with two seeds or more"
    )
    rows = pd.read_parquet(parser.parse_args().results)
    by_seed = {
        str(seed): _scores(rows[rows["seed"] == seed]) for seed in sorted(rows["seed"].unique())
    }
    if len(by_seed) < 2:
        parser.error("the results have one seed, and an oracle needs another: `bench --seeds 2`")
    without = {seed: _scores(rows[rows["seed"].astype(str) != seed]) for seed in by_seed}
    together = _scores(rows)
    others = [str(name) for name in together if name not in FORMS]
    places = together.groupby(PLACE).ngroups
    print(
        f"{f'of {places}':<37}{'all seeds':>10}"
        + "".join(f"{f'seed {seed}':>8}" for seed in by_seed)
    )
    for told, names in (
        ("beside all", others),
        ("without hindsight", [name for name in others if not name.startswith("wga-")]),
    ):
        for form in [name for name in (*FORMS, *TOOLS) if name in together]:
            each = [counted(scores, form, names) for scores in by_seed.values()]
            _show(f"{form}, {told}", str(counted(together, form, names)), each)
        each = [by_oracle(without[seed], scores, names) for seed, scores in by_seed.items()]
        _show(f"oracle, {told}", "", each)


def _scores(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each set, condition and user, a column a method; the mean over seeds."""
    return rows.pivot_table(index=[*PLACE, "user"], columns="method", values="score")


def _show(what: str, together: str, each: Sequence[int]) -> None:
    print(f"{what:<37}{together:>10}" + "".join(f"{n:>8}" for n in each))


if __name__ == "__main__":
    main()
