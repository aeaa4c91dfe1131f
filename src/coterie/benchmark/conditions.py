"""Conditions: what is done to the users' data before anyone learns from it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from coterie.benchmark.population import Numbers, Population
from coterie.engines.attacks import ATTACKS
from coterie.errors import KnobError, did_you_mean

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
