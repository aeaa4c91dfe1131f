"""Four hospitals that keep their patients' data: one trains a model for itself, three answer with gradients.

With `--everyone` each of the four trains a model for itself, and answers the others.

One command starts everything on this machine, each hospital in processes of its own, connected by
NVFLARE over mutual TLS (`pip install ".[flare]"` in a clone), and ends it:

    python examples/consortium.py [FOLDER [DATA]] [--wrong SITE] [--everyone]

FOLDER is where the consortium is set up, a temporary folder when it is left out. DATA is a folder
with the four `processed.*.data` files of the UCI Heart Disease set; tables of the same shape are
made up without it. SITE has its patients' `ill` the wrong way round: the default rule finds out,
and does not listen to it. Between real hospitals the same commands run on four machines; see
docs/engines.md.
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import numpy as np
import pandas as pd
import psutil

from coterie.benchmark.sets.tables import heart
from coterie.federation.kits import accept
from coterie.federation.manifest import fingerprint

SIZES = {"cleveland": 303, "hungarian": 294, "switzerland": 123, "va": 200}
COTERIE = [sys.executable, "-m", "coterie", "federate"]


def hospitals(data: Path | None) -> dict[str, pd.DataFrame]:
    """Return each hospital's patients: 13 findings, of which many are missing, and `ill`."""
    if data is not None:
        population = heart(data)
        table = cast("pd.DataFrame", population.inputs).assign(ill=population.targets)
        return {name: table[population.owners == name] for name in SIZES}
    tables = {}
    for k, (name, n) in enumerate(SIZES.items()):
        rng = np.random.default_rng(k)
        age, sex, cp = rng.integers(30, 75, n), rng.integers(0, 2, n), rng.integers(1, 5, n)
        thalach, oldpeak = rng.normal(140, 25, n).round(), rng.exponential(1.0, n).round(1)
        score = (
            0.05 * (age - 50)
            + 0.8 * sex
            + 0.9 * (cp == 4)
            - 0.03 * (thalach - 140)
            + (0.5 + 0.1 * k) * oldpeak
        )
        columns = {"age": age, "sex": sex, "cp": cp, "thalach": thalach, "oldpeak": oldpeak}
        columns |= {
            "trestbps": rng.normal(130, 18, n).round(),
            "chol": rng.normal(240, 50, n).round(),
        }
        columns |= {
            "fbs": rng.integers(0, 2, n),
            "exang": rng.integers(0, 2, n),
            "ca": rng.integers(0, 4, n),
        }
        columns |= {c: rng.integers(0, 3, n) for c in ("restecg", "slope", "thal")}
        table = pd.DataFrame(columns).astype(float)
        table = table.mask(rng.random(table.shape) < 0.1)
        tables[name] = table.assign(ill=(rng.random(n) < 1 / (1 + np.exp(1.2 - score))).astype(int))
    return tables


def set_up(
    folder: Path, tables: dict[str, pd.DataFrame], me: str, options: Sequence[str] = ()
) -> list[str]:
    """Write the consortium's folders, each hospital's table in its own, and return the sites."""
    folder.mkdir(parents=True, exist_ok=True)
    tables[me].to_csv(folder / "mine.csv", index=False)
    sites = [name for name in tables if name != me]
    ports = free_ports(2)
    command = [
        *COTERIE,
        "init",
        str(folder),
        "--data",
        str(folder / "mine.csv"),
        "--target",
        "ill",
        "--me",
        me,
    ]
    command += ["--server", "localhost", "--port", str(ports[0]), "--admin-port", str(ports[1])]
    command += [word for site in sites for word in ("--site", site)]
    command += [
        word for column in ("cp", "restecg", "slope", "thal") for word in ("--categorical", column)
    ]
    subprocess.run([*command, *options], check=True)
    for site in sites:
        kit = folder / "sites" / site
        # a real site runs `coterie federate accept`, and compares with user 0
        accept(kit, fingerprint(kit))
        tables[site].to_csv(kit / "data.csv", index=False)
    return sites


def commands(folder: Path, sites: Sequence[str]) -> list[list[str]]:
    """Return what starts the server and the sites."""
    return [
        [*COTERIE, "server", str(folder)],
        *([*COTERIE, "site", str(folder / "sites" / site)] for site in sites),
    ]


def free_ports(n: int) -> list[int]:
    """Return ports that nothing listens at."""
    sockets = [socket.socket() for _ in range(n)]
    for each in sockets:
        each.bind(("localhost", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@contextmanager
def started(*commands: list[str]) -> Iterator[list[psutil.Process]]:
    """Start commands, what each says going to a file in its folder, and end them with all their children."""
    processes: list[psutil.Process] = []
    try:
        for command in commands:
            path = Path(command[-1]) / "said.txt"
            path.write_text("")  # of two in one folder, each adds its lines
            with path.open("a") as said:
                one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
                processes.append(psutil.Popen(command, stdout=said, stderr=said, env=one_thread))
        yield processes
    finally:
        end(processes)


def end(processes: list[psutil.Process]) -> None:
    """End processes and all their children, at once."""
    family = [*processes]
    for process in processes:
        if process.is_running():
            family += process.children(recursive=True)
    for process in family:
        if process.is_running():
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(family, timeout=10)


def main(folder: Path, data: Path | None, wrong: str | None, everyone: bool) -> None:
    """Set up, start, train, and apply the model."""
    tables = hospitals(data)
    if wrong is not None:
        tables[wrong] = tables[wrong].assign(ill=1 - tables[wrong]["ill"])
    options = ["--own-examples", "40", "--steps", "150", "--batch-size", "40"]
    sites = set_up(folder, tables, "va", [*options, "--everyone"] if everyone else options)
    members = ["va", *sites] if everyone else sites
    with started(*commands(folder, members)):
        subprocess.run([*COTERIE, "run", str(folder)], check=True)
    place = folder / "sites" / "va" / "run" if everyone else folder / "run"
    for member in members if everyone else []:  # at four hospitals, each sees its own only
        print(
            f"{member}: {(folder / 'sites' / member / 'run' / 'summary.txt').read_text(encoding='utf-8')}"
        )
    predict = [sys.executable, "-m", "coterie", "predict", str(place), str(folder / "mine.csv")]
    print(subprocess.run(predict, check=True, capture_output=True, text=True).stdout[:200])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--wrong", metavar="SITE", choices=[name for name in SIZES if name != "va"])
    parser.add_argument("--everyone", action="store_true")
    given = parser.parse_args()
    place = given.folder or Path(tempfile.mkdtemp())
    try:
        main(place, given.data, given.wrong, given.everyone)
    finally:
        if given.folder is None:
            shutil.rmtree(place, ignore_errors=True)
