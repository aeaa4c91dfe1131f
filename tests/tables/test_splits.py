"""Several splits of user 0's rows: the error of their mean, and the verdict by it."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import coterie
from coterie.cli import app
from coterie.data import TableTask, from_table
from coterie.errors import KnobError
from coterie.recording.configuration import Configuration, UserSummary
from coterie.recording.record import Record
from coterie.recording.result import Difference, End, GuardDecision
from coterie.reporting.verdict import judged, verdict
from coterie.tables.fit import fit
from coterie.tables.splits import FOLDER, Split, over_splits

COLUMNS: dict[str, Any] = {"user_column": "who", "target": "y", "me": "a", "own_examples": 12}


def split(value: float) -> Split:
    return Split(
        "with peers",
        {"loss": Difference(ours=1 + value, alone=1.0, error=0.1, less_is_better=True)},
    )


def test_the_error_is_that_of_the_mean_over_splits_that_overlap() -> None:
    """Differences that depend on the test rows alone: the mean over splits has a variance that can be simulated."""
    rng = np.random.default_rng(0)
    means, errors, trials = [], [], 2000
    for _ in range(trials):
        rows = rng.normal(size=50)
        found = over_splits(
            [split(rng.choice(rows, 10, replace=False).mean()) for _ in range(8)], 10, 40
        )
        means.append(found.measures["loss"].difference)
        errors.append(found.measures["loss"].error)
    variance, claimed = np.var(means), np.mean(np.square(errors))
    assert claimed == pytest.approx(variance, rel=0.12)
    naive = claimed * (1 / 8) / (1 / 8 + 10 / 40)
    assert naive < 0.5 * variance  # what an error without the correction would claim


def test_by_chance_a_verdict_is_rare() -> None:
    rng = np.random.default_rng(1)
    found = []
    for _ in range(600):
        rows = rng.normal(size=50)
        splits = [split(rng.choice(rows, 10, replace=False).mean()) for _ in range(10)]
        found.append(judged("me", over_splits(splits, 10, 40)).finding)
    # of 0.05, by a test of t that is not exact
    assert np.mean([each != "unclear" for each in found]) < 0.08


def visits(n: int = 300) -> pd.DataFrame:
    rng = np.random.default_rng(5)
    u, v, w = rng.normal(size=(3, n))
    y = np.where(2 * u + v + rng.normal(size=n) / 2 > 0, "yes", "no")
    return pd.DataFrame({"who": np.resize(["a", "b", "c"], n), "u": u, "v": v, "w": w, "y": y})


def again(k: int) -> tuple[TableTask, coterie.WeightedAveraging]:
    return from_table(visits(), **COLUMNS, seed=k), coterie.WeightedAveraging(0.8)


def test_the_verdict_is_on_the_mean_and_so_in_record_and_page_and_after_resuming(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {
        "steps": 6,
        "lr": 0.1,
        "progress": False,
        "trackers": (),
        "measure": False,
    }
    others = [functools.partial(again, k) for k in (1, 2)]
    run = fit(*again(0), "linear", tmp_path, again=others, **settings)
    assert run is not None
    single = [Record.load(tmp_path / FOLDER / f"{k:02d}" / "record.jsonl").end for k in (2, 3)]
    plain = fit(*again(0), "linear", tmp_path.with_name("plain"), **settings)
    assert plain is not None
    for end, seed in zip([plain.record.end, *single], range(3), strict=True):
        assert end.test["loss"] != run.test["loss"] or seed == 0
    found = run.record.end.comparison
    assert found is not None
    assert found.splits == 3
    each = [
        end.comparison.measures["loss"].difference if end.comparison else 0.0
        for end in (plain.record.end, *single)
    ]
    assert found.measures["loss"].difference == pytest.approx(np.mean(each))
    constants = [float(end.constant or 0) for end in (plain.record.end, *single)]
    assert run.record.end.constant == pytest.approx(np.mean(constants))
    wanted = np.std(each, ddof=1) * np.sqrt(1 / 3 + 20 / (12 + 20))
    assert found.measures["loss"].error == pytest.approx(wanted)
    record, page = (
        Record.load(tmp_path / "record.jsonl"),
        (tmp_path / "index.html").read_text(encoding="utf-8"),
    )
    assert record.end == run.record.end
    assert "on 3 random splits with 20 test rows each" in record.end.verdict
    assert record.end.verdict == run.verdict.sentence
    assert record.end.verdict in page
    assert "The splits, against training alone" in page
    more = [*others, functools.partial(again, 3)]
    resumed = fit(*again(0), "linear", tmp_path, again=more, resume=True, **settings)
    assert resumed is not None
    assert resumed.record.end.comparison is not None
    assert resumed.record.end.comparison.splits == 4


def test_where_alone_is_served_both_are_said() -> None:
    measures = {"loss": Difference(ours=0.5, alone=0.5, error=0.0, less_is_better=True)}
    guard = GuardDecision(served="alone", difference=0.1, error=0.2)
    end = End(
        step=1,
        best_step=1,
        guard=guard,
        comparison=over_splits([Split("alone", measures)] * 3, 10, 40),
    )
    asked = Configuration(rule="", me=UserSummary(name="me", examples=9), peers={"b": 9}, steps=1)
    said = verdict(asked, end)
    assert said.finding == "alone"
    assert said.sentence.startswith("me gets the model trained without peers: ")
    assert "It is not clear whether a model for me is better or worse" in said.sentence
    assert said.sentence.endswith("3 splits are too few to be sure.")
    said = verdict(asked, replace(end, constant=0.4))
    assert said.sentence == (
        "The model for me is no better than a constant: its loss on 3 random splits with 10 test"
        " rows each is 0.5, a constant has 0.4."
    )
    said = judged("me", over_splits([split(-0.3), split(-0.31), split(-0.29)] * 3, 10, 40))
    assert said.finding == "better"
    wanted = (
        "A model for me is better than one trained alone: loss -0.3000 ± 0.0052 on 9 random splits"
    )
    assert said.sentence.startswith(wanted)


def test_without_a_model_trained_alone_there_is_nothing_to_compare(tmp_path: Path) -> None:
    with pytest.raises(KnobError, match="`--repeats` compares with a model trained alone"):
        fit(
            *again(0),
            "linear",
            tmp_path,
            again=[functools.partial(again, 1)],
            guard="off",
            steps=2,
            progress=False,
        )


@pytest.mark.parametrize("rule", ["wga", "fedavg"])
def test_repeats_on_the_command_line(tmp_path: Path, rule: str) -> None:
    visits().assign(patient=np.arange(300)).to_csv(tmp_path / "visits.csv", index=False)
    named = ["--user-column", "who", "--target", "y", "--me", "a", "--steps", "10", "--rule", rule]
    command = [
        "train",
        "--data",
        str(tmp_path / "visits.csv"),
        *named,
        "--out",
        str(tmp_path / "run"),
        "--repeats",
        "3",
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    end = Record.load(tmp_path / "run" / "record.jsonl").end
    assert end.verdict in " ".join(result.output.split())
    assert "3 random splits" in end.verdict
    page = (tmp_path / "run" / "index.html").read_text(encoding="utf-8")
    assert "The model served, that of the first split, on" in page
    assert f"{end.seconds:.3g} s" in page
    others = [
        Record.load(path / "record.jsonl").end
        for path in sorted((tmp_path / "run" / "splits").iterdir())
    ]
    assert len(others) == 2
    assert end.seconds > sum(other.seconds for other in others)  # of all three
    assert result.stderr.count("'patient' looks like an id") == 1  # not once for each split


@pytest.mark.parametrize("rule", ["wga", "fedavg"])
def test_repeats_and_methods_for_everybody(tmp_path: Path, rule: str) -> None:
    visits(120).to_csv(tmp_path / "visits.csv", index=False)
    named = ["--user-column", "who", "--target", "y", "--me", "all", "--steps", "4"]
    command = ["train", "--data", str(tmp_path / "visits.csv"), *named, "--rule", rule]
    out = tmp_path / "run"
    result = CliRunner().invoke(app, [*command, "--out", str(out), "--repeats", "3"])
    assert result.exit_code == 0, result.output
    index = (out / "index.html").read_text(encoding="utf-8")
    for name in "abc":
        end = Record.load(out / name / "record.jsonl").end
        folders = [out / "splits" / f"{k:02d}" / name for k in (2, 3)]
        others = [Record.load(folder / "record.jsonl").end for folder in folders]
        assert not any(other.comparison and other.comparison.splits for other in others)
        assert end.comparison is not None
        assert (end.comparison.splits, end.seconds > sum(o.seconds for o in others)) == (3, True)
        assert "on 3 random splits" in end.verdict
        assert end.verdict.replace("'", "&#39;") in index
        assert "The splits, against training alone" in (out / name / "index.html").read_text(
            "utf-8"
        )
    result = CliRunner().invoke(app, ["predict", str(out), str(tmp_path / "visits.csv")])
    assert set(result.stdout.split()[1].split(",")) > {"a"}, result.output
