"""User 0's command while NVFLARE works: jobs that end, sites that come back, and how a run is ended or followed.

NVFLARE is a stand-in here; test_consortium.py has the real one.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.waiting import ENOUGH
from typer.testing import CliRunner

from coterie.cli import app
from coterie.errors import CoterieError, KnobError
from coterie.federation import supervision
from coterie.federation.lead import RECORD, REFUSED, RUN, SUMMARY
from coterie.federation.supervision import SUBMITTED
from coterie.recording import Configuration, Point, Record, UserSummary


class Server:
    """NVFLARE's server: each poll of a job takes the next thing that befalls it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.here = folder, ["a", "b"]
        self.submitted: list[str] = []
        self.ended: list[str] = []
        self.befalls: list[Callable[[], str | None]] = []

    @contextmanager
    def session(self, kit: Path, wait: float) -> Iterator[Any]:
        clients = [SimpleNamespace(name=name, last_connect_time=time.time()) for name in self.here]
        yield SimpleNamespace(
            get_system_info=lambda: SimpleNamespace(client_info=clients),
            submit_job=self._submit,
            get_job_meta=lambda job: {"status": self._status(job)},
            abort_job=self.ended.append,
        )

    def _submit(self, job: str) -> str:
        self.submitted.append(f"job {len(self.submitted) + 1}")
        return self.submitted[-1]

    def _status(self, job: str) -> str:
        """Let the next thing befall a job."""
        if job in self.ended:
            return "FINISHED:ABORTED"
        status = self.befalls.pop(0)()
        if status is not None:
            self.ended.append(job)
        return status or "RUNNING"

    def ends(self) -> str | None:
        (self.folder / RUN / SUMMARY).write_text("it is over")
        return None

    def dies(self) -> str | None:
        return "FINISHED:EXECUTION_EXCEPTION"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    there = Server(tmp_path)
    monkeypatch.setattr(supervision, "session_of", there.session)
    monkeypatch.setattr(supervision, "SECONDS_BETWEEN_POLLS", 0.0)
    monkeypatch.setattr(supervision, "SECONDS_TO_RECONNECT", 0.0)
    (tmp_path / "coterie.toml").write_text('me = "me"\nsites = ["a", "b"]\n')
    (tmp_path / "server").mkdir()
    (tmp_path / RUN).mkdir()
    return there


def begins(server: Server) -> str | None:
    """Let the run have a record, as from its first steps on."""
    me = UserSummary(name="me", examples=9)
    made = Configuration(rule="Alone()", me=me, peers={}, steps=20)
    Record(made, server.folder / RUN / RECORD).add(Point(step=0))
    return None


def test_nobody_leads_beside_a_job_that_runs(server: Server) -> None:
    server.befalls = [lambda: None]
    server.submitted = ["job 1"]
    (server.folder / SUBMITTED).write_text("job 1\n")
    with pytest.raises(KnobError, match=r"runs already: follow it .*attach"):
        supervision.follow(server.folder, resume=True, wait=0.0, progress=False)
    assert server.submitted == ["job 1"]
    assert (server.folder / SUBMITTED).exists(), "it is who follows that job who takes it away"


def test_of_two_who_lead_at_once_the_second_is_told(server: Server) -> None:
    """Neither has submitted a job when the other one looks."""
    first, both = threading.Event(), threading.Event()

    def waits() -> str | None:
        first.set()
        assert both.wait(ENOUGH)
        return server.ends()

    server.befalls = [waits]
    said: list[str] = []
    thread = threading.Thread(
        target=lambda: said.append(supervision.follow(server.folder, progress=False))
    )
    thread.start()
    assert first.wait(ENOUGH)
    (server.folder / SUBMITTED).unlink()  # as before it is written
    try:
        with pytest.raises(KnobError, match=r"runs already: follow it .*attach"):
            supervision.follow(server.folder, progress=False)
    finally:
        both.set()
        thread.join(ENOUGH)
    assert said == ["it is over"]
    assert server.submitted == ["job 1"]


def test_jobs_that_end_early_are_counted_and_user_0_goes_on_alone(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def alone(folder: Path, sites: Any) -> None:
        server.ends()

    monkeypatch.setattr(supervision, "lead", alone)
    server.befalls = [server.dies] * 3
    supervision.follow(server.folder, attempts=3, show_line=said.append, progress=False)
    assert len(server.submitted) == 3
    assert said[-1] == "3 jobs in a row have ended early; going on alone"


def test_without_sites_nothing_begins_and_later_the_run_goes_on_alone(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.here = []
    with pytest.raises(CoterieError, match="0 of 2 sites are connected after 0 s"):
        supervision.follow(server.folder, wait=0.0, progress=False)
    monkeypatch.setattr(supervision, "lead", lambda folder, sites: server.ends())
    server.here = ["a"]

    def lost() -> str | None:
        server.here = []
        return server.dies()

    server.befalls = [lost]
    said: list[str] = []
    supervision.follow(server.folder, wait=0.0, show_line=said.append, progress=False)
    assert said[-1] == "no site is left; going on alone"


def test_a_refused_run_is_told_by_the_command(server: Server) -> None:
    """The job runs in another process, which leaves a note."""

    def refuses() -> str | None:
        (server.folder / RUN / REFUSED).write_text("a gives 50 more gradients")
        return None

    server.befalls = [refuses]
    with pytest.raises(KnobError, match="a gives 50 more gradients"):
        supervision.follow(server.folder, progress=False)


@pytest.mark.parametrize("by", ["Ctrl-C", "SIGTERM", "SIGHUP", "stop"])
def test_who_ends_the_command_ends_the_job_and_is_told_how_to_go_on(
    by: str, server: Server
) -> None:
    """The sites would otherwise go on giving gradients to a run that nobody follows."""
    handlers = [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGHUP)]

    def end() -> str | None:
        if by == "Ctrl-C":
            raise KeyboardInterrupt
        if by == "stop":  # from another terminal
            assert supervision.stop(server.folder)
        else:
            os.kill(os.getpid(), getattr(signal, by))
        return None

    server.befalls = [end, lambda: None, lambda: None]
    result = CliRunner().invoke(app, ["federate", "run", str(server.folder)])
    assert result.exit_code == 130
    assert set(server.ended) == {"job 1"}
    assert f"coterie federate run {server.folder} --resume" in result.output
    assert handlers == [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGHUP)]
    result = CliRunner().invoke(app, ["federate", "stop", str(server.folder)])
    assert "no job runs" in result.output


def test_a_job_whose_terminal_is_gone_is_followed_again(server: Server) -> None:
    result = CliRunner().invoke(app, ["federate", "attach", str(server.folder)])
    assert "no job of" in result.output
    (server.folder / SUBMITTED).write_text("job of before")
    begins(server)
    server.befalls = [server.dies, server.ends]
    result = CliRunner().invoke(app, ["federate", "attach", str(server.folder)])
    assert "the job has ended early" in result.output
    assert "it is over" in result.output
    assert server.submitted == ["job 1"]


def test_a_clock_that_goes_back_lets_no_site_that_is_gone_look_alive() -> None:
    """Whoever is there gives a new sign of life by the new clock; who is not has one of the future."""
    now = time.time()
    clients = [
        SimpleNamespace(name=name, last_connect_time=None if since is None else now + since)
        for name, since in {"here": -1.0, "gone": 3600.0, "lost": -3600.0, "new": None}.items()
    ]
    session = SimpleNamespace(get_system_info=lambda: SimpleNamespace(client_info=clients))
    assert supervision._heard(session, ["here", "gone", "lost", "new", "other"]) == {"here"}


def test_a_server_that_goes_in_the_middle_is_told_in_words(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to who looks on: NVFLARE raises errors of its own; and a file of jobs may be empty after a kill."""
    path = server.folder / SUBMITTED
    path.write_text("")
    with pytest.raises(KnobError, match=r"no job of .* runs"):
        supervision.follow(server.folder, attach=True)
    path.write_text("job 1\n")
    monkeypatch.setattr(supervision, "session_of", gone_in_the_middle)
    for ask in (supervision.stop, lambda folder: supervision.connected_sites(folder, "a", 0.0)):
        with pytest.raises(CoterieError, match=r"does not answer: \w+Error: .*; start it"):
            ask(server.folder)
    assert not path.exists(), "whoever follows the run submits no other"


@contextmanager
def gone_in_the_middle(kit: Path, wait: float) -> Iterator[Any]:
    def gone(*_: Any) -> Any:
        raise RuntimeError("the connection is closed")

    yield SimpleNamespace(get_system_info=gone, get_job_meta=gone)
