"""What users tell each other of their rows, so that all prepare them alike.

Sums and counts, which add up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import pandas as pd

from coterie.data.columns import MAX_CATEGORIES
from coterie.data.preparation import Kind, NumberColumn, Preparation, kinds_of, tidy
from coterie.errors import DataError


@dataclass(frozen=True)
class ColumnSums:
    """Sums over a column of numbers.

    Squares are about the mean: about zero they would lose what is far from it.

    Example:
        >>> both = ColumnSums.of(np.array([1.0, np.nan])) + ColumnSums.of(np.array([3.0, 5.0]))
        >>> both.mean, both.missing
        (3.0, 1)
    """

    count: int  # of values that are there
    missing: int
    total: float
    squares: float  # Σ (value − mean)²

    @classmethod
    def of(cls, values: np.ndarray[Any, np.dtype[np.float64]]) -> ColumnSums:
        """Return the sums of some numbers, NaN where one is missing."""
        there = values[~np.isnan(values)]
        squares = float(((there - there.mean()) ** 2).sum()) if len(there) else 0.0
        return cls(len(there), len(values) - len(there), float(there.sum()), squares)

    def __add__(self, other: ColumnSums) -> ColumnSums:
        if not (self.count and other.count):
            between = 0.0
        else:
            between = (
                (self.mean - other.mean) ** 2
                * self.count
                * other.count
                / (self.count + other.count)
            )
        return ColumnSums(
            self.count + other.count,
            self.missing + other.missing,
            self.total + other.total,
            self.squares + other.squares + between,
        )

    @property
    def mean(self) -> float:
        """The mean of the values that are there."""
        return self.total / self.count

    @property
    def variance(self) -> float:
        """Their variance."""
        return self.squares / self.count

    def prepared(self) -> NumberColumn:
        """Return how the column is prepared, with the mean for what is missing."""
        rows = self.count + self.missing
        scale, share = math.sqrt(self.variance * self.count / rows) or 1.0, self.missing / rows
        gap = (share, math.sqrt(share * (1 - share))) if self.missing else None
        return NumberColumn(self.mean, self.mean, scale, gap)


@dataclass(frozen=True)
class Statistics:
    """What a user tells of its training rows.

    Those of several users add up to what all of them prepare by.

    Example:
        >>> import pandas as pd
        >>> tables = pd.DataFrame({"age": [40.0, 60.0]}), pd.DataFrame({"age": [80.0, 100.0]})
        >>> each = [Statistics.of(rows, pd.Series([0, 1]), "classification") for rows in tables]
        >>> (each[0] + each[1]).preparation([0, 1]).inputs(pd.DataFrame({"age": [70.0]}))
        tensor([[0.]])
    """

    kind: Kind
    numbers: Mapping[str, ColumnSums]  # by column
    categories: Mapping[str, Mapping[str, int]]  # by column, how many rows have each
    target: ColumnSums | None = None  # in regression

    @classmethod
    def of(
        cls,
        rows: pd.DataFrame,
        targets: pd.Series[Any],
        kind: Kind,
        categorical: Sequence[str] = (),
    ) -> Statistics:
        """Return the sums and counts of a user's training rows and their targets.

        `categorical` names columns of numbers to treat as categories.
        """
        numeric, other = kinds_of(rows, categorical)
        neat = tidy(rows, numeric, other)
        return cls(
            kind,
            {column: ColumnSums.of(neat[column].to_numpy(dtype=float)) for column in numeric},
            {column: dict(Counter(neat[column].tolist())) for column in other},
            ColumnSums.of(targets.to_numpy(dtype=float)) if kind == "regression" else None,
        )

    def __add__(self, other: Statistics) -> Statistics:
        for column in sorted(
            {*self.numbers, *self.categories} ^ {*other.numbers, *other.categories}
        ):
            raise DataError(
                f"not all users have the column {column!r}; name those that all have in `features`"
            )
        for column in sorted(self.numbers.keys() ^ other.numbers.keys()):
            raise DataError(
                f"column {column!r} holds numbers for one user and text for another; correct it, or"
                " name it in `categorical`"
            )
        return Statistics(
            self.kind,
            {column: sums + other.numbers[column] for column, sums in self.numbers.items()},
            {
                column: dict(Counter(counts) + Counter(other.categories[column]))
                for column, counts in self.categories.items()
            },
            None if self.target is None or other.target is None else self.target + other.target,
        )

    def to_plain(self) -> dict[str, Any]:
        """Return it as what JSON can hold."""
        plain = {column: astuple(sums) for column, sums in self.numbers.items()}
        target = None if self.target is None else astuple(self.target)
        categories = {column: dict(counts) for column, counts in self.categories.items()}
        return {"kind": self.kind, "numbers": plain, "categories": categories, "target": target}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Statistics:
        """Return the statistics that `to_plain` gave."""
        numbers = {column: ColumnSums(*sums) for column, sums in plain["numbers"].items()}
        target = None if plain["target"] is None else ColumnSums(*plain["target"])
        return cls(plain["kind"], numbers, plain["categories"], target)

    def preparation(self, classes: Sequence[Any] = ()) -> Preparation:
        """Return how all prepare their rows.

        Missing numbers become the mean; columns without a value are dropped.

        `classes`: the class of each output, in classification.
        """
        numbers = {column: sums for column, sums in self.numbers.items() if sums.count}
        categories = {column: sorted(counts) for column, counts in self.categories.items()}
        categories = {
            column: values for column, values in categories.items() if values != ["(missing)"]
        }
        if not numbers and not categories:
            raise DataError(
                "the training rows have no value in any feature; name others in `features`"
            )
        for column, values in categories.items():
            if len(values) > MAX_CATEGORIES:
                raise DataError(
                    f"column {column!r} has {len(values)} different values, each of which would be"
                    " an input; leave it out of `features`, or join values until there are at most"
                    f" {MAX_CATEGORIES}"
                )
        columns = {column: sums.prepared() for column, sums in numbers.items()}
        texts = {column: tuple(values) for column, values in categories.items()}
        if self.target is None:
            return Preparation(columns, texts, self.kind, tuple(classes))
        scale = math.sqrt(self.target.variance) or 1.0
        return Preparation(columns, texts, self.kind, centre=self.target.mean, scale=scale)
