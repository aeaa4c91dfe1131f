"""Every example and every Python block of the documentation runs, warnings being errors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.test_extending import REGISTRIES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def run(path: Path, folder: Path) -> str:
    command = [sys.executable, "-W", "error", str(path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # small models only wait for each other's threads
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


TESTED = {"cluster", "everyone", "consortium", "adapter", "own_loop"}  # have tests of their own


@pytest.mark.parametrize(
    "path",
    [path for path in sorted((ROOT / "examples").glob("*.py")) if path.stem not in TESTED],
    ids=lambda path: path.stem,
)
def test_example(path: Path, tmp_path: Path) -> None:
    assert run(path, tmp_path)


def test_the_cluster_is_four_processes(tmp_path: Path) -> None:
    out = run(ROOT / "examples" / "cluster.py", tmp_path)
    gave = sorted(re.findall(r"(writer \d) gave (\d+) gradients", out))
    assert gave == [(f"writer {k}", "200") for k in (0, 5, 8)]
    accuracy = re.search(r"test: loss [\d.]+, accuracy ([\d.]+)", out)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.8


@pytest.mark.skipif(not os.environ.get("COTERIE_SLOW"), reason="starts five processes: COTERIE_SLOW=1 runs it")
def test_everyone_is_four_processes(tmp_path: Path) -> None:
    out = run(ROOT / "examples" / "everyone.py", tmp_path)
    assert sorted(re.findall(r"^(writer \d): ", out, re.MULTILINE)) == [f"writer {k}" for k in (0, 3, 5, 8)]


def test_own_loop_learns(tmp_path: Path) -> None:
    accuracy = re.search(r"'accuracy': ([\d.]+)", run(ROOT / "examples" / "own_loop.py", tmp_path))
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        assert target.startswith("http") or (page.parent / target).exists(), target
