"""Every example and every Python block of the documentation runs, warnings being errors."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support import processes
from tests.test_extending import REGISTRIES

Printed = Callable[[str], str]

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKED = [
    *sorted(ROOT.glob("*.md")),
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in page.parts),
]


EXAMPLES = ROOT / "examples"


@pytest.fixture
def printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Printed:
    """Give a function that runs an example in an empty folder, and returns what it prints."""

    def run(name: str) -> str:
        monkeypatch.chdir(tmp_path)
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


TESTED = {"cluster", "everyone", "consortium", "adapter", "own_loop"}  # have tests of their own


@pytest.mark.parametrize("name", sorted({path.stem for path in EXAMPLES.glob("*.py")} - TESTED))
def test_example(name: str, printed: Printed) -> None:
    assert printed(name)


def forked(name: str, folder: Path) -> str:
    """Let a child of this process run an example for each of four ranks."""

    def rank(number: int) -> None:
        os.chdir(folder)
        with (folder / f"{number}.txt").open("w") as said, contextlib.redirect_stdout(said):
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")

    assert (
        processes.Started([functools.partial(rank, number) for number in range(4)]).end() == [0] * 4
    )
    return "".join((folder / f"{number}.txt").read_text() for number in range(4))


def started(name: str, folder: Path) -> str:
    """Let an example start torchrun, as it does by itself."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py")]
    # small models only wait for each other's threads
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


SLOW = pytest.mark.skipif(
    not os.environ.get("COTERIE_SLOW"), reason="starts six processes: COTERIE_SLOW=1 runs it"
)


@pytest.mark.parametrize("run", [forked, pytest.param(started, marks=SLOW)])
def test_the_cluster_is_four_processes(run: Callable[[str, Path], str], tmp_path: Path) -> None:
    out = run("cluster", tmp_path)
    gave = sorted(re.findall(r"(writer \d) gave (\d+) gradients", out))
    assert gave == [(f"writer {k}", "200") for k in (0, 5, 8)]
    accuracy = re.search(r"test: loss [\d.]+, accuracy ([\d.]+)", out)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.8


@SLOW
def test_everyone_is_four_processes(tmp_path: Path) -> None:
    out = started("everyone", tmp_path)
    assert sorted(re.findall(r"^(writer \d): ", out, re.MULTILINE)) == [
        f"writer {k}" for k in (0, 3, 5, 8)
    ]


def test_own_loop_learns(printed: Printed) -> None:
    accuracy = re.search(r"'accuracy': ([\d.]+)", printed("own_loop"))
    assert accuracy is not None
    assert float(accuracy[1]) > 0.8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    blocks = [block for block in blocks if ">>>" not in block]  # the others run as doctests
    for registry in REGISTRIES:  # what a page registers is forgotten
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(blocks), page.name, "exec"), {"__name__": "__main__"})  # noqa: S102  # our own text


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's titles, as GitHub and the site make them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text):
        if not target.startswith("http"):
            there = page.parent / target if target else page
            assert there.exists(), target
            assert not anchor or there.suffix != ".md" or anchor in anchors(there), (
                f"{target}#{anchor}"
            )
