"""Bounds against exact moments of many random problems: the largest ratio of the error to its bound.

python -m benchmarks.theorems [--problems 5000]
"""

import argparse

import numpy as np
from tests.support.auxiliary import ratios
from tests.theory.test_affine import draw as draw_affine

from coterie.theory import affine_bound


def affine(cases: int) -> None:
    """AffPCL: three step sizes, three horizons."""
    worst, broken, count = 0.0, 0, 0
    for lr in (0.003, 0.03, 0.2):
        for steps in (1, 10, 100):
            rng = np.random.default_rng([cases, steps, round(1000 * lr)])
            problems, (x, z) = draw_affine(rng, cases), rng.normal(size=(2, cases)) * 3
            alpha = rng.choice([0.0, 0.5, 1.0], cases)
            ratio = problems.expected(lr, steps, x, z, alpha=alpha) / affine_bound(
                problems, lr, steps, x, z, alpha=alpha
            )
            worst, broken, count = (
                max(worst, ratio.max()),
                broken + int((ratio > 1 + 1e-9).sum()),
                count + cases,
            )
    print(f"affine_bound: {count} cases, {broken} broken, largest ratio {worst:.4f}")


def auxiliary(cases: int) -> None:
    """AuxMom and AuxMVR: five pairs of rounds and steps."""
    for recursive, name in ((False, "AuxMom"), (True, "AuxMVR")):
        found = [
            ratios(
                np.random.default_rng([cases, rounds, steps]),
                cases,
                rounds,
                steps,
                recursive=recursive,
            )
            for rounds, steps in ((1, 1), (1, 8), (40, 1), (40, 3), (15, 10))
        ]
        ratio = np.concatenate(found)
        broken, bounded = int((ratio > 1 + 1e-9).sum()), int((ratio > 0).sum())
        print(
            f"auxiliary_bound, {name}: {ratio.size} cases, of which {bounded} have a bound, {broken} broken, "
            f"largest ratio {ratio.max():.4f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=5000)
    problems = parser.parse_args().problems
    affine(problems)
    auxiliary(problems)
