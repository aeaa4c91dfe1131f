"""The benchmark's sets by name: where each is read from, and what it is learned with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from coterie.benchmark.sets import digits, heart, mnist, school, shakespeare, vowels, wisdm
from coterie.benchmark.sets.population import Population
from coterie.errors import DataError, KnobError


@dataclass(frozen=True)
class UserSet:
    """A set of users' data.

    Args:
        read: from its folder to the examples.
        models: what it is learned with, the first unless another is asked for.
        own_examples: how many examples user 0 has.
        most_peers: how many peers it has, at most.
        folder: its folder within the folder of all data; none where nothing is read.
        files: what must be there.
        source: where to get it.
        batch_size: how many examples each user draws for a gradient.
    """

    read: Callable[[Path], Population]
    models: tuple[str, ...]
    own_examples: int
    most_peers: int
    folder: str = ""
    files: tuple[str, ...] = ()
    source: str = ""
    batch_size: int = 32


SETS: Mapping[str, UserSet] = {
    "digits": UserSet(digits.read, ("linear", "mlp", "cnn"), own_examples=30, most_peers=13),
    "mnist": UserSet(
        mnist.read,
        ("mlp", "linear", "cnn"),
        own_examples=20,
        most_peers=10,
        batch_size=16,
        folder="mnist_by_writer",
        files=mnist.FILES,
        source="the pictures and labels of github.com/karpathy/convnetjs (demo/mnist) and the training labels of "
        "github.com/facebookresearch/qmnist",
    ),
    "wisdm": UserSet(
        wisdm.read,
        ("linear", "mlp"),
        own_examples=30,
        most_peers=19,
        folder="wisdm_activity",
        files=("WISDM_ar_v1.1_transformed.arff",),
        source="the WISDM Lab of Fordham University, Activity Prediction v1.1, transformed",
    ),
    "heart": UserSet(
        heart.read,
        ("linear", "mlp"),
        own_examples=30,
        most_peers=3,
        folder="heart_disease",
        files=heart.FILES,
        source="the UCI Machine Learning Repository, Heart Disease, its processed files",
    ),
    "school": UserSet(
        school.read,
        ("linear", "mlp"),
        own_examples=20,
        most_peers=19,
        folder="school_exam",
        files=("school.mat",),
        source="github.com/jiayuzhou/MALSAR (data/school.mat)",
    ),
    "vowels": UserSet(
        vowels.read,
        ("mlp", "linear"),
        own_examples=33,
        most_peers=14,
        folder="vowel_deterding",
        files=("vowel-context.data",),
        source="the UCI Machine Learning Repository, Connectionist Bench (Vowel Recognition, Deterding)",
    ),
    "shakespeare": UserSet(
        shakespeare.read,
        ("rnn", "gru"),
        own_examples=80,
        most_peers=5,
        batch_size=16,
        folder="shakespeare",
        files=("shakespeare.zip",),
        source="github.com/nltk/nltk_data (packages/corpora/shakespeare.zip)",
    ),
}


def missing(name: str, data: Path | None) -> str | None:
    """Say what a set lacks and where to get it, or None where all of it is there.

    Args:
        name: of the set.
        data: the folder of all data; None where there is none.

    Example:
        >>> missing("vowels", Path("nowhere")).partition(":")[0]
        'vowels needs nowhere/vowel_deterding/vowel-context.data, which is not there'
    """
    if name not in SETS:
        raise KnobError(f"unknown set {name!r}; the sets are {', '.join(SETS)}")
    user_set = SETS[name]
    if not user_set.files:
        return None
    if data is None:
        return f"{name} is read from a folder: name it with `--data`; it is had from {user_set.source}"
    for file in user_set.files:
        path = data / user_set.folder / file
        if not path.is_file():
            return f"{name} needs {path}, which is not there: get it from {user_set.source}"
    return None


@functools.lru_cache(maxsize=2)  # MNIST is large, and one set is done after the other
def load(name: str, data: Path | None = None) -> Population:
    """Return the examples of a set.

    Args:
        name: of the set, in `SETS`.
        data: the folder of all data, with a folder for each set; digits needs none.

    Example:
        >>> len(load("digits")), load("digits").names[:2]
        (1797, ['writer 0', 'writer 1'])
    """
    lacking = missing(name, data)
    if lacking:
        raise DataError(lacking)
    return SETS[name].read((data or Path()) / SETS[name].folder)
