"""The NVFLARE part of `engines.py`: a provisioned server and sites on this machine, over mutual TLS.

One job measures all sides in turns:

- calls: a bare Collab call that sends x and gets an array of its size back, nothing else;
- bare: the same with a gradient by plain autograd at each site and then at user 0, as a script
  without coterie;
- ours: `Remote.gradients`, with the weights, the caps, the log of requests and the checks;
- masked: the same with `secure_sums`, with every site's gradient under masks.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
from nvflare.collab import collab
from nvflare.fuel.flare_api.flare_api import new_secure_session
from torch.nn.functional import mse_loss

from coterie.engines.in_process.passes import Passes
from coterie.engines.peer import Peer
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.responder import Responder
from coterie.federation.jobs import Answering, CollabSites
from coterie.federation.manifest import Kit
from coterie.federation.provisioning import LEAD, Consortium, provision
from coterie.federation.workspace import (
    SERVER_CLASS,
    SITE_CLASS,
    server_command,
    site_command,
    site_workspace,
    surroundings,
    write_job,
)
from coterie.gradients.parameters import Parameters
from engines import PEERS, ROUNDS, Flat, in_turn, timed, user

F = TypeVar("F", bound=Callable[..., Any])
main: Callable[[F], F] = collab.main
publish: Callable[[F], F] = collab.publish
NAMES = tuple(f"site-{k}" for k in range(1, 1 + PEERS))
RESULT = "times.json"


def plain_gradient(model: Flat, rank: int, x: Any) -> Any:
    """Return a gradient at x as a script without coterie would."""
    with torch.no_grad():
        model.w.copy_(torch.from_numpy(np.array(x)))
    inputs, targets = user(rank).batch(4, seed=0, step=0)
    return torch.autograd.grad(mse_loss(model(inputs), targets), [model.w])[0].numpy()


class Site(Answering):
    """A site that answers bare calls and coterie's."""

    def __init__(self, d: int) -> None:
        torch.set_num_threads(1)
        self.model = Flat(d)
        self._responder: Responder | None = None

    @publish
    def echo(self, x: Any) -> Any:
        """Return x."""
        return x

    @publish
    def plain(self, x: Any) -> Any:
        """Return a gradient."""
        return plain_gradient(self.model, 1, x)

    def answer(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Answer as coterie's sites do."""
        return self.responder().answer(method, arguments, "server")

    def responder(self) -> Responder:
        """Return what answers, made at the first request."""
        if self._responder is None:
            mine = user(1)
            mine.name = str(collab.site_name)
            log = Path(collab.workspace.get_root_dir()) / "requests.jsonl"
            self._responder = Responder(Peer(mine, Passes(self.model, mse_loss), log=log))
        return self._responder


class User0:
    """User 0, who takes the time of each side in turns."""

    def __init__(self, d: int, seconds: float) -> None:
        self.d, self.seconds = d, seconds

    @main
    def run(self) -> None:
        """Measure, and write the medians in milliseconds."""
        torch.set_num_threads(1)
        model, plain = Flat(self.d), Flat(self.d)
        sites = CollabSites()
        sites.wait_until_there()
        how: dict[str, Any] = {
            "sites": sites,
            "names": NAMES,
            "batch_size": 4,
            "timeout": 60,
        }
        engine, secure = (
            Remote(model, mse_loss, user(0), secure_sums=masked, **how) for masked in (False, True)
        )
        x = Parameters(model).share()
        weights = dict.fromkeys(NAMES, 1 / PEERS)

        def bare() -> None:
            point = x.detach().numpy()
            answers = [torch.from_numpy(g) for _, g in collab.clients(timeout=60).plain(point)]
            (torch.from_numpy(plain_gradient(plain, 0, point)) + sum(answers) / PEERS).norm()

        def ours() -> None:
            g = engine.gradients(x, 0, weights)
            assert not g.left_out, g.left_out

        def masked() -> None:
            g = secure.gradients(x, 0, weights)
            assert not g.left_out, g.left_out

        sides: dict[str, Callable[[], object]] = {
            "calls": lambda: list(collab.clients(timeout=60).echo(x.detach().numpy())),
            "bare": bare,
            "ours": ours,
            "masked": masked,
        }
        steps = max(
            10, int(self.seconds / ROUNDS / len(sides) / (30e-3 if self.d < 100_000 else 250e-3))
        )
        write_result(in_turn({name: partial(timed, side, steps) for name, side in sides.items()}))


def write_result(result: Any) -> None:
    """Write what user 0 found, whole or not at all."""
    fresh = Path(collab.workspace.get_root_dir()).parent / "times.new"
    fresh.write_text(json.dumps(result), encoding="utf-8")
    fresh.rename(fresh.with_name(RESULT))


def flare(d: int, seconds: float) -> dict[str, float]:
    """Return the median milliseconds of each side."""
    medians: dict[str, float] = deployed(
        "engines_flare", {"d": d, "seconds": seconds}, {"d": d}, limit=120 + 20 * seconds
    )
    return medians


def deployed(
    module: str, lead: dict[str, Any], site: dict[str, Any], *, limit: float, size: int = 1
) -> Any:
    """Run a module's `User0` and `Site`, made with these arguments, as a job; return what user 0 wrote."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        ports = _free_ports()
        consortium = Consortium("benchmark", "localhost", NAMES, *ports)
        provision(consortium, folder, size=size)
        _allow(folder / "server" / "local" / "resources.json", module)
        commands = [server_command(folder / "server")]
        for name in NAMES:
            kit = Kit(
                "benchmark", name, "user0", "localhost", ports[0], "y", (), "linear", size, 1, 1
            )
            place_of = site_workspace(folder / "sites" / name, kit)
            _allow(place_of / "local" / "resources.json", module)
            commands.append(site_command(place_of, kit))
        job = _job(folder, module, lead, site)
        here = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        env = surroundings() | {"PYTHONPATH": here, "OMP_NUM_THREADS": "1"}
        processes = [
            psutil.Popen(command, env=env, stdout=subprocess.DEVNULL) for command in commands
        ]
        try:
            return _result(folder, job, limit)
        finally:
            family = [child for process in processes for child in process.children(recursive=True)]
            for process in (*processes, *family):
                process.kill()
            psutil.wait_procs([*processes, *family], timeout=10)


def _job(folder: Path, module: str, lead: dict[str, Any], site: dict[str, Any]) -> Path:
    job = write_job(folder / "job", NAMES)
    for side, ours, kind, args in (
        ("server", SERVER_CLASS[False], "User0", lead),
        ("client", SITE_CLASS[False], "Site", site),
    ):
        path = job / "app" / "config" / f"config_fed_{side}.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        assert config["components"][0]["path"] == ours
        config["components"][0] |= {"path": f"{module}.{kind}", "args": args}
        path.write_text(json.dumps(config), encoding="utf-8")
    return job


def _allow(path: Path, module: str) -> None:
    resources = json.loads(path.read_text(encoding="utf-8"))
    resources["class_allow_list"] += [f"{module}.User0", f"{module}.Site"]
    path.write_text(json.dumps(resources), encoding="utf-8")


def _result(folder: Path, job: Path, limit: float) -> Any:
    until = time.monotonic() + limit
    session = new_secure_session(LEAD, str(folder / "lead"), timeout=60)
    try:
        while len(session.get_system_info().client_info) < PEERS and time.monotonic() < until:
            time.sleep(0.5)
        session.submit_job(str(job))
        while not (folder / RESULT).exists():
            if time.monotonic() > until:
                raise TimeoutError(f"no result in {limit} s")
            time.sleep(0.5)
    finally:
        session.close()
    return json.loads((folder / RESULT).read_text(encoding="utf-8"))


def _free_ports() -> list[int]:
    sockets = [socket.socket() for _ in range(2)]
    for each in sockets:
        each.bind(("localhost", 0))
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports
