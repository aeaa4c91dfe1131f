"""Coverage and width of user 0's sets and intervals, with 40 own rows.

    python benchmarks/conformal.py --data DIR [--sets heart,school] [--users 6] [--coverage 0.9]
        [--tables 20] [--jobs 2]

Linear models in closed form, all of the same 40 own rows, whose scores are those of folds. Own-only
is the mixture of the candidates that ask no peer, with the 40 own scores; `ours` is the mixture of
all, with own scores (peers lend where these are too few: with fewer rows or more coverage); pooled
is the pooled model with everybody's scores alike. Test rows are all other own rows. `--tables`
takes so many of benchmarks/r_tables.py too: the limits of who lends were chosen by looking at the
benchmark's sets, and at none of these.
"""

import argparse
import itertools
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import r_tables
import torch

from coterie.benchmark.sets import SETS, load
from coterie.benchmark.tasks import CONDITIONS, candidates, task_of
from coterie.evaluation.conformal import Calibration, scores, scores_of_losses
from coterie.mixture.families import SOFTMAX, SQUARED, Array
from coterie.mixture.fit import fit_here
from coterie.mixture.mixing import MixtureEntry

OWN, MORE = 30, 10
WAYS = ("own-only", "ours", "pooled")
Rows = tuple[Array, Array]


def rows_of(*parts: object) -> Rows:
    """Return all rows of some examples."""
    taken = [each.take(torch.arange(len(each))) for each in parts]  # type: ignore[attr-defined,arg-type]
    inputs, targets = (torch.cat([one[side] for one in taken]) for side in (0, 1))
    return inputs.flatten(1).double().numpy(), targets.double().numpy()


def measured(job: tuple[str, str, str, int, Path, float]) -> dict[str, tuple[float, float]]:
    """Return of each way the coverage, and the width or the number of classes."""
    name, condition, user, most, data, coverage = job
    torch.set_num_threads(1)
    people = load(SETS[name], data)
    task = task_of(people, user, own_examples=OWN, most_peers=most, condition=condition)
    x, y = rows_of(task.me.examples, task.me.validation, task.me.test)
    family, classes = (SOFTMAX if people.n_classes else SQUARED), people.n_classes or 1
    y = y.astype(int) if people.n_classes else y.reshape(-1, 1)
    own, test = slice(0, OWN + MORE), slice(OWN + MORE, None)
    peers = {peer.name: rows_of(peer.examples) for peer in task.peers}
    given = [
        (a, b.astype(int) if people.n_classes else b.reshape(-1, 1)) for a, b in peers.values()
    ]
    fitted = fit_here(x[own], y[own], given, family, classes)

    def told(entry: MixtureEntry, inputs: Array) -> Array:
        outputs = np.column_stack([inputs, np.ones(len(inputs))]) @ entry.parameters
        return family.predict(outputs)

    def lent(entry: MixtureEntry) -> dict[str, Array]:
        return {who: scores(told(entry, a), b) for who, (a, b) in peers.items()}

    found, pooled = {}, fitted.entries["pooled"]
    for way, entry, by in (
        ("own-only", fitted.alone, None),
        ("ours", fitted.served, lent(fitted.served)),
        ("pooled", pooled, lent(pooled)),
    ):
        mine = scores_of_losses(entry.losses, classes=bool(people.n_classes))
        limit = Calibration(mine, by or {}).threshold(coverage).score
        if way == "pooled":
            limit = float(np.quantile(np.concatenate([mine, *lent(pooled).values()]), coverage))
        answers = told(entry, x[test])
        wide = (1 - answers <= limit).sum(1).mean() if people.n_classes else 2 * limit / task.spread
        covered = float((scores(answers, y[test].astype(float)) <= limit).mean())
        found[way] = covered, float(wide)
    return found


def summary(title: str, everything: dict[tuple[str, str], dict[str, tuple[float, float]]]) -> None:
    """Print the means over sets, with standard errors; widths are relative to own-only."""
    for condition in CONDITIONS:
        cells = []
        for way in WAYS:
            of = [one for (_, which), one in everything.items() if which == condition]
            covered = np.array([one[way][0] for one in of])
            relative = np.array([one[way][1] / one["own-only"][1] for one in of])
            told = [
                f"{each.mean():.3f} ± {each.std(ddof=1) / len(each) ** 0.5:.3f}"
                for each in (covered, relative)
            ]
            cells.append(f"{told[0]}, {told[1]}×")
        print(f"| {title} | {condition} | {' | '.join(cells)} |")


def main(given: argparse.Namespace) -> None:
    """Print a table with a row for each set and condition."""
    data, jobs, chosen = given.data, given.jobs, [one for one in given.sets.split(",") if one]
    others = [f"r-{name}" for name in list(r_tables.TABLES)[: given.tables]]
    print(f"| set | condition | {' | '.join(WAYS)} |\n|---|---|{'---|' * len(WAYS)}")
    for title, names in (("mean of the benchmark's", chosen), ("mean of other tables", others)):
        everything = {}
        for name, condition in itertools.product(names, CONDITIONS):
            people, most = load(SETS[name], data), SETS[name].most_peers
            able = [one for one in candidates(people, OWN) if len(people.rows(one)) >= 2 * OWN]
            work = [
                (name, condition, user, most, data, given.coverage) for user in able[: given.users]
            ]
            with ProcessPoolExecutor(jobs) as pool:
                each = list(pool.map(measured, work))
            cells = {way: np.array([one[way] for one in each]).mean(0) for way in WAYS}
            everything[name, condition] = {way: tuple(cell) for way, cell in cells.items()}
            shown = [f"{cells[way][0]:.3f}, {cells[way][1]:.2f}" for way in WAYS]
            print(f"| {name} | {condition} | {' | '.join(shown)} |", flush=True)
        if len(names) > 1:
            summary(f"{title} {len(names)}", everything)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", default="digits,heart,school,vowels,wisdm")
    parser.add_argument("--users", type=int, default=6)
    parser.add_argument("--coverage", type=float, default=0.9)
    parser.add_argument("--tables", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    main(parser.parse_args())
