"""Trees as candidates of a mixture: boosted with the peers, and a forest of the own rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from coterie.mixture import fit
from coterie.mixture.candidates import Candidates, OwnRows, some_of
from coterie.mixture.families import Array, Family
from coterie.mixture.fit import asks_here, linear_candidates
from coterie.mixture.posterior import Rows
from coterie.mixture.scaling import Scaling
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
from coterie.trees.tensors import Trees, joined, of_boosted, of_forest

FEWEST = 10
"""With fewer own rows there are no trees."""
KINDS = {"trees": 1.0, "trees, own rows count five times": 5.0}
"""What an own row counts in each kind of boosted trees, where a peer's row counts 1."""
MOST = 500_000
"""Boosted trees have so many bins in all their ensembles at most: more columns and classes have none."""
MOST_ELSEWHERE = 100_000
"""The same where peers are elsewhere, who send them all at each level."""
PERSONAL, GROUPS = "trees of peers, own last layer", 3
"""The kind with a personal last layer; so many parts of the peers are judged by the others' trees."""
FOREST = 100
"""Trees of the forest; each sees at most this many rows:"""
FOREST_ROWS = 2_000
GROWTH = Growth()

Data = tuple[Array, Array] | Rows
"""Inputs (n, D) and targets (n, K), and what rows count, if not 1."""
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
    layer: bool = False,
) -> list[Candidates]:
    """Return blocks of candidates, each judged on own rows that it did not see.

    Args:
        own: rows of user 0, in the caller's units.
        peers: the same of each peer.
        family: of the loss; for counts there are no trees.
        folds: of each own row.
        held_out: inputs of validation rows.
        seed: of the forest, and of the rows that trees see where there are very many.
        growth: how ensembles grow.
        elsewhere: as for `boosted`.
        layer: whether there is a personal last layer too, where the peers are at hand.
    """
    if family.name not in BOUND or len(own[0]) < FEWEST:
        return []
    count = int(folds.max()) + 1
    blocks = forest(own, family, count, held_out=held_out, seed=seed, signs=growth.signs)
    lanes = len(KINDS) * (int(folds.max()) + 2) * len(outputs_grown(family, own[1].shape[1]))
    most = MOST if elsewhere is None else MOST_ELSEWHERE
    if (peers or elsewhere) and Bins.of(own[0]).starts[-1] * lanes <= most:
        settings: dict[str, Any] = {"held_out": held_out, "seed": seed, "growth": growth}
        blocks += boosted(own, peers, family, folds, elsewhere=elsewhere, **settings)
        if layer and elsewhere is None and not any(growth.signs):
            blocks += personal(own, peers, family, folds, **settings)
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
    kinds: Mapping[str, float] = KINDS,
    tau: Array | None = None,
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
        kinds: what an own row counts in each.
        tau: the weights of peers at hand in the ensemble of all own rows, then in those without
            each fold, (1 + F, N); equal when None.
    """
    own, others = Rows(*own), [Rows(*each) for each in peers]
    units, bins = TreeUnits(own.targets, family), Bins.of(own.inputs)
    views = int(folds.max()) + 2
    seen = np.column_stack([np.ones(len(folds)), *(folds != q for q in range(views - 1))])
    weights = np.concatenate([seen * count for count in kinds.values()], 1)
    settings: dict[str, Any] = {"family": family, "growth": growth, "seed": seed}
    mine = Part(
        bins.places(own[0], mine=True),
        units.to(own[1]),
        np.zeros(len(own[0]), dtype=np.int64),
        weights,
        bins=bins,
        counts=own.weights,
        **settings,
    )
    others = [rows._replace(targets=units.to(rows.targets)) for rows in others]
    listening = np.ones((len(peers), views)) if tau is None else len(peers) * tau.T
    if elsewhere is None:
        ask = peers_here(bins, others, np.tile(listening, len(kinds)), **settings)
    else:
        about = (family.name, bins, np.asarray(units.shift), units.scale, weights.shape[1])

        def ask(level: Level) -> Array | None:
            return elsewhere(Histograms(*about, level))

    grown = driven(grow(mine, bins, growth), ask)
    blocks, k = [], own[1].shape[1]
    outputs = grown.outputs.reshape(len(grown.looks), len(folds), len(kinds), views, k)
    blind = units.back(outputs[:, np.arange(len(folds)), :, folds + 1])  # (n, looks, kinds, K)
    some = units.back(outputs[:, some_of(len(folds)), :, 1:])
    by_fold = np.transpose(some, (3, 1, 0, 2, 4))  # (F, m, looks, kinds, K)
    for i, kind in enumerate(kinds):
        made = [
            _module(grown, look, i * views, bins, units, grows=mine.grows)
            for look in range(len(grown.looks))
        ]
        blocks.append(_block(kind, blind[:, :, i], by_fold[:, :, :, i], made, held_out))
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
    kind: str,
    blind: Array,
    by_fold: Array,
    made: Sequence[Trees],
    held_out: Array | None,
    *,
    alone: bool = False,
) -> Candidates:
    import torch

    outputs = None
    if held_out is not None:
        rows = torch.as_tensor(held_out, dtype=torch.float32)
        with torch.no_grad():
            outputs = np.stack([each(rows).double().numpy() for each in made], 1)
    predictors = [Predictor(each) for each in made]
    about: dict[str, Any] = {"held_out": outputs, "by_fold": by_fold, "alone": alone}
    return Candidates(kind, blind, predictors=predictors, **about)


def personal(
    own: Data,
    peers: Sequence[Data],
    family: Family,
    folds: Array,
    *,
    held_out: Array | None = None,
    seed: int = 0,
    growth: Growth = GROWTH,
) -> list[Candidates]:
    """Return user 0's linear models of the columns and of what the peers' trees say: a personal last layer.

    Its prior over users says how much each coefficient differs between them. Trees are of the peers
    alone: they saw no own row. For the rows of a third of the peers they are of the other two.

    Args:
        own: inputs and targets of user 0.
        peers: of each peer at hand; with fewer than two there is none.
        family: of the loss.
        folds: of each own row.
        held_out: inputs of validation rows.
        seed: of the rows that trees see where there are very many.
        growth: how ensembles grow.
    """
    if len(peers) < 2:
        return []
    own, others = Rows(*own), [Rows(*each) for each in peers]
    groups = np.arange(len(peers)) % min(GROUPS, len(peers))
    seen = np.column_stack([np.ones(len(peers)), *(groups != g for g in range(groups.max() + 1))])
    units, bins, (n, d) = TreeUnits(own[1], family), Bins.of(own[0]), own[0].shape
    ends = (growth.trees // 4, growth.trees)
    growth = growth._replace(looks=ends)
    settings: dict[str, Any] = {"family": family, "growth": growth, "seed": seed}
    nobody = np.zeros((n, seen.shape[1]))
    places, owners = bins.places(own[0], mine=False), np.zeros(n, dtype=np.int64)
    mine = Part(places, units.to(own[1]), owners, nobody, bins=bins, **settings)
    theirs = [rows._replace(targets=units.to(rows.targets)) for rows in others]
    ask = peers_here(bins, theirs, seen, **settings)
    grown, k = driven(grow(mine, bins, growth), ask), own[1].shape[1]
    spans = [grown.trees[a:b] for a, b in pairwise((0, *ends))]
    nodes = [
        [of_boosted(span, e, bins, mine.grows, k) for span in spans] for e in range(seen.shape[1])
    ]

    def columns(inputs: Array, ensemble: int) -> Array:
        """Return inputs, beside the sums of an ensemble's first trees and of all others."""
        import torch

        rows = torch.as_tensor(inputs, dtype=torch.float32)
        sums = [Trees.of(span, n_inputs=d)(rows) for span in nodes[ensemble]]
        return np.column_stack(
            [inputs, *(each.detach().double().numpy()[:, mine.grows] for each in sums)]
        )

    inputs = columns(own[0], 0)
    scaling = Scaling.of(inputs, own[1], family, intercept=True)
    scaled = scaling.rows(inputs, own.targets, own.weights)
    rows = OwnRows.of(scaled, family, whole=True, folds=folds)
    theirs = [
        scaling.clipped(scaling.rows(columns(x, 1 + int(g)), y, counts))
        for (x, y, counts), g in zip(others, groups, strict=True)
    ]
    asking = linear_candidates(rows, family, scaling, len(peers))
    _, found = fit.driven(asking, asks_here(theirs, family))
    (block,) = (one for one in found if one.kind == "hierarchical")

    def behind(at: Array) -> Trees:
        """Return the trees, whose leaves count as the layer says, with its linear part."""
        whole, each = nodes[0], len(mine.grows)
        value = [
            span.value[:, mine.grows] @ at[d + i * each : d + (i + 1) * each]
            for i, span in enumerate(whole)
        ]
        return Trees.of(joined(whole, value), n_inputs=d, base=at[-1], slopes=at[:d])

    block = replace(block, kind=PERSONAL, behind=behind)
    if held_out is not None:
        block = block.on(np.column_stack([columns(held_out, 0), np.ones(len(held_out))]))
    return [block]


def forest(
    own: Data,
    family: Family,
    folds: int = 1,
    *,
    held_out: Array | None = None,
    seed: int = 0,
    signs: Sequence[int] = (),
) -> list[Candidates]:
    """Return a forest of user 0's rows, each judged by the trees that did not see it.

    It is not fitted without each of the folds, and stands as it is for each of them. A class that
    none of n trees' rows had counts as one more row, shared by all classes. `signs` are as in
    `Growth`.
    """
    from sklearn.ensemble import ExtraTreesClassifier, ExtraTreesRegressor

    inputs, targets, counts = Rows(*own)
    n, k = targets.shape
    settings = {
        "oob_score": True,
        "bootstrap": True,
        "random_state": seed % 2**32,
        "max_samples": FOREST_ROWS if n > FOREST_ROWS else None,
        "monotonic_cst": signs if any(signs) else None,
    }
    if family.is_squared:
        numbers = targets if k > 1 else targets[:, 0]
        fitted = ExtraTreesRegressor(FOREST, **settings).fit(inputs, numbers, counts)
        nodes = of_forest(fitted.estimators_, None, k)
        blind = np.asarray(fitted.oob_prediction_).reshape(n, 1, k)
        made = Trees.of(nodes, n_inputs=inputs.shape[1])
    elif family.name == "softmax":
        numbers = targets.argmax(1)
        fitted = ExtraTreesClassifier(FOREST, **settings).fit(inputs, numbers, counts)
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
    by_fold = np.repeat(blind[None, some_of(n)], folds, 0)
    return [_block("forest, alone", blind, by_fold, [made], held_out, alone=True)]
