"""The demonstration: one digits writer with few examples, alone and with its peers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.data import Task, digits_by_writer
from coterie.reporting.figures import learning_curves
from coterie.reporting.page import Section, write_page
from coterie.rules import Alone, BiasCorrection, Rule, WeightedAveraging
from coterie.tables.models import mlp
from coterie.training.train import train

RATES = (0.003, 0.01, 0.03)
"""The step sizes that every method is tuned over."""

METHODS: Mapping[str, Callable[[Task], Rule]] = {
    "Alone": lambda task: Alone(),
    "Pooled": lambda task: WeightedAveraging.pooled(task.me, task.peers),
    "WGA": lambda task: WeightedAveraging(alpha=0.5),
    "BC": lambda task: BiasCorrection(alpha=len(task.peers) / (len(task.peers) + 1), beta=0.01),
}
"""Train alone; on everybody's examples; by weighted averaging with half the weight on the peers; by bias
correction with the paper's alpha, N/(N + 1)."""

EXPLANATION = (
    "One writer of scikit-learn's digits is user 0 and has few examples of its own; the other 13 writer segments "
    "are its peers. `Alone` uses the own examples, `Pooled` everybody's alike, `WGA` averages the own gradient and "
    "the peers' half and half, `BC` averages and takes the peers' estimated bias away.",
    "± is one standard error over seeds (other examples, initial weights and batches, the same writer); the "
    "difference to Alone is paired by seed.",
)


@dataclass(frozen=True)
class Result:
    """One method with one seed, at the step size that did best on the validation examples."""

    method: str
    seed: int  # of the examples, the initial weights and the batches
    lr: float  # the step size chosen
    validation_loss: float  # by which it was chosen
    test_accuracy: float  # on examples that are used once
    steps: Sequence[int]  # of the curve
    curve: Sequence[float]  # the validation loss over the steps


def results(me: int, own_examples: int, seeds: int, steps: int) -> Iterator[Result]:
    """Yield the result of each method with each seed as it comes, the methods of one seed together."""
    loss = torch.nn.functional.cross_entropy
    for seed in range(seeds):
        task = digits_by_writer(me, own_examples, seed)
        torch.manual_seed(seed)
        model = mlp(task.n_inputs, task.n_outputs)
        for method, rule in METHODS.items():
            options: dict[str, Any] = {"steps": steps, "seed": seed, "progress": False}
            tried = {lr: train(model, loss, task.me, task.peers, rule(task), lr=lr, **options) for lr in RATES}
            curves = {lr: run.record.curve("validation_loss") for lr, run in tried.items()}
            lr = min(RATES, key=lambda lr: min(curves[lr][1]))
            yield Result(method, seed, lr, min(curves[lr][1]), tried[lr].test["accuracy"], *curves[lr])


def table(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return a row for each method: mean test accuracy and paired difference to Alone, with standard errors.

    Example:
        >>> accuracies = {"Alone": 0.5, "BC": 0.75}
        >>> rows = [Result(m, s, 0.01, 1.0, a + s / 8, [], []) for s in (0, 1) for m, a in accuracies.items()]
        >>> table(rows)[1]
        {'method': 'BC', 'test accuracy': '0.812 ± 0.062', 'difference to Alone': '+0.250 ± 0.000'}
    """
    by_method: dict[str, dict[int, float]] = {}
    for result in results:
        by_method.setdefault(result.method, {})[result.seed] = result.test_accuracy
    rows = []
    for method, accuracies in by_method.items():
        paired = [accuracies[seed] - by_method["Alone"][seed] for seed in accuracies]
        mean = _mean_and_error(list(accuracies.values()), ".3f")
        difference = "" if method == "Alone" else _mean_and_error(paired, "+.3f")
        rows.append({"method": method, "test accuracy": mean, "difference to Alone": difference})
    return rows


def write_curves(out: Path, title: str, results: Sequence[Result]) -> Path:
    """Write a page with the table, the learning curves and the step sizes, and return its path."""
    methods = dict.fromkeys(r.method for r in results)
    curves = {m: [(r.steps, r.curve) for r in results if r.method == m] for m in methods}
    rates = [{"method": m, **{f"seed {r.seed}": f"{r.lr:g}" for r in results if r.method == m}} for m in curves]
    loss = "Loss on the writer's validation examples, mean over seeds ± one standard error."
    chosen = "Chosen by each method in each seed, by validation loss among the same three."
    sections = [
        Section("Result", EXPLANATION, [table(results)]),
        Section("Learning curves", [loss], figures=[learning_curves(curves, "validation loss")]),
        Section("Step sizes", [chosen], [rates]),
    ]
    return write_page(out / "index.html", title, sections)


def _mean_and_error(values: Sequence[float], form: str) -> str:
    if len(values) < 2:
        return f"{np.mean(values):{form}}"
    return f"{np.mean(values):{form}} ± {np.std(values, ddof=1) / np.sqrt(len(values)):.3f}"
