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


def losses(w: Array, data: Data) -> Array:
    """Return the squared error of each example."""
    x, y = data
    return np.asarray((np.column_stack([x, np.ones(len(x))]) @ w - y) ** 2)


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


def frequencies(table: Array, counts: Array) -> Array:
    """Return how often each look is the best."""
    best = [int(np.argmin([float((row * count).sum()) for row in table])) for count in counts]
    return np.array([best.count(look) / len(best) for look in range(len(table))])


def trunk_and_branch(
    own: Data,
    peers: list[Data],
    held_out: Data,
    start: Array,
    folds: Array,
    *,
    counts: Array,
    steps: int,
    lr: float,
) -> dict[str, Any]:
    """Return the point served, its path, τ, and the losses told of it and of Alone.

    Args:
        own: user 0's examples.
        peers: theirs.
        held_out: the validation examples; there may be none.
        start: where all copies start.
        folds: of the own examples, then of those held out.
        counts: of shape (resamples, examples), how often each is drawn.
        steps: of the run.
        lr: the step size.
    """
    n, n_folds = len(own[0]), int(folds.max()) + 1
    parts: list[Data] = [own] + [tuple(a[folds[:n] != q] for a in own) for q in range(n_folds)]
    half, every = steps // 2, max(1, steps // 20)
    alone = [start.copy() for _ in parts]
    trunks, pooled = [start.copy() for _ in range(n_folds)], start.copy()
    sizes = np.array([len(y) for _, y in peers], float)
    by_size = sizes / sizes.sum()
    grams: list[list[Array]] = [[] for _ in trunks]
    kappas: list[list[Array]] = [[] for _ in trunks]
    norms: list[list[Array]] = [[] for _ in trunks]
    weights = [np.full(len(peers), 1 / len(peers)) for _ in trunks]
    paths: dict[str, dict[str, list[Any]]] = {
        p: {"x": [], "l": [], "c": [], "f": []} for p in ("alone", "branch", "pooled")
    }

    def look(name: str, full: Array, blind: list[Array]) -> None:
        crossed = told = losses(full, own)
        if blind:
            each = np.array([losses(w, own) for w in blind])
            crossed = np.array([each[folds[i], i] for i in range(n)])
            told = crossed + losses(full, own) - each.mean(0)
        paths[name]["x"].append(full.copy())
        for key, values in (("l", crossed), ("c", told), ("f", losses(full, own))):
            paths[name][key].append(np.concatenate([values, losses(full, held_out)]))

    for t in range(half):
        if t % every == 0:
            look("alone", alone[0], alone[1:])
        for q, w in enumerate(trunks):
            rows = np.array([gradient(w, p) for p in peers])
            trunks[q] = w - lr * weights[q] @ rows  # by the weights found before
            if t % max(1, half // 12) == 0:
                lacking = np.vstack([np.zeros_like(w), rows]) - gradient(w, parts[1 + q])
                grams[q].append(lacking @ lacking.T)
                h = np.mean(grams[q], axis=0)
                kappas[q].append(simplex(0.9 * h + 0.1 * np.diag(np.diag(h))))
                norms[q].append(np.linalg.norm(rows, axis=1))
                if kappas[q][-1][1:].sum() > 1e-6:  # else nobody points the right way
                    weights[q] = kappas[q][-1][1:] / kappas[q][-1][1:].sum()
        pooled = pooled - lr * by_size @ np.array([gradient(pooled, p) for p in peers])
        alone = [w - lr * gradient(w, part) for w, part in zip(alone, parts, strict=True)]
    late = max(1, len(kappas[0]) // 3)
    taus, bounds = [], np.zeros(len(peers))
    for q in range(n_folds):
        heard = [k[1:] / k[1:].sum() for k in kappas[q][-late:] if k[1:].sum() > 1e-6]
        tau = np.mean(heard, axis=0) if heard else np.full(len(peers), 1 / len(peers))
        tau[tau < 0.25 / len(tau)] = 0
        taus.append(tau / tau.sum())
        bounds += np.median(norms[q][-late:], axis=0) / n_folds
    ends = np.array([losses(w, own) for w in trunks])
    judged = np.mean([ends[folds[i], i] for i in range(n)])
    copies, used = [np.mean(trunks, axis=0), *trunks], [np.mean(taus, axis=0), *taus]
    if judged > losses(pooled, own).mean():
        copies, used = [pooled.copy() for _ in parts], [by_size] * len(parts)

    def step_of(w: Array, tau: Array, a: float, own: Array | float) -> Array:
        total = sum(weight * gradient(w, peer) for weight, peer in zip(tau, peers, strict=True))
        if np.linalg.norm(total) > sum(
            weight * bound for weight, bound in zip(tau, bounds, strict=True)
        ):
            return np.asarray(own * np.ones_like(w))  # the peers are not heard
        return np.asarray((1 - a) * own + a * total)

    for t in range(half, steps + 1):
        if t % every == 0 or t in (half, steps):
            look("alone", alone[0], alone[1:])
            look("branch", copies[0], copies[1:])
            look("pooled", pooled, [])
        if t == steps:
            break
        a = 1 / (1 + np.exp(-(2.2 - 6.8 * (t - half) / max(1, steps - half - 1))))
        copies = [
            w - lr * step_of(w, tau, a, gradient(w, part))
            for w, part, tau in zip(copies, parts, used, strict=True)
        ]
        pooled = pooled - lr * step_of(pooled, by_size, 1.0, 0.0)
        alone = [w - lr * gradient(w, part) for w, part in zip(alone, parts, strict=True)]
    everything = tuple(np.concatenate(pair) for pair in zip(own, held_out, strict=True))
    return _served(paths, folds, counts, cast("Data", everything)) | {"tau": used[0]}


def _served(
    paths: dict[str, dict[str, list[Any]]], folds: Array, counts: Array, everything: Data
) -> dict[str, Any]:
    tables = {name: np.array(path["l"]) for name, path in paths.items()}
    without = {
        name: [
            frequencies(table[:, folds != q], counts[:, folds != q])
            for q in range(int(folds.max()) + 1)
        ]
        for name, table in tables.items()
    }

    def best(scores: dict[str, float]) -> str:
        other = "branch" if scores["branch"] <= scores["pooled"] else "pooled"
        return "alone" if scores["alone"] <= scores[other] else other

    def score(name: str, example: int, fold: int) -> float:
        return float(without[name][fold] @ tables[name][:, example])

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    everyone = range(len(folds))
    path = best({name: mean([score(name, i, folds[i]) for i in everyone]) for name in paths})
    told = {"served": [], "alone": []}  # type: dict[str, list[float]]
    for i in everyone:
        its = best(
            {name: mean([score(name, j, folds[j]) for j in everyone if j != i]) for name in paths}
        )
        for key, name in (("served", its), ("alone", "alone")):
            looks = without[name][folds[i]]
            average = sum(f * w for f, w in zip(looks, paths[name]["x"], strict=True))
            lower = losses(average, everything)[i] - looks @ np.array(paths[name]["f"])[:, i]
            told[key].append(float(looks @ np.array(paths[name]["c"])[:, i] + lower))
    chosen = frequencies(tables[path], counts)
    point = sum(f * w for f, w in zip(chosen, paths[path]["x"], strict=True))
    return {"path": path, "point": point, **told}
