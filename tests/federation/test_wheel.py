"""Sites install the coterie that user 0 runs, from a wheel that user 0 sends: no package index has it."""

from __future__ import annotations

import base64
import csv
import hashlib
import re
import zipfile
from importlib import metadata
from pathlib import Path

import coterie
from coterie.federation.kits import write_wheel

ROOT = Path(__file__).parent.parent.parent


def test_the_wheel_holds_what_runs_here_and_its_record_is_true(tmp_path: Path) -> None:
    name, digest = write_wheel(tmp_path)
    assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digest
    package = Path(coterie.__file__).parent
    with zipfile.ZipFile(tmp_path / name) as archive:
        packed = {path: archive.read(path) for path in archive.namelist()}
        distribution = metadata.PathDistribution(
            zipfile.Path(archive, f"coterie-{coterie.__version__}.dist-info/")
        )
        assert (distribution.version, distribution.metadata["Name"]) == (
            coterie.__version__,
            "coterie",
        )
        (command,) = distribution.entry_points
        assert (command.name, command.value) == ("coterie", "coterie.cli:app")
        assert distribution.requires == metadata.requires("coterie")
    for source in package.rglob("*.py"):
        assert packed[f"coterie/{source.relative_to(package)}"] == source.read_bytes()
    (record,) = (packed[path] for path in packed if path.endswith("/RECORD"))
    listed = {path: (told, size) for path, told, size in csv.reader(record.decode().splitlines())}
    assert set(listed) == set(packed)
    for path, (told, size) in listed.items():
        if not path.endswith("/RECORD"):
            expected = (
                base64.urlsafe_b64encode(hashlib.sha256(packed[path]).digest()).decode().rstrip("=")
            )
            assert (told, int(size)) == (f"sha256={expected}", len(packed[path]))


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    assert write_wheel(tmp_path) == write_wheel(tmp_path / "again")


def test_no_page_and_no_source_fetches_coterie_from_a_package_index() -> None:
    """Its name there may be anybody's."""
    pages = [
        path
        for pattern in ("*.md", "docs/**/*.md", "src/**/*.py", "examples/*.py")
        for path in ROOT.glob(pattern)
    ]
    fetches = re.compile(r"""pip install ["'`]?coterie""")
    assert [path.name for path in pages if fetches.search(path.read_text(encoding="utf-8"))] == []


def test_the_projects_address_is_set_in_one_place() -> None:
    nobodys = ".".join(("coterie", "example"))
    folders = (".ci", ".github", "src", "tests", "docs", "benchmarks", "examples")
    paths = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if "_build" not in path.parts
    ]
    paths += list(ROOT.glob("*"))
    text = {path: path.read_bytes() for path in paths if path.is_file() and path.suffix != ".pyc"}
    assert [path.name for path, content in text.items() if nobodys.encode() in content] in (
        ["pyproject.toml"],
        [],
    )
