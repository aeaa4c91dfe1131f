"""Contributions on planted problems: is the order of peers right, and do intervals cover?

    python benchmarks/contributions.py [--own 24] [--repetitions 200]    # 0.3 s of a processor each

Two copies of user 0, a stranger and a liar of 80 rows each, twelve features, noise of variance 1.
User 0's truth is a random vector of length 3, the stranger's one of the same length at a right
angle to it, and the liar's is user 0's, negated. So no stranger is like user 0 by chance. Shapley
values are over all 16 coalitions. What they should be is known from 4,000 further rows of user 0,
under the models that were served.

The order that is counted is the one between kinds: each copy before the stranger and the liar.
The stranger and the liar, which both weigh next to nothing, are shown beside it.
"""

import argparse
import itertools
import math

import numpy as np

from coterie.mixture.contributions import Estimate, _estimate
from coterie.mixture.families import SQUARED, Array
from coterie.mixture.fit import fit_here

NAMES = ("copy 1", "copy 2", "stranger", "liar")
FEATURES, LENGTH = 12, 3.0
COALITIONS = [frozenset(s) for r in range(5) for s in itertools.combinations(NAMES, r)]


def shapley(losses: dict[frozenset[str], Array], name: str) -> Array:
    """Return the Shapley value in every row, over all coalitions."""
    value = np.zeros_like(losses[frozenset()])
    for who in COALITIONS:
        if name not in who:
            chance = math.factorial(len(who)) * math.factorial(3 - len(who)) / math.factorial(4)
            value += chance * (losses[who] - losses[who | {name}])
    return value


def repetition(own: int, seed: int) -> dict[str, tuple[Estimate, float, Estimate, float]]:
    """Return by peer its Shapley and leave-one-out value, each with what it should be."""
    rng = np.random.default_rng(seed)
    truth, other = LENGTH * np.linalg.qr(rng.normal(size=(FEATURES, 2)))[0].T

    def user(n: int, w: Array) -> tuple[Array, Array]:
        x = rng.normal(size=(n, FEATURES))
        return x, x @ w + rng.normal(size=n)

    truths = dict(zip(NAMES, (truth, truth, other, -truth), strict=True))
    me, peers = user(own, truth), {name: user(80, w) for name, w in truths.items()}
    x, y = user(4000, truth)
    told, right = {}, {}
    for who in COALITIONS:
        fitted = fit_here(*me, [peers[name] for name in NAMES if name in who], SQUARED).served
        told[who] = fitted.losses
        outputs = np.column_stack([x, np.ones(len(x))]) @ fitted.parameters
        right[who] = SQUARED.reported_losses(outputs, y[:, None])
    all_of_them, found = frozenset(NAMES), {}
    for name in NAMES:
        without = all_of_them - {name}
        found[name] = (
            _estimate(shapley(told, name)),
            float(shapley(right, name).mean()),
            _estimate(told[without] - told[all_of_them]),
            float((right[without] - right[all_of_them]).mean()),
        )
    return found


def main() -> None:
    """Print how often the order is right and how often the intervals cover."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--own", type=int, default=24)
    parser.add_argument("--repetitions", type=int, default=200)
    options = parser.parse_args()
    every = [repetition(options.own, seed) for seed in range(options.repetitions)]
    print(f"{options.own} own rows, {options.repetitions} repetitions")
    for k, what in enumerate(("told", "should be")):
        value = {
            name: np.array([(one[name][0].value, one[name][1])[k] for one in every])
            for name in NAMES
        }
        means = ", ".join(f"{name} {of.mean():.3f}" for name, of in value.items())
        worse = np.maximum(value["stranger"], value["liar"])
        both = float(np.mean(np.minimum(value["copy 1"], value["copy 2"]) > worse))
        mean = float(np.mean((value["copy 1"] + value["copy 2"]) / 2 > worse))
        liar = float(np.mean(value["stranger"] > value["liar"]))
        print(
            f"{what}: each copy before stranger and liar {both:.3f}; their mean {mean:.3f};"
            f" stranger before liar {liar:.3f}; means: {means}"
        )
    for k, what in ((0, "Shapley"), (2, "leave-one-out")):
        inside = [
            one[name][k].interval[0] <= one[name][k + 1] <= one[name][k].interval[1]  # type: ignore[union-attr, operator]
            for one in every
            for name in NAMES
        ]
        print(f"{what}: 95 % intervals cover {np.mean(inside):.3f}")


if __name__ == "__main__":
    main()
