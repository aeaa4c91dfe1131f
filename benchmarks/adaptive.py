"""Adaptive averaging on digits by writer, beside training alone and fixed weights.

    python benchmarks/adaptive.py [--users 8] [--examples 30] [--steps 200] [--model linear]

Each of the first `users` writer segments in turn is user 0, with `examples` of its digits to learn from and the
rest of them for the test; the others are peers with all of theirs. Conditions: *honest*; *half wrong*, every second
peer has all its labels moved by one to nine; *permuted*, digits are dealt to users at random, so that pooling is
right. All methods take the same steps of Adam, and the last model counts. Differences to Alone are paired by user.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import coterie
from coterie import models
from coterie.data.digits import BOUNDS

CONDITIONS = ("honest", "half wrong", "permuted")
RULES: dict[str, Callable[[], coterie.Rule]] = {
    "Alone": coterie.Alone,
    "alpha 0.1": lambda: coterie.WeightedAveraging(0.1),
    "alpha 0.3": lambda: coterie.WeightedAveraging(0.3),
    "alpha 0.9": lambda: coterie.WeightedAveraging(0.9),
    "adaptive": coterie.AdaptiveAveraging,
}


def users(me: int, examples: int, condition: str) -> tuple[coterie.User, list[coterie.User], set[str]]:
    """Return user 0 with a test set, its peers, and the names of those who mislead."""
    digits, random = load_digits(), np.random.default_rng(me)
    rows = random.permutation(len(digits.target)) if condition == "permuted" else np.arange(len(digits.target))
    parts = np.split(rows, BOUNDS[1:-1])

    def pair(indices: NDArray[np.int64], shift: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.tensor(digits.images[indices] / 16, dtype=torch.float32)
        return inputs, torch.tensor((digits.target[indices] + shift) % 10)

    own, test = train_test_split(parts[me], train_size=examples, random_state=me)
    peers: list[coterie.User] = []
    wrong = set()
    for k, part in enumerate(parts):
        if k == me:
            continue
        shift = int(random.integers(1, 10)) if condition == "half wrong" and len(peers) % 2 else 0
        peers.append(coterie.User(f"writer {k}", *pair(part, shift)))
        if shift:
            wrong.add(peers[-1].name)
    return coterie.User(f"writer {me}", *pair(own), test=pair(test)), peers, wrong


def row(condition: str, settings: argparse.Namespace) -> str:
    """Return one line of the table: accuracies, the difference of adaptive to Alone, the weight on who misleads."""
    accuracies: dict[str, list[float]] = {name: [] for name in RULES}
    misled = []
    for me in range(settings.users):
        user, peers, wrong = users(me, settings.examples, condition)
        torch.manual_seed(me)
        model = models.build(settings.model, 64, 10)
        for name, rule in RULES.items():
            run = coterie.train(
                model,
                torch.nn.functional.cross_entropy,
                user,
                peers,
                rule(),
                lr=settings.lr,
                steps=settings.steps,
                seed=me,
                progress=False,
            )
            accuracies[name].append(run.test["accuracy"])
            choice = run.record.configuration.get("choice")
            if choice:
                misled.append(choice["alpha"] * sum(choice["tau"].get(peer, 0.0) for peer in wrong))
    gain = np.subtract(accuracies["adaptive"], accuracies["Alone"])
    shown = " | ".join(f"{np.mean(found):.3f}" for found in accuracies.values())
    error = gain.std(ddof=1) / np.sqrt(len(gain))
    return f"| {condition} | {shown} | {gain.mean():+.3f} ± {error:.3f} | {np.mean(misled):.1%} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Adaptive averaging on digits by writer.")
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--examples", type=int, default=30)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--model", default="linear")
    settings = parser.parse_args()
    torch.set_num_threads(1)
    print(f"| {settings.model} | {' | '.join(RULES)} | adaptive − Alone | weight on wrong peers |")
    print("|---" * (len(RULES) + 3) + "|")
    for condition in CONDITIONS:
        print(row(condition, settings), flush=True)


if __name__ == "__main__":
    main()
