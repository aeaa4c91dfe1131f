"""From rows of a table to tensors and back, with statistics of user 0's training rows only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from pandas.api import types
from torch import Tensor

from coterie.data.columns import (
    AS_DATES,
    MAX_CATEGORIES,
    as_category,
    first_in,
    parts_of_dates,
    weights_in,
    with_dates,
)
from coterie.errors import DataError, FileError, KnobError, did_you_mean
from coterie.recording import files

Kind: TypeAlias = Literal["classification", "regression"]
FILE = "preparation.json"
MAX_DEVIATIONS = 10.0
"""Prepared numbers are clamped to this many of user 0's standard deviations.

A peer's may lie far outside.
"""


TUPLES = ("classes", "dates", "class_weights")


class NumberColumn(NamedTuple):
    """How a column of numbers becomes inputs."""

    fill: float  # what stands for a number that is missing
    mean: float
    scale: float
    gap: tuple[float, float] | None = None
    """Mean and scale of the input that says which were missing; None where none was in training."""


@dataclass(frozen=True)
class Preparation:
    """Turn rows into inputs and targets, and outputs into predictions.

    Args:
        numbers: the columns of numbers: missing ones become the median, with an indicator column;
            all are then centred and scaled.
        categories: the values of each column of categories, one-hot; "missing" is a category,
            unknown ones are all zeros.
        kind: "classification" or "regression".
        classes: the class of each output, in classification.
        centre: the mean of the target, in regression.
        scale: the spread of the target, in regression.
        ids: the column that tells rows apart, which predictions carry along.
        weights: the column that says how much a row counts in the loss.
        dates: columns of dates, whose parts are among the others.
        class_weights: how much a row of each class counts in the loss, where they differ.
    """

    numbers: Mapping[str, NumberColumn]
    categories: Mapping[str, tuple[str, ...]]
    kind: Kind
    classes: tuple[Any, ...] = ()
    centre: float = 0.0
    scale: float = 1.0
    ids: str | None = None
    weights: str | None = None
    dates: tuple[str, ...] = ()
    class_weights: tuple[float, ...] = ()

    @classmethod
    def fit(
        cls,
        rows: pd.DataFrame,
        targets: pd.Series[Any],
        all_targets: pd.Series[Any],
        kind: Kind,
        categorical: Sequence[str] = (),
    ) -> Preparation:
        """Fit the statistics of user 0's training rows and their targets.

        The list of classes comes from all users' targets. `categorical` names columns of numbers to
        treat as categories.
        """
        seen = [column for column in rows.columns if rows[column].notna().any()]
        numeric, other = kinds_of(rows[seen], categorical)
        for column in other:
            if (different := rows[column].nunique()) > MAX_CATEGORIES:
                raise DataError(
                    f"column {column!r} has {different} different values, each of which would be an"
                    " input; leave it out of `features`, or join values until there are at most"
                    f" {MAX_CATEGORIES}"
                )
        if not seen:
            raise DataError(
                "user 0's training rows have no value in any feature; name others in `features`"
            )
        tidied = tidy(rows, numeric, other)
        numbers = _fitted(tidied[list(numeric)]) if numeric else {}
        categories = {column: tuple(sorted(set(tidied[column]))) for column in other}
        if kind == "classification":
            return cls(numbers, categories, kind, classes_of(all_targets))
        scale = float(np.std(targets.to_numpy(dtype=float))) or 1.0
        return cls(numbers, categories, kind, centre=float(targets.mean()), scale=scale)

    @property
    def numeric(self) -> tuple[str, ...]:
        """The columns of numbers."""
        return tuple(self.numbers)

    @property
    def categorical(self) -> tuple[str, ...]:
        """The columns of categories."""
        return tuple(self.categories)

    @property
    def n_outputs(self) -> int:
        """The number of outputs a model needs."""
        return len(self.classes) or 1

    @property
    def n_inputs(self) -> int:
        """The number of inputs a model gets."""
        return len(self.columns_of_inputs)

    @property
    def columns_of_inputs(self) -> list[str]:
        """The column that each input comes from."""
        gaps = (column for column, each in self.numbers.items() if each.gap is not None)
        values = (column for column, each in self.categories.items() for _ in each)
        return [*self.numbers, *gaps, *values]

    def inputs(self, rows: pd.DataFrame) -> Tensor:
        """Return rows as inputs, of shape (rows, n_inputs)."""
        return self.transformed(self.tidied(rows))

    def transformed(self, tidied: pd.DataFrame) -> Tensor:
        """Return what `tidied` gave as inputs."""
        prepared = torch.tensor(self._prepared(tidied), dtype=torch.float32)
        return prepared.clamp_(-MAX_DEVIATIONS, MAX_DEVIATIONS)

    def _prepared(self, tidied: pd.DataFrame) -> NDArray[np.float64]:
        """Return numbers, which of them are missing, and categories, before they are cut."""
        numbers = tidied[list(self.numbers)].to_numpy(dtype=float)
        fill, mean, scale = np.array([each[:3] for each in self.numbers.values()]).reshape(-1, 3).T
        missing = np.isnan(numbers)
        parts = [(np.where(missing, fill, numbers) - mean) / scale]
        for place, each in enumerate(self.numbers.values()):
            if each.gap is not None:
                parts.append((missing[:, [place]] - each.gap[0]) / each.gap[1])
        for column, values in self.categories.items():
            found = pd.Index(values).get_indexer(pd.Index(tidied[column]))
            parts.append(found[:, None] == np.arange(len(values)))
        return np.ascontiguousarray(np.concatenate(parts, axis=1, dtype=float))

    def tidied(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Return the features of rows as floats and texts."""
        parts = parts_of_dates(self.dates)
        for column in (*self.dates, *self.numeric, *self.categorical):
            if column not in rows.columns and column not in parts:
                hint = did_you_mean(column, rows.columns)
                raise DataError(
                    f"the table has no column {column!r}, which the model was trained with{hint}"
                )
        return tidy(with_dates(rows, self.dates), self.numeric, self.categorical)

    def unfamiliar(self, rows: pd.DataFrame) -> list[str]:
        """Say which columns hold what training did not see.

        Other categories, numbers that are cut.
        """
        unfamiliar, tidied = [], self.tidied(rows)
        prepared = self._prepared(tidied)[:, : len(self.numbers)]
        for column, numbers in zip(self.numeric, prepared.T, strict=True):
            if far := int((np.abs(numbers) > MAX_DEVIATIONS).sum()):
                unfamiliar.append(
                    f"column {column!r} has {far} of {len(rows)} numbers more than"
                    f" {MAX_DEVIATIONS:g} standard deviations from the mean of the training rows;"
                    " they are taken for that far"
                )
        for column, categories in self.categories.items():
            other = ~tidied[column].isin(categories).to_numpy()
            if other.any():
                unfamiliar.append(
                    f"column {column!r} has {other.sum()} of {len(rows)} values that the training"
                    f" rows did not have, the first is {tidied[column][other].iloc[0]!r}; they"
                    " count as none of the known ones"
                )
        return unfamiliar

    def targets(self, values: pd.Series[Any]) -> Tensor:
        """Return targets as class numbers, or as numbers of shape (rows, 1) in user 0's units."""
        if self.kind == "regression":
            try:
                numbers = (values.to_numpy(dtype=float) - self.centre) / self.scale
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"column {values.name!r} should hold numbers: {error}; correct it"
                ) from error
            if not np.isfinite(numbers).all():
                raise DataError(
                    f"column {values.name!r} holds a number that is not finite; drop the row"
                )
            return torch.tensor(numbers, dtype=torch.float32)[:, None]
        number = {value: i for i, value in enumerate(self.classes)}
        if unknown := [value for value in values.tolist() if value not in number]:
            known = ", ".join(map(repr, self.classes[:12]))
            raise DataError(
                f"column {values.name!r} has the class {unknown[0]!r}; the classes are {known}"
                f"{did_you_mean(unknown[0], self.classes)}"
            )
        return torch.tensor([number[value] for value in values.tolist()])

    def examples(
        self, rows: pd.DataFrame, target: str
    ) -> tuple[Tensor, Tensor | dict[str, Tensor]]:
        """Return rows as inputs and targets.

        These are a dict of `value` and `weight` where rows have weights.
        """
        inputs, targets = self.inputs(rows), self.targets(rows[target])
        if self.weights is None:
            return inputs, targets
        return inputs, {
            "value": targets,
            "weight": torch.tensor(weights_in(rows, self.weights), dtype=torch.float32),
        }

    def predictions(self, outputs: Tensor) -> pd.DataFrame:
        """Return a model's outputs as a table.

        `prediction`, and in classification each class's probability.
        """
        if self.kind == "regression":
            return pd.DataFrame(
                {"prediction": (outputs[:, 0].double() * self.scale + self.centre).numpy()}
            )
        probabilities = outputs.double().softmax(1)
        predicted: dict[str, Any] = {
            "prediction": [self.classes[i] for i in probabilities.argmax(1).tolist()]
        }
        names = (f"probability_{each}" for each in self.classes)
        return pd.DataFrame(predicted | dict(zip(names, probabilities.T.numpy(), strict=True)))

    def balanced(self, targets: pd.Series[Any]) -> Preparation:
        """Return the same, with a loss in which all classes of these targets count alike."""
        if self.kind != "classification":
            raise KnobError(f"`class_weight` is for classes, but {targets.name!r} is a number")
        if self.weights is not None:
            raise KnobError("`class_weight` and `weights` both weigh the rows; give one of them")
        counts = targets.value_counts()
        weights = (len(targets) / len(counts) / counts).to_dict()
        return replace(self, class_weights=tuple(weights.get(each, 0.0) for each in self.classes))

    def save(self, folder: Path) -> None:
        """Write it to `preparation.json` in a folder, as data that can be read without running code."""
        files.write_json(folder / FILE, self.to_plain())

    @classmethod
    def load(cls, folder: Path) -> Preparation:
        """Read it from a folder; damage is a `FileError`."""
        path, remedy = folder / FILE, "put back a whole copy, or have it written anew"
        plain = files.read_json(path, remedy)
        try:
            return cls.from_plain(plain)
        except Exception as error:  # not written by `save`, in spite of its digest, so anything may be wrong with it
            raise FileError(
                f"{path} cannot be understood by this version of coterie ({error}); {remedy}"
            ) from error

    def to_plain(self) -> dict[str, Any]:
        """Return it as what JSON can hold, and can be read without running code."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Preparation:
        """Return the preparation that `to_plain` gave."""
        changed: dict[str, Any] = {name: tuple(plain.get(name, ())) for name in TUPLES}
        changed["numbers"] = {
            str(column): NumberColumn(
                float(fill), float(mean), float(scale), gap and (float(gap[0]), float(gap[1]))
            )
            for column, (fill, mean, scale, gap) in plain["numbers"].items()
        }
        changed["categories"] = {
            str(column): tuple(map(str, values)) for column, values in plain["categories"].items()
        }
        return cls(**{**plain, **changed})


def classes_of(targets: pd.Series[Any]) -> tuple[Any, ...]:
    """Return the classes among targets; of mixed types: numbers among numbers, text among text."""
    return tuple(sorted(targets.unique().tolist(), key=lambda value: (type(value).__name__, value)))


def kinds_of(
    rows: pd.DataFrame, categorical: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the columns of numbers and those of categories."""
    numbers = [
        c
        for c in rows.columns
        if types.is_numeric_dtype(rows[c]) and not types.is_bool_dtype(rows[c])
    ]
    numeric = tuple(c for c in numbers if c not in categorical)
    other = tuple(c for c in rows.columns if c not in numeric)
    for column in other:
        if rows[column].dtype.kind in "mM":
            dates = rows[column].dtype.kind == "M"
            held = "dates" if dates else "durations"
            remedy = AS_DATES.format(column, column) if dates else "turn them into numbers"
            raise DataError(f"column {column!r} holds {held}; {remedy}, or leave it out (`drop`)")
    return numeric, other


def _fitted(numbers: pd.DataFrame) -> dict[str, NumberColumn]:
    """Return how columns of numbers are filled, centred and scaled, by scikit-learn."""
    from sklearn.impute import SimpleImputer
    from sklearn.preprocessing import StandardScaler

    imputer = SimpleImputer(strategy="median", add_indicator=True)
    scaler = StandardScaler().fit(imputer.fit_transform(numbers))
    spread = [*zip(scaler.mean_.tolist(), scaler.scale_.tolist(), strict=True)]
    count = numbers.shape[1]
    gaps = dict(zip(imputer.indicator_.features_.tolist(), spread[count:], strict=True))
    return {
        column: NumberColumn(float(fill), *spread[place], gaps.get(place))
        for place, (column, fill) in enumerate(
            zip(map(str, numbers), imputer.statistics_, strict=True)
        )
    }


def tidy(rows: pd.DataFrame, numeric: Sequence[str], categorical: Sequence[str]) -> pd.DataFrame:
    """Return the columns as floats with NaN, or as text with "(missing)"."""
    tidy: dict[str, Any] = {}
    for column in numeric:
        # dates are no numbers
        held = rows[column].astype(str) if rows[column].dtype.kind in "mM" else rows[column]
        values = pd.to_numeric(held, errors="coerce")
        if (text := (values.isna() & rows[column].notna()).to_numpy()).any():
            problem = (
                f"column {column!r} should hold numbers, but it is {first_in(rows[column], text)}"
            )
            remedy = (
                "correct it, leave it empty where the value is unknown, or say so if decimals"
                " follow commas"
            )
            raise DataError(f"{problem}; {remedy} (`--decimal ,`)")
        numbers = values.to_numpy(dtype=float, na_value=np.nan)
        if (infinite := np.isinf(numbers)).any():
            problem = (
                f"column {column!r} holds an infinite number: {first_in(rows[column], infinite)}"
            )
            raise DataError(f"{problem}; leave it empty where the value is unknown")
        tidy[column] = numbers
    for column in categorical:
        tidy[column] = [
            "(missing)" if pd.isna(value) else as_category(value) for value in rows[column]
        ]
    return pd.DataFrame(tidy, index=rows.index)
