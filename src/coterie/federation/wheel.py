"""What a site installs: the coterie that runs here, and a lock of all that it needs, with hashes.

No package index has coterie.
"""

import base64
import hashlib
import zipfile
from importlib import metadata
from pathlib import Path

import coterie
from coterie.errors import CoterieError
from coterie.federation.manifest import INSTALL as SCRIPT
from coterie.federation.manifest import LOCK, filled
from coterie.recording import files

_TAG = "py3-none-any"


def write_installation(folder: Path) -> None:
    """Write coterie's wheel, the lock of what it needs, and the script that installs both, to a kit."""
    wheel, digest = write_wheel(folder)
    lock = lock_file().read_bytes()
    (folder / LOCK).write_bytes(lock)
    script = filled(
        "install.sh",
        wheel=wheel,
        wheel_digest=digest,
        lock=LOCK,
        lock_digest=files.sha256(lock),
        torch=f"torch=={metadata.version('torch').partition('+')[0]}",
    )
    (folder / SCRIPT).write_text(script, encoding="utf-8")
    (folder / SCRIPT).chmod(0o700)


def lock_file() -> Path:
    """Return where the lock is: in the package, or where the package is developed beside its source."""
    package = Path(coterie.__file__).parent
    beside = package / "federation" / LOCK
    found = beside if beside.exists() else package.parents[1] / LOCK
    if not found.exists():
        raise CoterieError(
            f"there is no {beside}, which a kit needs; install coterie from its wheel or its source"
        )
    return found


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
    content[f"coterie/federation/{LOCK}"] = lock_file().read_bytes()
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
