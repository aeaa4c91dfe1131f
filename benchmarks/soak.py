"""A long run over processes: the same model as in process at the end, and no growth of memory.

    python benchmarks/soak.py                # 1,000 steps, 100,510 parameters, 8 ranks here
    python benchmarks/soak.py --sums-only    # peers pass on sums

prints how far the two models are apart, and for every rank the resident memory of the last 100
steps over that of the first 200, medians of one sample a step.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import coterie
from coterie.engines.processes.engine import TorchDistributed, serve

RANKS, HIDDEN = 8, 1340  # 64 inputs and 10 outputs: 100,510 parameters
PAGE = resource.getpagesize()


def user(rank: int) -> coterie.User:
    """Return a user of 200 examples that only its rank makes."""
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(200, 64, generator=generator) + 0.1 * rank
    return coterie.User(f"user {rank}", inputs, torch.randint(10, (200,), generator=generator))


def model() -> nn.Module:
    """Return the network, the same in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 10))


def resident() -> int:
    """Return the bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE


def growth(samples: list[int]) -> dict[str, float]:
    """Return the memory at the end over that at the start, and the latter in MB."""
    first, last = statistics.median(samples[:200]), statistics.median(samples[-100:])
    return {"MB": round(first / 1e6, 1), "ratio": round(last / first, 4)}


def trained(engine: Any, peers: list[coterie.User], steps: int, samples: list[int]) -> coterie.Run:
    """Train user 0's model, noting the memory at every step."""
    return coterie.train(
        *(model(), cross_entropy, user(0), peers, coterie.BiasCorrection(0.8, 0.05)),
        lr=1e-3,
        steps=steps,
        engine=engine,
        hooks=[lambda _: samples.append(resident())],
    )


def be_rank(rank: int, steps: int, sums_only: bool) -> None:
    """Be one of the processes, and print what came of it."""
    torch.set_num_threads(1)
    samples: list[int] = []
    result: dict[str, Any] = {"rank": rank}
    if rank:
        net = model()
        net.register_forward_hook(lambda *_: samples.append(resident()))
        serve(net, cross_entropy, user(rank), sums_only=sums_only, timeout=120)
    else:
        there = trained(functools.partial(TorchDistributed, timeout=120), [], steps, samples)
        peers = [user(k) for k in range(1, RANKS)]
        here = trained(functools.partial(coterie.InProcess, one_by_one=True), peers, steps, [])
        a, b = (
            nn.utils.parameters_to_vector(run.model.parameters()).detach() for run in (there, here)
        )
        result |= {
            "same bits": torch.equal(a, b),
            "relative difference": float((a - b).norm() / b.norm()),
        }
        result["seconds"] = there.record.end.seconds
    # in one write: eight processes have one output
    sys.stdout.write(json.dumps(result | growth(samples)) + "\n")


def main() -> None:
    """Start the processes and show what they print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--sums-only", action="store_true")
    options = parser.parse_args()
    if "RANK" in os.environ:
        be_rank(int(os.environ["RANK"]), options.steps, options.sums_only)
        return
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    shared = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(RANKS),
    }
    command = [
        sys.executable,
        __file__,
        "--steps",
        str(options.steps),
        *["--sums-only"] * options.sums_only,
    ]
    ranks = [subprocess.Popen(command, env=shared | {"RANK": str(rank)}) for rank in range(RANKS)]  # noqa: S603
    sys.exit(max(process.wait() for process in ranks))


if __name__ == "__main__":
    main()
