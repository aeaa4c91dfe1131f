"""What a participant sees while NVFLARE works for it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from coterie.engines.peer import Caps
from coterie.engines.peer.ledger import Ledger
from coterie.federation import workspace
from coterie.federation.watching import LOG, NewLines, RunWatch, Screen, ServerWatch, SiteWatch
from coterie.recording import Configuration, Point, Record, UserSummary


def words(said: list[str]) -> list[str]:
    """Return lines without the time before them."""
    return [line.partition(" ")[2] for line in said]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("coterie.federation.watching.SECONDS_BETWEEN_LINES", 0.0)
    return []


def test_a_site_sees_the_connection_what_it_gave_and_what_it_refused(
    tmp_path: Path, said: list[str]
) -> None:
    (tmp_path / LOG).write_text("of an earlier day: Successfully registered client:basel\n")
    ledger = Ledger(tmp_path / "requests.jsonl")
    ledger.give(2, caller="user 0", step="7")
    watch = SiteWatch(
        tmp_path,
        NewLines(tmp_path / LOG),
        Caps(gradients=100),
        ledger.given,
        Screen(said.append, terminal=False),
    )
    watch()
    with (tmp_path / LOG).open("a") as log:
        log.write("INFO - Successfully registered client:basel for project trial.\nnot a who")
    watch()
    ledger.give(5, caller="user 0", step="8")
    ledger.give(5, caller="user 0", step="9")
    watch()
    for step in ("10", "11"):
        ledger.note(caller="user 0", step=step, refused="not finite")
    watch()
    ledger.note(caller="user 0", sum_with="bern", fingerprint="12ab-34cd")
    watch()
    assert words(said) == [
        "waiting for the server",
        "connected to the server",
        "no request yet",
        "step 9: 12 of 100 gradients given",
        "refused at step 10: not finite",
        "step 11: 12 of 100 gradients given, 2 requests refused",
        "masked sums with bern, whose key is 12ab-34cd",
    ]


def test_user_0_sees_which_sites_are_connected(tmp_path: Path, said: list[str]) -> None:
    watch = ServerWatch(tmp_path, Screen(said.append, terminal=False))
    log = "ClientManager - INFO - Client: New client basel@10.0.0.7 joined. Sent token.  Total clients: 1\n"
    log += "ClientManager - INFO - Client: New admin lead joined. Sent token.  Total clients: 1\n"
    log += "ClientManager - INFO - Client: New client bern joined. Sent token.  Total clients: 2\n"
    log += "FederatedServer - INFO - Remove the dead Client. Name: bern.  Total clients: 1\n"
    log += "ClientManager - INFO - Client Name:basel left.  Total clients: 0\n"
    (tmp_path / LOG).write_text(log)
    watch()
    assert [line for line in words(said) if "sites" not in line] == [
        "basel is connected",
        "bern is connected",
        "bern is lost",
        "basel has left",
    ]
    assert words(said)[-1] == "sites connected: 0"


def test_what_the_process_says_is_in_its_log_and_not_on_the_screen(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("psutil")
    monkeypatch.setattr(workspace, "SECONDS_BETWEEN_LOOKS", 0.01)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    looks: list[int] = []
    code = "import sys, time; print('to one', flush=True); print('to other', file=sys.stderr); time.sleep(0.3)"
    code += "; sys.exit(3)"
    look = lambda: looks.append(1)  # noqa: E731
    assert workspace.run_process([sys.executable, "-c", code], tmp_path, lambda: look) == 3
    assert looks
    assert capfd.readouterr().out == ""
    assert sorted((tmp_path / LOG).read_text().split("\n")) == ["", "to one", "to other"]
    assert (tmp_path / LOG).stat().st_mode & 0o077 == 0


def test_without_a_bar_a_run_is_told_by_tenths(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter(range(100))
    monkeypatch.setattr("coterie.recording.progress.time.monotonic", lambda: float(next(seconds)))
    configuration = Configuration(
        rule="Alone()", me=UserSummary(name="me", examples=9), peers={}, steps=20
    )
    shown: list[int] = []
    show_new = RunWatch(
        tmp_path, 20, lambda *numbers: shown.append(numbers[0]), said.append, tenths=True
    )
    record = Record(configuration, tmp_path / "record.jsonl")
    for step in (0, 1, 2, 3, 20):
        record.add(Point(step=step, own_loss=0.5, validation={"loss": 1 / (1 + step)}))
        show_new()
    assert shown == [0, 1, 2, 3, 20]
    assert said == [
        "step 2 of 20: own loss 0.5 · best validation loss 0.3333 · 9 s left",
        "step 20 of 20: own loss 0.5 · best validation loss 0.04762",
    ]


def test_lines_that_are_not_whole_wait(tmp_path: Path) -> None:
    lines, path = NewLines(tmp_path / "log"), tmp_path / "log"
    assert lines() == []
    path.write_text("one\ntw")
    assert lines() == ["one"]
    path.write_text("one\ntwo\nthree\n")
    assert lines() == ["two", "three"]


def test_what_comes_from_elsewhere_does_not_steer_the_terminal(
    tmp_path: Path, said: list[str]
) -> None:
    ledger = Ledger(tmp_path / "requests.jsonl")
    watch = SiteWatch(
        tmp_path, NewLines(tmp_path / LOG), Caps(), 0, Screen(said.append, terminal=False)
    )
    ledger.note(caller="user 0", step="1", failed="ValueError: \033[2J\rall is well")
    watch()
    assert words(said)[1] == "refused at step 1: ValueError: ?[2J?all is well"


def test_on_a_terminal_one_line_changes(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(print, terminal=True)
    screen.now("step 1")
    screen.now("step 2")
    screen.line("refused")
    shown = capsys.readouterr().out
    assert shown.startswith("\r\033[Kstep 1\r\033[Kstep 2\r\033[K")
    assert shown.endswith("refused\nstep 2")


def test_what_a_screen_could_not_show_yet_is_shown_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a terminal lines come every ten seconds; the last one must tell how things stand in the end."""
    said: list[str] = []
    seconds = [0.0]
    monkeypatch.setattr("coterie.federation.watching.time.monotonic", lambda: seconds[0])
    ledger = Ledger(tmp_path / "requests.jsonl")
    watch = SiteWatch(
        tmp_path,
        NewLines(tmp_path / LOG),
        Caps(gradients=100),
        0,
        Screen(said.append, terminal=False),
    )
    for step in range(3):
        ledger.give(5, caller="user 0", step=str(step))
        watch()
    assert words(said) == ["waiting for the server"]
    for seconds[0] in (5.0, 15.0, 30.0):  # nothing more is asked
        watch()
    assert words(said) == [
        "waiting for the server",
        f"step 2: {ledger.given} of 100 gradients given",
    ]


def test_a_site_that_does_not_connect_is_told_what_to_look_for(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once; its certificate may have ended while it was connected, or the server may be gone."""
    now = [0.0]
    monkeypatch.setattr("coterie.federation.watching.time.monotonic", lambda: now[0])
    screen, log = Screen(said.append, terminal=False), NewLines(tmp_path / LOG)
    watch = SiteWatch(tmp_path, log, Caps(gradients=100), 0, screen)
    for now[0] in (1.0, 59.0, 61.0, 90.0):
        watch()
    told = f"no connection after 60 s: `coterie federate doctor {tmp_path}` finds out why"
    assert words(said) == ["waiting for the server", told]


def test_a_full_disk_is_on_the_sites_screen(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log, which would say so, cannot be written."""
    free = [10**9]
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free[0]))
    watch = SiteWatch(
        tmp_path,
        NewLines(tmp_path / LOG),
        Caps(gradients=100),
        0,
        Screen(said.append, terminal=False),
    )
    for free[0] in (10**9, 1000, 0, 10**9):
        watch()
    told = [line for line in words(said) if line != "waiting for the server"]
    assert told == [
        f"the disk of {tmp_path} is full: nothing is given until there is room",
        "there is room again",
    ]
