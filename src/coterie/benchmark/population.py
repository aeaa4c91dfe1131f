"""The examples of many users, in one table with an owner a row."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    import pandas as pd

Numbers: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Population:
    """The examples of many users.

    Args:
        inputs: one row an example: a tensor that goes into a model as it is (bytes are scaled to
            [0, 1]), or a table whose columns are prepared with user 0's statistics.
        targets: class numbers from 0, of one or more dimensions, or real numbers.
        owners: the name of the user of each row.
        n_classes: the number of classes; 0 in regression.
        categorical: columns of the table that hold categories.

    Example:
        >>> people = Population(torch.zeros(3, 2), np.array([0, 1, 1]), np.array(["a", "b", "a"]), n_classes=2)
        >>> people.names, people.rows("a").tolist()
        (['a', 'b'], [0, 2])
    """

    inputs: "Tensor | pd.DataFrame"
    targets: Numbers
    owners: Numbers
    n_classes: int = 0
    categorical: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def names(self) -> list[str]:
        """The users, in the order of their first rows."""
        return list(self._rows)

    def rows(self, name: str) -> Numbers:
        """Return where a user's examples are."""
        return self._rows[name]

    @functools.cached_property
    def _rows(self) -> dict[str, Numbers]:
        rows_of: dict[str, list[int]] = {}
        for row, name in enumerate(self.owners.tolist()):
            rows_of.setdefault(name, []).append(row)
        return {name: np.array(rows) for name, rows in rows_of.items()}

    def take(self, rows: Numbers) -> Self:
        """Return the examples at these rows."""
        if isinstance(self.inputs, Tensor):
            inputs: Tensor | pd.DataFrame = self.inputs[torch.from_numpy(rows)]
        else:
            inputs = self.inputs.iloc[rows].reset_index(drop=True)
        return type(self)(
            inputs, self.targets[rows], self.owners[rows], self.n_classes, self.categorical
        )
