"""The paper's first figure as its authors computed it, and as coterie does: how many times faster.

The authors' notebook steps through 700,000 scalar updates for each of 100 trials. Here a few such
trials are run and scaled up to 100; coterie's exact curve and 100 exact sample paths, both at 700
recorded steps, are run in full. Both are timed in one process, one after the other.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time

import numpy as np

from coterie.paper.studies import N_PEERS, STEPS, notebook_correction, paper_problem

TRIALS = 100
RECORDED = 700


def notebook_trial(
    alpha: float, beta: float, lr: float, steps: int, rng: np.random.Generator
) -> list[float]:
    """One trial of BC as in the notebook: a scalar loop, the loss recorded 700 times."""
    x, c, losses = rng.standard_normal(), 0.0, []
    for t in range(steps):
        g_own = (x - 1) + 10 * rng.standard_normal()
        g_avg = 2 * (x - 5) + 10 / math.sqrt(10) * rng.standard_normal()
        x -= lr * ((1 - alpha) * g_own + alpha * (g_avg - c))
        c = (1 - beta) * c + beta * (g_avg - g_own)
        if (t + 1) % (steps // RECORDED) == 0:
            losses.append((x - 1) ** 2 / 2)
    return losses


def main() -> None:
    """Time both and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=3, help="trials of the scalar loop to run")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()

    problem, lr, beta = paper_problem(), 1e-4, 1e-4
    rule = notebook_correction(alpha := N_PEERS / (N_PEERS + 1) * (1 - beta / 2))
    rng = np.random.default_rng(0)
    start = time.perf_counter()
    looped = [notebook_trial(alpha, beta, lr, options.steps, rng) for _ in range(options.trials)]
    loop = (time.perf_counter() - start) / options.trials * TRIALS

    recorded = np.arange(1, RECORDED + 1) * (options.steps // RECORDED)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        law = problem.law(rule, lr, recorded)
        exact, paths = law.expected(), law.paths(TRIALS, seed=0)
        times.append(time.perf_counter() - start)
    ours = statistics.median(times)

    result = {
        "steps": options.steps,
        "trials": TRIALS,
        "loop_seconds_for_100_trials": loop,
        "loop_trials_run": options.trials,
        "loop_final_loss": float(np.mean([trial[-1] for trial in looped])),
        "coterie_seconds": ours,
        "coterie_final_loss_exact": float(exact.loss[-1]),
        "coterie_final_loss_sampled": float(problem.loss(paths)[:, -1].mean()),
        "ratio": loop / ours,
    }
    if options.json:
        print(json.dumps(result))
        return
    print(
        f"scalar loop, {TRIALS} trials of {options.steps:,} steps: {loop:.1f} s ({options.trials} run)"
    )
    print(
        f"coterie, exact curve and {TRIALS} exact sample paths:  {ours * 1000:.1f} ms (median of 5)"
    )
    print(f"ratio: {result['ratio']:,.0f}")


if __name__ == "__main__":
    main()
