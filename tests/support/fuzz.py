"""Nonsense sent to a worker, to a site and to user 0, without a network: what comes of it, counted.

    >>> from tests.support import fuzz
    >>> [kind for kind in fuzz.questions_to_a_worker(20) if kind not in ("answered", "typed")]
    []

Every function takes how many messages to send and a seed. What it counts as "untyped: …" is a
fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tests.support.processes import Alone
from torch import nn
from torch.nn.functional import cross_entropy

import coterie
from coterie.engines.in_process.passes import Passes
from coterie.engines.messages import decoded, read_array
from coterie.engines.peer import Caps, Peer
from coterie.engines.processes.engine import _HELLO, _Member, check_hellos, serve
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.responder import Responder, answer_message
from coterie.engines.remote.sites import LocalReplies, LocalSites
from coterie.errors import CoterieError
from coterie.privacy.sums import SumsOnly

RUN: dict[str, Any] = {"batch_size": 4, "seed": 0, "secure_sums": False, "constants": {}}
GO: dict[str, Any] = {"refused": None, "names": {"1": "a", "2": "b"}, "sums": False}
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


def _outcome(send: Callable[..., object], *arguments: Any, **options: Any) -> str:
    try:
        send(*arguments, **options)
    except CoterieError:
        return "typed"
    except Exception as error:
        return f"untyped: {type(error).__name__}: {error}"
    return "answered"


def member(sums: SumsOnly | None = None) -> _Member:
    """Return a peer "a" of user 0, beside another, "b", without a network."""
    others: Any = Alone({})
    peer = Peer(user(), Passes(model(), cross_entropy), Caps(norm=1.0, examples=4))
    return _Member(others, peer, sums, masked_only=False)


def questions_to_a_worker(n: int, seed: int = 0) -> Counter[str]:
    """Ask a worker of user 0, or pass it on, wrong things; what it gives is finite, within the caps."""
    rng, outcomes = np.random.default_rng(seed), Counter[str]()
    request = {"points": _oddities(rng)[0], "step": 3, "seed": 0, "batch_size": 8}
    request |= {"buffers": {}, "frozen": None}
    points = len(request["points"])
    asked: dict[str, Any] = {"request": request, "weights": np.full((points, 3), 1 / 3)}
    asked |= {"columns": ["b", "a", "c"], "sketched": 1, "sketch": 4}
    for k in range(n):
        one = member(SumsOnly() if k % 2 else None)
        message = _message(asked, rng)
        if isinstance(message, dict) and rng.random() < 0.5:
            message["request"] = _message(request, rng)
        total = np.ones((points, one.peer.passes.parameters.size))
        content = {"total": total, "given": np.ones((points, 3), bool), "strict": [1, 1.0]}
        passed = _message(content | {"digest": "0"}, rng)
        outcomes[_outcome(_asked, one, k, message, passed)] += 1
    return outcomes


def _asked(one: _Member, number: int, message: Any, passed: Any) -> None:
    """Let a worker answer as its thread does, which survives what it raises."""
    sent: list[Any] = []
    one.others.reply = lambda mate, number, answer: sent.append(answer)  # type: ignore[method-assign]
    lead, b = one.lead, one.others.mates["b"]
    arguments = dict(message) if isinstance(message, dict) else {"request": message}
    steps = [(b, "passed", {"sum": number, "content": passed}), (lead, "sum", arguments)]
    for mate, method, told in steps:
        try:
            answer = one._answer(mate, method, told | {"number": number})
        except Exception as error:
            answer = {"refused": f"it failed with {type(error).__name__}"}
        sent += [] if answer is None else [answer]
    for answer in sent:
        assert "total" not in answer, "what was passed on was not this sum"
    if all(answer.get("refused") for answer in sent):
        raise CoterieError(str(sent))


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
        array = read_array("a", message, "gradients", tuple(points.shape), step=3)
        if isinstance(array, str):  # or why there is none
            assert array.isprintable()
            assert len(array) < 200
            raise CoterieError(array)
        gradients = decoded(array)
        if gradients is None:
            raise CoterieError("not of floating-point numbers")
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


def notes_of_strangers(n: int, seed: int = 0) -> Counter[str]:
    """Say wrong things in the place of user 0 and of a peer."""
    rng, outcomes = np.random.default_rng(seed), Counter[str]()
    odd: list[Any] = [0, -1, 2**70, 1.5, True, None, "", "x", [], {}, [[]], {"refused": "\x1b[2J"}]
    odd += [[1, 0.5], [1, 2], [3, 0.5], [None, 1], ["x", "y"], [1, None], [1, 1, 1], [True, True]]
    odd += [{"1": "b"}, {"x": "a"}, {"1": "a", "0": "user 0"}, {"1": "a", "7": "c"}]
    parameters = sum(p.numel() for p in model().parameters())
    hello = {"name": "a", "examples": 3, "data": "", "size": parameters, "dtype": "torch.float32"}
    hello |= {"sums_only": None, "refused": None}
    notes: dict[str, dict[str, Any]] = {"run": RUN, "go": GO, "hello": hello}

    def hear(subject: str, note: Any) -> None:
        others: Any = Alone({"run": RUN, "go": GO} | {subject: note})
        if subject == "hello":
            heard = {2: others.hear(2, "hello", **_HELLO)}
            check_hellos(model(), heard)
        else:
            serve(model(), cross_entropy, user(), processes=others)

    for _ in range(n):
        subject = str(rng.choice(list(notes)))
        note: Any = dict(notes[subject])
        if rng.random() < 0.8:
            note[str(rng.choice(list(note)))] = odd[rng.integers(len(odd))]
        else:
            note = odd[rng.integers(len(odd))]
        outcomes[_outcome(hear, subject, note)] += 1
    return outcomes
