"""Where a package that is not always there is missing, one sentence says which, and what brings it."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from coterie.cli import app
from coterie.registry import IMPORTS


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a table, modules that need packages, and the first file of a server."""
    table = {
        "clinic": ["a", "b"] * 20,
        "age": [30.0, 41.5, 52.0, 60.0, 48.0] * 8,
        "ill": [0, 1, 1, 0] * 10,
    }
    pd.DataFrame(table).to_csv(tmp_path / "visits.csv", index=False)
    (tmp_path / "adapter.py").write_text("import peft.tuners\n", encoding="utf-8")
    (tmp_path / "reader.py").write_text("import pyreadr\n", encoding="utf-8")
    startup = tmp_path / "trial" / "server" / "startup"
    startup.mkdir(parents=True)
    (startup / "fed_server.json").write_text("{}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    # which `--import` adds to, and later tests' processes would inherit
    monkeypatch.setenv(IMPORTS, "")
    return tmp_path


FLARE = 'NVFLARE is not installed; `pip install "nvflare<2.10,>=2.9"`'
HUGGING_FACE = 'not installed; `pip install "datasets>=4" "peft>=0.19" "transformers>=5"`'
TRAIN = "train --data visits.csv --user-column clinic --target ill --me a --out run"


@pytest.mark.parametrize(
    ("missing", "command", "said"),
    [
        (
            "nvflare",
            "federate init new --data visits.csv --target ill --server localhost --site b",
            FLARE,
        ),
        ("nvflare", "federate server trial", FLARE),
        ("peft", "--import adapter.py list", f"the package 'peft' is {HUGGING_FACE}"),
        (
            "mlflow",
            f"{TRAIN} --tracker mlflow",
            "this tracker needs 'mlflow', which is not installed; `pip install mlflow`",
        ),
        (
            "pyreadr",
            "--import reader.py list",
            "the package 'pyreadr' is not installed; `pip install pyreadr`",
        ),
    ],
)
def test_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, missing: str, command: str, said: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    # what Python takes for a package that is not there
    monkeypatch.setitem(sys.modules, missing, None)
    answer = CliRunner().invoke(app, command.split())
    assert answer.exit_code == 2
    assert answer.output == f"coterie: {said}\n"
    assert not (folder / "new").exists()
