"""Coverage and width of user 0's sets and intervals, with 40 own rows: 30 to learn from, 10 to calibrate with.

    python benchmarks/conformal.py --data DIR [--sets heart,school] [--users 6] [--coverage 0.9]

Three models, linear: training alone, adaptive averaging, pooled. Own-only is the first with the 10
own scores; `ours` is the second with own scores and those that peers lend; pooled is the third with
everybody's scores alike. A model is judged with 20 draws of the rows to calibrate with from all own
rows that it was not trained on; the others are its test rows.
"""

import argparse
import itertools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

import coterie
from coterie.benchmark.conditions import CONDITIONS
from coterie.benchmark.sets import SETS, load
from coterie.benchmark.tasks import SetTask, candidates, task_of
from coterie.evaluation.conformal import Calibration, scores
from coterie.users.user import User

OWN, HELD_OUT, DRAWS = 30, 10, 20
Rows = tuple[torch.Tensor, torch.Tensor]


def rows_of(examples: object) -> Rows:
    """Return all rows of some examples."""
    inputs, targets = examples.take(torch.arange(len(examples)))  # type: ignore[attr-defined,arg-type]
    return inputs.flatten(1), targets


def outputs(model: torch.nn.Module, inputs: torch.Tensor, classes: int) -> NDArray[np.float64]:
    """Return probabilities, or numbers."""
    with torch.no_grad():
        found = model(inputs)
    return np.asarray((found.softmax(1) if classes else found).double().numpy())


def measured(task: SetTask, classes: int, coverage: float) -> dict[str, tuple[float, float]]:
    """Return the coverage and the width, or the number of classes, of each way."""
    assert task.me.validation is not None
    assert task.me.test is not None
    me = User(task.me.name, *rows_of(task.me.examples))
    peers = [User(peer.name, *rows_of(peer.examples)) for peer in task.peers]
    parts = [rows_of(part) for part in (task.me.validation, task.me.test)]
    inputs, targets = (torch.cat([part[side] for part in parts]) for side in (0, 1))
    size = me.batch(1, seed=0, step=0)[0].shape[1]
    loss = functional.cross_entropy if classes else functional.mse_loss
    rules = {
        "alone": coterie.Alone(),
        "ours": coterie.AdaptiveAveraging(),
        "pooled": coterie.WeightedAveraging.pooled(me, peers),
    }
    drawn: dict[str, list[tuple[float, float]]] = {}
    for name, rule in rules.items():
        torch.manual_seed(0)
        start = torch.nn.Linear(size, classes or 1)
        how: dict[str, Any] = {
            "steps": 200,
            "lr": 0.01,
            "guard": "off",
            "progress": False,
            "measure": False,
        }
        model = coterie.train(start, loss, me, peers, rule, **how).model

        def scored(rows: Rows, model: torch.nn.Module = model) -> NDArray[np.float64]:
            return scores(outputs(model, rows[0], classes), rows[1].double().numpy())

        lent = {peer.name: scored(rows_of(peer.examples)) for peer in peers}
        every, answers = scored((inputs, targets)), 1 - outputs(model, inputs, classes)
        for draw in range(DRAWS):
            order = np.random.default_rng(draw).permutation(len(every))
            own, test = every[order[:HELD_OUT]], order[HELD_OUT:]
            ways = {"alone": {"own-only": Calibration(own)}, "pooled": {}}.get(
                name, {"ours, own scores": Calibration(own), "ours": Calibration(own, lent)}
            )
            limits = {
                way: calibration.threshold(coverage).score for way, calibration in ways.items()
            }
            if name == "pooled":
                limits["pooled"] = float(
                    np.quantile(np.concatenate([own, *lent.values()]), coverage)
                )
            for way, limit in limits.items():
                wide = (
                    (answers[test] <= limit).sum(1).mean() if classes else 2 * limit / task.spread
                )
                drawn.setdefault(way, []).append(
                    (float((every[test] <= limit).mean()), float(wide))
                )
    found = {way: tuple(np.mean(pairs, 0).tolist()) for way, pairs in drawn.items()}
    return found


def main(data: Path, sets: list[str], users: int, coverage: float) -> None:
    """Print a table with a row for each set and condition."""
    ways = ("own-only", "ours, own scores", "ours", "pooled")
    print(f"| set | condition | {' | '.join(ways)} |\n|---|---|{'---|' * len(ways)}")
    everything: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for name, condition in itertools.product(sets, CONDITIONS):
        people = load(SETS[name], data)
        classes = people.n_classes
        able = candidates(people, OWN)[:users]
        tasks = [
            task_of(people, me, own_examples=OWN, most_peers=19, condition=condition) for me in able
        ]
        each = [measured(task, classes, coverage) for task in tasks]
        cells = []
        for way in ways:
            pairs = np.array([one[way] for one in each])
            everything.setdefault((condition, way), []).append(tuple(pairs.mean(0)))
            cells.append(f"{pairs[:, 0].mean():.3f}, {pairs[:, 1].mean():.2f}")
        print(f"| {name} | {condition} | {' | '.join(cells)} |", flush=True)
    for condition in CONDITIONS:
        cells = []
        for way in ways:
            covered = [pair[0] for pair in everything[condition, way]]
            relative = np.mean(
                [
                    a[1] / b[1]
                    for a, b in zip(
                        everything[condition, way], everything[condition, "own-only"], strict=True
                    )
                ]
            )
            cells.append(f"{np.mean(covered):.3f}, {relative:.2f}×")
        print(f"| mean | {condition} | {' | '.join(cells)} |")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument(
        "--sets", default=",".join(name for name in SETS if name not in ("mnist", "shakespeare"))
    )
    parser.add_argument("--users", type=int, default=6)
    parser.add_argument("--coverage", type=float, default=0.9)
    given = parser.parse_args()
    main(given.data, given.sets.split(","), given.users, given.coverage)
