"""The NVFLARE part of `exchanges.py`: time and bytes to a given loss, with latency added to every exchange.

A provisioned server and three sites on this machine, over mutual TLS, each a writer of digits. In
one job user 0 trains a linear model by averaging, with each latency and each K in turn, until its
validation loss is that which an exchange at every step reaches in as many own gradients, or 2 %
more. The latency is a delay in what carries the messages (`Delayed`): no exchange takes less time
than without it, plus that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from engines_flare import NAMES, deployed, write_result
from nvflare.collab import collab
from torch import nn
from torch.nn.functional import cross_entropy

import coterie
from coterie.data import digits_by_writer
from coterie.engines.in_process.passes import Passes
from coterie.engines.peer import Peer
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.responder import Responder
from coterie.engines.remote.sites import Replies
from coterie.federation.jobs import Answering, CollabSites

F = TypeVar("F", bound=Callable[..., Any])
main: Callable[[F], F] = collab.main
LATENCIES = (0.0, 0.02, 0.2)
KINDS = ((1, 1), (4, 1), (16, 1), (1, 4), (1, 16))


def model() -> nn.Module:
    """Return the model that all build."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


@dataclass(frozen=True)
class DelayedReplies:
    """Replies that come later."""

    replies: Replies
    seconds: float

    def done(self) -> bool:
        """Say whether they are all there."""
        return self.replies.done()

    def wait(self) -> Mapping[str, Any]:
        """Return them, later."""
        answers = self.replies.wait()
        time.sleep(self.seconds)
        return answers


class Delayed:
    """The sites of this job, farther away by so many seconds there and back."""

    def __init__(self, seconds: float) -> None:
        self.sites, self.seconds = CollabSites(), seconds

    def ask(
        self, names: Sequence[str], method: str, timeout: float, **arguments: Any
    ) -> DelayedReplies:
        """Ask as `CollabSites` does."""
        return DelayedReplies(self.sites.ask(names, method, timeout, **arguments), self.seconds)


class Site(Answering):
    """A writer of digits."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._peer: Peer | None = None

    def answer(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Answer as coterie's sites do."""
        return Responder(self.peer()).answer(method, arguments, "server")

    def peer(self) -> Peer:
        """Return what answers, made at the first request."""
        if self._peer is None:
            name = str(collab.site_name)
            mine = digits_by_writer(0).peers[NAMES.index(name)]
            mine.name = name
            log = Path(collab.workspace.get_root_dir()) / "requests.jsonl"
            self._peer = Peer(mine, Passes(model(), cross_entropy), log=log)
        return self._peer


class User0:
    """Another writer, who trains again and again."""

    def __init__(self, gradients: int, latencies: list[float]) -> None:
        self.gradients, self.latencies = gradients, latencies

    @main
    def run(self) -> None:
        """Train with every latency and kind, and write what it took."""
        torch.set_num_threads(1)
        CollabSites().wait_until_there()
        target = min(self.trained(0.0, (1, 1), 0.0)["losses"]) * 1.02
        runs = []
        for latency in self.latencies:
            for kind in KINDS:
                one = self.trained(latency, kind, target)
                runs.append(
                    {
                        "latency": latency,
                        "kind": kind,
                        **{k: v for k, v in one.items() if k != "losses"},
                    }
                )
        write_result({"target": target, "runs": runs})

    def trained(self, latency: float, kind: tuple[int, int], target: float) -> dict[str, Any]:
        """Train until the validation loss is low enough, or for twice as many own gradients as at first."""
        task, losses = digits_by_writer(0), []
        me = task.me
        engine = Remote(
            model(),
            cross_entropy,
            me,
            sites=Delayed(latency),
            names=NAMES,
            batch_size=16,
            timeout=60,
        )

        def low_enough(step: coterie.Step) -> bool:
            if step.point is not None:
                losses.append(step.point.validation["loss"])
            return bool(losses and losses[-1] <= target)

        began = time.perf_counter()
        run = coterie.train(
            engine.own.passes.model,
            cross_entropy,
            me,
            [],
            coterie.WeightedAveraging(0.6),
            optimizer=torch.optim.SGD,
            lr=0.3,
            steps=(1 if not target else 2) * self.gradients // kind[1],
            evaluate_every=max(1, 4 // kind[1]),
            engine=engine,
            exchange_every=kind[0],
            local_steps=kind[1],
            hooks=[low_enough],
            guard="off",
            progress=False,
        )
        seconds, end = time.perf_counter() - began, run.record.end
        if end is None:
            raise AssertionError("the run has ended")
        mine = end.traffic[me.name]
        return {
            "losses": losses,
            "reached": losses[-1] <= target,
            "seconds": seconds,
            "gradients": run.step * kind[1],
            "exchanges": mine.messages // len(NAMES),
            "bytes": mine.bytes_sent + mine.bytes_received,
        }


def latency(*, short: bool) -> None:
    """Print time, exchanges and bytes to the loss."""
    gradients, latencies = (40, [0.2]) if short else (160, list(LATENCIES))
    result = deployed(
        "exchanges_flare",
        {"gradients": gradients, "latencies": latencies},
        {},
        limit=1200,
        size=650,
    )
    print(f"to a validation loss of {result['target']:.4f}")
    print("| latency | exchange_every | local_steps | seconds | own gradients | exchanges | kB |")
    print("|---" * 7 + "|")
    for one in result["runs"]:
        every, steps = one["kind"]
        reached = f"{one['seconds']:.1f}" if one["reached"] else "not reached"
        print(
            f"| {1e3 * one['latency']:.0f} ms | {every} | {steps} | {reached} | {one['gradients']} | "
            f"{one['exchanges']} | {one['bytes'] / 1e3:.0f} |"
        )
