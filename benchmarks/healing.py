"""A site that is killed and started again: how soon it is asked, and whether the run is what it says.

    python benchmarks/healing.py [--times 20] [--seed 0]

Three sites and user 0 on this machine, over NVFLARE with mutual TLS (examples/consortium.py). At a
random step one site is killed (SIGKILL, with all its processes) and started again at once. A row
is one time: the step, the seconds from its start to its connection, from there to its first answer.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

_PATH = Path(__file__).parents[1] / "examples" / "consortium.py"
_SPEC = importlib.util.spec_from_file_location("example_of_a_consortium", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
consortium: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(consortium)

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


def has_answered(kit: Path, more_than: int) -> bool:
    """Say whether a site has answered more often."""
    return answers(kit) > more_than


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
    with contextlib.ExitStack() as life:
        _, *processes = life.enter_context(consortium.started(*commands))
        life.enter_context(consortium.started([*consortium.COTERIE, "run", str(folder)]))
        waited = until(lambda: all(answers(kit) > 20 for kit in kits), "the run's start")
        print(f"first answers after {waited:.1f} s", flush=True)
        for k in range(times):
            which = int(rng.integers(len(sites)))
            kit, said = kits[which], kits[which] / "said.txt"
            until(partial(has_answered, kit, answers(kit) + int(rng.integers(10, 200))), "steps")
            consortium.end([processes[which]])
            step, before = step_of(kit), answers(kit)
            (processes[which],) = life.enter_context(consortium.started(commands[1 + which]))
            up = until(lambda said=said: "connected to the server" in said.read_text(), "it")  # type: ignore[misc]
            asked = until(partial(has_answered, kit, before), "asking it")
            print(
                f"{k + 1}: {sites[which]} killed at step {step}: connected after {up:.1f} s, asked"
                f" {asked:.1f} s later, at step {step_of(kit)}",
                flush=True,
            )
    print((folder / "said.txt").read_text()[-1500:])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
