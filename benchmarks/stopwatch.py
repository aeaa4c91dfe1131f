"""How long a consortium takes from `init` to the verdict, each site on its kit alone.

    python benchmarks/stopwatch.py [--installs 1]

User 0 and three made-up hospitals (examples/consortium.py) on this machine. Each site gets its kit
in a folder of its own and runs three commands there: `sh install.sh`, `venv/bin/coterie federate
accept .` and `venv/bin/coterie federate site .`. Its Python is that of the kit, its environment
empty but for what an index and its certificates need. `--installs` is how many sites install for
themselves, one after the other; the others use the first one's environment. A row is a step, the
seconds it took, and the seconds since the beginning.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_PATH = Path(__file__).parents[1] / "examples" / "consortium.py"
_SPEC = importlib.util.spec_from_file_location("example_of_a_consortium", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
consortium: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(consortium)

KEPT = ("PATH", "HOME", "LANG", "TORCH_INDEX")


class Stopwatch:
    """Prints what each step took."""

    def __init__(self) -> None:
        self.began = self.last = time.monotonic()

    def __call__(self, step: str) -> None:
        """Print a row."""
        now = time.monotonic()
        print(f"| {step} | {now - self.last:.0f} | {now - self.began:.0f} |", flush=True)
        self.last = now


def main(installs: int) -> None:
    """Set up, install, connect, train and print."""
    bare = {name: value for name, value in os.environ.items() if name in KEPT or "PIP" in name}
    with tempfile.TemporaryDirectory() as place:
        folder, tables = Path(place) / "trial", consortium.hospitals(None)
        mine = "va"
        (Path(place) / "mine.csv").write_text(tables.pop(mine).to_csv(index=False))
        port, admin = map(str, consortium.free_ports(2))
        init = [*consortium.COTERIE, "init", str(folder), "--data", f"{place}/mine.csv"]
        init += ["--target", "ill", "--me", mine, "--server", "localhost", "--port", port]
        init += ["--admin-port", admin, *(word for site in tables for word in ("--site", site))]
        print("| step | seconds | since the beginning |\n|---|---|---|")
        watch = Stopwatch()
        said = subprocess.run(init, check=True, capture_output=True, text=True).stdout  # noqa: S603
        watch("user 0: `federate init`")
        kits = {}
        for number, (site, table) in enumerate(tables.items()):
            kit = kits[site] = Path(place) / "elsewhere" / site
            shutil.copytree(folder / "sites" / site, kit)  # a USB stick, say
            if number < installs:
                subprocess.run(["sh", "install.sh"], cwd=kit, env=bare, check=True)  # noqa: S607
                watch(f"{site}: `sh install.sh`")
            else:
                (kit / "venv").symlink_to(kits[next(iter(tables))] / "venv")
            told = re.search(rf"tell {site} .*: (\S+)", said)
            assert told is not None
            accept = ["venv/bin/coterie", "federate", "accept", ".", "--fingerprint", told[1]]
            subprocess.run(accept, cwd=kit, env=bare, check=True, stdout=sys.stderr)  # noqa: S603
            watch(f"{site}: `federate accept .`")
            table.to_csv(kit / "data.csv", index=False)
        server = [*consortium.COTERIE, "server", str(folder)]
        sites = [
            [str(kit / "venv/bin/coterie"), "federate", "site", str(kit)] for kit in kits.values()
        ]
        with consortium.started(server, *sites):
            for kit in kits.values():
                while "connected to the server" not in (kit / "said.txt").read_text():
                    time.sleep(0.1)
            watch("all: `federate site .`, until connected")
            run = [*consortium.COTERIE, "run", str(folder)]
            verdict = subprocess.run(run, check=True, capture_output=True, text=True)  # noqa: S603
            watch("user 0: `federate run`, until the verdict")
    print(verdict.stdout)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--installs", type=int, default=1)
    main(**vars(parser.parse_args()))
