"""Nonsense sent to a worker, to a site and to user 0, without a network: what comes of it, counted.

    >>> from tests.support import fuzz
    >>> [kind for kind in fuzz.frames_to_a_worker(20) if kind not in ("answered", "typed")]
    []

Every function takes how many messages to send and a seed. What it counts as "untyped: …" is a
fault.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # it is there
from torch.nn.functional import cross_entropy

import coterie
from coterie.engines.in_process.passes import Passes
from coterie.engines.peer import Caps, Peer
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.messages import answer_message, read_reply
from coterie.engines.remote.responder import Responder
from coterie.engines.remote.sites import LocalReplies, LocalSites
from coterie.engines.torch_distributed.group import Group
from coterie.engines.torch_distributed.hellos import HELLO, check_hellos, strictest
from coterie.engines.torch_distributed.request import Ask
from coterie.engines.torch_distributed.wire import Wire
from coterie.engines.torch_distributed.worker import _Worker
from coterie.errors import CoterieError
from coterie.privacy.keys import Identity
from coterie.privacy.member import Member
from coterie.privacy.sums import SumsOnly

RUN: dict[str, Any] = {
    "batch_size": 4,
    "seed": 0,
    "compress": None,
    "moves_buffers": True,
    "backend": "gloo",
    "nonce": "0",
    "secure_sums": False,
}
GO: dict[str, Any] = {"refused": None, "sketch": 4}
NUMBERS = [0, 1, -1, 2, 3, 4, 5, 7, 16, 17, 2**31, 2**62, 2**63 - 1, -(2**63)]


def model() -> nn.Module:
    """Return a model whose buffers travel."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def user(name: str = "a") -> coterie.User:
    """Return somebody with 20 examples."""
    return coterie.User(
        name, torch.randn(20, 3, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 2
    )


@contextmanager
def worker(
    secret: bytes | None = None, notes: Mapping[str, bytes] | None = None, *, masked: bool = False
) -> Iterator[_Worker]:
    """Give a worker of rank 1 of 4, of which every message arrives and no answer leaves.

    `notes` stand in the place of user 0's.
    """
    group = Group(HashStore(), 1, 4, 1.0, secret)
    group.leave_note("run", RUN | {"secure_sums": masked})
    group.leave_note("go", GO)
    for key, data in (notes or {}).items():
        group.store.set(key, data)  # type: ignore[arg-type]  # it takes bytes
    calls = dict.fromkeys(("broadcast", "reduce", "gather", "init_process_group"), mock.DEFAULT)
    with mock.patch.multiple(dist, **calls), mock.patch.object(Wire, "share_constants"):
        given: dict[str, Any] = {
            "sums_only": masked,
            "secure_sums": masked,
            "log": None,
            "privacy": None,
        }
        yield _Worker(group, model(), cross_entropy, user(), caps=Caps(), **given)


def _outcome(send: Callable[..., object], *arguments: Any, **options: Any) -> str:
    try:
        send(*arguments, **options)
    except CoterieError:
        return "typed"
    except Exception as error:
        return f"untyped: {type(error).__name__}: {error}"
    return "answered"


def frames_to_a_worker(n: int, seed: int = 0, secret: bytes | None = None) -> Counter[str]:
    """Send messages of random, flipped and extreme bytes to a worker of torch.distributed."""
    rng, outcomes = np.random.default_rng(seed), Counter[str]()
    with worker(secret) as one:
        for _ in range(n):
            request = one.wire.request
            request.ask(Ask(int(rng.integers(2, 4))), int(rng.integers(100)), int(rng.integers(2)))
            request.weights.fill_(1 / 3)
            request.points.copy_(torch.from_numpy(rng.normal(size=tuple(request.points.shape))))
            _spoil(request.bytes.numpy(), request._head.numpy(), request.weights.numpy(), rng)
            outcomes[_outcome(one.answer, told_to_end=False)] += 1
    return outcomes


def frames_to_a_masked_worker(n: int, seed: int = 0) -> Counter[str]:
    """Send a worker that gives masked sums only wrong agreements, and spoiled messages that ask for its part."""
    rng, outcomes = np.random.default_rng(seed), Counter[str]()
    others = {name: Member(Identity(name), SumsOnly()) for name in "bc"}
    with worker(masked=True) as one:
        # for what nobody will ever leave there
        one.group.store.set_timeout(timedelta(milliseconds=1))
        for k in range(n):
            one.wire.take_points(1)
            request = one.wire.request
            request.ask(Ask.OFFER, k)
            one.answer(told_to_end=False)
            offers: dict[str, Any] = {"a": one.group.read_note(f"sums/{k}/offer/1", "a")}
            offers |= {name: other.offer() for name, other in others.items()}
            told: dict[str, Any] = {
                "weights": dict.fromkeys(offers, 1 / 3),
                "largest": 16.0,
                "offers": offers,
            }
            is_part = bool(k % 3)
            note = told if is_part else _message(told, rng)
            one.group.store.set(f"sums/{k}/agreement", json.dumps(note, default=str))
            request.ask(Ask.JOIN, k)
            if is_part:
                one.answer(told_to_end=False)
                request.ask(Ask.PART, int(rng.integers(100)))
                request.weights.fill_(1 / 3)
                request.points.copy_(torch.from_numpy(rng.normal(size=tuple(request.points.shape))))
                _spoil(request.bytes.numpy(), request._head.numpy(), request.weights.numpy(), rng)
            outcomes[_outcome(one.answer, told_to_end=False)] += 1
    return outcomes


def _spoil(data: Any, head: Any, weights: Any, rng: np.random.Generator) -> None:
    how = rng.integers(4)
    if how == 0:
        data[:] = rng.integers(0, 256, len(data))
    elif how == 1:
        places = rng.integers(0, len(data), 8)
        data[places] ^= rng.integers(1, 256, 8).astype(np.uint8)
    elif how == 2:
        head[rng.integers(len(head))] = rng.choice(NUMBERS)
    else:
        weights.flat[rng.integers(weights.size)] = rng.choice(
            [np.nan, np.inf, -np.inf, -1, 0, 1e308, 1e-308]
        )


def _oddities(rng: np.random.Generator) -> list[Any]:
    point = rng.normal(size=(int(rng.integers(1, 4)), sum(p.numel() for p in model().parameters())))
    return [
        point,
        point.astype(np.float32),
        point.astype(np.longdouble),
        point.astype(np.complex64),
        point[:, :-1],
        point[0],
        point * np.inf,
        point * 1e300,
        np.zeros((0, point.shape[1])),
        np.zeros((17, point.shape[1])),
        np.array(None),
        np.array(["a"]),
        np.array([object()]),
        np.zeros((2, 2, 2), bool),
        np.array("2020-01-01", dtype="datetime64[D]"),
        *NUMBERS,
        10**400,
        True,
        None,
        1.5,
        float("nan"),
        "x" * 10_000,
        "\x1b[2J\n[/blue]",
        b"\xff",
        [],
        {},
        {"1.running_mean": np.zeros((1, 4))},
        {"1.running_mean": np.full((1, 4), np.nan), "1.num_batches_tracked": np.zeros(1)},
        {3: np.zeros(3)},
        {"1.running_mean": np.array([None])},
        np.int64(3),
        object(),
    ]


def _message(fields: dict[str, Any], rng: np.random.Generator) -> Any:
    odd = _oddities(rng)
    if rng.random() < 0.05:
        return odd[rng.integers(len(odd))]
    message = dict(fields)
    for name in rng.choice([*fields, "more"], int(rng.integers(1, 4))):
        if rng.random() < 0.2:
            message.pop(name, None)
        else:
            message[str(name)] = odd[rng.integers(len(odd))]
    return message


def messages_to_a_site(n: int, seed: int = 0) -> Counter[str]:
    """Send dictionaries of wrong things to a site of NVFLARE; what is given must be finite, within the caps."""
    rng = np.random.default_rng(seed)
    peer = Peer(user(), Passes(model(), cross_entropy), Caps(norm=1.0, examples=4))
    fields = {
        "points": _oddities(rng)[0],
        "step": 3,
        "seed": 0,
        "batch_size": 8,
        "buffers": {},
        "frozen": None,
    }

    def send(message: Any) -> None:
        reply = answer_message(peer, "server", message)
        if set(reply) == {"refused"}:
            raise CoterieError(reply["refused"])
        norms = np.linalg.norm(reply["gradients"][np.isfinite(reply["gradients"]).all(1)], axis=1)
        assert (norms <= 1.0001).all()

    return Counter(_outcome(send, _message(fields, rng)) for _ in range(n))


def replies_to_user_0(n: int, seed: int = 0) -> Counter[str]:
    """Answer user 0 with dictionaries of wrong things; it gets gradients of the right shape, or a short reason."""
    rng = np.random.default_rng(seed)
    points = torch.zeros(2, sum(p.numel() for p in model().parameters()))
    fields = {"gradients": np.zeros(tuple(points.shape)), "site": "a", "step": 3, "seconds": 0.0}

    def read(message: Any) -> None:
        gradients = read_reply("a", message, 3, points)
        if gradients is None or isinstance(gradients, str):  # or why there are none
            assert gradients is None or (gradients.isprintable() and len(gradients) < 200)
            raise CoterieError(gradients)
        assert gradients.shape == points.shape

    return Counter(_outcome(read, _message(fields, rng)) for _ in range(n))


def messages_of_masked_sums(n: int, seed: int = 0) -> Counter[str]:
    """Send wrong agreements and requests to a site that gives masked sums only; it gives parts, or refuses."""
    rng, outcomes = np.random.default_rng(seed), Counter[str]()
    sites = {
        name: Responder(
            Peer(user(name), Passes(model(), cross_entropy), Caps(norm=1.0)), SumsOnly()
        )
        for name in "abc"
    }
    asked = {
        "points": _oddities(rng)[0],
        "step": 3,
        "seed": 0,
        "batch_size": 8,
        "buffers": {},
        "frozen": None,
    }

    def send(method: str, message: Any) -> None:
        reply = getattr(sites["a"], method)(message)
        if set(reply) == {"refused"}:
            assert len(reply["refused"]) < 300
            raise CoterieError(reply["refused"])
        assert reply["part"].dtype == np.uint32 if method == "part" else set(reply) == {"joined"}

    for k in range(n):
        offers = {name: site.offer() for name, site in sites.items()}
        told: dict[str, Any] = {
            "weights": dict.fromkeys(sites, 1 / 3),
            "largest": 16.0,
            "offers": offers,
        }
        if k % 2:
            sites["a"].join(told)
            message = _message(asked | {"round": k}, rng)
        else:
            how = rng.integers(3)
            if how == 0:
                offers["b"] = _message(offers["b"], rng)
            message = told | {"offers": _message(offers, rng)} if how == 1 else _message(told, rng)
        method = "part" if k % 2 else "join"
        outcomes[_outcome(send, method, message)] += 1
    return outcomes


def replies_of_masked_sums(n: int, seed: int = 0) -> Counter[str]:
    """Answer user 0's questions for masked sums with wrong things; it goes on, alone where there is no sum."""
    rng, outcomes = np.random.default_rng(seed), Counter[str]()

    class Odd(LocalSites):
        def ask(self, names: Any, method: str, timeout: float, **arguments: Any) -> LocalReplies:
            replies = dict(super().ask(names, method, timeout, **arguments).wait())
            if "a" in replies and rng.random() < 0.5:
                replies["a"] = _message(replies["a"], rng)
            return LocalReplies(replies)

    def step(engine: Remote, k: int) -> None:
        g = engine.gradients(
            torch.zeros(engine.own.parameters.size), k, dict.fromkeys("abcd", 0.25)
        )
        assert g.peers is not None
        assert g.peers.isfinite().all()
        if g.left_out:
            assert all(reason.isprintable() and len(reason) < 200 for reason in g.left_out.values())
            raise CoterieError(str(g.left_out))

    for _ in range(n):
        peers = {name: Peer(user(name), Passes(model(), cross_entropy)) for name in "abcd"}
        made = Remote(
            model(),
            cross_entropy,
            user("me"),
            sites=Odd(peers),
            names="abcd",
            batch_size=8,
            secure_sums=True,
        )
        for at in range(2):
            outcomes[_outcome(step, made, at)] += 1
    return outcomes


def notes_of_strangers(n: int, seed: int = 0, secret: bytes | None = None) -> Counter[str]:
    """Leave wrong notes in the place of user 0's and of the peers'."""
    rng, outcomes = np.random.default_rng(seed), Counter[str]()
    odd: list[Any] = [
        0,
        -1,
        2**70,
        1.5,
        True,
        None,
        "",
        "x",
        "gloo",
        [],
        {},
        [[]],
        {"refused": "\x1b[2J"},
    ]
    odd += [[1, 0.5], [1, 2], [3, 0.5], [None, 1], ["x", "y"], [1, None], [1, 1, 1], [True, True]]
    wire = Wire(model(), 1, None, moves_buffers=True, backend="gloo")
    hello = {
        "name": "a",
        "examples": 3,
        "data": "",
        "size": wire.size,
        "dtype": "torch.float32",
        "sums_only": None,
    }
    notes: dict[str, dict[str, Any]] = {"run": RUN, "go": GO, "hello/1": hello | {"refused": None}}

    def read(key: str, data: bytes) -> None:
        if key == "hello/1":
            group = Group(HashStore(), 0, 2, 0.1, secret)
            group.store.set(key, data)  # type: ignore[arg-type]  # it takes bytes
            said = group.read_note(key, "rank 1", **HELLO)
            check_hellos("me", wire, [said], [])
            strictest([said])
        else:
            with worker(secret, {key: data}):
                pass

    for _ in range(n):
        key = str(rng.choice(list(notes)))
        note: Any = dict(notes[key])
        if rng.random() < 0.8:
            note[str(rng.choice(list(note)))] = odd[rng.integers(len(odd))]
        else:
            note = odd[rng.integers(len(odd))]
        data = bytearray(json.dumps(note).encode())
        if rng.random() < 0.5:
            data[rng.integers(len(data))] = rng.integers(256)
        outcomes[_outcome(read, key, bytes(data))] += 1
    return outcomes
