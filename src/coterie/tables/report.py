"""The page of a table's run.

That of any run, and how good the predictions for the test rows are.
"""

import inspect
import math
import warnings
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy import special
from torch import Tensor, nn

from coterie.data import Preparation
from coterie.errors import KnobError
from coterie.evaluation.evaluate import compare, evaluate, example_losses, outputs_on, whole_of
from coterie.evaluation.metrics import (
    METRICS,
    Bin,
    Metric,
    Numbers,
    area_under_roc,
    binary_accuracy,
    calibration,
    confusion,
    kind_of,
    less_is_better,
    probabilities_of,
    roc_curve,
)
from coterie.mixture.contributions import Contribution
from coterie.mixture.served import Constant
from coterie.recording import files
from coterie.recording.result import Comparison
from coterie.reporting.page import Interval, Points, Section, interval_chart, line_chart
from coterie.reporting.run_page import write_run_page
from coterie.reporting.summary import shown
from coterie.reporting.verdict import difference, serves_alone
from coterie.reporting.whom import contributed_section
from coterie.tables import models
from coterie.tables.dependence import (
    LEAVES,
    OTHERS,
    STRONGEST,
    Dependence,
    dependence,
    dependence_section,
)
from coterie.training.run import Run
from coterie.trees.tensors import for_another_user
from coterie.users.examples import InMemory
from coterie.users.trees import Tree, mapped
from coterie.users.user import User

MEASURES = {
    "classification": ("auc", "average-precision", "balanced-accuracy", "f1", "brier"),
    "regression": ("mae", "r2"),
}
"""What is reported beside the usual metric."""
RARE = 0.1
"""Where all classes but one have a smaller share of the training rows, accuracy says little."""
PERMUTED_ROWS = 20_000
"""About how many rows a column's importance is computed from."""
ROWS_A_BIN = 12
"""How many rows a bin of the calibration has at least, where there are more than twice as many."""


@dataclass(frozen=True)
class Share:
    """A share of rows, with the ends of its 95 % interval (Wilson's).

    Example:
        >>> Share.of(8, 10)
        Share(value=0.8, low=0.490..., high=0.943...)
    """

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, right: float, rows: float) -> "Share":
        """Return a share of so many rows; not a number where there are none."""
        if not rows:
            return cls(math.nan, math.nan, math.nan)
        z, p = float(special.ndtri(0.975)), right / rows
        centre = p + z**2 / (2 * rows)
        reach = z * math.sqrt(p * (1 - p) / rows + z**2 / (4 * rows**2))
        whole = 1 + z**2 / rows
        return cls(p, (centre - reach) / whole, (centre + reach) / whole)

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "–"
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class OfClass:
    """How well one class is told from the others."""

    name: str
    rows: int
    sensitivity: Share  # of its rows, those told to be of it
    specificity: Share  # of the others, those told not to be
    precision: Share  # of those told to be of it, its rows
    auc: float  # how often a row of it has a higher probability of it than another


@dataclass(frozen=True)
class Effect:
    """What a column does for the predictions.

    By how much the loss rises where its values are exchanged.
    """

    column: str
    rise: float
    error: float  # one standard error over rows


@dataclass(frozen=True)
class Quality:
    """How good a table's model is on test rows."""

    rows: int
    served: Mapping[str, float]  # every measure of the model served
    comparison: Comparison | None  # the same beside the model trained alone, where that is another
    # of the last class where there are two, of the predicted one, or of numbers
    calibration: Sequence[Bin]
    effects: Sequence[Effect]  # the largest first
    # every measure of always predicting the class shares, or the mean, of the training rows
    constant: Mapping[str, float] = field(default_factory=dict)
    by_class: Sequence[OfClass] = ()
    # rows of each class (down) told to be of each (across)
    confusion: Sequence[Sequence[float]] = ()
    # with two classes
    roc: Mapping[str, tuple[Sequence[float], Sequence[float]]] = field(default_factory=dict)
    dependence: Sequence[Dependence] = ()  # along the strongest columns

    def to_plain(self) -> dict[str, Any]:
        """Return it as what JSON can hold."""
        return asdict(self) | {"calibration": [one._asdict() for one in self.calibration]}


def quality(
    model: nn.Module,
    alone: nn.Module | None,
    preparation: Preparation,
    target: str,
    rows: "pd.DataFrame",
    *,
    shares: Sequence[float] = (),
) -> Quality:
    """Return how good a model is on test rows, beside one trained alone where that is not the same.

    Rows count by their weights, where they have any. `shares` are the classes' in the training
    rows, for the constant that predicts no more than these; of numbers it predicts the mean.
    """
    inputs, targets = preparation.examples(rows, target)
    examples, loss = InMemory(inputs, targets), models.loss_of(preparation)
    metrics = metrics_of(preparation, MEASURES[preparation.kind])
    comparison = None
    if alone is not None:
        comparison = compare(model, alone, loss, examples, metrics, on=f"{len(rows)} test rows")
    served = evaluate(model, loss, examples, metrics)
    logits = torch.tensor([shares or [1.0]]).clamp_min(1e-3).log()  # a class may be new
    constant = {}
    if shares or preparation.kind == "regression":
        constant = evaluate(Constant(logits), loss, examples, metrics)
    effects = permutation_effects(model, preparation, target, rows)
    weights = targets["weight"].double().numpy() if isinstance(targets, dict) else None
    values = targets["value"] if isinstance(targets, dict) else targets
    outputs = _outputs(model, examples)
    if preparation.kind == "regression":
        predicted, true = (
            preparation.centre + preparation.scale * each.double().numpy()[:, 0]
            for each in (outputs, values)
        )
        bins = _calibration_of_numbers(predicted, true, weights)
        return Quality(len(rows), served, comparison, bins, effects, constant)
    probabilities, truth = probabilities_of(outputs), values.numpy()
    matrix = confusion(probabilities.argmax(1), truth, len(preparation.classes), weights)
    others = {"served": probabilities} | (
        {} if alone is None else {"alone": probabilities_of(_outputs(alone, examples))}
    )
    return Quality(
        len(rows),
        served,
        comparison,
        calibration(*_probability_and_outcome(probabilities, truth), _bins(len(rows)), weights),
        effects,
        constant,
        _quality_by_class(preparation.classes, probabilities, truth, matrix, weights),
        matrix.tolist(),
        (
            {name: _roc(each, truth, weights) for name, each in others.items()}
            if probabilities.shape[1] == 2
            else {}
        ),
    )


def class_shares(users: Sequence[User], preparation: Preparation) -> tuple[float, ...]:
    """Return the share of each class in users' training rows, by weight; nothing for numbers."""
    if preparation.kind == "regression":
        return ()
    total = np.zeros(len(preparation.classes))
    for user in users:
        targets = user.examples.take(torch.arange(len(user)))[1]
        values, weights = (
            (targets["value"], targets["weight"].numpy())
            if isinstance(targets, dict)
            else (targets, None)
        )
        total += np.bincount(values.numpy(), weights=weights, minlength=len(total))
    return tuple((total / total.sum()).tolist())


def is_imbalanced(shares: Sequence[float]) -> bool:
    """Say whether accuracy says little: all classes but one are rare.

    Example:
        >>> is_imbalanced([0.96, 0.04]), is_imbalanced([0.7, 0.3]), is_imbalanced([1.0, 0.0])
        (True, False, False)
    """
    return bool(shares) and 0 < sum(shares) - max(shares) < RARE


def warn_of_imbalance(shares: Sequence[float], preparation: Preparation) -> None:
    """Say that a class has nearly all training rows, and what helps."""
    if is_imbalanced(shares) and not preparation.class_weights:
        most = preparation.classes[int(np.argmax(shares))]
        warnings.warn(
            f"{max(shares):.0%} of the training rows are {most!r}, so that predicting nothing else"
            " has this accuracy: the model is judged by balanced accuracy and average precision;"
            " if the rare classes must be found, let all count alike: `class_weight='balanced'`"
            " (`--class-weight balanced`)",
            stacklevel=3,
        )


def permutation_effects(
    model: nn.Module, preparation: Preparation, target: str, rows: "pd.DataFrame"
) -> list[Effect]:
    """Return by how much the loss rises where a column's values are exchanged among rows, the largest first.

    Each row gets the values of the rows that follow it by 0, 1, 2, … places: of all rows where
    these are few, which is the mean over all permutations, else of some.
    """
    n, loss = len(rows), models.loss_of(preparation)
    count = min(n, max(5, PERMUTED_ROWS // n))
    shifts = (
        np.arange(n) if count == n else np.random.default_rng(0).choice(n, count, replace=False)
    )
    weights = (
        np.ones(n)
        if preparation.weights is None
        else rows[preparation.weights].to_numpy(dtype=float)
    )
    order = torch.from_numpy(np.concatenate([(np.arange(n) + shift) % n for shift in shifts]))
    inputs, targets = preparation.examples(rows, target)

    def losses(inputs: Tensor, targets: Tree) -> Numbers:
        return example_losses(model, loss, InMemory(inputs, targets), chunk=8192).numpy()

    before, effects = losses(inputs, targets), []
    own, others = inputs.repeat(count, 1), inputs[order]
    repeated = mapped(lambda values: torch.cat([values] * count), targets)
    for column in (*preparation.numeric, *preparation.categorical):
        exchanged = torch.tensor([source == column for source in preparation.columns_of_inputs])
        rise = (
            losses(torch.where(exchanged, others, own), repeated).reshape(count, n).mean(0) - before
        )
        mean = float(np.average(rise, weights=weights))
        error = math.sqrt(float((weights**2 * (rise - mean) ** 2).sum())) / float(weights.sum())
        effects.append(Effect(column, mean, error))
    return sorted(effects, key=lambda effect: -effect.rise)


def _outputs(model: nn.Module, examples: InMemory) -> torch.Tensor:
    whole = whole_of(outputs_on(model, examples))
    assert whole is not None  # noqa: S101  # a table's model has a row of outputs for each of inputs
    outputs: torch.Tensor = whole[0]
    return outputs.cpu()


def _bins(rows: int) -> int:
    return max(2, min(10, rows // ROWS_A_BIN))


def _probability_and_outcome(probabilities: Numbers, truth: Any) -> tuple[Numbers, Any]:
    """Return the probability of the last of two classes and whether it came true.

    Of more, of the predicted one.
    """
    if probabilities.shape[1] == 2:
        return probabilities[:, 1], truth == 1
    return probabilities.max(1), probabilities.argmax(1) == truth


def _calibration_of_numbers(predicted: Numbers, true: Numbers, weights: Any) -> list[Bin]:
    """Return rows in bins by the number told: its mean, and the mean of what came true."""
    bins, w = [], np.ones(len(predicted)) if weights is None else weights
    for part in np.array_split(np.argsort(predicted), _bins(len(predicted))):
        if total := w[part].sum():
            mean = float(w[part] @ true[part] / total)
            error = math.sqrt(float((w[part] ** 2 * (true[part] - mean) ** 2).sum())) / total
            bins.append(Bin(len(part), float(w[part] @ predicted[part] / total), mean, error))
    return bins


def _quality_by_class(
    names: Sequence[Any], probabilities: Numbers, truth: Any, matrix: Numbers, weights: Any
) -> list[OfClass]:
    w = np.ones(len(truth)) if weights is None else weights
    # of one row, so that weights do not make more rows than there are
    worth = float(w.sum() / (w**2).sum())
    by_class = []
    for k, name in enumerate(names):
        hits, of_it, predicted = matrix[k, k], matrix[k].sum(), matrix[:, k].sum()
        others = matrix.sum() - of_it
        pairs = (hits, of_it), (others - predicted + hits, others), (hits, predicted)
        sensitivity, specificity, precision = (
            Share.of(part * worth, whole * worth) for part, whole in pairs
        )
        area = area_under_roc(probabilities[:, k], truth == k, weights)
        rows = int((truth == k).sum())
        by_class.append(OfClass(str(name), rows, sensitivity, specificity, precision, area))
    return by_class


def _roc(probabilities: Numbers, truth: Any, weights: Any) -> tuple[list[float], list[float]]:
    if len(np.unique(truth)) < 2:
        return [], []
    false, true = roc_curve(probabilities[:, 1], truth == 1, weights)
    return false.tolist(), true.tolist()


@dataclass(frozen=True)
class TableMetric:
    """A registered metric of outputs and targets as a table's users have them."""

    name: str
    centre: float = 0.0
    scale: float = 1.0

    def __call__(self, outputs: Tensor, targets: Any) -> float:
        """Return the metric in the units of the table's target."""
        metric = METRICS[self.name]
        weighted = isinstance(targets, Mapping)
        values = targets["value"] if weighted else targets
        if values.is_floating_point():
            outputs, values = (
                self.centre + self.scale * each.double() for each in (outputs, values)
            )
        if weighted and "weights" in inspect.signature(metric).parameters:
            return metric(outputs, values, weights=targets["weight"])  # type: ignore[call-arg]  # as it says itself
        return metric(outputs, values)

    @property
    def less_is_better(self) -> bool:
        """Whether a smaller value is better."""
        return less_is_better(self.name)


def _fits(metric: Metric, preparation: Preparation) -> bool:
    """Say whether a metric is for such targets.

    A model of a table has an output for each class, not one logit.
    """
    return kind_of(metric) in (None, preparation.kind) and metric is not binary_accuracy


def metrics_of(
    preparation: Preparation, names: Sequence[str] = (), shares: Sequence[float] = ()
) -> dict[str, Metric]:
    """Return the named metrics and last the usual one, accuracy or the root mean squared error.

    Where nothing is named and nearly all training rows are of one class, by the classes' shares,
    balanced accuracy and average precision come first.

    A metric of classes where the target is a number is refused, and one of numbers where it is a
    class.
    """
    usual = "accuracy" if preparation.kind == "classification" else "rmse"
    if not names and is_imbalanced(shares):
        names = ("balanced-accuracy", "average-precision")
    for name in names:
        if not _fits(METRICS[name], preparation):
            fitting = [one for one in METRICS if _fits(METRICS[one], preparation)]
            raise KnobError(
                f"`{name}` is no metric for {preparation.kind}; choose among {', '.join(fitting)}"
            )
    units = (
        {}
        if preparation.kind == "classification"
        else {"centre": preparation.centre, "scale": preparation.scale}
    )
    return {name: TableMetric(name, **units) for name in dict.fromkeys((*names, usual))}


FILE = "evaluation.json"
"""Holds the numbers of the page."""
SHOWN = 15
"""How many columns the page shows at most."""


def write_report(
    folder: Path,
    run: Run,
    preparation: Preparation,
    target: str,
    test_rows: "pd.DataFrame",
    *,
    shares: Sequence[float] = (),
    more: Sequence[Section] = (),
    others: Mapping[str, nn.Module] | None = None,
) -> Quality | None:
    """Write the page of a run, and the numbers of its test rows, if any, to `evaluation.json`.

    Return these. `others` are other users' models, of rows that are prepared in the same way.
    """
    if not len(test_rows):
        write_run_page(folder / "index.html", run.record, run.state.get("weight"), more=more)
        return None
    alone = None if serves_alone(run.record.end) or run.alone is None else run.alone
    judged = quality(run.model, alone, preparation, target, test_rows, shares=shares)
    served = {"served": run.model} | ({} if alone is None else {"alone": alone})
    if (shifted := for_another_user(run.model)) is not None:
        served[LEAVES] = shifted
    for name in list(others or {})[:OTHERS]:
        served[f"user {name}"] = (others or {})[name]
    strongest = [one.column for one in judged.effects[:STRONGEST] if one.rise > 0]
    along = [dependence(served, preparation, test_rows, column) for column in strongest]
    judged = replace(judged, dependence=along)
    comparison = run.record.end.comparison
    splits = comparison is not None and bool(comparison.splits)
    files.write_json(folder / FILE, judged.to_plain())
    sections = [
        _predictions(judged, preparation, target, shown_above=run.test, splits=splits),
        _effects(judged, target),
        *([dependence_section(along, preparation, target)] if along else []),
        *more,
    ]
    write_run_page(folder / "index.html", run.record, run.state.get("weight"), more=sections)
    return judged


def contributed(contributions: Mapping[str, Contribution], folder: Path) -> Section:
    """Write what each peer adds to contributions.json in a folder, and return it for the page."""
    plain = {
        name: {what: estimate._asdict() for what, estimate in one._asdict().items()}
        for name, one in contributions.items()
    }
    files.write_json(folder / "contributions.json", plain)
    return contributed_section(contributions)


def _predictions(
    judged: Quality,
    preparation: Preparation,
    target: str,
    shown_above: Container[str],
    splits: bool,
) -> Section:
    """Return how good the predictions are, in numbers and in pictures.

    What the page has told is left out. Of several splits it is the first that they are of.
    """
    classes = preparation.kind == "classification"
    which = ", that of the first split," if splits else ""
    text = [f"The model served{which} on {judged.rows} test rows that chose nothing."]
    if classes:
        text.append(
            "Sensitivity: the share of a class's rows that is predicted to be of it. Specificity:"
            " the share of the other rows that is not. Precision: the share of the rows predicted"
            " to be of it that is. In brackets 95 % intervals. AUC: how often a row of the class"
            " has a higher probability of it than another row."
        )
    if judged.constant:
        text.append(
            "Constant: always predicting the classes by their shares of the training rows."
            if classes
            else "Constant: always predicting the mean of the training rows."
        )
    tables = [_by_class(judged), _confusion(judged, target)] if classes else []
    tables += [rows] if (rows := _measures(judged, shown_above)) else []
    charts = _quality_charts(judged, preparation, target)
    return Section(f"How good predictions of {target} are", text, tables, charts=charts)


def _measures(judged: Quality, shown_above: Container[str]) -> list[dict[str, str]]:
    """Return a row for each measure, beside the constant's, and those of the model trained alone.

    What the page has told of the latter is left out.
    """
    rows = []
    for name, value in judged.served.items():
        row = {"measure": name, "served": shown(value)}
        if judged.comparison is not None and name not in shown_above:
            one = judged.comparison.measures[name]
            row |= {"alone": shown(one.alone), "difference": difference(one)}
        if judged.constant:
            row |= {"constant": shown(judged.constant[name])}
        rows.append(row)
    return rows


def _by_class(judged: Quality) -> list[dict[str, str]]:
    return [
        {
            "class": one.name,
            "rows": str(one.rows),
            "sensitivity": str(one.sensitivity),
            "specificity": str(one.specificity),
            "precision": str(one.precision),
            "AUC": "–" if math.isnan(one.auc) else f"{one.auc:.3f}",
        }
        for one in judged.by_class
    ]


def _confusion(judged: Quality, target: str) -> list[dict[str, str]]:
    names = [one.name for one in judged.by_class]
    return [
        {
            f"{target} is": name,
            **{f"predicted {other}": f"{n:.4g}" for other, n in zip(names, counts, strict=True)},
        }
        for name, counts in zip(names, judged.confusion, strict=True)
    ]


def _quality_charts(judged: Quality, preparation: Preparation, target: str) -> list[str]:
    charts = []
    lines: dict[str, Points] = {name: curve for name, curve in judged.roc.items() if curve[0]}
    if lines:
        last = preparation.classes[-1]
        others = f"share of the other rows predicted to be {last}"
        charts.append(
            line_chart(
                {**lines, "by chance": ([0, 1], [0, 1])}, others, f"sensitivity for {last} (ROC)"
            )
        )
    bins = judged.calibration
    if len(bins) > 1:
        charts.append(_calibration_chart(judged, preparation, target))
    return charts


def _calibration_chart(judged: Quality, preparation: Preparation, target: str) -> str:
    bins, classes = judged.calibration, preparation.classes
    predicted, true = [one.predicted for one in bins], [one.came_true for one in bins]
    ends = [0.0, 1.0] if classes else [min(predicted), max(predicted)]
    low, high = ([one.came_true + side * one.error for one in bins] for side in (-2, 2))
    if classes:
        low, high = [max(0.0, y) for y in low], [min(1.0, y) for y in high]
        of = str(classes[-1]) if len(classes) == 2 else "the predicted class"
        names = (
            f"predicted probability of {of}",
            f"share that came true (calibration, {len(bins)} bins)",
        )
    else:
        names = f"predicted {target}", f"mean of what came true (calibration, {len(bins)} bins)"
    lines: dict[str, Points] = {
        "came true, ± two standard errors": (predicted, true),
        "as predicted": (ends, ends),
    }
    return line_chart(lines, *names, bands={"came true, ± two standard errors": (low, high)})


def _effects(judged: Quality, target: str) -> Section:
    """Return what the predictions rest on."""
    shown = judged.effects[:SHOWN]
    text = [
        "By how much the loss on the test rows rises where a column's values are exchanged among"
        f" them: what the predictions of {target} rest on, not what causes it. Columns that tell"
        " the same share it. Lines are two standard errors to either side."
    ]
    if more := len(judged.effects) - len(shown):
        text.append(
            f"The {SHOWN} largest of {len(judged.effects)}; `evaluation.json` has the other {more}."
        )
    bars = [
        Interval(one.column, one.rise, one.error, f"{one.rise:+.3f} ± {one.error:.3f}")
        for one in shown
    ]
    return Section(
        "What predictions rest on",
        text,
        charts=[interval_chart(bars, "rise of the loss by column")],
    )


def left_out_section(left_out: Mapping[str, str]) -> Section:
    """Return which peers could not take part, and why."""
    return Section(
        "Who was left out", tables=[[{"peer": name, "why": why} for name, why in left_out.items()]]
    )
