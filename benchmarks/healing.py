"""A site that is killed and started again: how soon it is asked, and whether the run is what it says.

    python benchmarks/healing.py [--times 20] [--seed 0]

Three sites and user 0 on this machine, over NVFLARE with mutual TLS (examples/consortium.py). At a
random step one site is killed (SIGKILL, with all its processes) and started again at once. A row
is one time: the step, the seconds from its start to its connection, from there to its first answer.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import consortium

STEPS = 9_000
OPTIONS = ["--rule", "wga", "--own-examples", "40", "--steps", str(STEPS), "--timeout", "5"]


def until(said: Callable[[], bool], what: str, seconds: float = 600.0) -> float:
    """Wait until something is so, and return how long that took."""
    begun = time.monotonic()
    while not said():
        if time.monotonic() - begun > seconds:
            raise TimeoutError(f"{what} took more than {seconds:g} s")
        time.sleep(0.05)
    return time.monotonic() - begun


def answers(kit: Path) -> int:
    """Return how many lines a site's log has."""
    path = kit / "requests.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def step_of(kit: Path) -> int:
    """Return the step of a site's last answer."""
    lines = (kit / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    return int(json.loads(lines[-1])["step"])


def main(times: int, seed: int) -> None:
    """Kill, start and print."""
    rng, folder = np.random.default_rng(seed), Path(tempfile.mkdtemp()) / "trial"
    sites = consortium.set_up(folder, consortium.hospitals(None), "va", OPTIONS)
    kits = [folder / "sites" / site for site in sites]
    commands = consortium.commands(folder, sites)
    with (
        consortium.started(*commands) as (_, *processes),
        consortium.started([*consortium.COTERIE, "run", str(folder)]),
    ):
        waited = until(lambda: all(answers(kit) > 20 for kit in kits), "the run's start")
        print(f"first answers after {waited:.1f} s", flush=True)
        for k in range(times):
            which = int(rng.integers(len(sites)))
            at = answers(kits[which]) + int(rng.integers(10, 200))
            until(lambda kit=kits[which], at=at: answers(kit) > at, "its next steps")  # type: ignore[misc]
            step, given = step_of(kits[which]), answers(kits[which])
            consortium.end([processes[which]])
            with consortium.started(commands[1 + which]) as (again,):
                said = kits[which] / "said.txt"
                up = until(lambda said=said: "connected to the server" in said.read_text(), "it")  # type: ignore[misc]
                asked = until(
                    lambda kit=kits[which], n=answers(kits[which]): answers(kit) > n, "asking it"  # type: ignore[misc]
                )
                print(
                    f"{k + 1}: {sites[which]} killed at step {step}: connected after {up:.1f} s,"
                    f" asked {asked:.1f} s later; steps {step_of(kits[which])}, given {given}",
                    flush=True,
                )
                processes[which] = again
                if k + 1 < times:
                    until(lambda kit=kits[which], n=answers(kits[which]): answers(kit) > n + 5, "more")  # type: ignore[misc]
                    consortium.end([])
    print((folder / "said.txt").read_text()[-1500:])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
