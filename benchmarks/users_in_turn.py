"""Users of data sets as user 0 in turn, with the examples and peers of `coterie bench`."""

from __future__ import annotations

import argparse
from pathlib import Path

from torch import nn

from coterie.benchmark.sets import SETS, load
from coterie.benchmark.sets.user_set import MODELS
from coterie.benchmark.tasks import SetTask, candidates, task_of
from coterie.users.sampling import seeded


def options(what: str | None, users: int = 8) -> argparse.ArgumentParser:
    """Return the options that say which sets and users."""
    parser = argparse.ArgumentParser(
        description=what, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, default=None, help="the folder of all data; digits need none"
    )
    parser.add_argument("--sets", default="digits")
    parser.add_argument("--users", type=int, default=users, help="of each set, at most")
    return parser


def users_of(name: str, settings: argparse.Namespace) -> list[str]:
    """Return the users of a set who are user 0."""
    return candidates(load(SETS[name], settings.data), SETS[name].own_examples)[: settings.users]


def problem_of(
    name: str, me: str, data: Path | None, model: str, condition: str = "honest"
) -> tuple[SetTask, nn.Module]:
    """Return the task of a user of a set, and a model to start from, which is the same for all."""
    kind = SETS[name]
    sizes = {"own_examples": kind.own_examples, "most_peers": kind.most_peers}
    task = task_of(load(kind, data), me, condition=condition, **sizes)
    with seeded(0, "model", 0):
        return task, MODELS[model](task.n_inputs, task.n_outputs)
