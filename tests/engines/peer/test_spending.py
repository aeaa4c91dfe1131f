"""What a ledger counts, refuses and tells, and what is left of a promise."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from coterie.engines.peer import ledger as module
from coterie.engines.peer.ledger import Ledger, Spending, kept_secret, read_secret
from coterie.errors import FileError, KnobError
from coterie.privacy.accountant import MAX_KINDS, Event, epsilon_of
from coterie.privacy.privacy import Privacy

EVENT, OTHER = Event(1.0, 20.0), Event(0.5, 30.0)
PROMISE = Privacy(epsilon=1.0, delta=1e-5, clip=2.0)


def nothing() -> None:
    return None


@pytest.fixture(params=[False, True], ids=["in memory", "in a file"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "log" if request.param else None


def test_no_more_than_the_most_is_given(where: Path | None) -> None:
    ledger = Ledger(where)
    assert ledger.given == 0
    assert [ledger.give(2, at_most=5, caller="x") for _ in range(3)] == [True, True, False]
    assert ledger.give(at_most=5, caller="x")
    assert not ledger.give(at_most=5, caller="x")
    assert ledger.given == ledger.given_so_far == 5
    assert ledger.give(10, caller="x"), "no limit"
    assert ledger.given == 15
    assert ledger.spent == {}


def test_private_gradients_are_counted_by_kind(where: Path | None) -> None:
    ledger = Ledger(where)
    assert ledger.spend(EVENT, 2, nothing, caller="x") is None
    assert ledger.spend(OTHER, 1, nothing) is None
    assert ledger.spend(EVENT, 3, nothing) is None
    assert ledger.spend(EVENT, 3, lambda: "enough") == "enough"
    assert ledger.spent == ledger.spent_so_far == {EVENT: 5, OTHER: 1}
    assert ledger.given == 6
    ledger.spent[EVENT] = 0
    assert ledger.spent[EVENT] == 5, "what is returned is a copy"


def test_another_that_reads_the_file_knows_as_much(tmp_path: Path) -> None:
    one, other = (Ledger(tmp_path / "log") for _ in range(2))
    one.spend(EVENT, 2, nothing)
    one.give(3, caller="x")
    one.note(refused="no")
    assert other.given == 5
    assert other.spent == {EVENT: 2}
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line.get("gradients") for line in lines] == [2, 3, None]
    assert (lines[0]["rate"], lines[0]["noise"]) == (1.0, 20.0)
    assert lines[2]["refused"] == "no"


def test_a_clock_that_goes_back_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By more than a minute: the file may be an old copy of itself."""
    now = [time.time()]
    monkeypatch.setattr("coterie.engines.peer.ledger.time.time", lambda: now[0])
    Ledger(tmp_path / "log").spend(EVENT, 1, nothing)
    written = json.loads((tmp_path / "log").read_text())["time"]
    now[0] -= module.MAX_BACK - 2
    assert Ledger(tmp_path / "log").spend(EVENT, 1, nothing) is None
    now[0] -= 4
    said = Ledger(tmp_path / "log").spend(EVENT, 1, nothing)
    assert said == f"its clock has gone back: its log has a line of {written}"
    assert Ledger(tmp_path / "log").given == 2
    now[0] += 100
    assert Ledger(tmp_path / "log").spend(EVENT, 1, nothing) is None


@pytest.mark.parametrize(
    "line", [{"gradients": -1}, {"gradients": "x"}, {"gradients": 1, "noise": 1.0}, {"time": "x"}]
)
def test_a_line_of_what_cannot_be_is_told(tmp_path: Path, line: dict[str, Any]) -> None:
    ledger = Ledger(tmp_path / "log")
    ledger.note(**line)
    with pytest.raises(FileError, match=r"line 1 of those added to .* tells of what cannot be"):
        _ = Ledger(tmp_path / "log").given


def test_a_ledger_is_a_plain_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="must be a plain file"):
        _ = Ledger(tmp_path).given


def test_long_texts_are_cut(tmp_path: Path) -> None:
    Ledger(tmp_path / "log").note(why="x" * 1000, number=10**300)
    line = json.loads((tmp_path / "log").read_text())
    assert line["why"] == "x" * module.MAX_LOGGED_CHARACTERS
    assert line["number"] == 10**300


def test_a_promise_is_kept_to_the_last_gradient(where: Path | None) -> None:
    ledger = Ledger(where)
    spending = Spending(PROMISE, ledger, most=None)
    assert spending.epsilon == 0.0
    allowed = spending.left(EVENT, 10_000)
    assert epsilon_of({EVENT: allowed}, 1e-5) <= 1.0 < epsilon_of({EVENT: allowed + 1}, 1e-5)
    assert spending.left(EVENT, 3) == 3
    assert spending.over_budget(EVENT, allowed) is None
    assert spending.over_budget(EVENT, allowed + 1) == (
        f"{allowed + 1} more gradients would exceed its ε = 1"
    )
    ledger.spend(EVENT, allowed - 1, nothing)
    assert spending.left(EVENT, 10) == 1
    assert spending.over_budget(EVENT, 1) is None
    assert spending.over_budget(EVENT, 2) is not None
    ledger.spend(OTHER, 1, nothing)
    assert spending.left(EVENT, 10) in (0, 1)
    both = {EVENT: allowed - 1, OTHER: 1}
    assert spending.epsilon == epsilon_of(both, 1e-5)
    assert spending.told() == {
        "epsilon": 1.0,
        "delta": 1e-5,
        "clip": 2.0,
        "spent": spending.epsilon,
    }


def test_the_most_is_over_all_kinds(where: Path | None) -> None:
    ledger = Ledger(where)
    spending = Spending(PROMISE, ledger, most=4)
    assert spending.left(EVENT, 10) == 4
    assert spending.over_budget(EVENT, 4) is None
    ledger.spend(OTHER, 3, nothing)
    assert spending.left(EVENT, 10) == 1
    assert spending.over_budget(EVENT, 1) is None
    said = spending.over_budget(EVENT, 2)
    assert said == "it has 1 gradients left to give, and was asked for 2"
    ledger.spend(OTHER, 3, nothing)
    assert spending.left(EVENT, 10) == 0


def test_after_gradients_without_noise_nothing_is_promised(where: Path | None) -> None:
    ledger = Ledger(where)
    spending = Spending(PROMISE, ledger, most=None)
    ledger.spend(EVENT, 1, nothing)
    assert spending.over_budget(EVENT, 1) is None
    ledger.give(caller="x")
    assert spending.epsilon == math.inf
    assert spending.left(EVENT, 1) == 0
    said = spending.over_budget(EVENT, 1)
    assert said is not None
    assert "without noise before" in said


def test_many_kinds_are_counted_as_few() -> None:
    ledger = Ledger()
    for k in range(MAX_KINDS + 8):
        ledger.spend(Event(0.01 * (k + 1), 30.0), 1, nothing)
    spending = Spending(PROMISE, ledger, most=None)
    assert len(spending._beside(EVENT)) <= MAX_KINDS
    assert spending._beside(EVENT).total() == MAX_KINDS + 8
    assert spending.epsilon >= epsilon_of(ledger.spent, 1e-5)


def test_a_secret_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    first = kept_secret(path)
    assert len(first) == 64
    assert kept_secret(path) == read_secret(path) == first
    assert [each.name for each in tmp_path.iterdir()] == ["secret"]
    assert path.stat().st_mode & 0o777 == 0o600
    for mode in (0o601, 0o610, 0o640, 0o604):
        path.chmod(mode)
        with pytest.raises(KnobError, match="others may read the secret"):
            read_secret(path)
    path.chmod(0o400)
    assert read_secret(path) == first
    path.chmod(0o600)
    path.write_bytes(b"\r\n" + b"x" * 16 + b"\n")
    assert read_secret(path) == b"x" * 16
    path.write_bytes(b"x" * 15 + b"\n")
    with pytest.raises(KnobError, match="at least 16 bytes, got 15"):
        read_secret(path)
