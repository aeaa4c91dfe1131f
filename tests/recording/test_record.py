"""Records: on disk as they grow, readable after a kill."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import coterie
from coterie.errors import DataError
from coterie.recording.record import Record, describe


def test_every_line_is_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "record.jsonl"
    record = Record({"seed": 3, "rule": "Alone()"}, path)
    for step in range(3):
        record.add({"step": step, "own_loss": 0.1 * step})
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert lines[0] == {"configuration": record.configuration, "versions": record.versions}
        assert lines[1:] == record.points
    record.finish({"step": 2, "stopped": None})
    read = Record.load(path)
    assert (read.configuration, read.versions, read.points, read.end, read.path) == (
        *(record.configuration, record.versions, record.points, record.end),
        path,
    )


def test_numbers_come_back_to_the_bit(tmp_path: Path) -> None:
    values = [0.1 + 0.2, 1e-300, -0.0, math.inf, 2.0**-1074, 12345678901234567890.0]
    record = Record({}, tmp_path / "record.jsonl")
    for step, value in enumerate(values):
        record.add({"step": step, "own_loss": value})
    assert [v.hex() for v in Record.load(tmp_path / "record.jsonl").curve("own_loss")[1]] == [
        v.hex() for v in values
    ]


def test_a_last_line_cut_anywhere_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    record = Record({"me": "Zoë"}, path)
    for step in range(3):
        record.add({"step": step, "own_loss": 0.5})
    whole = path.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for length in range(start, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert [point["step"] for point in Record.load(path).points] == [0, 1]
    path.write_bytes(whole[:-1])  # only the end of the line is missing
    assert [point["step"] for point in Record.load(path).points] == [0, 1, 2]


def test_a_record_cut_and_taken_up_again(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    record = Record({}, path)
    for step in range(5):
        record.add({"step": step})
    record.finish({"step": 4})
    path.write_bytes(path.read_bytes()[:-7])
    read = Record.load(path)
    assert read.end == {}
    read.cut(2)
    read.add({"step": 3, "again": 1})
    again = Record.load(path)
    assert again.points == [{"step": 0}, {"step": 1}, {"step": 2}, {"step": 3, "again": 1}]
    assert again.end == {}


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\n", b"{}\n", b'{"step": 1}\n', b'{"configuration": {}, "ver'])
def test_what_is_no_record(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "record.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match="is not the record of a run"):
        Record.load(path)


def test_curves() -> None:
    record = Record({})
    record.add({"step": 0, "validation_loss": 2.0})
    record.add({"step": 5, "validation_loss": 1.0, "own_loss": 3.0})
    record.add({"step": 9, "own_loss": 2.5, "validation_loss": None})
    assert record.curve("own_loss") == ([5, 9], [3.0, 2.5])
    assert record.curve("validation_loss") == ([0, 5], [2.0, 1.0])
    assert record.curve("nothing") == ([], [])


def test_a_point_is_copied() -> None:
    record, point = Record({}), {"step": 1}
    record.add(point)
    point["step"] = 2
    assert record.points == [{"step": 1}]


def named(step: int, scale: float = 1.0) -> float:
    return scale / (step + 1)


@pytest.mark.parametrize(
    ("thing", "text"),
    [
        (coterie.Alone(), "Alone()"),
        (coterie.BiasCorrection(0.5, named), "BiasCorrection(alpha=0.5, beta=named)"),
        (coterie.WeightedAveraging(0.5, {"a": 1.0}), "WeightedAveraging(alpha=0.5, tau={'a': 1.0})"),
        (torch.nn.functional.cross_entropy, "cross_entropy"),
        (nn.CrossEntropyLoss(label_smoothing=0.1), "CrossEntropyLoss()"),
        (functools.partial(named, 3, scale=2), "partial(named, 3, scale=2)"),
        (None, "None"),
    ],
)
def test_descriptions_are_the_same_in_every_process(thing: Any, text: str) -> None:
    assert describe(thing) == text
    assert "0x" not in describe(thing)
