"""Bad input on the command line: each ends with one message, without a traceback, and leaves nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

Change = Callable[[pd.DataFrame], pd.DataFrame]


def table() -> pd.DataFrame:
    """Return a good table: three wards, an age, a sex, a dose, and who is ill."""
    rng = np.random.default_rng(0)
    age = rng.integers(20, 90, 90)
    ill = np.where(age + rng.normal(0, 9, 90) > 55, "yes", "no")
    wards, sex = np.resize(["a", "b", "c"], 90), np.resize(["f", "m"], 90)
    return pd.DataFrame({"ward": wards, "age": age, "sex": sex, "dose": age / 7 + 0.5, "ill": ill})


def _put(column: str, row: int, value: Any) -> Change:
    def change(frame: pd.DataFrame) -> pd.DataFrame:
        values = frame[column].astype(object).tolist()
        values[row] = value
        return frame.assign(**{column: values})

    return change


OPTIONS: dict[str, list[str]] = {
    "lr NaN": ["--lr", "nan"],
    "lr below 0": ["--lr", "-1"],
    "lr 0": ["--lr", "0"],
    "lr infinite": ["--lr", "inf"],
    "lr a text": ["--lr", "fast"],
    "steps 0": ["--steps", "0"],
    "steps below 0": ["--steps", "-5"],
    "steps 1.9": ["--steps", "1.9"],
    "batch size 0": ["--batch-size", "0"],
    "batch size a text": ["--batch-size", "all"],
    "seed beyond 64 bits": ["--seed", str(2**70)],
    "seed a text": ["--seed", "one"],
    "threads 0": ["--threads", "0"],
    "unknown rule": ["--rule", "best"],
    "empty rule": ["--rule", ""],
    "alpha without effect": ["--alpha", "0.5"],
    "alpha beyond 1": ["--rule", "wga", "--alpha", "1.5"],
    "alpha NaN": ["--rule", "wga", "--alpha", "nan"],
    "beta without effect": ["--rule", "wga", "--beta", "0.1"],
    "knob without a value": ["--rule", "wga", "--knob", "alpha"],
    "unknown knob": ["--rule", "wga", "--knob", "strength=3"],
    "unknown aggregator": ["--rule", "wga", "--knob", "aggregator=best"],
    "tau without a weight": ["--rule", "wga", "--tau", "b"],
    "tau of a text": ["--rule", "wga", "--tau", "b=half"],
    "tau of nobody": ["--rule", "wga", "--tau", "z=1"],
    "a knob given twice": ["--rule", "wga", "--alpha", "0.3", "--knob", "alpha=0.5"],
    "a peer's weight given twice": ["--rule", "wga", "--tau", "b=0.3", "--tau", "b=0.5"],
    "weights of what is pooled": ["--rule", "pooled", "--tau", "b=1"],
    "tau NaN": ["--rule", "wga", "--tau", "b=nan"],
    "tau beyond 1": ["--rule", "wga", "--tau", "b=2"],
    "unknown user": ["--me", "z"],
    "leave out nobody": ["--leave-out", "z"],
    "leave out oneself": ["--leave-out", "a"],
    "leave out everybody": ["--leave-out", "b", "--leave-out", "c"],
    "unknown target": ["--target", "health"],
    "target is the user": ["--target", "ward"],
    "unknown user column": ["--user-column", "clinic"],
    "unknown category": ["--categorical", "colour"],
    "unknown kind": ["--kind", "ranking"],
    "text as a number": ["--kind", "regression"],
    "numbers as classes": ["--target", "dose", "--kind", "classification"],
    "own examples 0": ["--own-examples", "0"],
    "too many own examples": ["--own-examples", "900"],
    "unknown model": ["--model", "deep"],
    "a model that is not there": ["--model", "nowhere:net"],
    "a model that is none": ["--model", "math:pow"],
    "a model whose function takes something else": ["--model", "operator:not_"],
    "a model that fails": ["--model", "builtins:divmod_"],
    "unknown metric": ["--metric", "beauty"],
    "unknown tracker": ["--tracker", "crystal"],
    "unknown device": ["--device", "gpu"],
    "a device that is not there": ["--device", "cuda:99"],
    "unknown engine": ["--engine", "steam"],
    "compress without effect": ["--compress", "bf16"],
    "timeout without effect": ["--timeout", "60"],
    "unknown feature": ["--features", "colour"],
    "the target as a feature": ["--features", "ill"],
    "drop of nothing": ["--drop", "colour"],
    "drop of the target": ["--drop", "ill"],
    "a feature that is dropped": ["--features", "age", "--drop", "age"],
    "drop without effect": ["--features", "age", "--drop", "sex"],
    "drop of everything": ["--drop", "age", "--drop", "sex", "--drop", "dose"],
    "a category that is dropped": ["--categorical", "age", "--drop", "age"],
    "an id that is not there": ["--id", "patient"],
    "the target as the id": ["--id", "ill"],
    "weights that are not there": ["--weights", "colour"],
    "weights of text": ["--weights", "sex"],
    "one column twice": ["--weights", "age", "--id", "age"],
    "all for validation": ["--validation", "1"],
    "nothing for test": ["--test", "0"],
    "nothing left to train on": ["--validation", "0.5", "--test", "0.5"],
    "a separator of two signs": ["--sep", ";;"],
    "a separator of another file": ["--sep", ";"],
    "one sign for two things": ["--decimal", ","],
    "no repeats": ["--repeats", "0"],
    "repeats of training alone": ["--repeats", "2", "--rule", "alone"],
    "exchanges of training alone": ["--exchange-every", "2", "--rule", "alone"],
    "repeats elsewhere": ["--repeats", "2", "--engine", "torch"],
    "repeats of nothing to compare": ["--repeats", "2", "--me", "all", "--rule", "alone"],
    "a metric of numbers": ["--metric", "rmse"],
    "a metric of one logit": ["--metric", "binary-accuracy", "--target", "dose"],
    "a metric of classes": ["--metric", "auc", "--target", "dose"],
    "resume of nothing with a bad rule": ["--resume", "--rule", "best"],
    "unknown option": ["--fast"],
}
"""Options added to a good `coterie train`."""

TABLES: dict[str, tuple[Change, list[str]]] = {
    "infinite target": (_put("dose", 3, math.inf), ["--target", "dose"]),
    "a stray text among numbers": (_put("age", 3, "old"), []),
    "a stray text in the target": (_put("dose", 3, "much"), ["--target", "dose"]),
    "an infinite age": (_put("age", 0, math.inf), ["--leave-out", "b", "--leave-out", "c"]),
    "decimal commas": (
        lambda f: f.assign(dose=f.dose.map("{:.1f}".format).str.replace(".", ",")),
        [],
    ),
    "dates": (lambda f: f.assign(seen="2020-02-03"), []),
    "no target": (_put("ill", 3, None), []),
    "nobody's row": (_put("ward", 4, None), []),
    "one class": (lambda f: f.assign(ill="yes"), []),
    "no rows": (lambda f: f[:0], []),
    "no features": (lambda f: f[["ward", "ill"]], []),
    "empty features": (lambda f: f[["ward", "ill"]].assign(age=None), []),
    "two rows": (lambda f: f[:2], []),
    "markup in a name": (lambda f: f.assign(ward=f.ward.replace("b", "[/blue]")), ["--steps", "0"]),
    "two targets": (lambda f: pd.concat([f, f[["ill"]]], axis=1), []),
    "too many categories": (
        lambda f: pd.concat([f] * 90, ignore_index=True).assign(
            id=[f"id {i}" for i in range(8100)]
        ),
        [],
    ),
}
"""Tables that cannot be learned from, with the options to try."""


def train(folder: Path, frame: pd.DataFrame, options: list[str]) -> list[str]:
    """Write a table, and return a command that trains on it."""
    frame.to_csv(folder / "visits.csv", index=False)
    named = {
        "--data": str(folder / "visits.csv"),
        "--user-column": "ward",
        "--target": "ill",
        "--me": "a",
    }
    named |= {"--out": str(folder / "run"), "--steps": "3"}
    given = {name: value for name, value in named.items() if name not in options}
    return ["train", *(word for pair in given.items() for word in pair), *options]


OTHERS: dict[str, Callable[[Path], list[str]]] = {
    "no command": lambda folder: ["fly"],
    "a table that is not there": lambda folder: train(
        folder, table(), ["--data", str(folder / "none.csv")]
    ),
    "a table that is a folder": lambda folder: train(folder, table(), ["--data", str(folder)]),
    "a table that is none": lambda folder: train(folder, table(), ["--data", _bytes(folder)]),
    "out is a file": lambda folder: train(folder, table(), ["--out", str(folder / "visits.csv")]),
    "out within a file": lambda folder: train(
        folder, table(), ["--out", str(folder / "visits.csv" / "run")]
    ),
    "predict without a model": lambda folder: ["predict", str(folder), str(folder / "none.csv")],
    "predict into a missing folder": lambda folder: [
        *("predict", str(folder), str(folder / "none.csv"), "--out", str(folder / "no" / "p.csv"))
    ],
    "an import that is not there": lambda folder: ["--import", str(folder / "own.py"), "list"],
    "an import of a module that is not there": lambda folder: [
        "--import",
        "no_such_module",
        "list",
    ],
    "an unknown kind to list": lambda folder: ["list", "dreams"],
    "an unknown figure": lambda folder: ["reproduce", "mona-lisa", "--out", str(folder / "r")],
    "an unknown set": lambda folder: ["bench", "--sets", "none", "--out", str(folder / "b")],
    "an unknown method": lambda folder: [
        "bench",
        "--sets",
        "digits",
        "--methods",
        "magic",
        "--out",
        str(folder / "b"),
    ],
    "a condition that is none": lambda folder: [
        *("bench", "--sets", "digits", "--conditions", "rain", "--out", str(folder / "b"))
    ],
    "bench of no users": lambda folder: [
        "bench",
        "--sets",
        "digits",
        "--users",
        "0",
        "--out",
        str(folder / "b"),
    ],
    "bench of no steps": lambda folder: [
        "bench",
        "--sets",
        "digits",
        "--steps",
        "0",
        "--out",
        str(folder / "b"),
    ],
    "demo of nobody": lambda folder: ["demo", "--me", "99", "--out", str(folder / "d")],
    "demo with too many examples": lambda folder: [
        "demo",
        "--own-examples",
        "9999",
        "--out",
        str(folder / "d"),
    ],
    "demo of no seeds": lambda folder: ["demo", "--seeds", "0", "--out", str(folder / "d")],
    "plan without numbers": lambda folder: ["plan"],
    "plan of a δ without ε": lambda folder: _plan("--delta", "1e-3"),
    "plan of a clip without ε": lambda folder: _plan("--clip", "3"),
    "plan of a target without a table": lambda folder: _plan("--target", "ill"),
    "plan of a negative noise": lambda folder: _plan("--noise", "-1"),
    "plan of NaN": lambda folder: _plan("--smoothness", "nan"),
    "plan of no peers": lambda folder: _plan("--n-peers", "-1"),
    "plan of pl beyond L": lambda folder: _plan("--pl", "9"),
    "plan of no steps": lambda folder: _plan("--steps", "0"),
    "federate with an unknown rule": lambda folder: _init(folder, "--rule", "best"),
    "federate with a bad knob": lambda folder: _init(folder, "--rule", "wga", "--alpha", "2"),
    "federate with lr NaN": lambda folder: _init(folder, "--lr", "nan"),
    "federate with steps 0": lambda folder: _init(folder, "--steps", "0"),
    "federate with two sites of a name": lambda folder: _init(folder, "--site", "basel"),
    "federate with a site's bad name": lambda folder: _init(folder, "--site", "../basel"),
    "federate run of nothing": lambda folder: ["federate", "run", str(folder)],
    "federate site of nothing": lambda folder: ["federate", "check", str(folder)],
}
"""Other commands."""


def _bytes(folder: Path) -> str:
    (folder / "visits.parquet").write_bytes(b"\x00\xff" * 40)
    return str(folder / "visits.parquet")


def _plan(option: str, value: str) -> list[str]:
    good = {
        "--n-peers": "3",
        "--noise": "1",
        "--bias-floor": "0.1",
        "--hessian-gap": "0.1",
        "--smoothness": "1",
    }
    good |= {"--pl": "0.5", "--steps": "100", "--initial-gap": "1"}
    return ["plan", *(word for pair in (good | {option: value}).items() for word in pair)]


def _init(folder: Path, *options: str) -> list[str]:
    table().drop(columns="ward").to_csv(folder / "mine.csv", index=False)
    good = [
        "--data",
        str(folder / "mine.csv"),
        "--target",
        "ill",
        "--site",
        "basel",
        "--server",
        "localhost",
    ]
    return ["federate", "init", str(folder / "trial"), *good, *options]


def _with(change: Change, options: list[str], folder: Path) -> list[str]:
    return train(folder, change(table()), options)


BAD_COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    **{
        f"train: {name}": partial(_with, lambda frame: frame, options)
        for name, options in OPTIONS.items()
    },
    **{
        f"table: {name}": partial(_with, change, options)
        for name, (change, options) in TABLES.items()
    },
    **OTHERS,
}
"""All of them by name, as functions of a folder that make what the command needs and return its words."""
