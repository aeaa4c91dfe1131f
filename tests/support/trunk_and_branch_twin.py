"""Trunk and branch in plain NumPy: linear regression, whole batches, plain gradient steps, one number at a time."""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import numpy as np
from scipy.optimize import minimize

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Data: TypeAlias = tuple[Array, Array]


def gradient(w: Array, data: Data) -> Array:
    """Return the gradient of the mean squared error; the last entry of w is the constant."""
    x, y = data
    with_one = np.column_stack([x, np.ones(len(x))])
    return np.asarray(2 / len(x) * with_one.T @ (with_one @ w - y))


def simplex(h: Array) -> Array:
    """Return the minimum of a quadratic form over the simplex, by a general solver."""
    n = len(h)
    scaled = h / np.trace(h)
    solved = cast("Any", minimize)(
        lambda k: k @ scaled @ k,
        np.full(n, 1 / n),
        jac=lambda k: 2 * scaled @ k,
        bounds=[(0, 1)] * n,
        constraints={"type": "eq", "fun": lambda k: k.sum() - 1, "jac": lambda k: np.ones(n)},
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    return np.asarray(np.maximum(solved.x, 0))


def trunk_and_branch(
    own: Data,
    peers: list[Data],
    held_out: Data,
    start: Array,
    folds: Array,
    *,
    steps: int,
    lr: float,
    evaluations: set[int],
) -> dict[str, Any]:
    """Return the point served, each kind's share of it, and each own example's loss under it and under Alone.

    Args:
        own: user 0's examples.
        peers: theirs.
        held_out: the validation examples; there may be none.
        start: where all copies start.
        folds: of the own examples.
        steps: of the run.
        lr: the step size.
        evaluations: after which steps all copies are judged.
    """
    n_folds = int(folds.max()) + 1
    parts: list[Data] = [own] + [tuple(a[folds != q] for a in own) for q in range(n_folds)]
    half, decays = steps // 2, [0.0, 0.03]
    alone = [[start.copy() for _ in parts] for _ in decays]
    branch: list[list[Array]] = []
    begun: list[list[Array]] = []
    trunks, pooled = [start.copy() for _ in range(n_folds)], start.copy()
    sizes = np.array([len(y) for _, y in peers], float)
    by_size, bounds = sizes / sizes.sum(), np.zeros(len(peers))
    grams: list[list[Array]] = [[] for _ in trunks]
    norms: list[list[Array]] = [[] for _ in trunks]
    weights = [np.full(len(peers), 1 / len(peers)) for _ in trunks]
    guess = np.append(np.zeros(own[0].shape[1]), own[1].mean())
    without = [np.append(0 * guess[:-1], part[1].mean()) for part in parts[1:]]
    candidates: list[tuple[str, list[Array]]] = [("constant", [guess, *without])]
    for t in range(steps + 1):
        if t == half:
            means = [np.mean(trunks, axis=0), *trunks]
            begun = [means, [pooled] * len(parts)]  # settings begin in turn from both
            branch = [[w.copy() for w in each] for each in begun]
            bounds = np.mean([np.median(each[-max(1, len(each) // 3) :], 0) for each in norms], 0)
        if t in evaluations:
            candidates += [("alone", [w.copy() for w in copies]) for copies in alone]
            candidates += [
                (kind, [w.copy() for w in copies])
                for kind, copies in zip(("branch", "branch from pooled"), branch, strict=False)
            ]
            candidates += [("pooled", [pooled.copy()] * len(parts))] if t else []
        for q, w in enumerate(trunks if t < half else []):
            rows = np.array([gradient(w, p) for p in peers])
            trunks[q] = w - lr * weights[q] @ rows  # by the weights found before
            if t % max(1, half // 12) == 0:
                lacking = np.vstack([np.zeros_like(w), rows]) - gradient(w, parts[1 + q])
                grams[q].append(lacking @ lacking.T)
                h = np.mean(grams[q], axis=0)
                kappa = simplex(0.9 * h + 0.1 * np.diag(np.diag(h)))
                norms[q].append(np.linalg.norm(rows, axis=1))
                if kappa[1:].sum() > 1e-6:  # else nobody points the right way
                    weights[q] = kappa[1:] / kappa[1:].sum()
        total = by_size @ np.array([gradient(pooled, p) for p in peers])
        if t < half or np.linalg.norm(total) <= by_size @ bounds:
            pooled = pooled - lr * total
        for decay, copies in zip(decays, alone, strict=True):
            copies[:] = [
                w - lr * (gradient(w, part) + decay * w)
                for w, part in zip(copies, parts, strict=True)
            ]
        for decay, copies, origins in zip(decays, branch, begun, strict=False):
            copies[:] = [
                w - lr * (gradient(w, part) + decay * (w - origin))
                for w, part, origin in zip(copies, parts, origins, strict=True)
            ]
    return _mixture(candidates, own, held_out, folds)


def outputs(w: Array, x: Array) -> Array:
    """Return predictions."""
    return np.asarray(x @ w[:-1] + w[-1])


def _mixture(
    candidates: list[tuple[str, list[Array]]], own: Data, held_out: Data, folds: Array
) -> dict[str, Any]:
    """Mix by exp(−Σ error²/2σ²T), σ² the least mean squared error, T = 1; one half of the prior asks nobody."""
    alone = np.array([kind in ("constant", "alone") for kind, _ in candidates])
    blind = np.array(
        [[outputs(w[1 + folds[i]], own[0][i]) for i in range(len(folds))] for _, w in candidates]
    )
    errors = (blind - own[1]) ** 2
    further = np.array([((outputs(w[0], held_out[0]) - held_out[1]) ** 2) for _, w in candidates])

    def weights(rows: Array, which: Array) -> Array:
        total = errors[:, rows].sum(1) + further.sum(1)
        count = rows.sum() + further.shape[1]
        prior = np.where(alone, 0.5 / (alone & which).sum(), 0.5 / max(1, (~alone & which).sum()))
        w = np.where(which, prior, 0) * np.exp(
            -(total - total[which].min()) / (2 * total[which].min() / count)
        )
        return np.asarray(w / w.sum())

    every = np.ones(len(folds), bool)
    told = {}
    for name, which in (("served", np.ones(len(alone), bool)), ("alone", alone)):
        mixed = [weights(folds != folds[i], which) @ blind[:, i] for i in range(len(folds))]
        told[name] = (np.array(mixed) - own[1]) ** 2
    shares = weights(every, np.ones(len(alone), bool))
    kinds = np.array([kind for kind, _ in candidates])
    point = np.sum([share * w[0] for share, (_, w) in zip(shares, candidates, strict=True)], axis=0)
    weight = {kind: float(shares[kinds == kind].sum()) for kind in dict.fromkeys(kinds.tolist())}
    return {"point": point, "weight": weight, **told}
