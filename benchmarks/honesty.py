"""Is what the closed form tells of itself true of fresh examples?

    python benchmarks/honesty.py [--repetitions 200] [--jobs 1] [--problems related,strangers]
        [--own 40]

Users in ten dimensions: 19 peers with 50 examples each. Regression has noise of variance 1. Classes
are three, by the largest of three linear functions with noise of Gumbel's kind.

What is told are differences in loss of the model served: to the one trained alone, and to that of
all peers' rows. Each has an interval of 95 %, by own rows that neither model had seen. The fresh
difference is that of the same models: exact for regression, on 4,000 fresh examples for classes.
*Covered*: in how many repetitions it lies in the interval; *above*, *below*: in how many it is
larger (what is told was too good) or smaller. *Clear*: how often the interval leaves out 0, and how
often with the wrong sign. The mean of told less fresh is ± one standard error. *Better*: in how many
repetitions the fresh difference is below 0; *told*: how many of these are clearly better by the
interval; *by a fifth*: by Student's t of a fifth of the same losses, as if these rows had been held
out. `--own` gives user 0 another number of examples in all problems, `--first` other seeds.
"""

from __future__ import annotations

import argparse
import multiprocessing
from typing import NamedTuple

import numpy as np
from scipy.stats import ttest_1samp

from coterie.mixture.families import SOFTMAX, SQUARED, Array
from coterie.mixture.fit import fit_here

D, PEERS, SPREAD, CLASSES, FRESH = 10, 19, 0.3, 3, 4000


class Problem(NamedTuple):
    """Who the peers are, how many examples user 0 has, and what is learned."""

    kind: str
    own: int
    classes: bool = False


PROBLEMS = {
    "related peers, 20 own rows": Problem("related", 20),
    "half of them wrong, 20": Problem("half wrong", 20),
    "strangers, 30": Problem("strangers", 30),
    "another intercept, 15": Problem("shifted", 15),
    "classes, related peers, 30": Problem("related", 30, classes=True),
    "classes, strangers, 30": Problem("strangers", 30, classes=True),
}


def examples(
    truth: Array, n: int, random: np.random.Generator, intercept: float = 0.0
) -> tuple[Array, Array]:
    """Return n examples of a linear function with noise, or of classes by the largest of several."""
    inputs = random.normal(size=(n, D))
    if truth.shape[1] == 1:
        return inputs, (inputs @ truth)[:, 0] + random.normal(size=n) + intercept
    return inputs, (inputs @ truth + random.gumbel(size=(n, CLASSES))).argmax(1)


def users(problem: Problem, truth: Array, random: np.random.Generator) -> list[tuple[Array, Array]]:
    """Return user 0's examples and those of the peers."""
    found = [examples(truth, problem.own, random)]
    for k in range(PEERS):
        other: Array = np.asarray(random.normal(size=truth.shape))
        near: Array = truth + SPREAD * other
        its: dict[str, Array] = {
            "related": near,
            "strangers": other,
            "half wrong": near if k % 2 else -truth,
            "shifted": truth,
        }
        intercept = 3.0 if problem.kind == "shifted" else 0.0
        found.append(examples(its[problem.kind], 50, random, intercept))
    return found


def once(problem: Problem, seed: int) -> list[tuple[float, ...]]:
    """Fit once; of each difference return what is told, its interval, the fresh one, and that of a fifth."""
    random = np.random.default_rng(seed)
    truth = random.normal(size=(D, CLASSES if problem.classes else 1))
    own, *peers = users(problem, truth, random)
    asked = examples(truth, FRESH, random)
    family = SOFTMAX if problem.classes else SQUARED
    fitted = fit_here(*own, peers, family, truth.shape[1], seed=seed)
    found: list[tuple[float, ...]] = []

    def fresh(parameters: Array) -> float:
        if not problem.classes:
            return 1 + float(np.square(parameters - np.vstack([truth, [[0]]])).sum())
        outputs = np.column_stack([asked[0], np.ones(FRESH)]) @ parameters
        return float(SOFTMAX.losses(outputs, np.eye(CLASSES)[asked[1]]).mean())

    served = fitted.served
    for other in (fitted.alone, fitted.entries["pooled"]):
        said = served.less(other, fitted.folds)
        few = (served.losses - other.losses)[: problem.own // 5]
        by_few = bool(few.mean() < 0 and ttest_1samp(few, 0).pvalue < 0.05)
        found.append((*said, fresh(served.parameters) - fresh(other.parameters), by_few))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--problems", default="", help="parts of names; all when left out")
    parser.add_argument("--own", type=int, default=0, help="own examples in all problems")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    print(
        "| problem | beside | told | fresh | told − fresh | covered | above | below | clear | wrongly |"
        " better | told | by a fifth |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for name, problem in PROBLEMS.items():
            if not any(part in name for part in options.problems.split(",")):
                continue
            seeds = range(options.first, options.first + options.repetitions)
            asked = problem._replace(own=options.own or problem.own)
            all_of = pool.starmap(once, [(asked, seed) for seed in seeds], chunksize=1)
            for which, beside in enumerate(("Alone", "pooled")):
                mean, low, high, fresh, few = np.array([each[which] for each in all_of]).T
                above, below = fresh > high, fresh < low
                clear = (low > 0) | (high < 0)
                shares = [1 - (above | below).mean(), above.mean(), below.mean(), clear.mean()]
                wrongly = clear & (np.sign(mean) != np.sign(fresh))
                error = (mean - fresh).std(ddof=1) / len(mean) ** 0.5
                print(
                    f"| {name} | {beside} | {mean.mean():+.3f} | {fresh.mean():+.3f} |"
                    f" {(mean - fresh).mean():+.3f} ± {error:.3f} | "
                    + " | ".join(f"{share:.2f}" for share in (*shares, wrongly.mean()))
                    + f" | {(fresh < 0).sum()} | {((fresh < 0) & (high < 0)).sum()} |"
                    f" {((fresh < 0) & (few > 0)).sum()} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
