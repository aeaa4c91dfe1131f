"""Private peers that are killed while they answer, two at a time on one ledger; what is spent must not be lost."""

from __future__ import annotations

import os
import random
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tests.support.processes import forked
from torch import nn

import coterie
from coterie.engines.in_process.passes import Passes
from coterie.engines.messages import Request
from coterie.engines.peer import Peer
from coterie.engines.peer.ledger import Ledger
from coterie.errors import FileError
from coterie.privacy import Privacy
from coterie.privacy.accountant import Event, epsilon_of

N, EPSILON, DELTA, PATIENCE = 40, 1.5, 1e-3, 60.0


def peer(log: Path, noise: float) -> Peer:
    """Return a private peer, of whose ε every answer costs what a gradient of all its examples does."""
    user = coterie.User("a", torch.ones(N, 3), torch.ones(N, 1))
    passes = Passes(nn.Linear(3, 1), nn.functional.mse_loss)
    return Peer(user, passes, None, log, privacy=Privacy(EPSILON, DELTA, 1.0, noise))


def request() -> Request:
    return Request(torch.zeros(1, 4), step=0, seed=0, batch_size=N)


@dataclass
class Outcome:
    """What came of it: every answer that left must be counted, and what is counted must not exceed ε."""

    kills: int = 0
    lost: int = 0  # times at which more had left than was counted, or the ledger could not be read
    overspent: int = 0  # times at which more was counted than ε allows
    left: int = 0  # answers that left
    counted: int = 0
    most: int = 0  # how many ε allows
    # whether what was spent at the end is what the accountant says of all that ε allows
    exact: bool = False

    @property
    def bad(self) -> int:
        """How often something went wrong."""
        return self.lost + self.overspent + (not self.exact)


def killed(log: Path, kills: int, seed: int, noise: float) -> Outcome:
    """Kill pairs of peers on one ledger some time after an answer, so often; then let one answer to the end."""
    event, rng, outcome, site = Event(1.0, noise), random.Random(seed), Outcome(), peer(log, noise)
    # the accountant is slow, and children need not ask it again
    outcome.most = site._spending.left(event, 2000)
    while outcome.kills < kills:
        outcome.left += _two_killed(site, rng)
        outcome.kills += 2
        try:
            outcome.counted = Ledger(log).given
        except FileError:
            outcome.lost += 1
            break
        outcome.lost += outcome.left > outcome.counted
        outcome.overspent += outcome.counted > outcome.most
    while site.answer(request()).gradients is not None:
        outcome.left += 1
    again = peer(log, noise)
    outcome.counted = again.ledger.given
    outcome.lost += outcome.left > outcome.counted
    outcome.exact = outcome.counted == outcome.most and again.epsilon == epsilon_of(
        {event: outcome.most}, DELTA
    )
    return outcome


def _two_killed(site: Peer, rng: random.Random) -> int:
    """Let two processes answer until each is killed, and return how many answers left.

    The peer has read nothing of its ledger yet: each process does, as one that is started anew.
    """
    read, write = os.pipe()

    def answers() -> None:
        torch.set_num_threads(1)
        while site.answer(request()).gradients is not None:
            os.write(write, b"!")  # the answer leaves

    children = [forked(answers) for _ in range(2)]
    left, wanted, end = 0, rng.randrange(6), time.monotonic() + PATIENCE
    for child in children:
        while left < wanted and time.monotonic() < end:
            if not select.select([read], [], [], 0.2)[0]:
                if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    break  # nothing is left to give
                continue
            left += len(os.read(read, 4096))
        time.sleep(rng.uniform(0, 0.004))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        wanted += rng.randrange(4)
    os.close(write)
    while told := os.read(read, 4096):
        left += len(told)
    os.close(read)
    return left
