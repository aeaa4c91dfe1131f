"""Conditions: what is done to the users' data before anyone learns from it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from coterie.benchmark.population import Numbers, Population

Changed: TypeAlias = tuple[Population, tuple[str, ...]]
"""The examples as they are to be, and the peers whose labels are wrong."""

Condition: TypeAlias = Callable[[Population, str, Sequence[str], np.random.Generator], Changed]
"""From the examples of user 0 and its peers, their names and a generator to what is done to them."""


def honest(people: Population, me: str, peers: Sequence[str], rng: np.random.Generator) -> Changed:
    """Leave the data as it is."""
    return people, ()


def wrong_labels(
    people: Population, me: str, peers: Sequence[str], rng: np.random.Generator
) -> Changed:
    """Give half of the peers (rounded down) wrong labels throughout, the same error for all."""
    wrong = sorted(rng.permutation(len(peers))[: len(peers) // 2].tolist())
    names = tuple(peers[k] for k in wrong)
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
