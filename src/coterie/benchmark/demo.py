"""The demonstration: one digits writer with few examples, alone and with its peers."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.choosing import AdaptiveAveraging, Algorithm
from coterie.data import Task, digits_by_writer
from coterie.recording.configuration import counted
from coterie.recording.result import Comparison, Difference
from coterie.reporting.page import (
    Bar,
    Lead,
    Points,
    Section,
    Tile,
    bar_chart,
    bar_picture,
    interval_chart,
    line_chart,
    write_page,
)
from coterie.reporting.run_page import interval
from coterie.reporting.verdict import Verdict, difference, judged
from coterie.rules import Alone, BiasCorrection, Rule, WeightedAveraging
from coterie.tables.models import mlp
from coterie.training.run import Run
from coterie.training.train import train

RATES = (0.003, 0.01, 0.03)
"""The step sizes that every method is tuned over."""

DEFAULT = "adaptive"

METHODS: Mapping[str, Callable[[Task], Rule | Algorithm]] = {
    DEFAULT: lambda task: AdaptiveAveraging(),
    "alone": lambda task: Alone(),
    "pooled": lambda task: WeightedAveraging.pooled(task.me, task.peers),
    "wga": lambda task: WeightedAveraging(alpha=0.5),
    "bc": lambda task: BiasCorrection(alpha=len(task.peers) / (len(task.peers) + 1), beta=0.01),
}
"""By the names that `coterie train --rule` knows.

The default; alone; on everybody's examples; the paper's two,
weighted averaging with half the weight on the peers and bias correction with the paper's alpha,
N/(N + 1)."""

EXPLANATION = (
    (
        "One writer of scikit-learn's digits is user 0 and has few examples of its own; the other"
        " 13 writer segments are its peers. `adaptive`, the default, finds from the own examples"
        " whom to listen to and until when; `alone` uses the own examples only, `pooled`"
        " everybody's alike; `wga` averages the own gradient and the peers' half and half, `bc`"
        " averages and takes the peers' estimated bias away."
    ),
    (
        "± is one standard error over seeds (other examples, initial weights and batches, the same"
        " writer); differences are paired by seed. Every method has the step size of least"
        " validation loss among the same three."
    ),
)


@dataclass(frozen=True)
class Result:
    """One method with one seed, at the step size that did best on the validation examples."""

    method: str
    seed: int  # of the examples, the initial weights and the batches
    lr: float  # the step size chosen
    validation_loss: float  # by which it was chosen
    test_accuracy: float  # on examples that are used once
    test_loss: float
    steps: Sequence[int]  # of the curve
    curve: Sequence[float]  # the validation loss over the steps
    weights: Mapping[str, float]  # of the peers among themselves, in what is served


def results(me: int, own_examples: int, seeds: int, steps: int) -> Iterator[Result]:
    """Yield the result of each method with each seed as it comes, the methods of one seed together."""
    loss = torch.nn.functional.cross_entropy
    for seed in range(seeds):
        task = digits_by_writer(me, own_examples, seed)
        torch.manual_seed(seed)
        model = mlp(task.n_inputs, task.n_outputs)
        for method, rule in METHODS.items():
            options: dict[str, Any] = {
                "steps": steps,
                "seed": seed,
                "progress": False,
                "measure": False,
            }
            # the others as they are, by themselves
            options |= {} if method == DEFAULT else {"guard": "off"}
            tried = {
                lr: train(model, loss, task.me, task.peers, rule(task), lr=lr, **options)
                for lr in RATES
            }
            lr = min(RATES, key=lambda lr: tried[lr].record.end.validation["loss"])
            yield _result(method, seed, lr, tried[lr])


def _result(method: str, seed: int, lr: float, run: Run) -> Result:
    end = run.record.end
    weights = {} if run.verdict.finding == "alone" else dict(end.tau)
    numbers = end.validation["loss"], end.test["accuracy"], end.test["loss"]
    return Result(method, seed, lr, *numbers, *run.record.curve("validation_loss"), weights)


def compared(results: Sequence[Result], method: str) -> Comparison:
    """Return a method beside Alone over the seeds that both have, with standard errors paired by seed.

    Example:
        >>> given = {"alone": 0.5, "bc": 0.75}
        >>> rows = [Result(m, s, 0.1, 1.0, a + s / 8, 1 - a, [], [], {}) for s in (0, 1) for m, a in given.items()]
        >>> {name: difference(one) for name, one in compared(rows, "bc").measures.items()}
        {'accuracy': '+0.25 ± 0', 'loss': '-0.25 ± 0'}
    """
    ours, alone = (
        {one.seed: one for one in results if one.method == name} for name in (method, "alone")
    )
    seeds = [seed for seed in ours if seed in alone]
    measures = {}
    for name, less_is_better in {"accuracy": False, "loss": True}.items():
        pairs = np.array(
            [[getattr(by[seed], f"test_{name}") for by in (ours, alone)] for seed in seeds]
        )
        ours_mean, alone_mean = pairs.mean(0).tolist() if seeds else (math.nan, math.nan)
        measures[name] = Difference(
            ours=ours_mean,
            alone=alone_mean,
            error=_error(pairs[:, 0] - pairs[:, 1]) if seeds else math.nan,
            less_is_better=less_is_better,
        )
    return Comparison(
        on=f"the test examples of {counted(len(seeds), 'seed')}",
        examples=len(seeds),
        measures=measures,
    )


def conclusion(results: Sequence[Result], me: int) -> Verdict:
    """Say whether the default rule's model is better than one trained alone."""
    return judged(
        f"writer {me} by `{DEFAULT}`, the default rule,", compared(results, DEFAULT), "seed"
    )


def table(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return a row for each method.

    Mean test accuracy and loss, and their paired differences to Alone.
    """
    rows = []
    for method in dict.fromkeys(result.method for result in results):
        row: dict[str, Any] = {"method": method}
        for name, one in compared(results, method).measures.items():
            values = [
                getattr(result, f"test_{name}") for result in results if result.method == method
            ]
            row[name] = f"{np.mean(values):.3f}"
            row[f"{name}, against alone"] = "" if method == "alone" else difference(one)
        rows.append(row)
    return rows


def write_demo_page(out: Path, me: int, title: str, results: Sequence[Result]) -> Path:
    """Write a page that begins with the conclusion, and the picture `whom.svg`.

    Return the page's path.
    """
    said = conclusion(results, me)
    tiles = [Tile(f"{name}, against alone", difference(one)) for name, one in said.measures.items()]
    others = [
        method
        for method in METHODS
        if method != "alone" and any(r.method == method for r in results)
    ]
    charts = [
        _intervals(name, {method: compared(results, method) for method in others})
        for name in said.measures
    ]
    rates = [
        {"method": m, **{f"seed {r.seed}": f"{r.lr:g}" for r in results if r.method == m}}
        for m in dict.fromkeys(r.method for r in results)
    ]
    about_shares = (
        "Shares of the peers' weight, the mean over seeds; none where the model trained alone was"
        " served."
    )
    sections = [
        Section(
            "Beside training alone",
            ["Right of the mark is better."],
            [table(results)],
            charts=charts,
        ),
        Section(
            f"Whom writer {me} listens to",
            [about_shares],
            charts=[bar_chart(whom(results), about_shares)],
        ),
        Section("What was done", EXPLANATION, folded=True),
        Section(
            "Learning curves",
            ["Loss on validation examples."],
            charts=[_loss_curves(results)],
            folded=True,
        ),
        Section("Step sizes", tables=[rates], folded=True),
    ]
    (out / "whom.svg").write_text(
        bar_picture(whom(results), f"Whom writer {me} listens to"), encoding="utf-8"
    )
    return write_page(
        out / "index.html", title, sections, lead=Lead(said.sentence, "", said.finding, tiles)
    )


def whom(results: Sequence[Result]) -> list[Bar]:
    """Return the mean share of each peer in what the default rule serves, the largest first."""
    by_run = [result.weights for result in results if result.method == DEFAULT]
    names = dict.fromkeys(name for weights in by_run for name in weights)
    shares = {
        name: sum(weights.get(name, 0.0) for weights in by_run) / len(by_run) for name in names
    }
    return [
        Bar(name, share, f"{share:.1%}")
        for name, share in sorted(shares.items(), key=lambda one: -one[1])
    ]


def _intervals(measure: str, compared: Mapping[str, Comparison]) -> str:
    """Return each method's difference to Alone in one measure, what is better to the right."""
    intervals = []
    for method, comparison in compared.items():
        one = comparison.measures[measure]
        better = judged(method, comparison).clear.get(measure)
        intervals.append(interval(f"{method}, {measure}", one, better, comparison))
    return interval_chart(intervals, f"difference to alone in {measure}")


def _loss_curves(results: Sequence[Result]) -> str:
    """Return the mean validation loss of each method over the steps."""
    lines: dict[str, Points] = {}
    for method in dict.fromkeys(result.method for result in results):
        of = [result for result in results if result.method == method]
        lines[method] = of[0].steps, np.mean([result.curve for result in of], axis=0).tolist()
    return line_chart(lines, "steps", "validation loss, mean over seeds")


def _error(values: Any) -> float:
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else math.nan
