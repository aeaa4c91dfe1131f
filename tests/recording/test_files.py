"""Files that are read again: whole or refused, with the file and the remedy named."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.support import intruders

from coterie.errors import FileError
from coterie.recording import files
from coterie.recording.files import ChainedLines

CONTENT = {"name": "Zoë", "numbers": [0.1 + 0.2, -0.0, 3], "nested": {"none": None, "true": True}}


def test_a_json_file_is_json_with_its_digest(tmp_path: Path) -> None:
    path = tmp_path / "new" / "settings.json"
    files.write_json(path, CONTENT)
    assert files.read_json(path, "") == CONTENT
    plain = json.loads(path.read_bytes())
    assert list(plain) == ["sha256", *CONTENT]
    assert [p.name for p in path.parent.iterdir()] == ["settings.json"]


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"sha256": "', '{"sha256": 3}', "\0" * 200, '{"steps": 60}']
)
def test_what_carries_no_digest_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "settings.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(
        FileError, match=r"settings.json (carries no SHA-256|is damaged).*; delete it"
    ):
        files.read_json(path, "delete it")


def test_a_right_digest_does_not_make_a_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    deep = b'"a": ' + b"[" * 100_000
    for body in (b"", b"}}", b'"a": 1', b"\xff}", deep):
        path.write_bytes(files.JSON_HEAD + files.sha256(body).encode() + files.JSON_END + body)
        with pytest.raises(FileError, match=r"settings.json is not JSON"):
            files.read_json(path, "")
    files.write_json(path, CONTENT)
    with pytest.raises(
        FileError, match=r"settings.json has no entry 'steps': .*another version.*; begin again"
    ):
        files.read_json(path, "begin again", needed=["name", "steps"])
    with pytest.raises(
        FileError, match=r"nowhere cannot be read \(No such file or directory\); begin again"
    ):
        files.read_json(tmp_path / "nowhere", "begin again")


@pytest.mark.parametrize("fails", ["fsync", "replace", "open", "mkdir"])
@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ENOSPC, "make room on its disk"), (errno.EROFS, "can be written to")],
)
def test_a_failure_while_writing_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, number: int, remedy: str
) -> None:
    path = tmp_path / "settings.json"
    files.write_json(path, CONTENT)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os if fails == "fsync" else Path, fails, fail)
        with pytest.raises(
            FileError,
            match=rf"settings.json cannot be written \({os.strerror(number)}\); .*{remedy}",
        ):
            files.write_json(path, {"steps": 1})
    assert files.read_json(path, "") == CONTENT
    files.write_json(path, {"steps": 1})
    assert files.read_json(path, "") == {"steps": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_lines_that_were_not_written_by_us_are_refused_in_spite_of_their_chain(
    tmp_path: Path,
) -> None:
    path = tmp_path / "lines.jsonl"
    lines = ChainedLines(path, "ask")
    lines.write([{}])
    assert lines.read() == [{}]
    empty = path.read_bytes()
    path.write_bytes(empty.replace(b"{", b"}", 1))
    with pytest.raises(FileError, match="line 1 was altered"):
        lines.read()


def test_a_cut_line_is_overwritten_and_a_strangers_is_not(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines = ChainedLines(path, "ask")
    lines.write([{"step": 0}])
    with path.open("ab") as file:
        file.write(b'{"step": 1, "cha')
    assert lines.read() == [{"step": 0}]
    lines.append({"step": 2}, sync=True)
    assert ChainedLines(path, "").read() == [{"step": 0}, {"step": 2}]
    with path.open("ab") as file:
        file.write(b"what is this?\n")
    with pytest.raises(FileError, match="was changed by somebody else while it was written; ask"):
        lines.append({"step": 3})
    path.write_bytes(b"")
    with pytest.raises(FileError, match="was changed by somebody else"):
        lines.append({"step": 3})
    path.unlink()
    with pytest.raises(FileError, match="cannot be written"):
        lines.append({"step": 3})
    assert not path.exists()


def test_lines_that_are_counted_cannot_be_lost_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.touch()
    lines = ChainedLines(path, "ask", counted=True)
    assert lines.read() == []
    assert lines.count_path is not None
    for step in range(12):
        lines.append({"step": step})
        count = lines.count_path.read_bytes()
        assert len(ChainedLines(path, "", counted=True).read()) == step + 1
    whole = path.read_bytes().splitlines(keepends=True)
    for fewer in range(12):
        path.write_bytes(b"".join(whole[:fewer]))
        with pytest.raises(
            FileError, match=rf"ledger.jsonl.count tells of 12 lines, and {fewer} are there; ask"
        ):
            ChainedLines(path, "ask", counted=True).read()
    path.write_bytes(b"".join(whole))
    lines.count_path.write_bytes(b"000000000011" + count[12:])
    with pytest.raises(FileError, match=r"is damaged, or not that of ledger.jsonl; ask"):
        ChainedLines(path, "ask", counted=True).read()
    lines.count_path.unlink()
    with pytest.raises(FileError, match=r"ledger.jsonl.count cannot be read .*; ask"):
        ChainedLines(path, "ask", counted=True).read()


def test_a_kill_between_a_line_and_its_count_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.touch()
    lines = ChainedLines(path, "ask", counted=True)
    lines.append({"step": 0})
    assert lines.count_path is not None
    count = lines.count_path.read_bytes()
    lines.append({"step": 1})
    lines.count_path.write_bytes(count)
    assert ChainedLines(path, "", counted=True).read() == [{"step": 0}, {"step": 1}]
    assert lines.read_on() == []
    lines.append({"step": 2})
    assert len(ChainedLines(path, "", counted=True).read()) == 3


def test_the_names_of_files_are_on_the_disk_with_their_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut a log that was begun anew is there: what was given does not count as given by nobody."""
    names = {path.stat().st_ino: path.name for path in [tmp_path]}
    synced: list[str] = []

    def noting(descriptor: int) -> None:
        names.update({path.stat().st_ino: path.name for path in tmp_path.iterdir()})
        synced.append(names[os.fstat(descriptor).st_ino])

    monkeypatch.setattr(os, "fsync", noting)
    (tmp_path / "log").touch()
    lines = ChainedLines(tmp_path / "log", "ask", counted=True)
    lines.append({"step": 0})
    assert synced == []
    lines.append({"step": 1}, sync=True)
    assert synced == ["log", "log.count", tmp_path.name]
    lines.append({"step": 2}, sync=True)
    assert synced[3:] == ["log"]


@pytest.mark.parametrize("kind", ["device", "pipe", "folder", "huge"])
def test_what_is_no_plain_file_or_too_large_is_not_read(kind: str, tmp_path: Path) -> None:
    """A model folder whose `model.json` led to a device was read without end."""
    path = tmp_path / "model.json"
    if kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, files.MOST_TEXT + 1)  # which takes no room on the disk
    with pytest.raises(FileError, match=r"no plain file|more than the|Is a directory"):
        files.read_json(path, "train again")
    if kind != "huge":
        with pytest.raises(FileError, match=r"no plain file|Is a directory"):
            ChainedLines(path, "train again").read()


def test_devices_pipes_and_bombs_in_the_place_of_any_file_are_typed_errors() -> None:
    assert intruders.bombs()[1] == []
