"""Everybody's model by `train_everyone` over the same runs one after the other, both sides timed in one run.

The users: the 14 writer segments of scikit-learn's digits, 20 people of WISDM, 20 schools, each
with the examples that the benchmark gives user 0. Both sides do all that `train` does by default:
guard, measured constants, evaluations, test. CPU time, so that other work on the machine counts
less. `train_everyone` also trains the pooled model, which is in its time.

    python benchmarks/everyone.py [--data DIR] [--sets digits wisdm school] [--hidden 0 64]
        [--steps 1000] [--json]

With `--samples 8 32` it is instead told what a sample costs in closed form: the mean over users of
the test loss, asking so many others, less that of asking all; of all schools, and of users planted
in groups of ten.

With `--rounding` the single runs are trained a second time, from parameters that are the next
numbers above: so far apart are two runs that differ by one rounding.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import coterie
from coterie.benchmark.sets import tables
from coterie.benchmark.tasks import Population, candidates
from coterie.data.preparation import Kind

RULES: dict[str, Any] = {"adaptive": None, "wga": coterie.WeightedAveraging(0.5)}


def digits(_: Path) -> tuple[list[coterie.User], int]:
    """Return the writers, and how many classes there are."""
    return [coterie.data.digits_by_writer(me=k).me for k in range(14)], 10


def of(people: Population, own_examples: int, most: int = 20) -> list[coterie.User]:
    """Return some users of a table, prepared alike."""
    chosen = candidates(people, own_examples)[:most]
    if isinstance(people.inputs, torch.Tensor):
        raise TypeError("a table is needed")
    table = people.inputs.assign(owner=people.owners, target=people.targets)
    kind: Kind = "classification" if people.n_classes else "regression"
    some = table[table["owner"].isin(chosen)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # columns that look like something else
        made = coterie.data.users_from_table(
            some, user_column="owner", target="target", own_examples=own_examples, kind=kind
        )
    return list(made.users)


def people_of_wisdm(data: Path) -> tuple[list[coterie.User], int]:
    """Return 20 people, and how many activities there are."""
    return of(tables.wisdm(data / "wisdm_activity"), 30), len(tables.ACTIVITIES)


def schools(data: Path) -> tuple[list[coterie.User], int]:
    """Return 20 schools, whose targets are numbers."""
    return of(tables.school(data / "school_exam"), 20), 0


def groups(count: int = 300, rows: int = 20) -> list[coterie.User]:
    """Return users of linear regressions, ten of each, 200 test rows each."""
    torch.manual_seed(0)
    truths, made = torch.randn(count // 10, 10), list[coterie.User]()
    for k in range(count):
        inputs = torch.randn(rows + 200, 10)
        targets = inputs @ truths[k // 10][:, None] + torch.randn(rows + 200, 1)
        held_out = inputs[rows:], targets[rows:]
        made.append(coterie.User(f"user {k}", inputs[:rows], targets[:rows], test=held_out))
    return made


def by_sample(name: str, users: list[coterie.User], sizes: list[int]) -> None:
    """Print how much more a user loses on its test set who asks a sample of the others."""
    losses, start = (
        dict[int, torch.Tensor](),
        nn.Linear(users[0].batch(1, seed=0, step=0)[0].numel(), 1),
    )
    for size in (len(users) - 1, *sizes):
        began = time.process_time()
        runs = coterie.train_everyone(start, mse_loss, users, sample=size, progress=False)
        took = time.process_time() - began
        losses[size] = torch.tensor([run.test["loss"] for run in runs.runs.values()])
        more = losses[size] - losses[len(users) - 1]
        error = more.std() / len(more) ** 0.5
        print(
            f"{name:<8}{len(users):>5} users, asking {size:>4}: {took:>6.1f} s, loss"
            f" {losses[size].mean():.4f}, more by {more.mean():+.4f} ± {error:.4f}",
            flush=True,
        )


SETS = {"digits": digits, "wisdm": people_of_wisdm, "school": schools}


def model(users: list[coterie.User], classes: int, hidden: int) -> nn.Module:
    """Return a linear model, or a network with a hidden layer."""
    torch.manual_seed(0)
    inputs = users[0].batch(1, seed=0, step=0)[0].numel()
    if not hidden:
        return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes or 1))
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes or 1)
    )


def next_numbers(start: nn.Module) -> nn.Module:
    """Return a copy of a model, each parameter the next number above."""
    moved = copy.deepcopy(start)
    for parameter in moved.parameters():
        parameter.data = torch.nextafter(parameter.data, torch.tensor(torch.inf))
    return moved


def largest(losses: dict[str, float], others: dict[str, float]) -> tuple[float, int]:
    """Return the largest difference of two users' losses, and of how many users they differ by more than 1e-6."""
    apart = [abs(loss - others[name]) for name, loss in losses.items()]
    return max(apart), sum(each > 1e-6 for each in apart)


def measured(name: str, hidden: int, rule: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of both sides, their ratio, and how far validation losses are apart."""
    users, classes = SETS[name](options.data)
    start, loss = model(users, classes, hidden), cross_entropy if classes else mse_loss
    settings: dict[str, Any] = {"lr": 0.01, "progress": False, "threads": 1}

    def one(me: coterie.User, steps: int, first: nn.Module) -> coterie.Run:
        others = [user for user in users if user is not me]
        return coterie.train(first, loss, me, others, RULES[rule], steps=steps, **settings)

    def losses(runs: Mapping[str, coterie.Run]) -> dict[str, float]:
        return {name: run.record.end.validation["loss"] for name, run in runs.items()}

    one(users[0], 2, start)  # what torch imports and sets up once
    coterie.train_everyone(start, loss, users[:3], RULES[rule], steps=2, **settings)
    began = time.process_time()
    together = coterie.train_everyone(
        start, loss, users, RULES[rule], steps=options.steps, **settings
    )
    between = time.process_time()
    apart = {user.name: one(user, options.steps, start) for user in users}
    ended = time.process_time()
    difference, differ = largest(losses(together.runs), losses(apart))
    results: dict[str, Any] = {
        "users": len(users),
        "how": next(iter(together.runs.values())).record.configuration.runs,
        "everyone_s": between - began,
        "one_by_one_s": ended - between,
        "ratio": (between - began) / (ended - between),
        "largest_difference": difference,
        "differ": differ,
        "same_verdicts": sum(
            together.runs[n].verdict.finding == run.verdict.finding for n, run in apart.items()
        ),
    }
    if options.rounding:
        moved = next_numbers(start)
        again = {user.name: one(user, options.steps, moved) for user in users}
        results["rounding_difference"], results["rounding_differ"] = largest(
            losses(apart), losses(again)
        )
    return results


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--data", type=Path, default=Path("data"), help="holds wisdm_activity and school_exam"
    )
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument(
        "--hidden", type=int, nargs="+", default=[0, 64], help="hidden units; 0: none"
    )
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    parser.add_argument("--steps", type=int, default=1000, help="of each run")
    parser.add_argument(
        "--rounding", action="store_true", help="how far single runs are apart by one rounding"
    )
    parser.add_argument("--samples", type=int, nargs="+", help="ask so many others in closed form")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.samples:
        by_sample("groups", groups(), options.samples)
        every = of(tables.school(options.data / "school_exam"), 20, most=1000)
        by_sample("schools", every, options.samples)
        return
    if not options.json:
        print(
            f"{'set':<8}{'hidden':>6} {'rule':<9}{'users':>5}{'everyone s':>12}{'one by one s':>14}{'ratio':>7}"
        )
    for name in options.sets:
        for hidden in options.hidden:
            for rule in options.rules:
                result = measured(name, hidden, rule, options)
                if options.json:
                    print(
                        json.dumps({"set": name, "hidden": hidden, "rule": rule} | result),
                        flush=True,
                    )
                    continue
                shown = f"{result['everyone_s']:>12.2f}{result['one_by_one_s']:>14.1f}{result['ratio']:>7.2f}"
                apart = f"{result['largest_difference']:.0e} ({result['differ']} over 1e-6)"
                same = f"  {result['same_verdicts']} verdicts, losses to {apart}"
                if options.rounding:
                    apart = f"{result['rounding_difference']:.0e} ({result['rounding_differ']} over 1e-6)"
                    same += f", by one rounding {apart}"
                print(
                    f"{name:<8}{hidden:>6} {rule:<9}{result['users']:>5}{shown}{same}", flush=True
                )


if __name__ == "__main__":
    main()
