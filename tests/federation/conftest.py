"""What tests with a consortium's real processes share."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "consortium.py"


@pytest.fixture(scope="session")
def example() -> ModuleType:
    """The example, which sets a consortium up and starts it."""
    spec = importlib.util.spec_from_file_location("consortium", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Mark all processes that a test starts, and end those that it leaves, whatever happens to it."""
    import psutil

    def marked() -> list[Any]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and process.environ().get("COTERIE_TEST") == str(
                    tmp_path
                ):
                    found.append(process)
        return found

    monkeypatch.setenv("COTERIE_TEST", str(tmp_path))
    yield
    left = marked()
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=10)
