"""Attackers with programs of their own: a lead under masks, a server between sites, and who hands over files.

Each function tries so many times and returns how often it came to something it must not come to.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.support import damage
from tests.support.masked import tau_of

import coterie
from coterie.engines.in_process.passes import Passes
from coterie.engines.messages import Request
from coterie.engines.peer import Caps, Peer
from coterie.engines.processes.processes import TAG_BYTES, Link, Seal
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.responder import Responder
from coterie.engines.remote.sites import LocalReplies
from coterie.errors import CoterieError, MaskError, PeerLost
from coterie.federation.manifest import Kit, verify
from coterie.federation.member import KNOWN_KEYS, KnownKeys, SealedSites, answered
from coterie.federation.settings import lead_settings, site_settings
from coterie.privacy.calls import Calls
from coterie.privacy.keys import Identity
from coterie.privacy.privacy import Privacy
from coterie.privacy.sums import SumsOnly
from coterie.training.run import Step
from coterie.trees.boosting import Bins, Level
from coterie.trees.histograms import Histograms

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
        attack += [{"points": one, "e_step": _e_step(rng)} for _ in range(4)]
        with tempfile.TemporaryDirectory() as folder:
            seen = [
                transcript(share, attack, Path(folder) / str(k), largest)
                for k, share in enumerate(shares)
            ]
        bad += seen[0] != seen[1]
    return bad


def _e_step(rng: np.random.Generator) -> dict[str, Any]:
    """Return an E-step of the logistic model as it travels, with priors and scales of any size."""
    wide = 10.0 ** rng.uniform(-12, 12, 6)
    mean, variance = wide[0] * rng.normal(size=(4, 1, 2)), np.full((4, 1, 2), wide[1])
    return {
        "family": "softmax",
        "layer": "",
        "told": ["gradient", "curvature", "gradient curvature", "posterior", "x"][rng.integers(5)],
        "examples": float(max(1.0, wide[2])),
        "intercept": True,
        "mean": mean,
        "variance": variance,
        "noise": np.full(1, wide[3]),
        "shift": wide[4] * rng.normal(size=3),
        "scale": np.full(3, wide[5]),
        "target_shift": np.zeros(2),
        "target_scale": np.ones(2),
    }


def private_e_steps(count: int, seed: int) -> int:
    """Return how many questions about all rows two private peers, who differ by a row, answer otherwise."""
    rng, bad = np.random.default_rng(seed), 0
    with tempfile.TemporaryDirectory() as folder:
        peers = []
        for name, canary in (("with", 1e3), ("without", 0.0)):
            inputs = torch.ones(100, 3)
            inputs[0] = canary
            user, passes = (
                coterie.User("a", inputs, torch.arange(100) % 2),
                Passes(logistic(), LOSS),
            )
            promise, caps = Privacy(2.0, 1e-3, 1.0), Caps(gradients=100, examples=50)
            peers.append(Peer(user, passes, caps, Path(folder) / name, privacy=promise))
        sums = SumsOnly(posteriors=True)
        sites = [Responder(peer, only) for only in (None, sums) for peer in peers]
        for _ in range(count):
            asked = {"points": np.array([at(0.3)], np.float32), "step": 0, "seed": 5}
            asked |= {"batch_size": 100, "buffers": {}, "frozen": None, "e_step": _e_step(rng)}
            if rng.random() < 0.5:
                edges = np.sort(rng.normal(size=3))
                bins = Bins(tuple(edges + k for k in range(3)))
                about = (np.zeros(2), 1.0, 2, Level((), ()), 100.0)
                asked["e_step"] = Histograms("softmax", bins, *about).message()
            told = [site.gradients(asked) for site in sites] + [
                site.part(asked | {"round": 1}) for site in sites
            ]
            alike = [told[k] == told[k + 1] for k in range(0, len(told), 2)]
            bad += not all(alike) or any("refused" not in each for each in told)
        bad += any(peer.ledger.given for peer in peers)
    return bad


CHANCE = 5.5
"""So many standard deviations nothing is by chance: 1 in 50 million."""
CHANGED: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "point": lambda asked: {"points": np.nextafter(asked["points"], np.float32(np.inf))},
    "step": lambda asked: {"step": asked["step"] + 1},
    "seed": lambda asked: {"seed": 6},
    "batch size": lambda asked: {"batch_size": 59},
    "more": lambda asked: {"more": 1},
    "round": lambda asked: {"round": 2},
}
VIEWS = (*CHANGED, "agreement", "key", "one", "all but one", "two rounds of one")
"""How a lead with a changed program asks one site otherwise than the others, or puts parts together."""


def inconsistent_views(count: int, seed: int) -> int:
    """Return in how many rounds, asked inconsistently, the parts told anything of a site beside their sum."""
    rng, bad = np.random.default_rng(seed), 0
    torch.manual_seed(seed)
    model, names = torch.nn.Linear(300, 4), [f"peer {k}" for k in range(1, 5)]
    people = [coterie.User(name, torch.randn(60, 300), torch.arange(60) % 4) for name in names]
    peers = {user.name: Peer(user, Passes(model, LOSS)) for user in people}
    known = {name: peer.identity.fingerprint for name, peer in peers.items()}
    for step in range(count):
        view, odd = VIEWS[int(rng.integers(len(VIEWS)))], names[int(rng.integers(len(names)))]
        sites = {name: Responder(peer, SumsOnly(keys=known)) for name, peer in peers.items()}
        told = told_to(sites)
        otherwise: dict[str, Any] = {"agreement": {"largest": 32.0}}
        if view == "key":  # the lead's own, in the place of another site's
            other = next(name for name in names if name != odd)
            forged = Identity(other).offer()[1].message()
            otherwise["key"] = {"offers": told["offers"] | {other: forged}}
        for name, site in sites.items():
            site.join(told | (otherwise.get(view, {}) if name == odd else {}))
        point = rng.normal(size=(1, 1204)).astype(np.float32)
        asked: dict[str, Any] = {"points": point, "step": step, "round": 1}
        asked |= {"seed": 5, "batch_size": 60, "buffers": {}, "frozen": None}
        changed = CHANGED[view](asked) if view in CHANGED else {}
        parts: dict[str, Any] = {
            name: site.part(asked | (changed if name == odd else {})).get("part")
            for name, site in sites.items()
        }
        if view == "two rounds of one":
            parts = {odd: parts[odd] - sites[odd].part(asked | {"round": 2})["part"]}
        elif view == "one":
            parts = {odd: parts[odd]}
        elif view == "all but one" or (view == "key" and parts[odd] is None):
            del parts[odd]
        words = np.sum([*parts.values()], axis=0, dtype=np.uint32)
        bad += _tells(words, asked, peers)
    return bad


def _tells(words: Any, request: Mapping[str, Any], peers: Mapping[str, Peer]) -> bool:
    """Say whether words are not as random ones, or go with what some site was asked."""
    numbers = words.view(np.int32)[:-4] / 2.0**31  # uniform, of variance 1/3
    n, wrong = len(numbers), not words[-4:].any()
    wrong |= bool(abs(numbers.mean()) > CHANCE / np.sqrt(3 * n))
    for peer in peers.values():
        asked = Request(torch.from_numpy(request["points"]), request["step"], 5, 60)
        gradient = peer.answer(asked).gradients
        assert gradient is not None
        wrong |= abs(np.corrcoef(numbers, gradient[0].numpy())[0, 1]) > CHANCE / np.sqrt(n)
    return bool(wrong)


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


class Relay:
    """A server between sites that drops, repeats, swaps and alters calls and replies as it likes."""

    def __init__(self, calls: Mapping[str, Calls], rng: np.random.Generator) -> None:
        self.calls, self.rng, self.old = calls, rng, list[Any]()
        self.answers = Counter[tuple[str, int]]()

    def ask(
        self, names: Sequence[str], method: str, timeout: float, **arguments: Any
    ) -> LocalReplies:
        """Pass a call on, or something else, once or twice; and bring a reply, or something else."""
        (name,), call, how = names, arguments["call"], int(self.rng.integers(9))
        if how == 0:
            return LocalReplies({})
        if how == 1:
            call = call | {"sealed": self._flipped(call["sealed"])}
        if how == 2:
            call = call | {"number": call["number"] + 1}
        if how == 3:  # the other site is asked instead
            name = "b" if name == "c" else "c"
        reply: Any = self._reply(name, call)
        if how == 4:
            self._reply(name, call)
        elif how == 5 and self.old:
            reply = self.old[int(self.rng.integers(len(self.old)))]
        elif how == 6 and reply is not None:
            reply = {"sealed": self._flipped(reply["sealed"])}
        elif how == 7:
            reply = {"n": 0, "of": names[0]}
        self.old.append(reply)
        return LocalReplies({names[0]: reply})

    def _reply(self, name: str, call: Any) -> Any:
        def answer(by: str, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
            self.answers[name, arguments["n"]] += 1
            return {"n": arguments["n"], "of": name}

        try:
            return answered(self.calls[name], call, answer)
        except MaskError:
            return None

    def _flipped(self, sealed: Any) -> Any:
        flipped = sealed.copy()
        flipped[int(self.rng.integers(len(flipped)))] ^= 1 << int(self.rng.integers(8))
        return flipped


def relayed(count: int, seed: int) -> int:
    """Return how many questions to other sites had a reply that is not theirs, or were answered twice."""
    calls = {name: Calls(Identity(name), "job") for name in "abc"}
    for one in calls.values():
        one.meet({name: other.offer for name, other in calls.items()})
    relay, bad = Relay(calls, np.random.default_rng(seed)), 0
    sites, came = SealedSites(relay, calls["a"]), 0
    logging.disable(logging.WARNING)
    for n in range(count):
        found = sites.ask(["b", "c"], "gradients", 1.0, n=n).wait()
        came += len(found)
        bad += sum(reply != {"n": n, "of": name} for name, reply in found.items())
    logging.disable(logging.NOTSET)
    assert came > count / 3, "what was let through did come"
    return bad + sum(times > 1 for times in relay.answers.values())


def forged_letters(count: int, seed: int) -> int:
    """Return how many letters between processes were believed that were altered, repeated, moved or left out."""
    rng, bad = np.random.default_rng(seed), 0
    for _ in range(count):
        (here, wire), (end, there) = socket.socketpair(), socket.socketpair()
        sender = Link(here, (Seal(b"key"), Seal(b"other")), 1000)
        reader = Link(there, (Seal(b"other"), Seal(b"key")), 1000)
        letters = [torch.from_numpy(rng.integers(0, 256, 40).astype(np.uint8)) for _ in range(4)]
        for letter in letters:
            sender.send(letter)
        frames = [bytearray(_whole(wire, 8 + TAG_BYTES + 40)) for _ in letters]
        k, how = int(rng.integers(3)), int(rng.integers(5))
        if how == 0:
            frames[k][int(rng.integers(len(frames[k])))] ^= 1 << int(rng.integers(8))
        elif how == 1:
            frames[k + 1] = frames[k]
        elif how == 2:
            frames[k], frames[k + 1] = frames[k + 1], frames[k]
        elif how == 3:
            del frames[k]
        else:
            frames[k][:8] = int(10 ** rng.uniform(3.1, 18)).to_bytes(8, "little")
        end.sendall(b"".join(frames))
        end.shutdown(socket.SHUT_WR)
        believed = list[torch.Tensor]()
        with suppress(PeerLost):
            while (came := reader.read()) is not None:
                believed.append(came)
        bad += not all(map(torch.equal, believed, letters)) or len(believed) > k + (how == 1)
        for each in (sender, reader):
            each.close()
        for plain in (wire, end):
            plain.close()
    return bad


def _whole(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        found += connection.recv(size - len(found))
    return found


def _is_believed(attempt: Callable[[], bytes]) -> bool:
    try:
        attempt()
    except MaskError:
        return False
    return True


BOMBS: dict[str, bytes | None] = {
    **dict.fromkeys(("device", "pipe", "folder", "sparse"), None),
    "deep": b'{"a":' * 200_000,
    "digits": b'{"a": ' + b"9" * 10**6 + b"}",
    "empty": b"",
    "TOML, deep": b"a = " + b"[" * 200_000,
    "TOML, tables": b"[" + b"a." * 2000 + b"a]\n" + b"a = {" * 2000,
    "TOML, digits": b"me = " + b"9" * 10**5,
    "YAML": b"a: &a [x,x]\n"
    + b"".join(b"%c: &%c [*%c,*%c]\n" % (k, k, k - 1, k - 1) for k in b"bcdefgh"),
}
"""What is put in the place of a file, and where it is a text, which."""


def _read_by_name(file: str, read: Callable[[Path], Any]) -> damage.Kind:
    return damage.Kind(_made(file), lambda path: read(path.parent))


def _made(file: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / file).write_text("", encoding="utf-8")
        return folder / file

    return make


FEDERATION = {
    "settings of user 0": _read_by_name("coterie.toml", lead_settings),
    "settings of a site": _read_by_name("coterie.toml", site_settings),
    "kit": _read_by_name("kit.json", Kit.load),
    "manifest of a kit": _read_by_name("manifest.json", lambda folder: verify(folder, "0")),
    "keys of other sites": _read_by_name(KNOWN_KEYS, lambda folder: KnownKeys(folder, {})()),
}


def bombs() -> tuple[int, list[str]]:
    """Return how many files were replaced by something else, and which of them did not end in a typed error."""
    wrong, n = [], 0
    for name, kind in (damage.KINDS | FEDERATION).items():
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
    else:
        path.write_bytes(BOMBS[bomb] or b"")


class Crowd:
    """Sites that answer user 0 well, or with something else that is large, late or no number."""

    def __init__(self, seed: int, odd: float) -> None:
        self.rng, self.odd = np.random.default_rng(seed), odd

    def ask(
        self, names: Sequence[str], method: str, timeout: float, **arguments: Any
    ) -> LocalReplies:
        """Answer for all of them."""
        if method == "ready":
            return LocalReplies({name: {"willing": True, "size": 100} for name in names})
        request = arguments["request"]
        return LocalReplies({name: self._reply(name, request) for name in names})

    def _reply(self, name: str, request: Mapping[str, Any]) -> Any:
        points = request["points"]
        good = {"gradients": np.ones_like(points), "site": name, "step": request["step"]}
        if self.rng.random() > self.odd:
            return good
        more = str(self.rng.random()) * 50_000
        wrongs: list[Any] = [
            {"refused": more},
            good | {"site": more},
            good | {"gradients": np.full_like(points, np.nan)},
            good | {"gradients": np.ones((1, 3 * points.size))},
            good | {"noise": more, "seconds": more, "examples": 10**400, "more": more},
            more,
            None,
        ]
        return wrongs[int(self.rng.integers(len(wrongs)))]


def memory_of_a_crowd(
    sites: int, steps: int, parameters: int, odd: float, seed: int = 0
) -> tuple[float, float]:
    """Return the most that user 0 holds over what all sites' gradients have, and by how much that grew.

    The second is of the second half of the steps over the first.
    """
    names = [f"site {k}" for k in range(sites)]
    me = coterie.User("me", torch.zeros(4, parameters - 1), torch.zeros(4, 1))
    most = [0.0, 0.0]

    def look(step: Step) -> None:
        if not tracemalloc.is_tracing():
            return
        half = int(step.step > steps // 2)
        most[half] = max(most[half], tracemalloc.get_traced_memory()[1])
        tracemalloc.reset_peak()

    how: dict[str, Any] = {"names": names, "misses": 10**6}
    for count in (2, steps):  # first what is imported
        if count == steps:
            tracemalloc.start()
        coterie.train(
            *(torch.nn.Linear(parameters - 1, 1), torch.nn.functional.mse_loss, me, []),
            coterie.WeightedAveraging(0.5),
            lr=1e-3,
            steps=count,
            batch_size=4,
            measure=False,
            hooks=[look],
            engine=partial(Remote, sites=Crowd(seed, odd), **how),
        )
    tracemalloc.stop()
    return max(most) / (4 * parameters * sites), most[1] / most[0]
