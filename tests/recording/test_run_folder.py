"""What a run writes to its folder: once a step, with or without a folder, and what could not be written is told."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import CheckpointError, FileError
from coterie.recording import checkpoint
from coterie.recording.checkpoint import RunFolder
from coterie.recording.claim import claimed


def test_without_a_folder_all_stays_in_memory() -> None:
    folder = RunFolder()
    assert folder.save(1, dict) is None
    assert folder.write("record", lambda: 7) == 7
    assert folder.where() == "what was computed is in this error's `run`"
    assert folder.unwritten() == ""


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    made = list[int]()

    def content() -> dict[str, Any]:
        made.append(len(made))
        return {"made": len(made)}

    with claimed(tmp_path) as claim:
        folder = RunFolder(claim)
        assert folder.where() == "what was computed is in this error's `run`"
        first = folder.save(3, content)
        assert first == tmp_path / "checkpoints" / "step-00000003.ckpt"
        assert folder.save(3, content) == first
        assert made == [0]
        assert folder.saved_at == 3
        second = folder.save(5, content)
        assert second == tmp_path / "checkpoints" / "step-00000005.ckpt"
        assert folder.where() == f"what was computed is saved in {second}"
        again = RunFolder(claim, saved_at=5)
        assert again.save(5, content) == second
        assert made == [0, 1]
        assert second is not None
        second.unlink()
        assert first is not None
        first.unlink()
        assert again.save(5, content) == second, "the file is gone: it is written again"
        assert made == [0, 1, 2]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert folder.unwritten() == ""
    assert checkpoint.load(second) == {"made": 3}


def test_what_could_not_be_written_is_told_last(tmp_path: Path) -> None:
    with claimed(tmp_path) as claim:
        folder = RunFolder(claim)
        folder.save(1, dict)

        def full() -> None:
            raise FileError("the disk is full")

        with pytest.warns(UserWarning, match="the disk is full"):
            assert folder.write("record", full) is None
        assert folder.where() == "what was computed is in this error's `run`"
        with pytest.warns(UserWarning, match=r"not all of this run is in .*: .*the disk is full"):
            assert "the disk is full" in folder.unwritten()


def test_no_more_than_what_is_too_old_goes(tmp_path: Path) -> None:
    paths = [checkpoint.save(tmp_path, step, {}) for step in (1, 2, 3)]
    assert checkpoint.KEPT == 2
    assert checkpoint.saved(tmp_path) == paths[1:]
    assert [checkpoint.step_of(path) for path in paths] == [1, 2, 3]
    assert checkpoint.step_of(tmp_path / "step-x.ckpt") == -1


@pytest.mark.parametrize("version", [1, 2])
def test_an_earlier_format_is_told_from_damage(tmp_path: Path, version: int) -> None:
    path = tmp_path / "step-00000001.ckpt"
    path.write_bytes(b"coterie-checkpoint %d abc\n" % version)
    with pytest.raises(CheckpointError, match="written by an earlier version"):
        checkpoint.load(path)
    path.write_bytes(b"something else")
    with pytest.raises(CheckpointError, match="not a checkpoint of coterie"):
        checkpoint.load(path)


def test_the_newest_whole_one_is_loaded(tmp_path: Path) -> None:
    paths = [checkpoint.save(tmp_path, step, {"step": step}) for step in (1, 2)]
    assert checkpoint.load_last(paths) == ({"step": 2}, paths[1])
    between = paths[0].with_name("step-00000001b.ckpt")
    between.write_bytes(paths[1].read_bytes())
    paths[1].write_bytes(b"x")
    with pytest.warns(UserWarning, match=r"going on from step-00000001b\.ckpt"):
        assert checkpoint.load_last([paths[0], between, paths[1]]) == ({"step": 2}, between)
    paths[1].write_bytes(b"x")
    with pytest.warns(UserWarning, match=r"going on from step-00000001\.ckpt"):
        assert checkpoint.load_last(paths) == ({"step": 1}, paths[0])
    assert not paths[1].exists()
    paths[0].write_bytes(b"x")
    with pytest.raises(CheckpointError):
        checkpoint.load_last(paths[:1])
    assert paths[0].exists()
