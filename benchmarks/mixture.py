"""Linear models in closed form, beside what a user of scikit-learn would type.

    python benchmarks/mixture.py --data DIR [--users 8] [--seeds 1] [--sets heart,school]
        [--parts planted,heart]

*sets*: the users of `coterie bench` in its four conditions; all methods have the own and the
validation examples to learn from. Scores are accuracy, or −RMSE in standard deviations of all
targets; then the log loss or squared error. *planted*: users differ in one of 8 coefficients, 40
own rows and 8 peers of 200; the mean squared error of the coefficients over that of `RidgeCV` on
the own rows, and the same for a stranger. *excess*: three classes by five columns, ten peers of 60
rows: the log loss of what is served less that of Alone's mixture on 4,000 fresh rows, ± its
standard error over repetitions, beside log 2/(n + 1); and in how many of them the difference that
is told is within two of its errors of the fresh one. Peers are alike; strangers, each with other
coefficients; wrong, every class renamed; or four of ten send huge and contrary rows. *heart*: the
four hospitals, ten splits, four fifths of each to learn from: log loss on the rest.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV, Ridge, RidgeCV
from sklearn.preprocessing import StandardScaler

from coterie.benchmark.sets import SETS, load
from coterie.benchmark.tasks import CONDITIONS, candidates, task_of
from coterie.data.preparation import Preparation
from coterie.mixture.families import SOFTMAX, SQUARED, Array
from coterie.mixture.fit import fit_here

Data = tuple[Array, Array]
STRENGTHS = np.logspace(-3, 3, 13)


def plain_tools(
    own: Data, peers: list[Data], test: Data, classes: int
) -> dict[str, tuple[float, float]]:
    """Return score and loss of scikit-learn's own-rows CV model, pooled, and pooled with the user one-hot."""
    owners = np.repeat(np.arange(len(peers) + 1), [len(x) for x, _ in (own, *peers)])
    x, y = joined([own, *peers])
    hot = np.eye(len(peers) + 1)
    scaler = StandardScaler().fit(x)
    inputs, everything, asked = (
        scaler.transform(own[0]),
        scaler.transform(x),
        scaler.transform(test[0]),
    )
    me = np.tile(hot[0], (len(asked), 1))
    ways = {
        "sklearn, own, CV": (inputs, own[1], asked),
        "sklearn, pooled": (everything, y, asked),
        "sklearn, pooled + user": (
            np.column_stack([everything, hot[owners]]),
            y,
            np.column_stack([asked, me]),
        ),
    }
    return {
        name: scored(*way, test[1], crossed=name == "sklearn, own, CV", classes=classes)
        for name, way in ways.items()
    }


def scored(
    x: Array, y: Array, asked: Array, truth: Array, *, crossed: bool, classes: int
) -> tuple[float, float]:
    """Fit by scikit-learn; return score and loss."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if classes == 1:
            error = np.square(
                (RidgeCV(STRENGTHS) if crossed else Ridge(1.0)).fit(x, y).predict(asked) - truth
            ).mean()
            return -(float(error) ** 0.5), float(error)
        if len(np.unique(y)) == 1:
            shares = np.full((len(asked), 1), 1.0)
            seen = np.unique(y)
        else:
            folds = max(2, min(4, int(np.bincount(y.astype(int))[np.unique(y).astype(int)].min())))
            model = LogisticRegressionCV(
                Cs=STRENGTHS, cv=folds, scoring="neg_log_loss", max_iter=300
            )
            fitted = (model if crossed else LogisticRegression(max_iter=300)).fit(x, y)
            shares, seen = fitted.predict_proba(asked), fitted.classes_
    places = np.searchsorted(seen, truth).clip(max=len(seen) - 1)
    right = np.where(seen[places] == truth, shares[np.arange(len(truth)), places], 0.0)
    return float((seen[shares.argmax(1)] == truth).mean()), float(
        -np.log(np.maximum(right, 1e-6)).mean()
    )


def mixtures(
    own: Data, peers: list[Data], test: Data, classes: int
) -> dict[str, tuple[float, float]]:
    """Return score and loss of what is served, of Alone's mixture and of the constant."""
    family = SQUARED if classes == 1 else SOFTMAX
    fitted = fit_here(*own, peers, family, classes)
    found = {}
    for name, entry in {"served": fitted.served, "alone": fitted.alone, **fitted.entries}.items():
        outputs = np.column_stack([test[0], np.ones(len(test[0]))]) @ entry.parameters
        loss = float(family.losses(outputs, family.targets(test[1], classes)).mean()) * (
            2 if classes == 1 else 1
        )
        found[name] = (
            (-(loss**0.5) if classes == 1 else float((outputs.argmax(1) == test[1]).mean())),
            loss,
        )
    return found


def table(rows: dict[str, list[tuple[float, float]]]) -> str:
    """Return the means of scores and losses, by method."""
    means = {name: np.mean(each, axis=0) for name, each in rows.items()}
    return " | ".join(f"{name} {score:.3f} ({loss:.3f})" for name, (score, loss) in means.items())


def numbers(examples: Any) -> Data:
    """Return inputs and targets of examples that are in memory."""
    return examples.inputs.flatten(1).double().numpy(), examples.targets.numpy().reshape(-1)


def joined(parts: Sequence[Data]) -> Data:
    """Return the rows of several parts together."""
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def on_sets(options: argparse.Namespace) -> None:
    """Print a line for each set and condition."""
    for name in options.sets.split(","):
        user_set = SETS[name]
        people = load(user_set, options.data)
        for condition in CONDITIONS:
            rows: dict[str, list[tuple[float, float]]] = {}
            seconds, count = 0.0, 0
            for me in candidates(people, user_set.own_examples)[: options.users]:
                for seed in range(options.seeds):
                    few = {"own_examples": user_set.own_examples, "most_peers": user_set.most_peers}
                    task = task_of(people, me, **few, condition=condition, seed=seed)
                    parts = [
                        task.me.examples,
                        task.me.validation,
                        task.me.test,
                        *(p.examples for p in task.peers),
                    ]
                    arrays = [numbers(examples) for examples in parts]
                    own = joined(arrays[:2])
                    began = time.process_time()
                    found = mixtures(own, arrays[3:], arrays[2], task.n_outputs)
                    seconds, count = seconds + time.process_time() - began, count + 1
                    found |= plain_tools(own, arrays[3:], arrays[2], task.n_outputs)
                    for method, (score, loss) in found.items():
                        rows.setdefault(method, []).append(
                            (score / task.spread, loss / task.spread**2)
                        )
            print(f"{name}, {condition}: {table(rows)} [{seconds / count:.2f} s]", flush=True)


def on_planted(options: argparse.Namespace) -> None:
    """Print the squared error of the coefficients over that of `RidgeCV`."""
    for stranger in (False, True):
        ours, alone, ridge = list[float](), list[float](), list[float]()
        for seed in range(50):
            random = np.random.default_rng(seed)
            centre, spread = random.normal(size=8), np.array([0.05] * 7 + [1.0])
            users, truths = [], []
            for k, n in enumerate([40] + [200] * 8):
                truths.append(
                    (-centre if stranger and not k else centre) + spread * random.normal(size=8)
                )
                x = random.normal(size=(n, 8))
                users.append((x, x @ truths[-1] + random.normal(size=n)))
            fitted = fit_here(*users[0], users[1:], SQUARED)
            served = [entry.parameters[:8, 0] for entry in (fitted.served, fitted.alone)]
            plain = RidgeCV(STRENGTHS).fit(*users[0]).coef_
            for into, found in zip((ours, alone, ridge), (*served, plain), strict=True):
                into.append(np.square(found - truths[0]).sum())
        ratio, by_alone = np.mean(ours) / np.mean(ridge), np.mean(alone) / np.mean(ridge)
        print(
            f"planted{', stranger' if stranger else ''}: served {ratio:.3f}, alone {by_alone:.3f} of RidgeCV's"
        )


def on_heart(options: argparse.Namespace) -> None:
    """Print the log loss of each hospital over ten splits."""
    people = load(SETS["heart"], options.data)
    for hospital in people.names:
        rows: dict[str, list[tuple[float, float]]] = {}
        for split in range(10):
            random = np.random.default_rng(split)
            mine = random.permutation(people.rows(hospital))
            own, test = mine[: len(mine) * 4 // 5], mine[len(mine) * 4 // 5 :]
            targets, findings = pd.Series(people.targets), pd.DataFrame(people.inputs)
            prepared = Preparation.fit(
                findings.iloc[own],
                targets.iloc[own],
                pd.Series([0, 1]),
                "classification",
                people.categorical,
            )
            inputs = prepared.inputs(findings).double().numpy()
            places = [own, *(people.rows(name) for name in people.names if name != hospital)]
            data = [(inputs[rows_], people.targets[rows_]) for rows_ in places]
            asked = inputs[test], people.targets[test]
            for method, both in (
                mixtures(data[0], data[1:], asked, 2) | plain_tools(data[0], data[1:], asked, 2)
            ).items():
                rows.setdefault(method, []).append(both)
        print(f"heart, {hospital}, {len(people.rows(hospital))} rows: {table(rows)}", flush=True)


def on_excess(options: argparse.Namespace) -> None:
    """Print what is lost to Alone's mixture, and whether what is told of it is true."""
    for kind in ("alike", "strangers", "wrong", "attackers"):
        for n in (6, 12, 25, 50, 100, 200):
            fresh, covered = list[float](), list[bool]()
            for seed in range(options.repetitions):
                random = np.random.default_rng(seed)
                truth = random.normal(size=(5, 3))

                def rows(count: int, of: Array, random: np.random.Generator = random) -> Data:
                    x = random.normal(size=(count, 5))
                    return x, (x @ of + random.gumbel(size=(count, 3))).argmax(1)

                own, asked, peers = rows(n, truth), rows(4000, truth), list[Data]()
                for k in range(10):
                    x, y = rows(60, random.normal(size=(5, 3)) if kind == "strangers" else truth)
                    x = 1e3 * x if kind == "attackers" and k < 4 else x
                    peers.append(
                        (
                            x,
                            (y + 1) % 3
                            if kind == "wrong" or (kind == "attackers" and k < 4)
                            else y,
                        )
                    )
                fitted = fit_here(*own, peers, SOFTMAX, 3)
                ours, alone = (
                    SOFTMAX.losses(
                        np.column_stack([asked[0], np.ones(4000)]) @ one.parameters,
                        np.eye(3)[asked[1]],
                    )
                    for one in (fitted.served, fitted.alone)
                )
                fresh.append(float((ours - alone).mean()))
                told = fitted.served.losses - fitted.alone.losses
                covered.append(bool(abs(told.mean() - fresh[-1]) <= 2 * told.std(ddof=1) / n**0.5))
            error = np.std(fresh, ddof=1) / len(fresh) ** 0.5
            print(
                f"| {kind} | {n} | {np.mean(fresh):+.3f} ± {error:.3f} | {np.log(2) / (n + 1):.3f} | "
                f"{np.mean(covered):.2f} |",
                flush=True,
            )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--sets", default="heart,school,vowels,digits,wisdm")
    parser.add_argument("--parts", default="planted,heart,sets")
    parser.add_argument("--repetitions", type=int, default=20)
    options = parser.parse_args()
    for part in options.parts.split(","):
        {"sets": on_sets, "planted": on_planted, "heart": on_heart, "excess": on_excess}[part](
            options
        )


if __name__ == "__main__":
    main()
