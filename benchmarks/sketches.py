"""How near the weights found from sketches come to those found from gradients.

    python benchmarks/sketches.py [--data DIR] [--sets digits,wisdm,mnist]
        [--sizes 256,1024,half] [--users 8]

Users of a set are user 0 in turn. Adaptive averaging goes through the first half of its steps in
process, once with every peer's gradient, and once for each size with sums and sketches, as peers
elsewhere give them. Shown is the total variation between both τ, the mean and the largest over
users, and the weight that wrong peers get. "half" is half of the model's numbers, at most 2,048:
what peers show that give sums only.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from users_in_turn import options, problem_of, users_of

import coterie
from coterie.benchmark.sets import SETS
from coterie.choosing.adaptive.adaptive_learner import AdaptiveLearner
from coterie.engines.compression import SKETCH, Sketch, sketch_key, sketch_size
from coterie.engines.engine import Answers, Capabilities, Question
from coterie.learners.spec import RunSpec
from coterie.recording.costs import Costs

MODEL = {"digits": "linear", "wisdm": "linear", "mnist": "mlp"}


class Sketched(coterie.InProcess):
    """Peers in this process that answer as those elsewhere do: by sums and sketches."""

    size: int

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do."""
        return dataclasses.replace(
            super().capabilities, many_points=True, sketch=self.size, not_stacked="as if elsewhere"
        )

    def ask(self, question: Question) -> Callable[[], Answers]:
        """Return sums and sketches."""
        equal = dict.fromkeys(self.names, 1 / len(self.names))
        each = [
            self.gradients(point, question.step, equal, rows=True).rows for point in question.points
        ]
        rows = torch.stack([matrix for matrix in each if matrix is not None])
        weights = question.weights.nan_to_num(0.0).to(rows)
        sketch = Sketch(rows.shape[2], self.size, sketch_key(self.seed, question.step))
        shown = sketch(rows[: question.sketched])
        sums = torch.einsum("pn,pnd->pd", weights, rows)
        return lambda: Answers(sums, weights.sum(1), {}, sketches=shown)


def tau(spec: RunSpec, engine: Any) -> np.ndarray[Any, Any]:
    """Return the weights after the first half of the steps, the mean over trunks."""
    costs = Costs(dict.fromkeys([spec.me.name, *engine.names], spec.batch_size))
    made = coterie.AdaptiveAveraging().learner(spec, engine, costs)
    assert isinstance(made, AdaptiveLearner)
    while made.step < made.schedule.half:
        made.take_step()
    return np.asarray(np.mean([fitted.tau() for fitted in made.peer_weights.fitted], axis=0))


def compared(name: str, condition: str, me: str, settings: argparse.Namespace) -> dict[str, float]:
    """Return for each size the total variation, and the weight on wrong peers."""
    task, model = problem_of(name, me, settings.data, MODEL[name], condition)
    task.me.validation = None
    loss = torch.nn.functional.cross_entropy
    how = {"lr": settings.lr, "steps": settings.steps, "batch_size": SETS[name].batch_size}
    d = sum(p.numel() for p in model.parameters())

    def weights_by(make: type[coterie.InProcess]) -> np.ndarray[Any, Any]:
        spec = RunSpec(model, loss, task.me, task.peers, **how).prepared()
        return tau(
            spec,
            make(spec.model, loss, task.me, task.peers, batch_size=spec.batch_size, seed=spec.seed),
        )

    wrong = np.array([peer.name in task.wrong for peer in task.peers])
    exact = weights_by(coterie.InProcess)
    results = {"d": float(d), "wrong, exact": float(exact[wrong].sum())}
    for size in settings.sizes.split(","):
        k = sketch_size(d, rows=False) or SKETCH if size == "half" else int(size)
        weights = weights_by(type("Sketched", (Sketched,), {"size": k}))
        results |= {
            size: float(np.abs(weights - exact).sum() / 2),
            f"wrong, {size}": float(weights[wrong].sum()),
        }
    return results


def main() -> None:
    """Print a line for each set and condition."""
    parser = options(__doc__)
    parser.add_argument("--conditions", default="honest,wrong-labels")
    parser.add_argument("--sizes", default="256,1024,half")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.01)
    settings = parser.parse_args()
    torch.set_num_threads(1)
    sizes = settings.sizes.split(",")
    print(
        "| set, condition | numbers | wrong | "
        + " | ".join(f"k = {k}: mean, most, wrong" for k in sizes)
        + " |"
    )
    print("|---" * (3 + len(sizes)) + "|")
    for name in settings.sets.split(","):
        users = users_of(name, settings)
        for condition in settings.conditions.split(","):
            by_user = [compared(name, condition, me, settings) for me in users]
            table = {key: np.array([user[key] for user in by_user]) for key in by_user[0]}
            shown = [
                f"{table[k].mean():.3f}, {table[k].max():.3f}, {table[f'wrong, {k}'].mean():.1%}"
                for k in sizes
            ]
            numbers, wrong = int(table["d"][0]), table["wrong, exact"].mean()
            print(
                f"| {name}, {condition} | {numbers:,} | {wrong:.1%} | " + " | ".join(shown) + " |",
                flush=True,
            )


if __name__ == "__main__":
    main()
