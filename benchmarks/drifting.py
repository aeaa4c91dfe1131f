"""Gradual change: a stream whose optimum drifts, with peers that drift, join and leave, against a tuned Alone.

f_k = ½(x − θ_k(t))², gradients with noise of standard deviation 10. All θ_k take a common random
step of .01 after every step; peers start 4 away from user 0 in standard deviation. Every coordinate
is a trial of its own. Losses are means over the last half of the steps. Knobs are those of the
least loss of half of the trials, the others are told.

    python benchmarks/drifting.py [--steps 20000] [--trials 200]
"""

import argparse
import itertools

import numpy as np
import torch

import coterie
from coterie.gradients.gradients import Gradients

NOISE, DRIFT, AWAY, PEERS = 10.0, 0.01, 4.0, 10
RATES = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01)
SHARE = PEERS / (PEERS + 1)
SETTINGS: dict[str, list[coterie.Rule]] = {
    "Alone": [coterie.Alone()],
    "averaging": [coterie.WeightedAveraging(alpha) for alpha in (0.003, 0.01, 0.03, 0.1)],
    "bias correction": [
        coterie.BiasCorrection(SHARE, beta) for beta in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
    ],
}
CONDITIONS = {
    "peers follow you": (0.0, False),
    "peers drift on their own, .003 a step": (0.003, False),
    "peers join and leave": (0.0, True),
    "both": (0.003, True),
}


def presence(steps: int, changing: bool) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """Return who is there at each step: stretches of 2,000 steps in the mean, absences of 1,000."""
    random, here = np.random.default_rng(1), np.ones(PEERS, dtype=bool)
    rows = []
    for _ in range(steps):
        if changing:
            here = np.where(random.random(PEERS) < np.where(here, 1 / 2000, 1 / 1000), ~here, here)
        rows.append(here)
    return np.array(rows)


def losses(
    rule: coterie.Rule, lr: float, steps: int, trials: int, change: tuple[float, bool]
) -> torch.Tensor:
    """Return every trial's mean loss over the last half of the steps; `change` is a value of `CONDITIONS`."""
    own_drift, changing = change
    random, there = torch.Generator().manual_seed(0), presence(steps, changing)
    here = torch.zeros(trials)
    peers = AWAY * torch.randn(PEERS, trials, generator=random)
    x, total = torch.zeros(trials), torch.zeros(trials)
    state = rule.init(x)
    names = tuple(f"peer {k}" for k in range(PEERS))
    tau = dict.fromkeys(names, 1 / PEERS)
    for step in range(steps):
        noise = NOISE * torch.randn(PEERS + 1, trials, generator=random)
        rows, answering = x - here - peers + noise[1:], np.flatnonzero(there[step])
        own = x - here + noise[0]
        average = (rows[answering].sum(0) + (PEERS - len(answering)) * own) / PEERS
        g = Gradients(own=own, peers=average, answered=float(sum(tau[names[k]] for k in answering)))
        direction, state = rule(g, state)
        x = x - lr * direction
        here = here + DRIFT * torch.randn(trials, generator=random)
        peers = peers + own_drift * torch.randn(PEERS, trials, generator=random)
        if step >= steps // 2:
            total += (x - here).square() / 2
    return total / (steps - steps // 2)


def main(steps: int, trials: int) -> None:
    """Print the table."""
    print("| | Alone | averaging | bias correction | difference to Alone |\n|---|---|---|---|---|")
    for condition, change in CONDITIONS.items():
        best = {}
        for name, rules in SETTINGS.items():
            tried = [
                losses(rule, lr, steps, trials, change)
                for rule, lr in itertools.product(rules, RATES)
            ]
            chosen = min(range(len(tried)), key=lambda k: float(tried[k][: trials // 2].mean()))
            rule, lr = list(itertools.product(rules, RATES))[chosen]
            best[name] = (
                tried[chosen][trials // 2 :],
                f"η {lr:g}" + (f", β {rule.beta:g}" if hasattr(rule, "beta") else ""),
            )
        apart = best["bias correction"][0] - best["Alone"][0]
        error = float(apart.std()) / len(apart) ** 0.5
        cells = [f"{float(values.mean()):.4f} ({knobs})" for values, knobs in best.values()]
        print(
            f"| {condition} | {' | '.join(cells)} | {float(apart.mean()):+.4f} ± {error:.4f} |",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--trials", type=int, default=200)
    main(**vars(parser.parse_args()))
