"""Trees as candidates of a mixture: boosted with the peers, and a forest of the own rows."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coterie.mixture.candidates import Candidates
from coterie.mixture.families import Array, Family
from coterie.mixture.served import Predictor
from coterie.trees.boosting import (
    BOUND,
    Bins,
    Grown,
    Growth,
    Level,
    Part,
    driven,
    grow,
    outputs_grown,
    peers_here,
)
from coterie.trees.histograms import Histograms
from coterie.trees.tensors import Trees, of_boosted, of_forest

FEWEST = 10
"""With fewer own rows there are no trees."""
KINDS = {"trees": 1.0, "trees, own rows count five times": 5.0}
"""What an own row counts in each kind of boosted trees, where a peer's row counts 1."""
MOST = 500_000
"""Boosted trees have so many bins in all their ensembles at most: more columns and classes have none."""
MOST_ELSEWHERE = 100_000
"""The same where peers are elsewhere, who send them all at each level."""
FOREST = 100
"""Trees of the forest; each sees at most this many rows:"""
FOREST_ROWS = 5_000
GROWTH = Growth()

Data = tuple[Array, Array]
Elsewhere = Callable[[Histograms], Array | None]


class TreeUnits:
    """Targets in units in which a first tree is a fair step, and the way back."""

    def __init__(self, targets: Array, family: Family) -> None:
        squared = family.is_squared
        self.shift = targets.mean(0) if squared else np.zeros(targets.shape[1])
        spread = float(targets.std()) if squared else 1.0
        self.scale = spread if spread > 0 else 1.0

    def to(self, targets: Array) -> Array:
        """Return targets in these units."""
        numbers: Array = (targets - self.shift) / self.scale
        return numbers

    def back(self, outputs: Array) -> Array:
        """Return outputs in the caller's units."""
        numbers: Array = outputs * self.scale + self.shift
        return numbers


def candidates(
    own: Data,
    peers: Sequence[Data],
    family: Family,
    folds: Array,
    *,
    held_out: Array | None = None,
    seed: int = 0,
    growth: Growth = GROWTH,
    elsewhere: Elsewhere | None = None,
) -> list[Candidates]:
    """Return blocks of candidates, each judged on own rows that it did not see.

    Args:
        own: inputs (n, D) and targets (n, K) of user 0, in the caller's units.
        peers: the same of each peer.
        family: of the loss; for counts there are no trees.
        folds: of each own row.
        held_out: inputs of validation rows.
        seed: of the forest, and of the rows that trees see where there are very many.
        growth: how ensembles grow.
        elsewhere: as for `boosted`.
    """
    if family.name not in BOUND or len(own[0]) < FEWEST:
        return []
    blocks = forest(own, family, held_out=held_out, seed=seed)
    lanes = len(KINDS) * (int(folds.max()) + 2) * len(outputs_grown(family, own[1].shape[1]))
    most = MOST if elsewhere is None else MOST_ELSEWHERE
    if (peers or elsewhere) and Bins.of(own[0]).starts[-1] * lanes <= most:
        settings: dict[str, Any] = {"held_out": held_out, "seed": seed, "growth": growth}
        blocks += boosted(own, peers, family, folds, elsewhere=elsewhere, **settings)
    return blocks


def boosted(
    own: Data,
    peers: Sequence[Data],
    family: Family,
    folds: Array,
    *,
    held_out: Array | None = None,
    seed: int = 0,
    growth: Growth = GROWTH,
    elsewhere: Elsewhere | None = None,
) -> list[Candidates]:
    """Return blocks of boosted trees: of every kind one for all rows and one without each fold.

    They grow side by side, and each is a candidate after several numbers of trees.

    Args:
        own: inputs and targets of user 0.
        peers: of each peer at hand.
        family: of the loss.
        folds: of each own row.
        held_out: inputs of validation rows.
        seed: of the rows that trees see where there are very many.
        growth: how ensembles grow.
        elsewhere: what asks peers who are elsewhere, in the place of `peers`: from a question to
            sums, or None where nobody answered.
    """
    units, bins = TreeUnits(own[1], family), Bins.of(own[0])
    views = int(folds.max()) + 2
    seen = np.column_stack([np.ones(len(folds)), *(folds != q for q in range(views - 1))])
    weights = np.concatenate([seen * count for count in KINDS.values()], 1)
    settings: dict[str, Any] = {"family": family, "growth": growth, "seed": seed}
    mine = Part(
        bins.places(own[0], mine=True),
        units.to(own[1]),
        np.zeros(len(own[0]), dtype=np.int64),
        weights,
        bins=bins,
        **settings,
    )
    others = [(x, units.to(y)) for x, y in peers]
    equal = np.ones((len(peers), weights.shape[1]))
    if elsewhere is None:
        ask = peers_here(bins, others, equal, **settings)
    else:
        about = (family.name, bins, np.asarray(units.shift), units.scale, weights.shape[1])

        def ask(level: Level) -> Array | None:
            return elsewhere(Histograms(*about, level))

    grown = driven(grow(mine, bins, growth), ask)
    blocks, k = [], own[1].shape[1]
    blind = grown.outputs.reshape(len(grown.looks), len(folds), len(KINDS), views, k)
    blind = units.back(blind[:, np.arange(len(folds)), :, folds + 1])  # (n, looks, kinds, K)
    for i, kind in enumerate(KINDS):
        made = [
            _module(grown, look, i * views, bins, units, grows=mine.grows)
            for look in range(len(grown.looks))
        ]
        blocks.append(_block(kind, blind[:, :, i], made, held_out))
    return blocks


def _module(
    grown: Grown, look: int, ensemble: int, bins: Bins, units: TreeUnits, *, grows: Sequence[int]
) -> Trees:
    base = units.back(grown.intercepts[look, ensemble])
    trees = grown.trees[: grown.looks[look]]
    nodes = of_boosted(trees, ensemble, bins, grows, len(base))
    scaled = nodes._replace(value=nodes.value * units.scale)
    return Trees.of(scaled, n_inputs=len(bins.edges), base=base)


def _block(
    kind: str, blind: Array, made: Sequence[Trees], held_out: Array | None, *, alone: bool = False
) -> Candidates:
    import torch

    outputs = None
    if held_out is not None:
        rows = torch.as_tensor(held_out, dtype=torch.float32)
        with torch.no_grad():
            outputs = np.stack([each(rows).double().numpy() for each in made], 1)
    predictors = [Predictor(each) for each in made]
    return Candidates(kind, blind, predictors=predictors, held_out=outputs, alone=alone)


def forest(
    own: Data, family: Family, *, held_out: Array | None = None, seed: int = 0
) -> list[Candidates]:
    """Return a forest of user 0's rows, each judged by the trees that did not see it.

    A class that none of n trees' rows had counts as one more row, shared by all classes.
    """
    from sklearn.ensemble import ExtraTreesClassifier, ExtraTreesRegressor

    inputs, targets = own
    n, k = targets.shape
    settings = {
        "oob_score": True,
        "bootstrap": True,
        "random_state": seed % 2**32,
        "max_samples": FOREST_ROWS if n > FOREST_ROWS else None,
    }
    if family.is_squared:
        numbers = targets if k > 1 else targets[:, 0]
        fitted = ExtraTreesRegressor(FOREST, **settings).fit(inputs, numbers)
        nodes = of_forest(fitted.estimators_, None, k)
        blind = np.asarray(fitted.oob_prediction_).reshape(n, 1, k)
        made = Trees.of(nodes, n_inputs=inputs.shape[1])
    elif family.name == "softmax":
        numbers = targets.argmax(1)
        fitted = ExtraTreesClassifier(FOREST, **settings).fit(inputs, numbers)
        classes = fitted.classes_.astype(np.int64)
        nodes = of_forest(fitted.estimators_, classes, k)
        blind = np.zeros((n, 1, k))
        blind[:, 0, classes] = np.nan_to_num(fitted.oob_decision_function_, nan=1 / len(classes))
        more, less = 1 / (k * (n + 1)), n / (n + 1)
        blind = np.log(less * blind + more)
        nodes = nodes._replace(value=less * nodes.value)
        made = Trees.of(nodes, n_inputs=inputs.shape[1], base=more, logarithm=True)
    else:
        return []
    return [_block("forest, alone", blind, [made], held_out, alone=True)]
