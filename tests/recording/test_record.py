"""Records: on disk as they grow, readable after a kill."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from tests.support.records import configuration

from coterie.errors import DataError
from coterie.recording import End, Point, Record


def test_every_line_is_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "record.jsonl"
    record = Record(configuration(seed=3), path)
    for step in range(3):
        record.add(Point(step=step, own_loss=0.1 * step))
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert lines[0] == {"configuration": record.configuration.to_plain(), "versions": record.versions}
        assert lines[1:] == [point.to_plain() for point in record.points]
    record.finish(End(step=2, best_step=1))
    read = Record.load(str(path))
    assert (read.configuration, read.versions, read.points, read.end, read.path) == (
        *(record.configuration, record.versions, record.points, record.end),
        path,
    )
    assert sorted(read.versions) == ["coterie", "numpy", "platform", "python", "scipy", "torch"]


def test_numbers_come_back_to_the_bit(tmp_path: Path) -> None:
    values = [0.1 + 0.2, 1e-300, -0.0, math.inf, 2.0**-1074, 12345678901234567890.0]
    record = Record(configuration(), tmp_path / "record.jsonl")
    for step, value in enumerate(values):
        record.add(Point(step=step, own_loss=value))
    assert [v.hex() for v in Record.load(tmp_path / "record.jsonl").curve("own_loss")[1]] == [
        v.hex() for v in values
    ]


def test_a_last_line_cut_anywhere_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    record = Record(configuration(peers={"Zoë": 3}), path)
    for step in range(3):
        record.add(Point(step=step, own_loss=0.5))
    whole = path.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for length in range(start, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert [point.step for point in Record.load(path).points] == [0, 1]
    path.write_bytes(whole[:-1])  # only the end of the line is missing
    assert [point.step for point in Record.load(path).points] == [0, 1, 2]


def test_a_record_cut_and_taken_up_again(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    record = Record(configuration(), path)
    for step in range(5):
        record.add(Point(step=step))
    before = record.ended
    record.finish(End(step=4, best_step=4))
    assert (before, record.ended) == (False, True)
    path.write_bytes(path.read_bytes()[:-7])
    read = Record.load(path)
    assert not read.ended
    read.cut(2)
    read.add(Point(step=3, weight=1.0))
    again = Record.load(path)
    assert again.points == [Point(step=0), Point(step=1), Point(step=2), Point(step=3, weight=1.0)]
    with pytest.raises(DataError, match=r"has not ended: let it go on, or resume it"):
        _ = again.end


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\n", b"{}\n", b'{"step": 1}\n', b'{"configuration": {}, "ver'])
def test_what_is_no_record(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "record.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match="is not the record of a run"):
        Record.load(path)


def test_curves() -> None:
    record = Record(configuration())
    record.add(Point(step=0, validation={"loss": 2.0}))
    record.add(Point(step=5, validation={"loss": 1.0}, own_loss=3.0))
    record.add(Point(step=9, own_loss=2.5))
    assert record.curve("own_loss") == ([5, 9], [3.0, 2.5])
    assert record.curve("validation_loss") == ([0, 5], [2.0, 1.0])
    assert record.curve("nothing") == ([], [])


def test_a_point_does_not_change() -> None:
    point = Point(step=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        point.step = 2  # type: ignore[misc]
