"""The description of a run: what stands there once reaches Python, the command, the file and the record."""

from __future__ import annotations

import inspect
import typing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch.nn.functional import mse_loss
from typer.testing import CliRunner

import coterie
from coterie.arguments import settings_of
from coterie.cli import app
from coterie.errors import KnobError
from coterie.federation.kits import set_up
from coterie.federation.provisioning import Consortium
from coterie.federation.settings import Data, LeadSettings, Model, Training, lead_settings
from coterie.learners.spec import RunSettings, RunSpec
from coterie.recording.configuration import StepSettings

OTHER: dict[str, Any] = {
    "steps": 6,
    "lr": 0.05,
    "batch_size": 7,
    "seed": 3,
    "exchange_every": 2,
    "local_steps": 2,
    "memory": "2GB",
    "sample": 1,
}
"""A value of each plain setting that is not its default."""


def users() -> list[coterie.User]:
    """Return three users alike."""
    inputs = torch.eye(3).repeat(4, 1)
    return [coterie.User(name, inputs, inputs.sum(1, keepdim=True)) for name in ("me", "a", "b")]


def plain(settings: object) -> dict[str, Any]:
    """Return the plain settings that something has."""
    return {name: getattr(settings, name) for name in OTHER}


def test_every_plain_setting_is_tried_here() -> None:
    assert set(OTHER) == {each.name for each in fields(StepSettings)}
    assert all(OTHER[each.name] != each.default for each in fields(StepSettings))


def test_every_setting_has_a_check_and_help() -> None:
    for name, setting in settings_of(RunSpec).items():
        assert setting.help.endswith("."), name
    assert set(settings_of(RunSpec)) == {each.name for each in fields(RunSpec)}


@pytest.mark.parametrize("function", [coterie.train, coterie.train_everyone])
def test_functions_take_the_fields_and_document_them(function: Any) -> None:
    seen = inspect.signature(function)
    for each in fields(RunSettings):
        parameter = seen.parameters[each.name]
        assert parameter.kind is parameter.KEYWORD_ONLY
        assert parameter.default is each.default
        assert parameter.annotation == typing.get_type_hints(RunSettings)[each.name]
        assert (
            f"\n    {each.name}: {settings_of(RunSettings)[each.name].help[:40]}"
            in function.__doc__
        )
    with pytest.raises(TypeError, match="'stepz'"):
        function(torch.nn.Linear(3, 1), mse_loss, users(), stepz=3)


def test_python_gives_all_of_it_to_the_record() -> None:
    me, *peers = users()
    run = coterie.train(
        torch.nn.Linear(3, 1), mse_loss, me, peers, coterie.WeightedAveraging(0.5), **OTHER
    )
    assert plain(run.record.configuration) == OTHER
    runs = coterie.train_everyone(
        torch.nn.Linear(3, 1), mse_loss, users(), coterie.WeightedAveraging(0.5), **OTHER
    )
    assert all(plain(each.record.configuration) == OTHER for each in runs.runs.values())


def test_the_command_gives_all_of_it_to_the_record(tmp_path: Path) -> None:
    rows = pd.DataFrame(
        {"who": ["a", "b", "c"] * 20, "x": range(60), "y": [0.5 * k for k in range(60)]}
    )
    rows.to_csv(tmp_path / "rows.csv", index=False)
    named = [
        "--data",
        str(tmp_path / "rows.csv"),
        "--user-column",
        "who",
        "--target",
        "y",
        "--me",
        "a",
    ]
    options = [
        text
        for name, value in OTHER.items()
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    command = ["train", *named, "--rule", "wga", "--out", str(tmp_path / "run"), *options]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert plain(coterie.Record.load(tmp_path / "run").configuration) == OTHER


def test_a_federations_file_has_all_of_it(tmp_path: Path) -> None:
    rows = pd.DataFrame(
        {"x": [k % 7 for k in range(40)], "y": [0.5 * (k % 7) + k % 3 for k in range(40)]}
    )
    rows.to_csv(tmp_path / "mine.csv", index=False)
    training = Training(rule="wga", misses=5, **OTHER)
    data = Data(table=str(tmp_path / "mine.csv"), target="y")
    settings = LeadSettings("me", ("basel",), data, Model(), training)
    set_up(tmp_path / "trial", Consortium("trial", "localhost", ("basel",)), settings)
    assert lead_settings(tmp_path / "trial") == settings


def test_epochs_become_steps_once() -> None:
    me, *peers = users()
    spec = RunSpec(torch.nn.Linear(3, 1), mse_loss, me, peers, epochs=3, batch_size=5)
    assert spec.steps == 3 * 3  # twelve examples are three batches of at most five
    assert replace(spec, steps=4).steps == 4
    with pytest.raises(KnobError, match=r"`steps` .* and `epochs` .* were both given"):
        RunSpec(torch.nn.Linear(3, 1), mse_loss, me, peers, epochs=3, steps=5)


@pytest.mark.parametrize("setting", [{"out": "x"}, {"threads": 2}, {"capture": False}])
def test_what_runs_of_one_program_cannot_have_is_refused(setting: dict[str, Any]) -> None:
    me, *peers = users()
    spec = RunSpec(torch.nn.Linear(3, 1), mse_loss, me, peers, coterie.Alone(), **setting)
    with pytest.raises(KnobError, match=f"`train_many` takes no `{next(iter(setting))}`"):
        coterie.train_many([spec])
