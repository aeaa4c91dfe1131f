"""From a population to the task of one of its users."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coterie.benchmark.population import CONDITIONS, Numbers, Population
from coterie.data.preparation import Kind, Preparation
from coterie.data.table import Task
from coterie.errors import DataError, KnobError, did_you_mean
from coterie.users.sampling import random_key
from coterie.users.user import User


@dataclass(frozen=True)
class SetTask(Task):
    """The task of one user of a population."""

    wrong: tuple[str, ...]  # the names of the peers whose labels are wrong
    # the standard deviation of all targets in the units that they have here; 1 for classes
    spread: float


def candidates(people: Population, own_examples: int) -> list[str]:
    """Return the users who can be user 0, in an order that is mixed but always the same.

    They have several classes and, beside the examples to learn from, as many again to hold out.

    Example:
        >>> owners = np.repeat(["a", "b", "c"], [20, 19, 20])
        >>> people = Population(torch.zeros(59, 1), np.arange(59) % 2, owners, n_classes=2)
        >>> sorted(candidates(people, own_examples=10))
        ['a', 'c']
    """
    able = [name for name in people.names if _can_learn(people, name, 2 * own_examples)]
    return [able[i] for i in np.random.default_rng(0).permutation(len(able))]


def task_of(
    people: Population,
    me: str,
    *,
    own_examples: int,
    most_peers: int,
    condition: str = "honest",
    seed: int = 0,
) -> SetTask:
    """Return the task of one user: its examples in three parts, and its peers with all theirs.

    Of user 0's examples `own_examples` are to learn from; as many, but at most half of the rest,
    are for validation; all others for test. Classes are in equal shares where there are enough of
    each. The columns of a table are prepared with statistics of the examples to learn from alone.
    User 0 has at most `most_peers` peers, each with `own_examples` or more; the seed says which
    examples and peers those are.

    Example:
        >>> owners = np.repeat(["a", "b", "c"], 40)
        >>> people = Population(torch.zeros(120, 1), np.arange(120) % 2, owners, n_classes=2)
        >>> task = task_of(people, "a", own_examples=10, most_peers=5, condition="wrong-labels")
        >>> task.me, len(task.me.validation), len(task.me.test), len(task.peers), len(task.wrong)
        (User('a', 10 examples), 10, 20, 2, 1)
    """
    if condition not in CONDITIONS:
        raise KnobError(
            f"unknown condition {condition!r}; the conditions are {', '.join(CONDITIONS)}"
            f"{did_you_mean(condition, CONDITIONS)}"
        )
    if me not in candidates(people, own_examples):
        raise DataError(
            f"user {me!r} cannot be user 0: it needs {2 * own_examples} examples of several"
            " classes; take another, or fewer own examples"
        )
    # One generator a choice, so that peers and parts are the same in all conditions.
    choice, change, split = (
        np.random.default_rng(random_key(seed, f"{me}/{use}")) for use in ("peers", "data", "parts")
    )
    others = [
        name for name in people.names if name != me and _can_learn(people, name, own_examples)
    ]
    peers = [others[i] for i in sorted(choice.permutation(len(others))[:most_peers].tolist())]
    people = people.take(np.sort(np.concatenate([people.rows(name) for name in (me, *peers)])))
    changed, wrong = CONDITIONS[condition](people, me, peers, change)
    own, held_out = _cut(changed, changed.rows(me), own_examples, split)
    validation, test = _cut(changed, held_out, min(own_examples, len(held_out) // 2), split)
    inputs, targets, spread = _prepared(changed, own)

    def examples(rows: Numbers) -> tuple[Tensor, Tensor]:
        return inputs[torch.from_numpy(rows)], targets[torch.from_numpy(rows)]

    user = User(me, *examples(own), validation=examples(validation), test=examples(test))
    everyone = tuple(User(name, *examples(changed.rows(name))) for name in peers)
    return SetTask(user, everyone, inputs[0].numel(), changed.n_classes or 1, wrong, spread)


def _can_learn(people: Population, name: str, least: int) -> bool:
    own = people.targets[people.rows(name)]
    return len(own) >= least and len(np.unique(own)) > 1


def _cut(
    people: Population, rows: Numbers, n: int, rng: np.random.Generator
) -> tuple[Numbers, Numbers]:
    """Return `n` of the rows and the others, with the classes in equal shares where there are enough of each."""
    from sklearn.model_selection import train_test_split

    classes = people.targets[rows] if people.n_classes and people.targets.ndim == 1 else None
    if classes is not None:
        counts = np.unique(classes, return_counts=True)[1]
        if counts.min() < 2 or len(counts) > min(n, len(rows) - n):
            classes = None
    a, b = train_test_split(
        rows, train_size=n, stratify=classes, random_state=int(rng.integers(2**31))
    )
    return a, b


def _prepared(people: Population, own: Numbers) -> tuple[Tensor, Tensor, float]:
    """Return all inputs and targets as a model takes them, and the spread of all targets in those units."""
    if isinstance(people.inputs, Tensor):
        inputs = people.inputs
        if inputs.dtype == torch.uint8:
            inputs = inputs.float() / 255
        return inputs, torch.from_numpy(people.targets), 1.0
    import pandas as pd

    targets: pd.Series[float] = pd.Series(people.targets)
    classes: pd.Series[int] = pd.Series(range(people.n_classes))
    kind: Kind = "classification" if people.n_classes else "regression"
    preparation = Preparation.fit(
        people.inputs.iloc[own], targets.iloc[own], classes, kind, people.categorical
    )
    spread = 1.0 if people.n_classes else float(people.targets.std()) / preparation.scale
    return preparation.inputs(people.inputs), preparation.targets(targets), spread
