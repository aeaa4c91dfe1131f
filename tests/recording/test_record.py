"""Records: on disk as they grow, readable after a kill."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.support.records import configuration

from coterie.errors import DataError, FileError, KnobError
from coterie.recording import End, Point, Record, checkpoint


def test_every_line_is_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "record.jsonl"
    record = Record(configuration(seed=3), path)
    for step in range(3):
        record.add(Point(step=step, own_loss=0.1 * step))
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert len({line.pop("chain") for line in lines}) == len(lines)
        assert lines[0] == {
            "configuration": record.configuration.to_plain(),
            "versions": record.versions,
        }
        assert lines[1:] == [point.to_plain() for point in record.points]
    record.finish(End(step=2, best_step=1))
    read = Record.load(str(path))
    assert Record.load(path.parent).points == read.points
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
    for length in range(start, len(whole)):
        path.write_bytes(whole[:length])
        read = Record.load(path)
        assert [point.step for point in read.points] == [0, 1]
        read.add(Point(step=2, own_loss=0.5))
        assert path.read_bytes() == whole


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


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe\n", b"{}\n", b'{"configuration": {}}\n', b'{"configuration": {}, "ver'],
)
def test_what_is_no_record(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "record.jsonl"
    path.write_bytes(content)
    with pytest.raises(
        FileError, match=r"is not the record of a run|carries no chain.* of an earlier version"
    ):
        Record.load(path)
    with pytest.raises(
        FileError,
        match=r"nowhere\.jsonl cannot be read \(No such file.*train again in another folder",
    ):
        Record.load(tmp_path / "nowhere.jsonl")


def test_a_line_that_was_altered_moved_or_lost_is_told_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    record = Record(configuration(), path)
    for step in range(4):
        record.add(Point(step=step, own_loss=0.5))
    lines = path.read_bytes().splitlines(keepends=True)
    altered = lines[3].replace(b"0.5", b"0.4")
    for number, damaged in (
        (4, [*lines[:3], altered, *lines[4:]]),
        (3, [*lines[:2], *lines[3:]]),
        (3, [*lines[:2], lines[3], lines[2], lines[4]]),
        (5, [*lines[:4], lines[3], lines[4]]),
        (1, [lines[0].replace(b"Alone()", b"alone()"), *lines[1:]]),
    ):
        path.write_bytes(b"".join(damaged))
        with pytest.raises(
            FileError,
            match=rf"its line {number} was altered, or a line before it is lost; put a whole",
        ):
            Record.load(path)


def test_lines_lost_at_the_end_are_told_by_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    record = Record(configuration(), path)
    for step in (0, 5, 10):
        record.add(Point(step=step))
    record.before_checkpoint(10)
    checkpoint.save(tmp_path / "checkpoints", 10, {"step": 10})
    record.add(Point(step=15))
    lines = path.read_bytes().splitlines(keepends=True)
    assert [point.step for point in Record.load(path).points] == [0, 5, 10, 15]
    # since the checkpoint: as if the run had been killed earlier
    path.write_bytes(b"".join(lines[:-1]))
    assert [point.step for point in Record.load(path).points] == [0, 5, 10]
    path.write_bytes(b"".join(lines[:3]))
    with pytest.raises(
        FileError,
        match=r"lines after line 3 are lost, since step-00000010.ckpt was written after them",
    ):
        Record.load(path)


def test_what_could_not_be_written_comes_with_the_next_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run" / "record.jsonl"
    record = Record(configuration(), path)
    record.add(Point(step=0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full_disk)
        with pytest.raises(
            FileError,
            match=r"record.jsonl cannot be written \(No space left.*make room on its disk",
        ):
            record.add(Point(step=1))
    assert [point.step for point in Record.load(path).points] == [0]
    record.add(Point(step=2))
    assert [point.step for point in Record.load(path).points] == [0, 1, 2]
    shutil.rmtree(path.parent)
    record.add(Point(step=3))
    record.finish(End(step=4, best_step=1))
    assert [point.step for point in Record.load(path).points] == [0, 1, 2, 3]
    assert Record.load(path).end == record.end


def test_two_writers_do_not_overwrite_each_other(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    Record(configuration(), path)
    ours, theirs = Record.load(path), Record.load(path)
    theirs.add(Point(step=1))
    with pytest.raises(FileError, match="was changed by somebody else"):
        ours.add(Point(step=2))
    assert [point.step for point in Record.load(path).points] == [1]


def full_disk(*_: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_curves() -> None:
    record = Record(configuration())
    record.add(Point(step=0, validation={"loss": 2.0}))
    record.add(Point(step=5, validation={"loss": 1.0}, own_loss=3.0))
    record.add(Point(step=9, own_loss=2.5))
    assert record.curve("own_loss") == ([5, 9], [3.0, 2.5])
    assert record.curve("validation_loss") == ([0, 5], [2.0, 1.0])
    assert record.curve("alone_validation_loss") == ([], [])  # there was no guard
    with pytest.raises(
        KnobError, match="the record has no 'own_los'; it has validation_loss, own_loss"
    ):
        record.curve("own_los")
    table = record.frame()
    assert table.index.tolist() == [point.step for point in record.points]
    assert table["own_loss"].dropna().to_dict() == {5: 3.0, 9: 2.5}
    assert table["validation_loss"].dropna().to_dict() == {0: 2.0, 5: 1.0}


def test_a_record_without_points_is_a_table_without_rows() -> None:
    assert Record(configuration()).frame().empty


def test_a_point_does_not_change() -> None:
    point = Point(step=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        point.step = 2  # type: ignore[misc]
