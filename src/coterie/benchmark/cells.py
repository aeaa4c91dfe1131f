"""What is measured: every method on every task, a cell each, kept on disk as soon as it is finished."""

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import coterie
from coterie.benchmark.contenders import RATES, Contender
from coterie.benchmark.methods import contender, names
from coterie.benchmark.sets import SETS, UserSet, load
from coterie.benchmark.sets.user_set import MODELS
from coterie.benchmark.tasks import CONDITIONS, GradientAttack, candidates, condition_of
from coterie.benchmark.tools import Tool
from coterie.benchmark.totals import ALONE
from coterie.errors import KnobError, did_you_mean
from coterie.recording import files


@dataclass(frozen=True)
class Cell:
    """One method on one task."""

    set: str  # of users
    model: str  # what is learned
    condition: str  # what is done to the data
    user: str  # who is user 0
    seed: int  # of the examples, the peers, the initial weights and the batches
    method: str  # how it is learned


@dataclass(frozen=True)
class Selection:
    """Which cells are asked for, as by the arguments of `run`.

    What trains alone is always among the methods.
    """

    sets: Sequence[str | UserSet]
    methods: Sequence[str | Contender | Tool]
    conditions: Sequence[str] = tuple(CONDITIONS)
    models: Sequence[str] | None = None
    users: int = 3
    seeds: int = 1

    def __post_init__(self) -> None:
        for option in ("sets", "methods", "conditions", "models"):
            if isinstance(value := getattr(self, option), str):
                raise KnobError(
                    f"`{option}` must be a list of names, got {value!r}; write `[{value!r}]`"
                )
        known = {model for user_set in self._sets.values() for model in user_set.makers} | set(
            MODELS
        )
        for condition in self.conditions:
            condition_of(condition)
        for name in self.models or ():
            if name not in known:
                hint, there = did_you_mean(name, sorted(known)), ", ".join(sorted(known))
                raise KnobError(f"unknown model {name!r}; the models are {there}{hint}")
        for what, number in (("users", self.users), ("seeds", self.seeds)):
            if number < 1:
                raise KnobError(f"`{what}` must be at least 1, got {number}")
        for one in self.methods:
            if not isinstance(one, str | Contender | Tool):
                raise KnobError(
                    f"`methods` are names or contenders, got {one!r}; write"
                    " `benchmark.Contender.of(name, rule)`"
                )
        _ = self._contenders

    def user_set(self, name: str) -> UserSet:
        """Return a set of this selection."""
        return self._sets[name]

    def contender(self, name: str) -> Contender | Tool:
        """Return a method of this selection."""
        return self._contenders[name]

    @property
    def _sets(self) -> dict[str, UserSet]:
        sets = [SETS[each] if isinstance(each, str) else each for each in self.sets]
        return {user_set.name: user_set for user_set in sets}

    @property
    def _contenders(self) -> dict[str, Contender | Tool]:
        each = [contender(one) if isinstance(one, str) else one for one in (*ALONE, *self.methods)]
        return {one.name: one for one in each}

    def cells(self, data: Path | None) -> Iterator[Cell]:
        """Yield the cells, those of one task together; `data` is the folder of all data."""
        for name, user_set in self._sets.items():
            fitting = list(user_set.makers)
            models = (
                fitting[:1]
                if self.models is None
                else [model for model in fitting if model in self.models]
            )
            people = load(user_set, data)
            users = candidates(people, user_set.own_examples)[: self.users]
            methods = {name: one for name, one in self._contenders.items() if one.fits(people)}
            for model, condition, user, seed, method in itertools.product(
                models, self.conditions, users, range(self.seeds), methods
            ):
                attacked = isinstance(condition_of(condition), GradientAttack)
                if not attacked or method in ALONE or methods[method].asks_gradients_only:
                    yield Cell(name, model, condition, user, seed, method)


class Store:
    """A folder of finished cells, one file each, all measured with the same settings and number of steps."""

    def __init__(self, out: Path, steps: int) -> None:
        if steps < 1:
            raise KnobError(f"`steps` must be at least 1, got {steps}")
        self.cells, self.steps = out / "cells", steps
        self.settings = {"steps": steps, "rates": list(RATES), "version": coterie.__version__}
        with files.writing(self.cells):
            self.cells.mkdir(parents=True, exist_ok=True)
        path = out / "settings.json"
        if path.exists():
            remedy = (
                "delete it, if this command has the settings that the folder was begun with; or"
                " name another folder"
            )
            before = files.read_json(path, remedy)
            for name, value in self.settings.items():
                if before.get(name) != value:
                    raise KnobError(
                        f"{out} was begun with {name} = {before.get(name)}, not {value}; name"
                        " another folder"
                    )
        else:
            files.write_json(path, self.settings)

    def __contains__(self, cell: Cell) -> bool:
        path = self._path(cell)
        return path.exists() and bool(_row(path))

    def add(self, cell: Cell, measured: dict[str, Any]) -> None:
        """Keep what was measured in a cell."""
        files.write_json(self._path(cell), asdict(cell) | measured)

    def rows(self) -> list[dict[str, Any]]:
        """Return all that is kept, a row a cell, in an order that does not depend on when it was measured."""
        rows = [_row(path) for path in self.cells.glob("*.json")]
        orders = {
            "set": list(SETS),
            "model": list(MODELS),
            "condition": list(CONDITIONS),
            "method": names(),
        }
        places = {
            field: {name: i for i, name in enumerate(order)} for field, order in orders.items()
        }

        def place(row: dict[str, Any]) -> tuple[Any, ...]:
            # A name that is not registered comes last.
            rank = {
                field: (order.get(row[field], len(order)), row[field])
                for field, order in places.items()
            }
            return (
                rank["set"],
                rank["model"],
                rank["condition"],
                row["user"],
                row["seed"],
                rank["method"],
            )

        return sorted(rows, key=place)

    def _path(self, cell: Cell) -> Path:
        key = json.dumps(asdict(cell)).encode()
        return self.cells / f"{hashlib.blake2b(key, digest_size=10).hexdigest()}.json"


def _row(path: Path) -> dict[str, Any]:
    """Read what was measured in a cell; damage is a `FileError`."""
    return files.read_json(path, "delete it: the same command measures it again")
