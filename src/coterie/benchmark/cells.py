"""What is measured: every method on every task, a cell each, kept on disk as soon as it is finished."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import coterie
from coterie.benchmark.methods import METHODS, RATES
from coterie.benchmark.models import MODELS
from coterie.benchmark.sets import CONDITIONS, SETS, candidates, load
from coterie.errors import KnobError


@dataclass(frozen=True)
class Cell:
    """One method on one task.

    Args:
        set: the set of users.
        model: what is learned.
        condition: what is done to the data.
        user: who is user 0.
        seed: of the examples, the peers, the initial weights and the batches.
        method: how it is learned.
    """

    set: str
    model: str
    condition: str
    user: str
    seed: int
    method: str


@dataclass(frozen=True)
class Selection:
    """Which cells are asked for.

    Args:
        sets: names in `SETS`.
        methods: names in `METHODS`; `alone`, which all are compared with, is always among them.
        conditions: names in `CONDITIONS`.
        models: names in `MODELS`, each for the sets that it fits; None takes the first of each set.
        users: how many users of a set are user 0 in turn.
        seeds: how often each is repeated.
    """

    sets: Sequence[str]
    methods: Sequence[str]
    conditions: Sequence[str]
    models: Sequence[str] | None
    users: int
    seeds: int

    def __post_init__(self) -> None:
        for what, asked, known in (
            ("set", self.sets, SETS),
            ("method", self.methods, METHODS),
            ("condition", self.conditions, CONDITIONS),
            ("model", self.models or (), MODELS),
        ):
            for name in asked:
                if name not in known:
                    raise KnobError(f"unknown {what} {name!r}; the {what}s are {', '.join(known)}")
        for what, number in (("users", self.users), ("seeds", self.seeds)):
            if number < 1:
                raise KnobError(f"`{what}` must be at least 1, got {number}")

    def cells(self, data: Path | None) -> Iterator[Cell]:
        """Yield the cells, those of one task together.

        Args:
            data: the folder of all data.
        """
        methods = dict.fromkeys(("alone", *self.methods))
        for name in self.sets:
            fitting = SETS[name].models
            models = fitting[:1] if self.models is None else [model for model in fitting if model in self.models]
            users = candidates(load(name, data), SETS[name].own_examples)[: self.users]
            for model in models:
                for condition in self.conditions:
                    for user in users:
                        for seed in range(self.seeds):
                            for method in methods:
                                yield Cell(name, model, condition, user, seed, method)


class Store:
    """A folder of finished cells, one file each, all measured with the same settings.

    Args:
        out: the folder.
        steps: of each run. A folder that was begun with another number is refused.
    """

    def __init__(self, out: Path, steps: int) -> None:
        if steps < 1:
            raise KnobError(f"`steps` must be at least 1, got {steps}")
        if out.exists() and not out.is_dir():
            raise KnobError(f"`out` must be a folder, {str(out)!r} is a file; name another")
        self.cells, self.steps = out / "cells", steps
        self.settings = {"steps": steps, "rates": list(RATES), "version": coterie.__version__}
        self.cells.mkdir(parents=True, exist_ok=True)
        path = out / "settings.json"
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            for name, value in self.settings.items():
                if before.get(name) != value:
                    raise KnobError(
                        f"{out} was begun with {name} = {before.get(name)}, not {value}; name another folder"
                    )
        write(path, self.settings)

    def __contains__(self, cell: Cell) -> bool:
        return self._path(cell).exists()

    def add(self, cell: Cell, found: dict[str, Any]) -> None:
        """Keep what a cell gave."""
        write(self._path(cell), asdict(cell) | found)

    def rows(self) -> list[dict[str, Any]]:
        """Return all that is kept, a row a cell, in an order that does not depend on when it was measured."""
        rows = [json.loads(path.read_text(encoding="utf-8")) for path in self.cells.glob("*.json")]
        orders = {"set": list(SETS), "model": list(MODELS), "condition": list(CONDITIONS), "method": list(METHODS)}
        places = {field: {name: i for i, name in enumerate(names)} for field, names in orders.items()}

        def place(row: dict[str, Any]) -> tuple[Any, ...]:
            first, last = ("set", "model", "condition"), ("user", "seed")
            # A method that is no longer known comes last.
            return (
                *(places[field].get(row[field], len(places[field])) for field in first),
                *(row[field] for field in last),
                places["method"].get(row["method"], len(METHODS)),
                row["method"],
            )

        return sorted(rows, key=place)

    def _path(self, cell: Cell) -> Path:
        key = json.dumps(asdict(cell)).encode()
        return self.cells / f"{hashlib.blake2b(key, digest_size=10).hexdigest()}.json"


def write(path: Path, content: Any) -> None:
    """Write JSON beside its place and rename it, so that a file is whole or not there."""
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps(content), encoding="utf-8")
    beside.replace(path)
