"""What a step costs when the peers are in other processes, over the bare calls of the same transport.

    python benchmarks/engines.py                   # 3 peers here, d = 10,000 and 1,000,000
    python benchmarks/engines.py --engine torch --seconds 30
    python benchmarks/engines.py --engine torch --sides bare sums --peers 7 --d 10000000

Every side takes its turn in the same processes. For processes:

- calls: one broadcast of x and one reduce of d numbers by gloo, nothing else;
- bare: the same with every rank's gradient by plain autograd between them, as a script without
  coterie would do;
- ours: `TorchDistributed.gradients`, where each sends its own; sums: where peers give sums only,
  which they pass on; masked: with `secure_sums`; adaptive: a question at five points;
- everyone: `Mutual.gradients`, where all four ask each other at the same time, over four bare
  steps, one after the other.

For NVFLARE, over mutual TLS, in one job (`engines_flare.py`): a bare Collab call that sends x and
gets as much back; the same with gradients by plain autograd; `Remote.gradients`; the same with
`secure_sums`.

For Flower, its messages: a grid in this process that packs each message as Flower sends it, to a
ClientApp that runs at once. (A deployment starts a process for each, which takes seconds and would
hide what differs; `benchmarks/flower.py` has whole runs.)

Of ours over bare two ratios are told: of the clock's time, the median of the turns; and of the
processor time that all processes together took in their turns, which other work on the machine
does not change.

The model has d parameters and next to no arithmetic, so that what is compared is the exchange.
Another engine joins by a function in `ENGINES` that measures it beside its own bare call.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import coterie
from coterie.engines.engine import Question
from coterie.engines.processes.engine import Mutual, TorchDistributed, serve
from coterie.engines.processes.processes import LAST_THREAD
from coterie.gradients.parameters import Parameters

PEERS = int(os.environ.get("WORLD_SIZE", "4")) - 1
SIDES = ("calls", "bare", "ours", "sums", "masked", "adaptive", "everyone")
ROUNDS = 15
"""How often every side takes its turn; the ratio is the median of the rounds', since a machine's load drifts."""


FAMILY = "COTERIE_BENCHMARK_FAMILY"
"""Names the process that all others were started by."""


def processor() -> float:
    """Return the processor time of all processes of this benchmark so far."""
    first, seconds = psutil.Process(int(os.environ[FAMILY])), 0.0
    for process in (first, *first.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            seconds += sum(process.cpu_times()[:2])
    return seconds


def in_turn(sides: Mapping[str, Callable[[], list[float]]]) -> dict[str, float]:
    """Let every side take its turns; return median milliseconds, and the ratios of ours to bare."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    spent = dict.fromkeys(sides, 0.0)
    for _ in range(ROUNDS):
        for name, side in sides.items():
            before, taken = processor(), side()
            spent[name] += processor() - before
            times[name].append(1e3 * statistics.median(taken) if taken else 0.0)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    for name, ratio, share in (("ours", "ratio", 1), ("everyone", "ratio of all", 1 + PEERS)):
        if name in sides and "bare" in sides and times["bare"][0]:
            pairs = zip(times[name], times["bare"], strict=True)
            medians[ratio] = statistics.median(a / b / share for a, b in pairs)
            medians[f"{ratio}, processor"] = spent[name] / spent["bare"] / share
    if {"ours", "adaptive"} <= spent.keys() and spent["ours"]:
        medians["five points over one, processor"] = spent["adaptive"] / spent["ours"]
    return medians


class Flat(nn.Module):
    """A model of d parameters whose output is their sum times the input."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, d) / d)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return one number an example."""
        out: Tensor = inputs * self.w.sum()
        return out


def user(rank: int) -> coterie.User:
    """Return a user of four examples."""
    generator = torch.Generator().manual_seed(rank)
    return coterie.User(
        str(rank), torch.randn(4, 1, generator=generator), torch.randn(4, 1, generator=generator)
    )


def timed(step: Callable[[], object], steps: int) -> list[float]:
    """Return the seconds of each of some steps, after a few that do not count."""
    for _ in range(3):
        step()
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return seconds


def bare(rank: int, d: int, steps: int, with_gradients: bool) -> list[float]:
    """Time a broadcast and a reduce, as a script without coterie would call them."""
    at = f"tcp://127.0.0.1:{os.environ['BARE_PORT']}"
    dist.init_process_group("gloo", init_method=at, rank=rank, world_size=1 + PEERS)
    model, mine = Flat(d), user(rank)
    x = Parameters(model).share()
    gradient = torch.zeros(d)

    def step() -> None:
        nonlocal gradient
        dist.broadcast(x, 0)
        if with_gradients:
            inputs, targets = mine.batch(4, seed=0, step=0)
            (gradient,) = torch.autograd.grad(mse_loss(model(inputs), targets), [model.w])
            gradient = gradient / PEERS if rank else torch.zeros(d)
        dist.reduce(gradient, 0)

    seconds = timed(step, steps)
    dist.destroy_process_group()
    return seconds


def ours(
    rank: int, d: int, steps: int, *, points: int = 1, sums_only: bool = False, masked: bool = False
) -> list[float]:
    """Time the engine."""
    logging.disable(logging.WARNING)  # who joins masked sums
    model, mine = Flat(d), user(rank)
    if rank:
        serve(model, mse_loss, mine, sums_only=sums_only, timeout=60)
        return []
    engine = TorchDistributed(model, mse_loss, mine, batch_size=4, timeout=60, secure_sums=masked)
    x = Parameters(model).share()
    weights = dict.fromkeys(engine.names, 1 / PEERS)
    asked = torch.full((points, PEERS), 1 / PEERS, dtype=torch.float64)
    question = Question(x.expand(points, -1), 0, asked)

    def step() -> None:
        if points > 1:
            engine.ask(question)()
        else:
            engine.gradients(x, 0, weights)

    seconds = timed(step, steps)
    engine.close()
    return seconds


def everyone(rank: int, d: int, steps: int) -> list[float]:
    """Time the engine of users who all train."""
    model = Flat(d)
    engine = Mutual(model, mse_loss, user(rank), batch_size=4, patience=60)
    x = Parameters(model).share()
    weights = dict.fromkeys(engine.names, 1 / PEERS)
    seconds = timed(lambda: engine.gradients(x, 0, weights), steps)
    engine.close()
    for thread in threading.enumerate():
        if thread.name == LAST_THREAD:
            thread.join()
    return seconds


def rank_of_torch(rank: int, d: int, seconds: float, only: list[str]) -> None:
    """Be one of the processes; the first prints the medians in milliseconds."""
    torch.set_num_threads(1)
    sides: dict[str, Callable[[int], list[float]]] = {
        "calls": lambda steps: bare(rank, d, steps, with_gradients=False),
        "bare": lambda steps: bare(rank, d, steps, with_gradients=True),
        "ours": lambda steps: ours(rank, d, steps),
        "sums": lambda steps: ours(rank, d, steps, sums_only=True),
        "masked": lambda steps: ours(rank, d, steps, masked=True),
        "adaptive": lambda steps: ours(rank, d, steps, points=5),
        "everyone": lambda steps: everyone(rank, d, steps),
    }
    sides = {name: side for name, side in sides.items() if name in only}
    steps = max(10, int(seconds / ROUNDS / len(sides) / (5e-3 if d < 100_000 else 30e-3)))
    medians = in_turn({name: partial(side, steps) for name, side in sides.items()})
    if not rank:
        print(json.dumps(medians))


def torch_distributed(d: int, seconds: float, sides: Sequence[str] = SIDES) -> dict[str, float]:
    """Return the median milliseconds of each side, and the `ratio` of ours to the bare calls."""
    with socket.socket() as one, socket.socket() as other:
        ports = []
        for listening in (one, other):
            listening.bind(("127.0.0.1", 0))
            ports.append(str(listening.getsockname()[1]))
    shared = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": ports[0],
        "BARE_PORT": ports[1],
        "WORLD_SIZE": str(1 + PEERS),
    }
    command = [
        sys.executable,
        __file__,
        "--rank-of",
        str(d),
        "--seconds",
        str(seconds),
        "--sides",
        *sides,
    ]
    ranks = [
        subprocess.Popen(  # noqa: S603  # our own command
            command, env=shared | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(1 + PEERS)
    ]
    try:
        out = [process.communicate(timeout=60 + 20 * seconds)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    medians: dict[str, float] = json.loads(out[0])
    return medians


def nvflare(d: int, seconds: float, _: Sequence[str] = SIDES) -> dict[str, float]:
    """Return the median milliseconds of each side; see `engines_flare.py`."""
    from engines_flare import flare  # noqa: PLC0415  # NVFLARE need not be installed for the others

    return flare(d, seconds)


def flower(d: int, seconds: float, _: Sequence[str] = SIDES) -> dict[str, float]:
    """Return the median milliseconds of a bare exchange of Flower's messages, and of ours."""
    # Flower need not be installed for the others
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from flwr.app import ArrayRecord, Message, RecordDict  # noqa: PLC0415
    from flwr.clientapp import ClientApp  # noqa: PLC0415
    from tests.support.flower import DirectGrid  # noqa: PLC0415

    from coterie.flower import FlowerGrid, client_app  # noqa: PLC0415

    def gradient(model: Flat, mine: coterie.User, at: Any) -> Any:
        with torch.no_grad():
            model.w.copy_(torch.from_numpy(np.array(at)))
        inputs, targets = mine.batch(4, seed=0, step=0)
        return torch.autograd.grad(mse_loss(model(inputs), targets), [model.w])[0].numpy()

    def record(array: Any) -> RecordDict:
        return RecordDict({"arrays": ArrayRecord([np.asarray(array)])})

    def array_of(message: Message) -> Any:
        return message.content.array_records["arrays"].to_numpy_ndarrays()[0]

    def bare_app(rank: int) -> ClientApp:
        app, model, mine = ClientApp(), Flat(d), user(rank)

        @app.query("plain")
        def plain(message: Message, _: Any) -> Message:
            return Message(record(gradient(model, mine, array_of(message))), reply_to=message)

        return app

    def app(mine: coterie.User) -> ClientApp:
        return client_app(lambda _: mine, lambda _: Flat(d), mse_loss)

    torch.set_num_threads(1)
    model, ranks = Flat(d), range(1, 1 + PEERS)
    x, here = Parameters(model).share(), Flat(d)
    grid = DirectGrid([bare_app(rank) for rank in ranks], packed=True)
    apps = [app(user(rank)) for rank in ranks]
    engine = FlowerGrid(DirectGrid(apps, packed=True), PEERS)(
        model, mse_loss, user(0), batch_size=4
    )
    weights = dict.fromkeys(engine.names, 1 / PEERS)

    def bare() -> None:
        asked = record(x.detach().numpy())
        sent = grid.push_messages([Message(asked, rank, "query.plain") for rank in ranks])
        answers = [torch.from_numpy(array_of(reply)) for reply in grid.pull_messages(sent)]
        own = torch.from_numpy(gradient(here, user(0), x.detach().numpy()))
        (own + sum(answers) / PEERS).norm()

    n_steps = max(5, int(seconds / ROUNDS / 2 / (10e-3 if d < 100_000 else 100e-3)))
    ours = partial(engine.gradients, x, 0, weights)
    return in_turn({"bare": partial(timed, bare, n_steps), "ours": partial(timed, ours, n_steps)})


ENGINES: dict[str, Callable[[int, float, Sequence[str]], dict[str, float]]] = {
    "torch": torch_distributed,
    "nvflare": nvflare,
    "flower": flower,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engine", choices=list(ENGINES), nargs="+", default=list(ENGINES))
    parser.add_argument(
        "--d", type=int, nargs="+", default=[10_000, 1_000_000], help="numbers of parameters"
    )
    parser.add_argument("--seconds", type=float, default=30, help="time to spend on each line")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="of torch")
    parser.add_argument("--peers", type=int, default=PEERS, help="of torch")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--rank-of", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        rank_of_torch(int(os.environ["RANK"]), options.rank_of, options.seconds, options.sides)
        return
    globals()["PEERS"] = options.peers
    os.environ[FAMILY] = str(os.getpid())
    for engine in options.engine:
        for d in options.d:
            medians = ENGINES[engine](d, options.seconds, options.sides)
            if options.json:
                print(json.dumps({"engine": engine, "d": d, "peers": PEERS, **medians}), flush=True)
            else:
                told = {}
                for of, what in (("ratio", "ours / bare"), ("ratio of all", "everyone / (4 bare)")):
                    told[what] = medians.pop(of, None)
                    told[f"{what}, processor"] = medians.pop(f"{of}, processor", None)
                shown = ", ".join(f"{name} {value:.2f} ms" for name, value in medians.items())
                more = "".join(
                    f"; {name} = {value:.2f}" for name, value in told.items() if value is not None
                )
                print(f"{engine:<8}d = {d:<10,}{shown}{more}", flush=True)


if __name__ == "__main__":
    main()
