"""Files that are read again, truncated and with flipped bits: what comes of reading them.

`corrupt(name, folder, truncations, flips)` writes a good file of a kind, damages it so many times,
reads it each time as coterie does, and counts what came of it. `KINDS` are the kinds.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import coterie
from coterie.benchmark import Cell, Store
from coterie.data import from_table
from coterie.engines.peer.ledger import Ledger
from coterie.errors import CoterieError
from coterie.recording import checkpoint
from coterie.tables.fit import fit
from coterie.tables.predict import predict

ROWS = pd.DataFrame(
    {
        "who": ["a", "b"] * 45,
        "u": np.arange(90) % 7,
        "v": np.arange(90) % 5,
        "y": np.arange(90) // 2 % 2,
    }
)


@dataclass
class Outcome:
    """What came of reading a file that was damaged many times."""

    refused: int = 0  # a typed error
    survived: int = 0  # of a record, all but its last line was read
    silent: int = 0  # read as if nothing had happened
    raw: list[str] = field(default_factory=list)  # errors of another type


@dataclass(frozen=True)
class Kind:
    """A kind of file that coterie reads again."""

    make: Callable[[Path], Path]  # writes a good one into an empty folder, and returns its path
    read: Callable[[Path], Any]  # as coterie does, by its path
    # whether what was read may pass for the whole
    survives: Callable[[Any, Any], bool] = lambda read, whole: False


def corrupt(name: str, folder: Path, truncations: int, flips: int, seed: int = 0) -> Outcome:
    """Damage a file of a kind so many times, in an empty folder, and count what comes of reading it."""
    kind, rng, outcome = KINDS[name], np.random.default_rng(seed), Outcome()
    path = kind.make(folder)
    good, whole = path.read_bytes(), kind.read(path)
    for length in rng.integers(0, len(good), truncations):
        path.write_bytes(good[:length])
        _read(kind, path, whole, outcome)
    for bit in rng.integers(0, 8 * len(good), flips):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        _read(kind, path, whole, outcome)
    path.write_bytes(good)
    return outcome


def _read(kind: Kind, path: Path, whole: Any, outcome: Outcome) -> None:
    try:
        read = kind.read(path)
    except CoterieError as error:
        if str(path) not in str(error) or ";" not in str(error):
            outcome.raw.append(f"the file or the remedy is not named: {error}")
        outcome.refused += 1
    except Exception as error:
        outcome.raw.append(f"{type(error).__name__}: {error}")
    else:
        if kind.survives(read, whole):
            outcome.survived += 1
        else:
            outcome.silent += 1


@functools.cache
def _trained() -> tempfile.TemporaryDirectory[str]:
    """Return a folder in which a model was trained from a table, by a rule that is chosen."""
    folder = tempfile.TemporaryDirectory()
    task, rule = (
        from_table(ROWS, user_column="who", target="y", me="a"),
        coterie.WeightedAveraging("auto"),
    )
    fit(
        task,
        rule,
        "linear",
        Path(folder.name),
        steps=6,
        evaluate_every=2,
        progress=False,
        trackers=(),
    )
    return folder


def _run_folder(file: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        shutil.copytree(_trained().name, folder, dirs_exist_ok=True)
        return next(folder.glob(file))

    return make


def _store(file: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        Store(folder, 3).add(
            Cell("digits", "linear", "honest", "a", 0, "alone"), {"score": 0.123456789}
        )
        return next(folder.glob(file))

    return make


def _ledger(path: Path, file: str = "requests.jsonl") -> Path:
    ledger = Ledger(path / "requests.jsonl")
    for step in range(5):
        ledger.give(at_most=9, caller="user 0", step=step)
    return path / file


def _lines(path: Path) -> list[Any]:
    record = coterie.Record.load(path)
    points = [point.to_plain() for point in record.points]
    return [
        record.configuration.to_plain(),
        *points,
        *([record.end.to_plain()] if record.ended else []),
    ]


def _lost_at_most_one(read: list[Any], whole: list[Any]) -> bool:
    return read in (whole, whole[:-1])


def _prediction(path: Path) -> pd.DataFrame:
    return predict(path.parent, ROWS)


KINDS = {
    "record": Kind(_run_folder("record.jsonl"), _lines, _lost_at_most_one),
    "checkpoint": Kind(_run_folder("checkpoints/step-00000006.ckpt"), checkpoint.load),
    "model.pt": Kind(_run_folder("model.pt"), _prediction),
    "model.json": Kind(_run_folder("model.json"), _prediction),
    "preparation": Kind(_run_folder("preparation.json"), _prediction),
    "bench settings": Kind(_store("settings.json"), lambda path: Store(path.parent, 3)),
    "ledger": Kind(_ledger, lambda path: Ledger(path).given),
    "ledger's count": Kind(
        partial(_ledger, file="requests.jsonl.count"),
        lambda path: Ledger(path.with_suffix("")).given,
    ),
    "bench cell": Kind(_store("cells/*.json"), lambda path: Store(path.parent.parent, 3).rows()),
}
