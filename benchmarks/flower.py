"""The app of examples/flower as a Flower user runs it, beside the same run in one process.

    python benchmarks/flower.py [--rounds 20] [--local-steps 5] [--only simulation|deployment]

A copy of the app is started by `flwr run`: in simulation (which needs Ray: `pip install
"flwr[simulation]"`), and in deployment, a SuperLink and three SuperNodes on this machine, over TLS
with a certificate made by openssl. A row is one of the two: the seconds from `flwr run` to its end,
the largest difference of its model from that of the same run in this process, and what the run
says of itself. Deployment takes fewer rounds, since Flower starts a process for every message.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

import coterie

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


def expected(rounds: int, local_steps: int) -> dict[str, torch.Tensor]:
    """Return the parameters of the same run in this process."""
    sys.path.insert(0, str(APP))
    from writers.task import LOSS, make_model, me, peer  # noqa: PLC0415  # the app's own

    peers = [peer(number) for number in range(PEERS)]
    rule = coterie.WeightedAveraging(alpha=0.5)
    how: dict[str, Any] = {"steps": rounds, "local_steps": local_steps, "progress": False}
    run = coterie.train(make_model(), LOSS, me(), peers, rule, lr=0.01, **how)
    return dict(run.model.state_dict())


def free_port() -> int:
    """Return a port that nothing listens at."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


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
    given = parser.parse_args()
    for kind, rounds in (("simulation", given.rounds), ("deployment", min(given.rounds, 3))):
        if given.only in (None, kind):
            print(measure(kind, rounds, given.local_steps), flush=True)


if __name__ == "__main__":
    main()
