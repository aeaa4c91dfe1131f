"""What a researcher takes from the benchmark: sweeps of knobs, tables and figures; attacks by name."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from typer.testing import CliRunner

from coterie import benchmark
from coterie.benchmark.methods import swept
from coterie.cli import app
from coterie.reporting.figures import differences


def test_a_sweep_of_a_knob_is_a_method_for_each_value_and_tables_and_figures_are_written(
    tmp_path: Path,
) -> None:
    words = ["bench", "--out", str(tmp_path), "--sets", "digits", "--users", "2", "--steps", "2"]
    words += ["--conditions", "honest", "--methods", "wga,alone", "--knob", "alpha=0.1,0.9"]
    result = CliRunner().invoke(app, [*words, "--jobs", "1"])
    assert result.exit_code == 0, result.output
    rows = list(csv.reader((tmp_path / "tables" / "methods.csv").read_text().splitlines()))
    names = [row[0] for row in rows[1:]]
    assert {"wga(alpha=0.1)", "wga(alpha=0.9)"} <= set(names)
    assert "wga" not in names
    tex = (tmp_path / "tables" / "honest.tex").read_text()
    lines = (tmp_path / "tables" / "honest.csv").read_text().splitlines()
    assert sum(line.endswith(r"\\") for line in tex.splitlines()) == len(lines) == 2
    assert r"$\pm$" in tex
    assert "±" not in tex
    assert (tmp_path / "tables" / "honest.md").read_text().startswith("| set |")
    assert (tmp_path / "figures" / "honest-1.pdf").read_bytes().startswith(b"%PDF")
    assert "<svg" in (tmp_path / "figures" / "honest-1.svg").read_text()


def test_two_knobs_make_every_pair_of_values() -> None:
    made = swept("bc", ["alpha=0.1,0.3", "beta=0.01,0.1,auto"])
    assert len({each.name for each in made if isinstance(each, benchmark.Contender)}) == 6


def test_attacks_by_name_are_conditions_with_as_many_attackers_as_are_asked_for(
    tmp_path: Path,
) -> None:
    """Each on the same data: alone does the same, and pooled is drawn away."""
    words = ["bench", "--out", str(tmp_path), "--sets", "digits", "--users", "1", "--steps", "8"]
    words += ["--conditions", "honest", "--methods", "pooled,fedavg", "--jobs", "1"]
    result = CliRunner().invoke(app, [*words, "--attack", "sign-flip", "--attackers", "12"])
    assert result.exit_code == 0, result.output
    found = pd.read_parquet(tmp_path / "results.parquet").to_dict("records")
    score = {(one["condition"], one["method"]): one["score"] for one in found}
    assert {method for condition, method in score if condition == "sign-flip-12"} == {
        *("alone", "sklearn-alone", "pooled")
    }, "who asks for more than gradients cannot be attacked by them"
    assert score["honest", "alone"] == score["sign-flip-12", "alone"]
    assert score["honest", "pooled"] > score["sign-flip-12", "pooled"]
    assert (tmp_path / "tables" / "sign-flip-12.tex").exists()
    page = (tmp_path / "index.html").read_text()
    assert "12 of the peers send what the attack <code>sign-flip</code> tells them to." in page
    for wrong, said in (
        (["--attack", "scald"], "did you mean 'scaled'?"),
        (["--attack", "scaled", "--attackers", "40"], "13 peers, of whom not 40 can attack"),
        (["--attackers", "4"], "`--attackers` is for `--attack`"),
    ):
        assert said in " ".join(CliRunner().invoke(app, [*words, *wrong]).output.split())


def test_twelve_methods_are_told_apart_by_marks_alone() -> None:
    values = {"set": {f"method {k}": (0.1 * k, 0.1) for k in range(12)}}
    figure: Figure = differences(values, "", "accuracy")
    containers: list[Any] = list(figure.axes[0].containers)
    lines = [container.lines[0] for container in containers]
    assert len({line.get_marker() for line in lines}) == 12
    looks = {(line.get_marker(), line.get_color()) for line in lines}
    assert len(looks) == 12


def test_an_attack_by_name_is_in_the_run_and_does_harm(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(300, 3)), columns=list("xyz"))
    frame = frame.assign(
        ward=np.resize(list("abc"), 300), ill=rng.normal(size=300) + frame["x"] > 0
    )
    frame.to_csv(tmp_path / "t.csv", index=False)
    words = ["train", "--data", str(tmp_path / "t.csv"), "--user-column", "ward", "--target", "ill"]
    words += ["--me", "a", "--rule", "wga", "--alpha", "0.9", "--steps", "60", "--no-guard"]
    loss = {}
    for name, attack in (("plain", []), ("flipped", ["--attack", "sign-flip", "--attackers", "2"])):
        out = tmp_path / name
        result = CliRunner().invoke(app, [*words, *attack, "--out", str(out)])
        assert result.exit_code == 0, result.output
        judged = json.loads((out / "evaluation.json").read_text())
        loss[name] = judged["served"]["loss"]
    assert loss["flipped"] > 1.5 * loss["plain"]
    for wrong, said in (
        (["--attack", "sign-flop"], "did you mean 'sign-flip'?"),
        (["--attack", "mimic", "--attackers", "3"], "from 1 to 2"),
        (["--attackers", "2"], "has no effect without `--attack`"),
    ):
        result = CliRunner().invoke(app, [*words, *wrong, "--out", str(tmp_path / "no")])
        assert result.exit_code == 2
        assert said in " ".join(result.output.split())
