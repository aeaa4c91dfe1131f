"""`coterie train --engine torch` and `coterie worker`: every user reads its own rows in a process of its own."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch._dynamo  # what an optimizer's first step would import in every child
import torch.utils.tensorboard.writer
from tests.support import processes
from typer.testing import CliRunner

from coterie.cli import app

USERS = ("Geneva", "Basel", "Bern")
COMMON = [
    "--user-column",
    "hospital",
    "--target",
    "ill",
    "--me",
    "Geneva",
    "--rule",
    "wga",
    "--steps",
    "30",
]


@pytest.fixture
def visits() -> pd.DataFrame:
    """Give visits in which Bern alone has a third class."""
    rng = np.random.default_rng(0)
    parts = []
    for name in USERS:
        age = rng.normal(50, 10, 60)
        ill = np.where(age + rng.normal(0, 8, 60) > 50, "yes", "no").astype(object)
        if name == "Bern":
            ill[:5] = "perhaps"
        parts.append(
            pd.DataFrame(
                {"hospital": name, "age": age, "ward": rng.choice(["a", "b"], 60), "ill": ill}
            )
        )
    return pd.concat(parts).sample(frac=1, random_state=0)


def invoke(arguments: Sequence[str], log: Path) -> None:
    result = CliRunner().invoke(app, list(arguments))
    log.write_text(
        result.output + (repr(result.exception) if result.exception else ""), encoding="utf-8"
    )
    if result.exit_code:
        raise processes.Failed


def together(commands: Sequence[Sequence[str]], tmp_path: Path) -> tuple[list[int], list[str]]:
    """Run a command in each of as many processes; return how they ended and what they said."""
    logs = [tmp_path / f"log {rank}" for rank in range(len(commands))]
    works = [
        functools.partial(invoke, command, log) for command, log in zip(commands, logs, strict=True)
    ]
    return processes.Started(works).end(), [log.read_text(encoding="utf-8") for log in logs]


def same_model(a: Path, b: Path) -> None:
    ours, theirs = (torch.load(folder / "model.pt", weights_only=True) for folder in (a, b))
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-6)


def test_a_table_in_parts_gives_the_model_of_the_whole_table(
    visits: pd.DataFrame, tmp_path: Path
) -> None:
    visits.to_csv(tmp_path / "visits.csv", index=False)
    order = list(dict.fromkeys(visits["hospital"]))
    peers = [name for name in order if name != "Geneva"]
    for rank, name in enumerate(("Geneva", *peers)):
        visits[visits["hospital"] == name].to_csv(tmp_path / f"part-{rank}.csv", index=False)
    here = [
        "train",
        "--data",
        str(tmp_path / "visits.csv"),
        *COMMON,
        "--out",
        str(tmp_path / "here"),
    ]
    assert CliRunner().invoke(app, here).exit_code == 0

    table = ["train", "--engine", "torch", "--data", str(tmp_path / "visits.csv"), *COMMON]
    files = ["train", "--engine", "torch", "--data", str(tmp_path / "part-{rank}.csv"), *COMMON]
    workers = [
        [*files, "--out", str(tmp_path / "workers")],
        *(
            ["worker", "--data", str(tmp_path / f"part-{k}.csv"), "--name", name]
            for k, name in enumerate(peers, 1)
        ),
    ]
    ways = {
        "table": [[*table, "--out", str(tmp_path / "table")]] * 3,
        "files": [[*files, "--out", str(tmp_path / "files")]] * 3,
        "workers": workers,
    }
    for way, commands in ways.items():
        statuses, logs = together(commands, tmp_path)
        assert statuses == [0, 0, 0], logs
        assert "ill for Geneva, classification, 2 peers" in logs[0]
        same_model(tmp_path / way, tmp_path / "here")
        lines = (tmp_path / way / "record.jsonl").read_text(encoding="utf-8").splitlines()
        first, last = json.loads(lines[0]), json.loads(lines[-1])
        assert first["configuration"]["peers"] == dict.fromkeys(peers, 60)
        assert set(last["end"]["traffic"]) == set(USERS)
    assert "gave 30 gradients" in logs[1]
    about = json.loads((tmp_path / "workers" / "preparation.json").read_text(encoding="utf-8"))
    assert about["classes"] == ["no", "perhaps", "yes"]  # one of them only Bern knows


def test_methods_and_what_measures_over_processes(visits: pd.DataFrame, tmp_path: Path) -> None:
    """A method has the model of one process; knobs that are auto are chosen by peers' gradients."""
    visits.to_csv(tmp_path / "visits.csv", index=False)
    common = [
        "--data",
        str(tmp_path / "visits.csv"),
        "--user-column",
        "hospital",
        "--target",
        "ill",
    ]
    common += ["--me", "Geneva", "--steps", "20"]
    method = [*common, "--rule", "scaffold", "--knob", "local_steps=3"]
    here = ["train", *method, "--out", str(tmp_path / "here")]
    assert CliRunner().invoke(app, here).exit_code == 0
    auto = [*common, "--rule", "bc", "--alpha", "auto", "--beta", "auto"]
    refused = [*common, "--rule", "hyp-cluster"]
    found = {}
    for name, options in {"method": method, "auto": auto, "refused": refused}.items():
        command = ["train", "--engine", "torch", *options, "--out", str(tmp_path / name)]
        found[name] = together([command] * 3, tmp_path)
    assert found["method"][0] == found["auto"][0] == [0, 0, 0], found
    same_model(tmp_path / "method", tmp_path / "here")
    first = json.loads(
        (tmp_path / "auto" / "record.jsonl").read_text(encoding="utf-8").splitlines()[0]
    )
    assert set(first["configuration"]["estimates"]["peers"]) == {"Basel", "Bern"}
    assert 0 <= first["configuration"]["choice"]["alpha"] <= 1
    assert found["refused"][0][0] == 1
    assert "this method needs all users in one process" in found["refused"][1][0]


def test_nothing_set_is_the_closed_form_over_processes_too(
    visits: pd.DataFrame, tmp_path: Path
) -> None:
    visits[visits["ill"] != "perhaps"].to_csv(tmp_path / "visits.csv", index=False)
    options = ["--data", str(tmp_path / "visits.csv"), *COMMON[:-4], "--model", "linear"]
    here = ["train", *options, "--out", str(tmp_path / "here")]
    assert CliRunner().invoke(app, here).exit_code == 0
    there = ["train", "--engine", "torch", *options, "--out", str(tmp_path / "there")]
    statuses, logs = together([there] * 3, tmp_path)
    assert statuses == [0, 0, 0], logs
    ours, theirs = (
        torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("there", "here")
    )
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-6, atol=1e-6)
    end = json.loads((tmp_path / "there" / "record.jsonl").read_text().splitlines()[-1])["end"]
    assert end["account"]["exchanges"] == 39


def test_what_does_not_fit_is_said_in_every_process(visits: pd.DataFrame, tmp_path: Path) -> None:
    visits.to_csv(tmp_path / "visits.csv", index=False)
    visits.drop(columns="ill").to_csv(tmp_path / "no target.csv", index=False)
    table = [
        "train",
        "--engine",
        "torch",
        "--data",
        str(tmp_path / "visits.csv"),
        *COMMON,
        "--out",
        str(tmp_path),
    ]
    statuses, logs = together([table] * 2, tmp_path)
    assert statuses == [1, 1]
    assert all(
        "2 peers of 'Geneva'" in log and "there are 1 processes for them" in log for log in logs
    )
    lacking = ["worker", "--data", str(tmp_path / "no target.csv"), "--name", "Basel"]
    statuses, logs = together([table, lacking], tmp_path)
    # torchrun would end all processes where a peer that is left out ended with an error
    assert statuses == [1, 0]
    assert all("the rows of 'Basel' have no column 'ill'" in log for log in logs)


def test_a_peer_whose_rows_cannot_be_used_is_left_out_and_the_others_train(
    visits: pd.DataFrame, tmp_path: Path
) -> None:
    """Basel has one class only, Bern is well, Chur has no ages."""
    visits["ill"] = visits["ill"].replace("perhaps", "no")
    visits.loc[visits["hospital"] == "Basel", "ill"] = "yes"
    chur = visits[visits["hospital"] == "Bern"].assign(hospital="Chur").drop(columns="age")
    parts = [visits[visits["hospital"] == name] for name in ("Geneva", "Basel", "Bern")]
    for rank, part in enumerate([*parts, chur]):
        part.to_csv(tmp_path / f"part-{rank}.csv", index=False)
    command = ["train", "--engine", "torch", "--data", str(tmp_path / "part-{rank}.csv"), *COMMON]
    statuses, logs = together([[*command, "--out", str(tmp_path / "run")]] * 4, tmp_path)
    assert statuses == [0] * 4, logs
    assert "rank 1 is left out: its rows are of one class only ('yes')" in logs[0]
    assert "rank 3 is left out: the table has no column 'age'" in logs[0]
    assert "is left out" in logs[1]
    assert "is left out" in logs[3]
    assert "ill for Geneva, classification, 1 peer " in logs[0]
    both = visits[visits["hospital"] != "Basel"]
    both.to_csv(tmp_path / "both.csv", index=False)
    here = ["train", "--data", str(tmp_path / "both.csv"), *COMMON, "--out", str(tmp_path / "here")]
    assert CliRunner().invoke(app, here).exit_code == 0
    same_model(tmp_path / "run", tmp_path / "here")


def test_code_that_user_0_names_must_be_allowed(visits: pd.DataFrame, tmp_path: Path) -> None:
    visits.to_csv(tmp_path / "visits.csv", index=False)
    data = ["--data", str(tmp_path / "visits.csv")]
    lead = [
        "train",
        "--engine",
        "torch",
        *data,
        *COMMON,
        "--out",
        str(tmp_path / "run"),
    ]
    lead += ["--model", "coterie.tables.models:mlp", "--leave-out", "Bern"]
    follow = ["worker", *data, "--user-column", "hospital", "--name", "Basel"]
    statuses, logs = together([lead, follow], tmp_path)
    assert statuses == [1, 1]
    assert "user 0 uses the model 'coterie.tables.models:mlp', which is code" in logs[1]
    statuses, logs = together([lead, [*follow, "--model", "json:loads"]], tmp_path)
    assert statuses == [1, 1]
    assert all("'json:loads'" in log and "raised TypeError" in log for log in logs)
    assert "rank 1 cannot take part" in logs[0]
    statuses, logs = together([lead, [*follow, "--model", "coterie.tables.models:mlp"]], tmp_path)
    assert statuses == [0, 0], logs
