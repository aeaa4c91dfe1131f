"""The cost of a clipped sum over that of a plain gradient of the same batch, all sides timed in one run.

The sides: a plain gradient; the clipped sum by layer (`engines/peer/ghost_norms.py`); the same from
every example's gradient by `vmap`; the noise alone; and a whole private gradient, with its noise
and its random sample. Then what a peer takes to answer: plainly, with a log of what it gives, and
privately, where each line of the log is on the disk before anything is computed. The log lies in
the folder for temporary files, or in `--log`.

    python benchmarks/clipping.py [--device cuda] [--threads 1] [--batch 32] [--seconds 20]
        [--log FOLDER]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from measured import milliseconds, ratio, repeated
from step_cost import cnn
from torch.nn.functional import cross_entropy

import coterie
from coterie.engines.in_process.model_support import ModelSupport
from coterie.engines.in_process.passes import Passes
from coterie.engines.messages import Request
from coterie.engines.peer import Caps, Peer
from coterie.engines.peer.ghost_norms import clipped_sum_by_layer
from coterie.engines.peer.private_gradients import PrivateGradients
from coterie.privacy import Privacy
from coterie.privacy.accountant import Event
from coterie.privacy.noise import clipped_sum, noisy


def main() -> None:
    """Print each side's time, and its ratio to the plain gradient."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--log", type=Path, help="a folder on the disk that the log would lie on")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    device, n = torch.device(given.device), given.batch
    user = coterie.User("a", torch.randn(8 * n, 1, 28, 28), torch.arange(8 * n) % 10).to(device)
    passes = Passes(cnn().to(device), cross_entropy)
    private = PrivateGradients(user, passes, Privacy(1.0, 1e-5, 1.0, 1.0), None)
    x, (inputs, targets) = passes.parameters.vector(), user.take(torch.arange(n), seed=0, step=0)
    sides: dict[str, Callable[[], object]] = {
        "plain gradient": lambda: passes.single(x, inputs, targets),
        "clipped by layer": lambda: clipped_sum_by_layer(passes, x, inputs, targets, 1.0),
        "clipped by vmap": lambda: clipped_sum(passes.each_example(x, inputs, targets), 1.0),
        "noise": lambda: noisy(x, 1.0, 1.0, n),
        "private gradient": lambda: private.gradient(x, event=Event(1 / 8, 1.0)),
    }
    with tempfile.TemporaryDirectory(dir=given.log) as folder:
        for name, privacy in (
            ("plain answer", None),
            ("private answer", Privacy(1e4, 1e-5, 1.0, 1.0)),
        ):
            log = Path(folder) / name.replace(" ", "-")
            peer = Peer(user, passes, Caps(), log, ModelSupport(), privacy=privacy)
            request = Request(x[None], step=0, seed=0, batch_size=n)
            sides[name] = partial(peer.answer, request)
        steps = {name: repeated(_done(side)) for name, side in sides.items()}
        times = milliseconds(steps, device, given.seconds)
    for name, each in times.items():
        plain = "plain answer" if "answer" in name else "plain gradient"
        print(f"{name:18s} {median(each):8.2f} ms {ratio(each, times[plain]):6.2f} x {plain}")


def _done(side: Callable[[], object]) -> Callable[[], None]:
    def step() -> None:
        side()

    return step


if __name__ == "__main__":
    main()
