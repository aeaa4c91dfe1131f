"""Train in children that are killed and resumed; print what came of it, one JSON object a line.

A process of its own for `test_resuming.py`: it imports torch once and forks a child for every run,
so that a start takes milliseconds. It computes nothing itself, since threads do not survive a fork.

    python killed_runs.py FOLDER KILLS SEED
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # what an optimizer's first step would import in every child
import torch.utils.tensorboard.writer
from torch import nn

import coterie
from coterie.recording import checkpoint

torch.set_num_threads(1)
STEPS, DONE = 60, 2**32 - 1


def users() -> list[coterie.User]:
    generator = torch.Generator().manual_seed(0)

    def examples(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(size, 6, generator=generator), torch.arange(size) % 3

    me = coterie.User("me", *examples(15), validation=examples(12), test=examples(9))
    return [me, *(coterie.User(f"peer {k}", *examples(size)) for k, size in enumerate((20, 7, 11)))]


def batch_dependent(out: Path, hooks: list[Any]) -> coterie.Run:
    """BatchNorm and dropout; bias correction; momentum under a cycle of rates."""
    me, *peers = users()
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
    )
    return coterie.train(
        *(model, nn.functional.cross_entropy, me, peers, coterie.BiasCorrection(0.8, 0.05)),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(
            o, max_lr=0.1, total_steps=STEPS + 1
        ),
        **settings(out, hooks),
    )


def plain(out: Path, hooks: list[Any]) -> coterie.Run:
    """A plain network; half correction from zero; Adam with rates that follow the validation loss."""
    me, *peers = users()
    torch.manual_seed(2)
    rule = coterie.BiasCorrection(lambda t: 0.9 / (1 + 0.01 * t), 0.1, correction=0.5, start="zero")
    return coterie.train(
        *(
            nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
            nn.functional.cross_entropy,
            me,
            peers,
            rule,
        ),
        optimizer=torch.optim.Adam,
        lr=0.05,
        scheduler=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.7),
        **settings(out, hooks),
    )


def settings(out: Path, hooks: list[Any]) -> dict[str, Any]:
    return {
        "steps": STEPS,
        "batch_size": 6,
        "evaluate_every": 3,
        "checkpoint_every": 2,
        "hooks": hooks,
        "out": out,
        "resume": True,
    }


RUNS: dict[str, Callable[[Path, list[Any]], coterie.Run]] = {
    "batch dependent": batch_dependent,
    "plain": plain,
}


def digest(run: coterie.Run, out: Path) -> str:
    """Return a digest of the model, the rule's and the optimizer's last state, the points and the test."""
    digest = hashlib.sha256()
    states = [run.model.state_dict(), run.state]
    last = checkpoint.load(checkpoint.saved(out / "checkpoints")[-1])
    states += [
        last["learner"]["model"],
        *last["learner"]["optimizer"]["state"].values(),
        last["learner"]["scheduler"],
    ]
    for state in states:
        for key, value in sorted(state.items()):
            digest.update(f"{key}=".encode())
            digest.update(
                value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
            )
    points = [point.to_plain() for point in coterie.Record.load(out / "record.jsonl").points]
    digest.update(json.dumps([points, dict(run.test), run.best_step]).encode())
    return digest.hexdigest()


def start(name: str, out: Path) -> tuple[int, int]:
    """Fork a child that trains, and return its id and where it tells its steps."""
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        return child, read
    status = 1
    try:
        run = RUNS[name](out, [lambda step: os.write(write, struct.pack("<I", step.step)) and None])
        (out / "digest").write_text(digest(run, out), encoding="utf-8")
        os.write(write, struct.pack("<I", DONE))
        status = 0
    finally:
        os._exit(status)  # whatever happened: no child runs the parent's code


def told(read: int) -> Iterator[int]:
    """Yield the steps a child tells, as they come, until it is gone."""
    while len(word := os.read(read, 4)) == 4:
        yield struct.unpack("<I", word)[0]


def killed(name: str, out: Path, step: int, delay: float) -> tuple[bool, int]:
    """Kill a child some time after a step; say whether it was training still, and the last step it told."""
    child, read = start(name, out)
    steps, last = told(read), 0
    while last < step:
        last = next(steps, DONE)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    last = max([last, *steps])
    os.close(read)
    if os.WIFEXITED(status) and os.waitstatus_to_exitcode(status):
        raise RuntimeError(f"a child of {name!r} failed before it was killed at step {step}")
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and last != DONE, last


def finished(name: str, out: Path) -> str:
    """Let a run go to its end in a child, and return its digest."""
    child, read = start(name, out)
    for _ in told(read):
        pass
    os.close(read)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise RuntimeError(f"{name!r} could not be taken up again")
    return (out / "digest").read_text(encoding="utf-8")


def whole(folder: Path) -> bool:
    """Say whether every checkpoint in a folder is whole."""
    for path in folder.glob("step-*.ckpt"):
        head, _, body = path.read_bytes().partition(b"\n")
        if not head.endswith(hashlib.sha256(body).hexdigest().encode()):
            return False
    return True


def outcomes(folder: Path, kills: int, seed: int) -> Iterator[dict[str, Any]]:
    """Kill runs at moments spread over the whole of them, until enough kills have hit training; yield what came."""
    rng = np.random.default_rng(seed)
    wanted = {name: finished(name, folder / f"{name}, whole") for name in RUNS}
    done = attempt = 0
    while done < kills:
        name, out = list(RUNS)[attempt % len(RUNS)], folder / f"run {attempt}"
        attempt += 1
        # Once while the run is being set up, then some time after a step: in a step, an evaluation,
        # a checkpoint.
        moments = [
            (0, rng.uniform(0, 0.03)),
            *((step, rng.uniform(0, 0.01)) for step in rng.integers(1, STEPS - 3, 5)),
        ]
        killed_at, torn = [], set[int]()
        for step, delay in sorted(moments):
            in_flight, last = killed(name, out, int(step), delay)
            if in_flight and last:
                killed_at.append(last)
            if not whole(out / "checkpoints"):
                raise RuntimeError(f"a checkpoint of {out} is not whole")
            torn |= {path.stat().st_mtime_ns for path in (out / "checkpoints").glob("*.new")}
        done += len(killed_at)
        yield {
            "run": name,
            "killed_at": killed_at,
            "torn": len(torn),
            "digest": finished(name, out),
            "wanted": wanted[name],
        }


def main(folder: Path, kills: int, seed: int) -> None:
    """Print what comes of kills, one JSON object a line."""
    for outcome in outcomes(folder, kills, seed):
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
