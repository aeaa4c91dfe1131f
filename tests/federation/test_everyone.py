"""Every site trains a model of its own, with no network between; `test_everyone_consortium.py` has NVFLARE."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.members import NAMES, Job, change, copied, everyone_in_process, set_up
from tests.support.waiting import ENOUGH
from typer.testing import CliRunner

import coterie
from coterie.cli import app
from coterie.engines.remote.sites import Replies
from coterie.errors import KnobError
from coterie.federation.lead import NEWS, RECORD, REFUSED, RUN, SUMMARY
from coterie.federation.manifest import Kit
from coterie.federation.member import MemberRun
from coterie.federation.relay import MEMBERS, MemberProgress, relay, unfinished
from coterie.federation.settings import Training, site_settings

QUICK: dict[str, Any] = {"patience": ENOUGH, "pause": 0.05}
STEPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A consortium whose sites give gradients of all their training rows, so that it does not matter who draws."""
    place = tmp_path_factory.mktemp("everyone") / "trial"
    set_up(place, Training(steps=STEPS, batch_size=60, timeout=ENOUGH))
    change(place, NAMES, norm="inf", examples="1")
    return place


@pytest.fixture(scope="module")
def expected(folder: Path) -> coterie.Runs:
    """Everyone trained in this process, with the sites' examples."""
    return everyone_in_process(folder, NAMES)


def models_of(folder: Path, names: Sequence[str]) -> dict[str, dict[str, torch.Tensor]]:
    return {
        name: torch.load(folder / "sites" / name / RUN / "model.pt", weights_only=True)
        for name in names
    }


def record(folder: Path, name: str) -> coterie.Record:
    return coterie.Record.load(folder / "sites" / name / RUN / RECORD)


def assert_same(folder: Path, expected: coterie.Runs) -> None:
    for name, found in models_of(folder, NAMES).items():
        for key, value in expected.models[name].state_dict().items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)
        end = record(folder, name).end
        assert (end.step, end.left_out) == (STEPS, {})
        assert end.verdict == expected.runs[name].record.end.verdict
        assert end.test == pytest.approx(dict(expected.runs[name].record.end.test), rel=1e-4)


def test_all_sites_get_what_train_everyone_gives_them(
    folder: Path, tmp_path: Path, expected: coterie.Runs
) -> None:
    place = copied(folder, tmp_path / "trial")
    relay(place, Job(place), **QUICK)
    assert_same(place, expected)
    for name in NAMES:
        assert (place / "sites" / name / RUN / "index.html").exists()
        lines = [
            json.loads(line)
            for line in (place / "sites" / name / "requests.jsonl").read_text().splitlines()
        ]
        lines = [line for line in lines if "calls_with" not in line]
        assert {line["caller"] for line in lines} == set(NAMES) - {name}
        given = sum(line["gradients"] for line in lines)
        assert given == sum(
            record(place, other).end.costs[name].gradients for other in NAMES if other != name
        )
    there = {path.name for path in (place / RUN).iterdir()}
    assert there == {MEMBERS, NEWS, SUMMARY}, (
        "the server is told how far everybody is, and nothing else"
    )
    assert unfinished(place / RUN) == []


def test_a_lost_server_costs_no_step(folder: Path, tmp_path: Path, expected: coterie.Runs) -> None:
    """All stop where they are, save their state, and go on in the next job to the same models."""
    place = copied(folder, tmp_path / "trial")
    relay(place, Job(place, lost_at=5), **QUICK)
    assert unfinished(place / RUN) == list(NAMES)
    assert (place / RUN / SUMMARY).read_text().count("has failed with PeerLost") == len(NAMES)
    relay(place, Job(place), **QUICK)
    assert unfinished(place / RUN) == []
    assert_same(place, expected)
    for name in NAMES:
        lines = (place / "sites" / name / "requests.jsonl").read_text().splitlines()
        exchanges = STEPS + 39  # those of the closed form
        assert sum('"gradients"' in line for line in lines) == 2 * exchanges, (
            "no step is asked for again"
        )


def test_a_site_that_is_lost_is_left_out_and_ends_in_another_job(
    folder: Path, tmp_path: Path
) -> None:
    """Two go on without it, one of whom is late twice; when it is back they have ended, and answer it."""
    place, both = copied(folder, tmp_path / "trial"), NAMES[:2]
    change(place, NAMES, rule='"wga"', misses="2")
    relay(
        place,
        Job(place, both, silent=lambda name, step: name == "bern" and step in (3, 5)),
        patience=10.0,
        pause=0.05,
    )
    assert unfinished(place / RUN) == ["chur"]
    assert "chur was not heard of after step 0" in (place / RUN / SUMMARY).read_text()
    lost = {"no answer": 2, "not waited for": STEPS - 2}
    assert record(place, "basel").end.left_out == {"bern": {"no answer": 2}, "chur": lost}
    assert record(place, "bern").end.left_out == {"chur": lost}
    before = models_of(place, both)
    relay(place, Job(place), **QUICK)
    assert unfinished(place / RUN) == []
    assert (record(place, "chur").end.step, record(place, "chur").end.left_out) == (STEPS, {})
    after = models_of(place, both)
    assert all(torch.equal(before[n][k], after[n][k]) for n in both for k in before[n]), (
        "they do not train again"
    )


def test_nobody_begins_where_caps_are_too_small_for_all(folder: Path, tmp_path: Path) -> None:
    place = copied(folder, tmp_path / "trial")
    # at five points in the first half, at one in the second; then closed forms
    asked = 5 * STEPS // 2 + STEPS // 2 + 219
    change(place, ["bern"], gradients=str(2 * asked - 1))
    relay(place, Job(place), **QUICK)
    said = (place / RUN / REFUSED).read_text()
    assert said.startswith(
        f"bern gives {2 * asked - 1} more gradients, and 2 sites may ask for {2 * asked}. Take"
    )
    assert not any((place / "sites" / name / RUN / RECORD).exists() for name in NAMES)


def test_a_run_that_fails_tells_its_kind_and_keeps_the_reason(folder: Path, tmp_path: Path) -> None:
    class Failing:
        def ask(
            self, names: Sequence[str], method: str, timeout: float, **arguments: Any
        ) -> Replies:
            raise ValueError("a patient's name")

    place = copied(folder, tmp_path / "trial")
    member, other = (MemberRun(place / "sites" / name) for name in ("bern", "chur"))
    assert member.train(Failing())["failed"] == "PeerLost", "nobody has passed on keys"
    member.key("job")
    assert member.meet({"chur": other.key("job")}) == {"met": ["chur"]}
    assert member.train(Failing()) == {
        "step": 0,
        "steps": STEPS,
        "ended": False,
        "failed": "ValueError",
        "began": True,
    }
    assert "a patient's name" in (member.out / REFUSED).read_text()
    assert member.responder.ready()["willing"], "it goes on answering"


def test_what_a_site_says_of_itself_is_taken_as_far_as_it_can_be(tmp_path: Path) -> None:
    one = MemberProgress(patience=10.0)
    one.hear(
        "bern", {"step": -3, "steps": "many", "ended": "yes", "failed": "a\x1b[2J" + "b" * 500}
    )
    assert (one.step, one.steps, one.ended) == (0, 0, False)
    assert one.failed is not None
    assert one.failed.isprintable()
    assert len(one.failed) <= 101
    one = MemberProgress(patience=10.0)
    states: list[Any] = [None, [], "ended", 7]
    for state in states:
        one.hear("bern", state)
    assert not one.is_over


def test_a_site_that_has_forgotten_that_it_trains_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its process was started again: it has another key, and nobody has asked it to train."""
    seconds = [0.0]
    monkeypatch.setattr("coterie.federation.relay.time.monotonic", lambda: seconds[0])
    one = MemberProgress(patience=60.0, last_seen=0.0)
    for seconds[0], began, anew in ((0, False, False), (4, False, False), (5, True, False)):
        one.hear("bern", {"step": 3, "steps": 9, "began": began})
        assert one.is_anew is anew
    for seconds[0], anew in ((20, False), (24, False), (26, True)):
        one.hear("bern", {"step": 3, "steps": 9, "began": False})
        assert one.is_anew is anew
    one.hear("bern", {"step": 9, "steps": 9, "ended": True, "began": False})
    assert not one.is_anew, "it has ended, and answers"


def test_nothing_is_promised_about_rows_where_everyone_trains(folder: Path, tmp_path: Path) -> None:
    """The points of a site's own run leave it without noise, so that a promise would not be kept."""
    place = copied(folder, tmp_path / "trial") / "sites" / "bern"
    text = (place / "coterie.toml").read_text()
    assert "[privacy]" not in text
    (place / "coterie.toml").write_text(
        f"{text}\n[privacy]\nepsilon = 1.0\ndelta = 1e-5\nclip = 1.0\n"
    )
    with pytest.raises(KnobError, match="tell of its rows without noise"):
        site_settings(place)


def test_masked_sums_are_refused_where_everyone_trains(folder: Path, tmp_path: Path) -> None:
    place = copied(folder, tmp_path / "trial") / "sites" / "bern"
    with (place / "coterie.toml").open("a") as file:
        file.write("\n[sums]\npeers = 2\n")
    with pytest.raises(KnobError, match="where everyone trains, sums are not masked"):
        site_settings(place)
    command = [
        "federate",
        "init",
        str(tmp_path / "x"),
        "--data",
        "a.csv",
        "--target",
        "ill",
        "--server",
        "localhost",
    ]
    answer = CliRunner().invoke(
        app, [*command, "--site", "bern", "--everyone", "--secure-sums", "--rule", "wga"]
    )
    assert answer.exit_code == 2
    assert "could work out the parts" in " ".join(answer.output.split())


def test_a_site_says_whom_it_answers_and_what_it_gives_at_most(folder: Path) -> None:
    """As many gradients again for each who asks, and no word of a run of its own where there is none."""
    settings = site_settings(folder / "sites" / "chur")
    assert settings.sites == ("basel", "bern")
    assert settings.caps.gradients == 2 * 10_000
    assert settings.training == Training(steps=STEPS, batch_size=60, timeout=ENOUGH)
    answer = CliRunner().invoke(app, ["federate", "check", str(folder / "sites" / "chur")])
    assert answer.exit_code == 0, answer.output
    for line in (
        "chur: 24 examples;",
        f"trained here: {STEPS} steps by 'adaptive'",
        "asked and answered: basel, bern",
    ):
        assert line in answer.output
    assert site_settings(folder / "sites" / "basel").data.table == str(folder / "mine.csv")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"members": ("bern", "chur")}, "'basel' too"),
        ({"members": ("basel", "basel")}, "different names"),
        ({"members": ("basel", "../bern")}, "letters, digits"),
        ({"training": {"hobby": 1}}, "'hobby', which is not a setting"),
        ({"training": {"steps": -1}}, "`steps`"),
        ({"training": {"lr": "fast"}}, "`lr`"),
    ],
)
def test_a_kit_with_a_strange_proposal_is_refused(
    folder: Path, what: dict[str, Any], message: str
) -> None:
    kit = Kit.load(folder / "sites" / "basel")
    with pytest.raises(KnobError, match=message):
        replace(kit, **what)
