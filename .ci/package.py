"""Build the sdist and, from it, the wheel; install the wheel in a clean environment, and run the demo from it.

`dist` then holds what would be published: sdist, wheel, and an SBOM of the clean environment
(CycloneDX).
"""

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(*command: str | Path, cwd: Path, expected: int = 0) -> str:
    """Run a command, and return what it says; another exit code than expected is an error that shows it."""
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    said = done.stdout + done.stderr
    if done.returncode != expected:
        sys.exit(f"{' '.join(map(str, command))} has ended with {done.returncode}:\n{said}")
    return said


def check_contents(dist: Path) -> Path:
    """Compare what is packed with the source tree, and return the wheel."""
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    sources = {
        str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*") if path.is_file()
    }
    sources = {name for name in sources if "__pycache__" not in name}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    sources |= set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"].values())
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        description = archive.read(metadata).decode()
    assert packed == sources, f"the wheel and src differ: {sorted(packed ^ sources)}"
    relative = re.findall(r"\]\((?!https?://|#)[^)]+\)", description)
    assert not relative, f"links that lead nowhere in the package's description: {relative}"
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = {"README.md", "LICENSE", "Makefile", "docs/conf.py", "tests/conftest.py"} - names
    assert not missing, f"the sdist lacks {sorted(missing)}"
    assert not [name for name in names if "_build/" in name], "the sdist has the built site"
    return wheel


def list_components(python: Path, sbom: Path) -> None:
    """Write what is installed beside coterie, each with its version and licence."""
    command = [
        sys.executable,
        "-m",
        "cyclonedx_py",
        "environment",
        "--pyproject",
        ROOT / "pyproject.toml",
    ]
    run(
        *command,
        "--mc-type",
        "library",
        "--output-reproducible",
        "-o",
        sbom,
        python,
        cwd=sbom.parent,
    )
    components = {
        each["name"] for each in json.loads(sbom.read_text(encoding="utf-8"))["components"]
    }
    missing = {"torch", "numpy", "scipy", "pandas"} - components
    assert not missing, f"the SBOM lacks {sorted(missing)}"


def main() -> None:
    """Check what would be published."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        dist = place / "dist"
        run(sys.executable, "-m", "build", "--outdir", dist, ROOT, cwd=place)
        wheel = check_contents(dist)
        run(sys.executable, "-m", "venv", place / "clean", cwd=place)
        binaries = place / "clean" / "bin"
        run(
            binaries / "python",
            "-m",
            "pip",
            "install",
            "-q",
            "-c",
            ROOT / "constraints.txt",
            wheel,
            cwd=place,
        )
        list_components(binaries / "python", dist / f"{wheel.name.partition('-py3')[0]}.cdx.json")
        print(run(binaries / "coterie", "--version", cwd=place).strip())
        print(
            run(
                binaries / "coterie",
                "demo",
                "--seeds",
                "1",
                "--steps",
                "20",
                "--out",
                "demo",
                cwd=place,
            ).strip()
        )
        assert (place / "demo" / "index.html").exists()
        (place / "mine.csv").write_text(
            "age,ill\n" + "30,0\n51,1\n30,1\n51,0\n" * 10, encoding="utf-8"
        )
        consortium = (
            "federate init trial --data mine.csv --target ill --server localhost --site basel"
        )
        refused = run(binaries / "coterie", *consortium.split(), cwd=place, expected=2).strip()
        assert refused == 'coterie: NVFLARE is not installed; `pip install "nvflare<2.10,>=2.9"`', (
            refused
        )
        shutil.rmtree(ROOT / "dist", ignore_errors=True)
        shutil.copytree(dist, ROOT / "dist")


if __name__ == "__main__":
    main()
