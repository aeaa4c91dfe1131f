"""Users with their examples as they are read, what a condition does to them, and one user's task."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from coterie.data.preparation import Kind, Preparation
from coterie.data.table import Task
from coterie.engines.attacks import ATTACKS
from coterie.errors import DataError, KnobError, did_you_mean
from coterie.users.sampling import random_key
from coterie.users.user import User

Numbers: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Population:
    """The examples of many users.

    Args:
        inputs: one row an example: a tensor that goes into a model as it is (bytes are scaled to
            [0, 1]), or a table whose columns are prepared with user 0's statistics.
        targets: class numbers from 0, of one or more dimensions, or real numbers.
        owners: the name of the user of each row.
        n_classes: the number of classes; 0 in regression.
        categorical: columns of the table that hold categories.

    Example:
        >>> people = Population(torch.zeros(3, 2), np.array([0, 1, 1]), np.array(["a", "b", "a"]), n_classes=2)
        >>> people.names, people.rows("a").tolist()
        (['a', 'b'], [0, 2])
    """

    inputs: "Tensor | pd.DataFrame"
    targets: Numbers
    owners: Numbers
    n_classes: int = 0
    categorical: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def names(self) -> list[str]:
        """The users, in the order of their first rows."""
        return list(self._rows)

    def rows(self, name: str) -> Numbers:
        """Return where a user's examples are."""
        return self._rows[name]

    @functools.cached_property
    def _rows(self) -> dict[str, Numbers]:
        rows_of: dict[str, list[int]] = {}
        for row, name in enumerate(self.owners.tolist()):
            rows_of.setdefault(name, []).append(row)
        return {name: np.array(rows) for name, rows in rows_of.items()}

    def take(self, rows: Numbers) -> Self:
        """Return the examples at these rows."""
        if isinstance(self.inputs, Tensor):
            inputs: Tensor | pd.DataFrame = self.inputs[torch.from_numpy(rows)]
        else:
            inputs = self.inputs.iloc[rows].reset_index(drop=True)
        return type(self)(
            inputs, self.targets[rows], self.owners[rows], self.n_classes, self.categorical
        )


Changed: TypeAlias = tuple[Population, tuple[str, ...]]
"""The examples as they are to be, and the peers whose labels are wrong, or who attack."""

Condition: TypeAlias = Callable[[Population, str, Sequence[str], np.random.Generator], Changed]
"""From the examples of user 0 and its peers, their names and a generator to what is done to them."""


def honest(people: Population, me: str, peers: Sequence[str], rng: np.random.Generator) -> Changed:
    """Leave the data as it is."""
    return people, ()


def wrong_labels(
    people: Population, me: str, peers: Sequence[str], rng: np.random.Generator
) -> Changed:
    """Give half of the peers (rounded down) wrong labels throughout, the same error for all."""
    names = _some(peers, len(peers) // 2, rng)
    return _relabelled(people, names), names


def permuted(
    people: Population, me: str, peers: Sequence[str], rng: np.random.Generator
) -> Changed:
    """Shuffle the examples among the users, each keeping its number.

    Nobody differs, and pooling is best.
    """
    return replace(people, owners=rng.permutation(people.owners)), ()


def stranger(
    people: Population, me: str, peers: Sequence[str], rng: np.random.Generator
) -> Changed:
    """Change user 0's labels, in training, validation and test alike.

    No peer resembles it, and alone is best.
    """
    return _relabelled(people, [me]), ()


CONDITIONS: Mapping[str, Condition] = {
    "honest": honest,
    "wrong-labels": wrong_labels,
    "permuted": permuted,
    "stranger": stranger,
}


@dataclass(frozen=True)
class GradientAttack:
    """Leave the data as it is; some of the peers send what the attack tells them to.

    They are half of the peers (rounded down), or as many as the name says: `sign-flip`, `sign-flip-4`.
    """

    attack: str
    attackers: int | None = None

    def __call__(
        self, people: Population, me: str, peers: Sequence[str], rng: np.random.Generator
    ) -> Changed:
        """Return the data as it is, and who attacks."""
        n = len(peers) // 2 if self.attackers is None else self.attackers
        if not 1 <= n <= len(peers):
            raise KnobError(f"{me} has {len(peers)} peers, of whom not {n} can attack")
        return people, _some(peers, n, rng)

    def __str__(self) -> str:
        who = "half" if self.attackers is None else self.attackers
        does = f"send what the attack `{self.attack}` tells them to"
        return f"Leave the data as it is; {who} of the peers {does}."


def condition_of(name: str) -> Condition:
    """Return a condition by its name, which is one of `CONDITIONS` or an attack.

    Example:
        >>> condition_of("sign-flip-4")
        GradientAttack(attack='sign-flip', attackers=4)
    """
    if name in CONDITIONS:
        return CONDITIONS[name]
    attack, _, number = name.rpartition("-")
    if name in ATTACKS:
        return GradientAttack(name)
    if attack in ATTACKS and number.isdecimal():
        return GradientAttack(attack, int(number))
    known = [*CONDITIONS, *ATTACKS]
    hint = did_you_mean(name, known)
    raise KnobError(f"unknown condition {name!r}; the conditions are {', '.join(known)}{hint}")


def _some(peers: Sequence[str], n: int, rng: np.random.Generator) -> tuple[str, ...]:
    """Return n of the peers, in their order."""
    return tuple(peers[k] for k in sorted(rng.permutation(len(peers))[:n].tolist()))


def _relabelled(people: Population, names: Sequence[str]) -> Population:
    """Call class c of these users c + 1 (the last 0).

    In regression, mirror their targets at their mean.
    """
    targets: Numbers = people.targets.copy()
    for name in names:
        rows = people.rows(name)
        own = targets[rows]
        targets[rows] = (own + 1) % people.n_classes if people.n_classes else 2 * own.mean() - own
    return replace(people, targets=targets)


@dataclass(frozen=True)
class SetTask(Task):
    """The task of one user of a population."""

    wrong: tuple[str, ...]  # the names of the peers whose labels are wrong, or who attack
    # the standard deviation of all targets in the units that they have here; 1 for classes
    spread: float
    attack: str = ""  # what the attackers send


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
    done = condition_of(condition)
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
    changed, wrong = done(people, me, peers, change)
    own, held_out = _cut(changed, changed.rows(me), own_examples, split)
    validation, test = _cut(changed, held_out, min(own_examples, len(held_out) // 2), split)
    inputs, targets, spread = _prepared(changed, own)

    def examples(rows: Numbers) -> tuple[Tensor, Tensor]:
        return inputs[torch.from_numpy(rows)], targets[torch.from_numpy(rows)]

    user = User(me, *examples(own), validation=examples(validation), test=examples(test))
    everyone = tuple(User(name, *examples(changed.rows(name))) for name in peers)
    attack = done.attack if isinstance(done, GradientAttack) else ""
    sizes = inputs[0].numel(), changed.n_classes or 1
    return SetTask(user, everyone, *sizes, wrong, spread, attack)


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

    targets: pd.Series[float] = pd.Series(people.targets)
    classes: pd.Series[int] = pd.Series(range(people.n_classes))
    kind: Kind = "classification" if people.n_classes else "regression"
    preparation = Preparation.fit(
        people.inputs.iloc[own], targets.iloc[own], classes, kind, people.categorical
    )
    spread = 1.0 if people.n_classes else float(people.targets.std()) / preparation.scale
    return preparation.inputs(people.inputs), preparation.targets(targets), spread
