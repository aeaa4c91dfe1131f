"""What a stranger meets first is true: workflows call make targets, containers start commands that exist."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coterie.cli import app

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_make_targets_that_exist(path: Path) -> None:
    targets = set(
        re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    workflow = load(path)
    assert workflow["permissions"] == {"contents": "read"}
    called: set[str] = set()
    for job in workflow["jobs"].values():
        commands = [step.get("run", "") for step in job.get("steps", ())]
        matrix = job.get("strategy", {}).get("matrix", {})
        called |= {word for line in commands for word in re.findall(r"^make ([a-z-]+)", line)}
        called |= set(matrix.get("target", ()))
        assert "uses" in job or job["timeout-minutes"] <= 180
    assert called
    assert called <= targets


def test_what_continuous_integration_runs_is_what_the_hosted_workflow_runs() -> None:
    here = {
        target
        for name in ("run", "release")
        for target in re.findall(
            r"^make (\S+)", (ROOT / ".ci" / name).read_text(encoding="utf-8"), re.MULTILINE
        )
    }
    assert here <= set(
        load(ROOT / ".github/workflows/test.yml")["jobs"]["make"]["strategy"]["matrix"]["target"]
    ) | {"test"}


def test_the_lock_has_what_is_needed_with_hashes_and_agrees_with_the_constraints() -> None:
    locked = dict(
        re.findall(
            r"^([\w.-]+)==(\S+) \\\n    --hash",
            (ROOT / "requirements.lock").read_text(),
            re.MULTILINE,
        )
    )
    pinned = dict(
        re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    )
    pinned = {name.lower(): version for name, version in pinned.items()}
    needed = {
        "numpy",
        "scipy",
        "scikit-learn",
        "pandas",
        "pyarrow",
        "typer",
        "nvflare",
        "dp-accounting",
    }
    assert needed <= locked.keys()
    assert "torch" not in locked, "it comes in many builds"
    assert {
        name: version for name, version in locked.items() if pinned.get(name, version) != version
    } == {}


def test_the_container_has_no_root_and_no_compiler() -> None:
    lines = [
        line
        for line in (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
        if line[:1] not in "# "
    ]
    last = max(number for number, line in enumerate(lines) if line.startswith("FROM "))
    assert [line for line in lines[last:] if line.startswith("USER ")] == ["USER 10001"]
    assert not re.search(r"apt-get|gcc|:latest", "\n".join(lines))
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert all((ROOT / name).exists() for name in copied)
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {f"!{name}" for name in copied} == {name for name in ignored if name.startswith("!")}


def test_the_consortium_of_containers_runs_commands_that_exist() -> None:
    services = load(ROOT / "compose.yaml")["services"]
    assert set(services) == {"setup", "server", "basel", "bern", "geneva"}
    (script,) = services["setup"]["command"]
    words = shlex.split(script.replace("$$", "$").replace("\\\n", " "), comments=True)
    starts = [place for place, word in enumerate(words) if word == "coterie"]
    commands = [words[place + 1 : place + 3] for place in starts]
    commands += [service["command"][:2] for name, service in services.items() if name != "setup"]
    assert sorted(name for _, name in commands) == [
        "accept",
        "init",
        "run",
        "server",
        "site",
        "site",
    ]
    for command in commands:
        answer = CliRunner().invoke(app, [*command, "--help"])
        assert answer.exit_code == 0
    told = CliRunner().invoke(app, ["federate", "init", "--help"], env={"COLUMNS": "200"}).output
    assert [word for word in words if word.startswith("--") and word not in told] == []
    for service in services.values():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert set(service.get("depends_on", ())) <= set(services)
    for site in ("basel", "bern"):
        (volume,) = services[site]["volumes"]
        assert volume["volume"]["subpath"] == f"sites/{site}", "a site sees its own folder alone"


def test_what_security_names_is_there_and_short_enough_to_read() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 1500
    files = [path for path in (ROOT / "tests").rglob("*.py") if "listening" not in path.parts]
    defined = {
        name
        for path in files
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    named = re.findall(r"`(test_\w+)`", text)
    assert len(named) > 25
    assert [name for name in named if name not in defined] == []
    places = re.findall(r"`((?:tests/|test_|benchmarks/)[\w/.]*)`", text)
    paths = [place for place in places if place not in named]
    known = {str(path.relative_to(ROOT)) for path in files} | {path.name for path in files}
    assert len(paths) > 5
    assert [path for path in paths if path not in known and not (ROOT / path).is_dir()] == []


def test_mutants_are_made_of_modules_that_exist_and_tested_by_tests_that_exist() -> None:
    tree = ast.parse((ROOT / "benchmarks" / "mutation.py").read_text(encoding="utf-8"))
    tests = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TESTS"
    )
    assert len(tests) >= 12
    modules = [ROOT / "src" / "coterie" / module for module in tests]
    named = [ROOT / path for paths in tests.values() for path in paths.split()]
    assert [path for path in (*modules, *named) if not path.is_file()] == []
    told = re.findall(
        r"^\| `([\w/]+\.py)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    assert set(told) <= set(tests), "CONTRIBUTING tells how many mutants of each are killed"


def texts() -> dict[str, str]:
    """Return what a stranger reads or runs, by its path."""
    folders = ("src", "tests", "docs", "examples", "benchmarks", ".github", ".ci")
    kinds = {".md", ".py", ".toml", ".yml", ".yaml", ".cff", ".sh", ".html", ".jinja", ".ini"}
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    paths = [path for path in paths if "_build" not in path.parts]
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in (*paths, *ROOT.iterdir())
        if path.is_file() and (path.suffix in kinds or path.name in {"Dockerfile", "Makefile"})
    }


def test_the_project_has_one_address_and_nothing_is_fetched_that_does_not_exist() -> None:
    read = texts()
    assert len(read) > 300
    nobodys = ".".join(("coterie", "example"))
    assert [path for path, text in read.items() if nobodys in text] in (["pyproject.toml"], [])
    fetches = re.compile(r"pip3? install (?:-\S+ )*['\"`]?coterie\b(?!-\d)")  # no wheel in a folder
    assert [path for path, text in read.items() if fetches.search(text)] == []


def test_the_first_version_is_told_in_forty_lines() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    _, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    assert [section.split()[0].strip(",") for section in sections][-1] == "0.1.0"
    assert len(sections[-1].strip().splitlines()) <= 40
    if "not released" in sections[-1].splitlines()[0]:
        assert len(sections) == 1, "what is not released yet has no news since"
