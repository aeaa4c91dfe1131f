"""Attackers with programs of their own: a lead under masks, a server between sites, and who hands over files.

Each function tries so many times and returns how often it came to something it must not come to.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.support import damage
from tests.support.masked import tau_of

import coterie
from coterie.engines.in_process.passes import Passes
from coterie.engines.peer import Caps, Peer
from coterie.engines.remote.responder import Responder
from coterie.errors import CoterieError, MaskError
from coterie.privacy.calls import Calls
from coterie.privacy.keys import Identity
from coterie.privacy.sums import SumsOnly

CAPS = Caps(gradients=1000, norm=10.0, examples=50)
LOSS = torch.nn.functional.cross_entropy


def logistic() -> torch.nn.Module:
    """Return the model whose gradient by a bias is a share of a class."""
    return torch.nn.Linear(3, 2)


def at(bias: float, weight: float = 0.0) -> list[float]:
    """Return a point at which a gradient is the share of healthy patients less that of a bias."""
    return [weight] + [0.0] * 5 + [bias, 0.0]


def leaky(share: float, name: str, rows: int = 100) -> coterie.User:
    """Return a site with this share of healthy patients, and a row that no number holds at some points."""
    inputs = torch.zeros(rows, 3)
    inputs[0, 0] = 1e30 * share
    return coterie.User(name, inputs, (torch.arange(rows) >= share * rows).long())


def told_to(sites: Mapping[str, Responder]) -> dict[str, Any]:
    """Return an agreement with the keys that sites offer."""
    offers = {name: site.offer() for name, site in sites.items()}
    return {"weights": tau_of(len(sites)), "largest": 16.0, "offers": offers}


def transcript(
    share: float, attack: Sequence[Any], folder: Path, largest: float = 16.0
) -> list[Any]:
    """Return all that a lead with a changed program sees of the first of three, but for the masked numbers."""
    folder.mkdir()
    people = [leaky(each, f"peer {k}") for k, each in enumerate((share, 0.3, 0.6), 1)]
    peers = {
        user.name: Peer(user, Passes(logistic(), LOSS), CAPS, folder / user.name) for user in people
    }
    known = {name: peer.identity.fingerprint for name, peer in peers.items()}
    sites = {name: Responder(peer, SumsOnly(keys=known)) for name, peer in peers.items()}
    told = told_to(sites) | {"largest": largest}
    seen: list[Any] = [{key: bool(key) for key in site.join(told)} for site in sites.values()]
    how = {"step": 0, "seed": 5, "batch_size": 100, "buffers": {}, "frozen": None}
    for number, point in enumerate(attack, 1):
        asked = how | (
            point if isinstance(point, dict) else {"points": np.array([point], np.float32)}
        )
        reply = sites["peer 1"].part(asked | {"round": number})
        reply.pop("part", None)
        seen += [reply, sites["peer 1"].ready(batch_size=100, gradients=10)]
    return seen


def masked_oracles(count: int, seed: int) -> int:
    """Return of how many attacks the answers tell two sites apart: random points, sizes and largest entries."""
    rng, bad = np.random.default_rng(seed), 0
    for _ in range(count):
        shares = rng.uniform(0.05, 0.95, 2)
        largest = 16.0 if rng.random() < 0.5 else 10.0 ** rng.uniform(-3, 14)
        sizes = 10.0 ** rng.uniform(-6, 38, 6)
        attack: list[Any] = [
            at(float(rng.normal() * size), float(rng.normal() * size)) for size in sizes
        ]
        attack += [at(float(bias)) for bias in rng.normal(size=6)]
        one = np.array([at(0.3)], np.float32)
        attack.append({"points": np.full((1, 8), np.nan, np.float32)})
        attack.append({"points": one, "batch_size": int(rng.integers(-3, 300))})
        attack.append({"points": one.astype(np.float16), "step": int(rng.integers(0, 99))})
        with tempfile.TemporaryDirectory() as folder:
            seen = [
                transcript(share, attack, Path(folder) / str(k), largest)
                for k, share in enumerate(shares)
            ]
        bad += seen[0] != seen[1]
    return bad


def sealed_calls(count: int, seed: int) -> int:
    """Return how many calls and replies that a server altered, repeated, moved or made up were believed."""
    rng, bad = np.random.default_rng(seed), 0
    jobs = []
    identities = {name: Identity(name) for name in "abc"}
    for job in ("1", "2"):
        calls = {name: Calls(identity, job) for name, identity in identities.items()}
        for one in calls.values():
            one.meet({name: other.offer for name, other in calls.items()})
        jobs.append(calls)
    (here, other), forger = jobs, Calls(Identity("b"), "1")
    forger.meet({"a": here["a"].offer})
    for _ in range(count):
        content = rng.bytes(int(rng.integers(1, 300)))
        number, sealed = here["b"].call("a", content)
        here["a"].take("b", number, sealed)
        answer = here["a"].answer("b", number, content)
        flipped, place = bytearray(sealed), int(rng.integers(len(sealed)))
        flipped[place] ^= 1 << int(rng.integers(8))
        wrongs: list[tuple[Calls, str, int, bytes]] = [
            (here["a"], "b", number + 10**6, bytes(flipped)),
            (here["a"], "b", number + 10**6, sealed),  # under another number
            (here["a"], "b", number, sealed),  # again
            (here["a"], "b", number, sealed[:-1]),
            (here["a"], "c", number, sealed),  # as if by another
            (here["c"], "b", number, sealed),  # to another
            (other["a"], "b", number, sealed),  # in another job
            (here["a"], "b", number + 10**6, forger.call("a", content)[1]),
        ]
        attempts: list[Callable[[], bytes]] = [
            partial(one.take, by, n, text) for one, by, n, text in wrongs
        ]
        attempts += [
            partial(here["b"].reply, "a", *reply)
            for reply in ((number, sealed), (number + 1, answer))
        ]
        bad += sum(_is_believed(attempt) for attempt in attempts)
    return bad


def _is_believed(attempt: Callable[[], bytes]) -> bool:
    try:
        attempt()
    except MaskError:
        return False
    return True


BOMBS: tuple[str, ...] = ("device", "pipe", "folder", "sparse", "deep", "digits", "empty")


def bombs() -> tuple[int, list[str]]:
    """Return how many files were replaced by something else, and which of them did not end in a typed error."""
    wrong, n = [], 0
    for name, kind in damage.KINDS.items():
        for bomb in BOMBS:
            with tempfile.TemporaryDirectory() as folder:
                path = kind.make(Path(folder))
                shutil.move(path, path.with_name("away"))
                _put(bomb, path)
                n += 1
                try:
                    kind.read(path)
                    wrong.append(f"{name}: {bomb} accepted")
                except CoterieError:
                    pass
                except Exception as error:
                    wrong.append(f"{name}: {bomb}: {type(error).__name__}")
    return n, wrong


def _put(bomb: str, path: Path) -> None:
    if bomb == "device":
        path.symlink_to("/dev/zero")
    elif bomb == "pipe":
        os.mkfifo(path)
    elif bomb == "folder":
        path.mkdir()
    elif bomb == "sparse":
        path.touch()
        os.truncate(path, 2**40)
    elif bomb == "deep":
        path.write_bytes(b'{"a":' * 200_000)
    elif bomb == "digits":
        path.write_bytes(b'{"a": ' + b"9" * 10**6 + b"}")
    else:
        path.touch()
