"""Sites install the coterie that user 0 runs, from a wheel that user 0 sends: no package index has it."""

from __future__ import annotations

import base64
import csv
import hashlib
import zipfile
from importlib import metadata
from pathlib import Path

import coterie
from coterie.federation.kits import write_wheel


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
