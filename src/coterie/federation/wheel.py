"""The wheel of the coterie that runs here, for sites to install: no package index has it."""

import base64
import hashlib
import zipfile
from importlib import metadata
from pathlib import Path

import coterie
from coterie.recording import files

_TAG = "py3-none-any"


def write_wheel(folder: Path) -> tuple[str, str]:
    """Write the installed coterie as a wheel, and return its name and its SHA-256.

    It holds the files that run here, so that sites get the same code. The same files give the same
    bytes.
    """
    distribution = metadata.distribution("coterie")
    package = Path(coterie.__file__).parent
    paths = [
        path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    content = {
        f"coterie/{path.relative_to(package).as_posix()}": path.read_bytes() for path in paths
    }
    about = f"coterie-{distribution.version}.dist-info"
    for name in ("METADATA", "entry_points.txt"):
        content[f"{about}/{name}"] = (distribution.read_text(name) or "").encode()
    tags = f"Wheel-Version: 1.0\nGenerator: coterie\nRoot-Is-Purelib: true\nTag: {_TAG}\n"
    content[f"{about}/WHEEL"] = tags.encode()
    record = [
        f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in sorted(content.items())
    ]
    content[f"{about}/RECORD"] = "".join([*record, f"{about}/RECORD,,\n"]).encode()
    wheel = folder / f"coterie-{distribution.version}-{_TAG}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(content.items()):
            entry = zipfile.ZipInfo(name)  # dated 1980
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return wheel.name, files.sha256(wheel.read_bytes())


def _digest(data: bytes) -> str:
    """Return a SHA-256 as a wheel's RECORD has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
