"""The examples of many users, in one table with an owner a row, and what a condition does to them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from coterie.engines.attacks import ATTACKS
from coterie.errors import KnobError, did_you_mean

if TYPE_CHECKING:
    import pandas as pd

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
