"""Importing coterie stays light: torch, NumPy and SciPy, and nothing that only a command needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import coterie
from coterie.cli import COMMANDS, _command

HEAVY = {
    "matplotlib",
    "sklearn",
    "typer",
    "rich",
    "pandas",
    "pyarrow",
    "jinja2",
    "skops",
    "tensorboard",
    "click",
}


def modules_after(*code: str) -> list[set[str]]:
    """Return the top-level modules of a fresh interpreter after each piece of code."""
    source = str(Path(coterie.__file__).parents[1])
    shown = [f"{piece}; print(json.dumps(sorted(sys.modules)))" for piece in code]
    process = subprocess.run(
        [sys.executable, "-c", "; ".join(["import json, sys", *shown])],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": source},
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith("[")]
    return [{name.partition(".")[0] for name in json.loads(line)} for line in lines]


def test_what_an_import_brings_and_what_is_heavy_only_where_it_is_used() -> None:
    told = "from coterie.cli import app; app(['--help'], standalone_mode=False)"
    light, told_of, used = modules_after(
        "import coterie, coterie.theory.quadratic", told, "coterie.data.digits_by_writer()"
    )
    assert {"coterie", "torch", "numpy", "scipy"} <= light
    assert not light & HEAVY
    assert "typer" in told_of
    assert not told_of & {"matplotlib", "pandas", "jinja2", "sklearn"}
    assert "sklearn" in used


def test_the_help_of_all_commands_does_not_wait_for_torch() -> None:
    (told,) = modules_after("from coterie.cli import app; app(['--help'], standalone_mode=False)")
    assert "typer" in told
    assert not told & {"torch", "scipy", "numpy"}
    assert modules_after("import coterie")[0].isdisjoint({"torch"})


def test_what_the_help_says_of_a_command_is_what_the_command_says_first() -> None:
    for name, words in COMMANDS.items():
        assert (_command(name).help or "").partition("\n\n")[0].strip() == words, name


def test_completion_is_installed_and_completes_commands_and_options(tmp_path: Path) -> None:
    source = str(Path(coterie.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": source, "HOME": str(tmp_path), "COMP_CWORD": "1"}
    # Typer then takes the shell's name, and does not look which shell has started the tests
    environment["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"

    def said(*words: str, **more: str) -> list[str]:
        code = "from coterie.cli import app; app(prog_name='coterie')"
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            capture_output=True,
            text=True,
            check=False,
            env=environment | more,
        )
        return done.stdout.split()

    said("--install-completion", "bash")
    assert "_COTERIE_COMPLETE=complete_bash" in (
        tmp_path / ".bash_completions" / "coterie.sh"
    ).read_text(encoding="utf-8")
    completing = {"_COTERIE_COMPLETE": "complete_bash"}
    assert said(**completing, COMP_WORDS="coterie tr") == ["train"]
    words = "coterie train --na"
    assert said(**completing, COMP_WORDS=words, COMP_CWORD="2") == ["--na-values"]


def test_training_waits_for_no_package_of_which_it_needs_one_function() -> None:
    shown = "print([name for name in ('scipy.stats', 'torch._dynamo') if name in sys.modules])"
    code = f"import sys, coterie; coterie.train; {shown}"
    source = str(Path(coterie.__file__).parents[1])
    process = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": source},
    )
    assert process.stdout.strip() == "[]"


def test_names_that_are_not_there_are_attribute_errors_and_packages_are() -> None:
    with pytest.raises(AttributeError, match="module 'coterie' has no attribute 'trian'"):
        coterie.trian  # noqa: B018
    assert coterie.benchmark.run.__module__ == "coterie.benchmark.running"
    assert set(coterie.__all__) <= set(dir(coterie))


@pytest.mark.parametrize("windows", [True, False])
def test_a_run_is_written_where_there_is_no_fcntl(windows: bool, tmp_path: Path) -> None:
    """As on Windows, with a stand-in for its locks; and where there are no locks at all, with a warning."""
    there = "types.SimpleNamespace(LK_NBLCK=2, LK_LOCK=1, locking=lambda *args: held.append(args))"
    code = f"""
import os, subprocess, sys, types
held = []
sys.modules["fcntl"] = None
sys.modules["msvcrt"] = {there if windows else None}
from pathlib import Path
from coterie.recording.claim import claimed
from coterie.recording.files import fcntl
assert fcntl is None
import coterie
coterie.train
with claimed(Path({str(tmp_path / "out")!r})):
    print(len(held), (Path({str(tmp_path / "out")!r}) / "lock").exists())
"""
    source = str(Path(coterie.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": source}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == (["1", "True"] if windows else ["0", "True"])
    assert ("without locks" in done.stderr) == (not windows)


def test_public_names() -> None:
    assert all(hasattr(coterie, name) for name in coterie.__all__)
    assert sorted(coterie.__all__) == list(coterie.__all__)
