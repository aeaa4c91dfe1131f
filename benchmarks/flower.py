"""The app of examples/flower as a Flower user runs it, beside the same run in one process.

    python benchmarks/flower.py [--rounds 20] [--local-steps 5] [--only simulation|deployment]
    python benchmarks/flower.py --kills 10 [--seed 0] [--minutes 8]

A copy of the app is started by `flwr run`: in simulation (which needs Ray: `pip install
"flwr[simulation]"`), and in deployment, a SuperLink and three SuperNodes on this machine, over TLS
with a certificate made by openssl. A row is one of the two: the seconds from `flwr run` to its end,
the largest difference of its model from that of the same run in this process, and what the run
says of itself. Deployment takes fewer rounds, since Flower starts a process for every message.

With `--kills` a deployment is struck at random moments, so often or for so many minutes: a
SuperNode, the process that answers for one, the ServerApp (also by SIGTERM) or the SuperLink. What
was killed is started again, and a run that has ended is begun again with `flwr run`. In the end the
model is compared with that of a run in this process, each peer absent in the recorded steps.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from healing import Absent

import coterie
from coterie.engines.in_process.passes import Passes
from coterie.engines.peer import Peer
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.sites import LocalSites
from coterie.recording.checkpoint import saved, step_of

APP = Path(__file__).parents[1] / "examples" / "flower"
PEERS = 3
CERTIFICATE = "/CN=localhost"
NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1"
QUIET = {
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    "RAY_raylet_start_wait_time_s": "300",
}


def expected(
    rounds: int, local_steps: int, absent: Mapping[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """Return the parameters of the same run in this process, where peers may be absent in some steps."""
    sys.path.insert(0, str(APP))
    from writers.task import LOSS, make_model, me, peer  # noqa: PLC0415  # the app's own

    peers = [peer(number) for number in range(PEERS)]
    rule = coterie.WeightedAveraging(alpha=0.5)
    how: dict[str, Any] = {"steps": rounds, "local_steps": local_steps, "progress": False}
    if absent:
        held = {one.name: Peer(one, Passes(make_model(), LOSS)) for one in peers}
        sites = Absent(LocalSites(held), absent)
        how["engine"] = partial(Remote, sites=sites, names=list(held), misses=10**9)
        peers = []
    run = coterie.train(make_model(), LOSS, me(), peers, rule, lr=0.01, **how)
    return dict(run.model.state_dict())


def free_port() -> int:
    """Return a port that nothing listens at."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Deployment:
    """A SuperLink, three SuperNodes and a run on this machine, each of which can be killed."""

    def __init__(self, folder: Path, rounds: int, local_steps: int) -> None:
        self.folder, self.out = folder, folder / "model.pt"
        self.env = os.environ | QUIET | {"FLWR_HOME": str(folder / "home")}
        app, port = shutil.copytree(APP, folder / "app"), free_port()
        (folder / "home").mkdir()
        text = f'[superlink.secure]\naddress = "localhost:{port}"\n'
        text += f'root-certificates = "{folder / "ca.pem"}"\n'
        (folder / "home" / "config.toml").write_text(text, encoding="utf-8")
        link = ["flower-superlink", "--host", "127.0.0.1", "--port", str(port)]
        self.commands = {"SuperLink": [*link, *certificates(folder)]}
        for number in range(PEERS):
            node = ["flower-supernode", "--root-certificates", str(folder / "ca.pem")]
            node += ["--superlink", f"localhost:{port}", "--port", str(free_port())]
            node += ["--node-config", f"partition-id={number} num-partitions={PEERS}"]
            self.commands[f"SuperNode {number}"] = node
        knobs = f'rounds={rounds} local-steps={local_steps} out="{self.out}"'
        knobs += f' folder="{folder / "run"}"'
        self.run = ["flwr", "run", str(app), "secure", "--run-config", knobs]
        self.processes: dict[str, psutil.Process] = {}
        self.keep_up()

    def keep_up(self) -> bool:
        """Start what does not run, and say whether that was anything."""
        gone = [n for n in self.commands if n not in self.processes or not self.runs(n)]
        with (self.folder / "said.txt").open("ab") as said:
            for name in gone:
                how: dict[str, Any] = {"env": self.env, "stdout": said, "stderr": said}
                self.processes[name] = psutil.Popen(self.commands[name], **how)
        return bool(gone)

    def runs(self, name: str) -> bool:
        """Say whether a process runs."""
        process = self.processes[name]
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)

    def of_app(self, kind: str) -> list[psutil.Process]:
        """Return the processes that run the app: "flwr-serverapp" or "flwr-clientapp"."""
        found = []
        for party in self.processes.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                family = party.children(recursive=True)
                found += [each for each in family if kind in " ".join(each.cmdline())]
        return found

    def begin(self) -> None:
        """Begin the run, or go on with it."""
        with (self.folder / "run.txt").open("ab") as said:
            for _ in range(20):  # until the SuperLink is up
                how: dict[str, Any] = {"env": self.env, "stdout": said, "stderr": said}
                if subprocess.run(self.run, check=False, **how).returncode == 0:  # noqa: S603
                    return
                time.sleep(3)
        raise RuntimeError((self.folder / "run.txt").read_text())

    def strike(self, kind: str) -> bool:
        """Kill one of a kind, and say whether there was one."""
        if kind in {"SuperLink", "SuperNode"}:
            there = [self.processes[n] for n in self.commands if n.startswith(kind)]
        else:
            there = self.of_app("flwr-clientapp" if kind == "ClientApp" else "flwr-serverapp")
        for process in there[:1]:
            children = process.children(recursive=True) if kind.startswith("Super") else []
            if kind == "ServerApp, SIGTERM":
                process.terminate()
            else:
                for each in (*children, process):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
        return bool(there)

    def end(self) -> None:
        """End all."""
        family = [p for one in self.processes.values() for p in one.children(recursive=True)]
        for process in (*family, *self.processes.values()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


KINDS = ("SuperNode", "ClientApp", "ServerApp", "ServerApp, SIGTERM", "SuperLink")


def kills(times: int, seed: int, minutes: float, rounds: int, local_steps: int) -> None:
    """Strike a deployment, bring it to its end, and compare."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        deployment = Deployment(folder, rounds, local_steps)
        steps = folder / "run" / "checkpoints"

        def step() -> int:
            return max(map(step_of, saved(steps)), default=0)

        try:
            began, done, running = time.monotonic(), 0, False
            while not deployment.out.exists() and time.monotonic() < began + 60 * minutes + 240:
                if not running:
                    deployment.begin()
                    running, until = True, time.monotonic() + 60
                    while not deployment.of_app("flwr-serverapp") and time.monotonic() < until:
                        time.sleep(0.5)
                striking = done < times and time.monotonic() < began + 60 * minutes
                time.sleep(rng.uniform(2, 25) if striking else 1)
                if striking and not deployment.out.exists():
                    kind, at = str(rng.choice(KINDS)), step()
                    if deployment.strike(kind):
                        done += 1
                        print(f"{time.monotonic() - began:.0f} s, step {at}: {kind}", flush=True)
                        time.sleep(3)
                deployment.keep_up()
                running = bool(deployment.of_app("flwr-serverapp"))
            if not deployment.out.exists():
                print((folder / "run.txt").read_text() + (folder / "said.txt").read_text()[-3000:])
                return
            end = coterie.Record.load(folder / "run").end
            found = torch.load(deployment.out, weights_only=True)
        finally:
            deployment.end()
    wanted = expected(rounds, local_steps, end.absent)
    apart = max(float((found[name] - value).abs().max()) for name, value in wanted.items())
    print(f"{done} strikes, {end.step} steps, absent {dict(end.absent)}: apart by {apart:.1e}")


@contextlib.contextmanager
def started(folder: Path, commands: list[list[str]], env: dict[str, str]) -> Iterator[None]:
    """Start commands, and end them with all their children."""
    with (folder / "said.txt").open("ab") as said:
        processes = [psutil.Popen(c, env=env, stdout=said, stderr=said) for c in commands]
    try:
        yield
    finally:
        family = [child for one in processes for child in one.children(recursive=True)]
        for process in (*family, *processes):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs([*family, *processes], timeout=10)


def certificates(folder: Path) -> list[str]:
    """Make an authority and a certificate for this machine, and return a SuperLink's options."""
    for command in (
        "req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 2 -subj /CN=trial",
        f"req -newkey rsa:2048 -nodes -keyout server.key -out server.csr -subj {CERTIFICATE}"
        f" -addext {NAMES}",
        "x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out server.pem -days 2"
        " -copy_extensions copy",
    ):
        subprocess.run(  # noqa: S603  # our own command
            ["openssl", *command.split()],  # noqa: S607
            cwd=folder,
            check=True,
            capture_output=True,
        )
    files = {"ca-certfile": "ca.pem", "certfile": "server.pem", "keyfile": "server.key"}
    return [part for name, file in files.items() for part in (f"--ssl-{name}", str(folder / file))]


def measure(kind: str, rounds: int, local_steps: int) -> str:
    """Run the app, and return what came of it in a line."""
    with tempfile.TemporaryDirectory() as place:
        folder, port, out = Path(place), free_port(), Path(place) / "model.pt"
        app = shutil.copytree(APP, folder / "app")
        env = os.environ | QUIET | {"FLWR_HOME": str(folder / "home")}
        link = ["flower-superlink", "--host", "127.0.0.1", "--port", str(port)]
        if kind == "simulation":
            name, about, more = "local", "insecure = true", ["--federation-config"]
            more += [f"num-supernodes={PEERS}"]
            commands = [[*link, "--insecure", "--simulation"]]
        else:
            name, about, more = "secure", f'root-certificates = "{folder / "ca.pem"}"', []
            commands = [[*link, *certificates(folder)]]
            for number in range(PEERS):
                node = ["flower-supernode", "--root-certificates", str(folder / "ca.pem")]
                node += ["--superlink", f"localhost:{port}", "--port", str(free_port())]
                node += ["--node-config", f"partition-id={number} num-partitions={PEERS}"]
                commands.append(node)
        (folder / "home").mkdir()
        text = f'[superlink.{name}]\naddress = "localhost:{port}"\n{about}\n'
        (folder / "home" / "config.toml").write_text(text, encoding="utf-8")
        knobs = f'rounds={rounds} local-steps={local_steps} out="{out}"'
        run = ["flwr", "run", str(app), name, "--run-config", knobs, *more, "--stream"]
        with started(folder, commands, env):
            time.sleep(5)
            began = time.monotonic()
            with (folder / "run.txt").open("wb") as said:
                subprocess.run(run, env=env, check=True, stdout=said, stderr=said)  # noqa: S603
            while not out.exists() and time.monotonic() < began + 600:
                time.sleep(0.2)
            seconds = time.monotonic() - began
        if not out.exists():
            raise RuntimeError((folder / "run.txt").read_text() + (folder / "said.txt").read_text())
        found, wanted = torch.load(out, weights_only=True), expected(rounds, local_steps)
        apart = max(float((found[name] - value).abs().max()) for name, value in wanted.items())
        waited = [line for line in (folder / "run.txt").read_text().splitlines() if "wait" in line]
    return f"{kind}: {rounds} exchanges in {seconds:.0f} s, models differ by {apart:.1e}{waited}"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--local-steps", type=int, default=5)
    parser.add_argument("--only", choices=("simulation", "deployment"))
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=8)
    given = parser.parse_args()
    if given.kills:
        kills(given.kills, given.seed, given.minutes, given.rounds, given.local_steps)
        return
    for kind, rounds in (("simulation", given.rounds), ("deployment", min(given.rounds, 3))):
        if given.only in (None, kind):
            print(measure(kind, rounds, given.local_steps), flush=True)


if __name__ == "__main__":
    main()
