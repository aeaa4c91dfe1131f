"""A folder that one process at a time writes to."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.support.folders import claimed_elsewhere
from tests.support.processes import ended, forked

from coterie.errors import FileError, KnobError
from coterie.recording.claim import LOCK, claimed


def test_a_second_process_is_told_who_is_there_and_a_dead_one_is_in_nobodys_way(
    tmp_path: Path,
) -> None:
    out = tmp_path / "deep" / "run"
    message = rf"run is in use by process %d on {socket.gethostname()}; wait until it has ended, stop it, or name"
    with claimed_elsewhere(out) as child:
        for patience in (0.0, 0.3):
            with pytest.raises(FileError, match=message % child), claimed(out, patience):
                pass
    assert (out / LOCK).exists()  # nobody was there to remove it
    with claimed(out):
        assert (out / LOCK).read_text(
            encoding="utf-8"
        ) == f"process {os.getpid()} on {socket.gethostname()}"
        (out / "file").touch()
    assert [path.name for path in out.iterdir()] == ["file"]


def test_who_waits_gets_it_once_the_other_has_gone(tmp_path: Path) -> None:
    with claimed_elsewhere(tmp_path) as child:
        timer = threading.Timer(0.3, os.kill, (child, signal.SIGTERM))
        timer.start()
        with claimed(tmp_path, patience=30.0):
            pass
        timer.join()


def test_one_thread_may_claim_again_and_another_may_not(tmp_path: Path) -> None:
    errors: list[str] = []

    def other() -> None:
        try:
            with claimed(tmp_path):
                pass
        except FileError as error:
            errors.append(str(error))

    with claimed(tmp_path) as first:
        with claimed(tmp_path / ".." / tmp_path.name) as again:
            assert again is first
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert "in use by another thread of this process" in errors[0]
        child = forked(other_process(tmp_path))
        assert ended(child) == 1  # a child that knows of the claim does not have it
        assert (tmp_path / LOCK).exists()
    with claimed(tmp_path):
        pass


def other_process(folder: Path) -> Any:
    def claim() -> None:
        with claimed(folder):
            pass

    return claim


def test_a_folder_that_was_made_and_not_written_to_is_gone_again(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), claimed(tmp_path / "run"):
        _ = 1 / 0
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(KnobError, match=r"`out` must be a folder, .*file' is a file; name another"),
        claimed(tmp_path / "file"),
    ):
        pass
    with (
        pytest.raises(FileError, match=r"run cannot be written \(Not a directory\)"),
        claimed(tmp_path / "file" / "run"),
    ):
        pass

    def read_only(*_: Any) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", read_only)
    message = (
        r"cannot be written \(Read-only file system\); make its folder one that can be written to"
    )
    with pytest.raises(FileError, match=message), claimed(tmp_path):
        pass


def test_a_file_system_without_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    with (
        pytest.warns(UserWarning, match="is on a file system without locks"),
        claimed(tmp_path) as claim,
    ):
        claim.keep()


def test_a_folder_that_is_deleted_is_claimed_anew_unless_another_has_it(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with claimed(out) as claim:
        (out / LOCK).unlink()
        claim.keep()
        assert (out / LOCK).exists()
        out.rename(tmp_path / "moved")
        with pytest.warns(
            UserWarning, match="was deleted while a run wrote to it, and is written anew"
        ):
            claim.keep()
        assert (out / LOCK).exists()
        out.rename(tmp_path / "moved too")
        with (
            claimed_elsewhere(out),
            pytest.warns(UserWarning, match="deleted"),
            pytest.raises(FileError, match="was deleted, and holds something else now"),
        ):
            claim.keep()
        shutil.rmtree(out)
        with pytest.warns(UserWarning, match="deleted"):
            assert claim.attempt("record", lambda: 3) == 3
