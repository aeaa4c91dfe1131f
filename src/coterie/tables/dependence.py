"""What models of a table predict along one column: where user 0's differs from the others'."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import nn

from coterie.data import Preparation
from coterie.evaluation.evaluate import outputs_on, whole_of
from coterie.reporting.page import Interval, Points, Section, interval_chart, line_chart
from coterie.users.examples import InMemory

STRONGEST = 6
"""So many columns are drawn."""
PLACES, CATEGORIES = 15, 8
"""At so many numbers of a column, or categories, at most."""
MOST_ROWS = 200
"""Over so many rows at most a mean is taken."""
LEAVES = "served, with the leaves of another user"
"""The line of the model served where its trees take user 0 for another user."""
OTHERS = 12
"""So many other users' models are drawn at most."""


@dataclass(frozen=True)
class Dependence:
    """Mean predictions over test rows, if all had the same value in a column (partial dependence)."""

    column: str
    values: Sequence[float | str]  # numbers rise, from the 5th to the 95th percentile
    # of every model: "served", "alone" where that is another, `LEAVES` where trees tell user 0 from
    # others, and other users' by name
    means: Mapping[str, Sequence[float]]

    def between(self, names: Sequence[str]) -> tuple[list[float], list[float]]:
        """Return the least and the largest mean of some models at each value."""
        every = np.array([self.means[name] for name in names])
        return every.min(0).tolist(), every.max(0).tolist()


def dependence(
    served: Mapping[str, nn.Module], preparation: Preparation, rows: pd.DataFrame, column: str
) -> Dependence:
    """Return what models predict along a column: a number, or the probability of `class_shown`.

    Args:
        served: models by name, all of rows that are prepared in the same way.
        preparation: of the rows.
        rows: over which means are taken; of many a sample.
        column: of the features, or a part of a date.
    """
    tidy = preparation.tidied(rows.sample(min(len(rows), MOST_ROWS), random_state=0))
    values: list[float | str]
    if column in preparation.numeric:
        known = tidy[column].dropna().to_numpy(dtype=float)
        ends = np.linspace(0.05, 0.95, PLACES)
        values = np.unique(np.quantile(known, ends)).tolist() if len(known) else []
    else:
        values = sorted(tidy[column].value_counts().index[:CATEGORIES].tolist())
    n, many = len(tidy), len(values)
    if not many:
        return Dependence(column, [], {})
    frame = pd.concat([tidy] * many, ignore_index=True)
    frame[column] = np.repeat(np.array(values, dtype=object), n)
    frame[column] = frame[column].astype(tidy[column].dtype)
    inputs = preparation.transformed(frame)
    examples, k = InMemory(inputs, torch.zeros(len(inputs))), class_shown(preparation)
    means = {}
    for name, model in served.items():
        whole = whole_of(outputs_on(model, examples))
        assert whole is not None  # noqa: S101  # a table's model has a row of outputs for each of inputs
        outputs = whole[0].double()
        if preparation.classes:
            told = outputs.softmax(1)[:, k]
        else:
            told = preparation.centre + preparation.scale * outputs[:, 0]
        means[name] = told.reshape(many, n).mean(1).tolist()
    return Dependence(column, values, means)


def class_shown(preparation: Preparation) -> int:
    """Return the class whose probability is drawn, the last one."""
    return len(preparation.classes) - 1


def dependence_section(
    found: Sequence[Dependence], preparation: Preparation, target: str
) -> Section:
    """Return the curves of columns, with the range of other users' models behind."""
    shown = [one for one in found if len(one.values) > 1]
    what = target
    if preparation.classes:
        what = f"probability of {preparation.classes[class_shown(preparation)]}"
    lines_of_own, known = ("served", "alone", LEAVES), shown[0].means if shown else {}
    others = [name for name in known if name not in lines_of_own]
    text = [
        f"The mean predicted {what} over the test rows, if all of them had the same value in one"
        " column; the columns are the strongest of those above. It says what the model does, not"
        " what causes the target; where columns belong together, some of these rows cannot be."
    ]
    if others:
        text.append(
            f"The area is between the lowest and the highest of {len(others)} other users' models,"
            " for the same rows: where the served one leaves it, this user differs from all others."
        )
    if LEAVES in known:
        both = [np.concatenate([one.means[name] for one in shown]) for name in ("served", LEAVES)]
        text.append(
            "Boosted trees may split between this user and all others. The line with the leaves of"
            " another user is what is predicted where they do not, with this user's own level: its"
            f" distance, {np.abs(both[0] - both[1]).mean():.3g} in the mean, is by how much leaves are"
            " shifted."
        )
    charts = []
    for one in shown:
        mine = [name for name in one.means if name not in others]
        low, high = one.between(others) if others else ([], [])
        if isinstance(one.values[0], str):
            texts = [
                ", ".join(
                    [f"{name} {one.means[name][i]:.3g}" for name in mine]
                    + ([f"others {low[i]:.3g} to {high[i]:.3g}"] if others else [])
                )
                for i in range(len(one.values))
            ]
            bars = [
                Interval(f"{one.column} = {value}", mean, 0.0, said)
                for value, mean, said in zip(one.values, one.means["served"], texts, strict=True)
            ]
            charts.append(interval_chart(bars, f"{what} by {one.column}"))
            continue
        at = [float(value) for value in one.values]
        lines: dict[str, Points] = {name: (at, one.means[name]) for name in mine}
        bands: dict[str, Points] = {}
        if others:
            middle = np.mean([one.means[name] for name in others], 0).tolist()
            lines["other users, mean and range"] = (at, middle)
            bands["other users, mean and range"] = (low, high)
        charts.append(line_chart(lines, one.column, what, bands=bands))
    return Section("What predictions do along a column", text, charts=charts)
