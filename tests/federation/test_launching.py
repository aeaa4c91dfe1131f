"""The process that waits for a job with all that it needs loaded."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.waiting import ENOUGH, until

pytest.importorskip("nvflare")

from nvflare.apis.event_type import EventType

from coterie.federation import launching
from coterie.federation.launching import SpareLauncher

PROGRAM = "import json, os, sys; print(json.dumps([__name__, sys.argv[1:], os.environ['TOKEN']]))"


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SpareLauncher:
    """Return one whose jobs run a module that writes what it was given to a file."""
    out = tmp_path / "said.json"
    program = PROGRAM.replace("print(", f"open({str(out)!r}, 'w').write(")
    (tmp_path / "job_of_the_test.py").write_text(f"{program}\nsys.exit(3)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(sys.path)}")
    monkeypatch.setattr(launching, "SECONDS_TO_THE_NEXT", 1e6)  # none is left behind
    command = f"{sys.executable} -m job_of_the_test -m 'a folder' --set x=1"
    monkeypatch.setitem(launching.COMMAND, "site", lambda context: command)
    monkeypatch.setattr(
        "coterie.federation.launching.job_launcher_utils.get_credential_env",
        lambda args: {"TOKEN": "s"},
    )
    return SpareLauncher("site", ["json"])


def context() -> Any:
    return SimpleNamespace(get_prop=lambda name: {})


def test_a_job_is_run_by_the_process_that_waits(launcher: SpareLauncher, tmp_path: Path) -> None:
    launcher.handle_event(EventType.SYSTEM_BOOTSTRAP, context())
    waiting = launcher._spare
    assert waiting is not None
    handle = launcher.launch_job({}, context())
    assert waiting.wait(ENOUGH) == 3
    said = json.loads((tmp_path / "said.json").read_text())
    assert said == ["__main__", ["-m", "a folder", "--set", "x=1"], "s"]
    assert "s" not in (waiting.args if isinstance(waiting.args, list) else []), "no secret is shown"
    handle.wait()


def test_one_that_was_killed_is_replaced(launcher: SpareLauncher, tmp_path: Path) -> None:
    launcher.handle_event(EventType.SYSTEM_BOOTSTRAP, context())
    assert launcher._spare is not None
    launcher._spare.kill()
    launcher._spare.wait(ENOUGH)
    launcher.launch_job({}, context()).wait()
    assert (tmp_path / "said.json").exists()


@pytest.mark.parametrize("again", [True, False])
def test_the_process_of_a_job_that_is_killed_is_started_again_in_its_job(
    again: bool, launcher: SpareLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends by itself at the second time; one that is killed at once is not started for ever."""
    monkeypatch.setattr(launching, "SECONDS_TO_LIVE", 0.0 if again else 1e6)
    program = f"import pathlib, signal, os\npath = pathlib.Path({str(tmp_path / 'times')!r})\n"
    program += "path.open('a').write('x')\n"
    program += "len(path.read_text()) < 2 and os.kill(os.getpid(), signal.SIGKILL)"
    (tmp_path / "job_of_the_test.py").write_text(program)
    handle = launcher.launch_job({}, context())
    handle.wait()
    assert (tmp_path / "times").read_text() == ("xx" if again else "x")


def test_the_process_of_a_job_that_is_ended_stays_ended(
    launcher: SpareLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "SECONDS_TO_LIVE", 0.0)
    times = tmp_path / "times"
    program = f"import time; open({str(times)!r}, 'a').write('x'); time.sleep(5)"
    (tmp_path / "job_of_the_test.py").write_text(program)
    handle = launcher.launch_job({}, context())
    until(times.exists, "the job's start")
    ending = threading.Thread(target=handle.wait)
    ending.start()
    handle.terminate()
    ending.join()
    assert times.read_text() == "x"


def test_who_waits_ends_with_its_parent() -> None:
    """Whatever kills the parent closes the pipe."""
    command = [sys.executable, "-m", "coterie.federation.launching", "json"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as waiting:
        assert waiting.stdin is not None
        waiting.stdin.close()
        assert waiting.wait(ENOUGH) == 0
