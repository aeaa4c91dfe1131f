"""How good a table's model is on test rows: all measures, each class, calibration, what predictions rest on."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy import special
from torch import Tensor, nn

from coterie.data import Preparation
from coterie.evaluation import classes
from coterie.evaluation.classes import Bin, Numbers
from coterie.evaluation.comparing import compare
from coterie.evaluation.evaluate import evaluate, example_losses, outputs_on, whole_of
from coterie.recording.result import Comparison
from coterie.tables import models
from coterie.tables.metrics import metrics_of
from coterie.users.examples import InMemory
from coterie.users.trees import Tree, mapped

if TYPE_CHECKING:
    import pandas as pd

MEASURES = {"classification": ("auc", "balanced-accuracy", "brier"), "regression": ("mae", "r2")}
"""What is reported beside the usual metric."""
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
        centre, reach = p + z**2 / (2 * rows), z * math.sqrt(p * (1 - p) / rows + z**2 / (4 * rows**2))
        whole = 1 + z**2 / rows
        return cls(p, (centre - reach) / whole, (centre + reach) / whole)

    def __str__(self) -> str:
        return "–" if math.isnan(self.value) else f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


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
    """What a column does for the predictions: by how much the loss rises where its values are exchanged."""

    column: str
    rise: float
    error: float  # one standard error over rows


@dataclass(frozen=True)
class Quality:
    """How good a table's model is on test rows."""

    rows: int
    served: Mapping[str, float]  # every measure of the model served
    comparison: Comparison | None  # the same beside the model trained alone, where that is another
    calibration: Sequence[Bin]  # of the last class where there are two, of the predicted one, or of numbers
    effects: Sequence[Effect]  # the largest first
    by_class: Sequence[OfClass] = ()
    confusion: Sequence[Sequence[float]] = ()  # rows of each class (down) told to be of each (across)
    roc: Mapping[str, tuple[Sequence[float], Sequence[float]]] = field(default_factory=dict)  # with two classes

    def to_plain(self) -> dict[str, Any]:
        """Return it as what JSON can hold."""
        return asdict(self) | {"calibration": [one._asdict() for one in self.calibration]}


def quality(
    model: nn.Module, alone: nn.Module | None, preparation: Preparation, target: str, rows: "pd.DataFrame"
) -> Quality:
    """Return how good a model is on test rows, beside one trained alone where that is not the same.

    Rows count by their weights, where they have any.
    """
    inputs, targets = preparation.examples(rows, target)
    examples, loss = InMemory(inputs, targets), models.loss_of(preparation)
    metrics = metrics_of(preparation, MEASURES[preparation.kind])
    comparison = None
    if alone is not None:
        comparison = compare(model, alone, loss, examples, metrics, on=f"{len(rows)} test rows")
    served = evaluate(model, loss, examples, metrics)
    effects = permutation_effects(model, preparation, target, rows)
    weights = targets["weight"].double().numpy() if isinstance(targets, dict) else None
    values = targets["value"] if isinstance(targets, dict) else targets
    outputs = _outputs(model, examples)
    if preparation.kind == "regression":
        told, true = (
            preparation.centre + preparation.scale * each.double().numpy()[:, 0] for each in (outputs, values)
        )
        return Quality(len(rows), served, comparison, _calibration_of_numbers(told, true, weights), effects)
    probabilities, truth = classes.probabilities_of(outputs), values.numpy()
    matrix = classes.confusion(probabilities.argmax(1), truth, len(preparation.classes), weights)
    others = {"served": probabilities} | (
        {} if alone is None else {"alone": classes.probabilities_of(_outputs(alone, examples))}
    )
    return Quality(
        len(rows),
        served,
        comparison,
        classes.calibration(*_probability_and_outcome(probabilities, truth), _bins(len(rows)), weights),
        effects,
        _by_class(preparation.classes, probabilities, truth, matrix, weights),
        matrix.tolist(),
        {name: _roc(each, truth, weights) for name, each in others.items()} if probabilities.shape[1] == 2 else {},
    )


def permutation_effects(
    model: nn.Module, preparation: Preparation, target: str, rows: "pd.DataFrame"
) -> list[Effect]:
    """Return by how much the loss rises where a column's values are exchanged among rows, the largest first.

    Each row gets the values of the rows that follow it by 0, 1, 2, … places: of all rows where these are few, which
    is the mean over all permutations, else of some.
    """
    n, loss = len(rows), models.loss_of(preparation)
    count = min(n, max(5, PERMUTED_ROWS // n))
    shifts = np.arange(n) if count == n else np.random.default_rng(0).choice(n, count, replace=False)
    weights = np.ones(n) if preparation.weights is None else rows[preparation.weights].to_numpy(dtype=float)
    order = torch.from_numpy(np.concatenate([(np.arange(n) + shift) % n for shift in shifts]))
    inputs, targets = preparation.examples(rows, target)

    def losses(inputs: Tensor, targets: Tree) -> Numbers:
        return example_losses(model, loss, InMemory(inputs, targets), chunk=8192).numpy()

    before, effects = losses(inputs, targets), []
    own, others = inputs.repeat(count, 1), inputs[order]
    repeated = mapped(lambda values: torch.cat([values] * count), targets)
    for column in (*preparation.numeric, *preparation.categorical):
        exchanged = torch.tensor([source == column for source in preparation.columns_of_inputs])
        rise = losses(torch.where(exchanged, others, own), repeated).reshape(count, n).mean(0) - before
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
    """Return the probability of the last of two classes and whether it came true; of more, of the predicted one."""
    if probabilities.shape[1] == 2:
        return probabilities[:, 1], truth == 1
    return probabilities.max(1), probabilities.argmax(1) == truth


def _calibration_of_numbers(told: Numbers, true: Numbers, weights: Any) -> list[Bin]:
    """Return rows in bins by the number told: its mean, and the mean of what came true."""
    bins, w = [], np.ones(len(told)) if weights is None else weights
    for part in np.array_split(np.argsort(told), _bins(len(told))):
        if total := w[part].sum():
            mean = float(w[part] @ true[part] / total)
            error = math.sqrt(float((w[part] ** 2 * (true[part] - mean) ** 2).sum())) / total
            bins.append(Bin(len(part), float(w[part] @ told[part] / total), mean, error))
    return bins


def _by_class(
    names: Sequence[Any], probabilities: Numbers, truth: Any, matrix: Numbers, weights: Any
) -> list[OfClass]:
    w = np.ones(len(truth)) if weights is None else weights
    worth = float(w.sum() / (w**2).sum())  # of one row, so that weights do not make more rows than there are
    by_class = []
    for k, name in enumerate(names):
        hits, of_it, told = matrix[k, k], matrix[k].sum(), matrix[:, k].sum()
        others = matrix.sum() - of_it
        pairs = (hits, of_it), (others - told + hits, others), (hits, told)
        sensitivity, specificity, precision = (Share.of(some * worth, of * worth) for some, of in pairs)
        area = classes.area_under_roc(probabilities[:, k], truth == k, weights)
        rows = int((truth == k).sum())
        by_class.append(OfClass(str(name), rows, sensitivity, specificity, precision, area))
    return by_class


def _roc(probabilities: Numbers, truth: Any, weights: Any) -> tuple[list[float], list[float]]:
    if len(np.unique(truth)) < 2:
        return [], []
    false, true = classes.roc_curve(probabilities[:, 1], truth == 1, weights)
    return false.tolist(), true.tolist()
