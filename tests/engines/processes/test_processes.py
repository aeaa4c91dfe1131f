"""One process among others, here with nobody at the other end."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import coterie
from coterie.engines.in_process.engine import InProcess
from coterie.engines.messages import packed, unpacked
from coterie.engines.processes.engine import _answer_mate
from coterie.engines.processes.processes import (
    LAST_THREAD,
    MOST_QUESTIONS,
    Processes,
    RemoteProcess,
)
from coterie.engines.processes.rendezvous import Address
from coterie.engines.remote.responder import Responder


class Written:
    """A link that keeps what is sent."""

    def __init__(self) -> None:
        self.letters: list[Any] = []
        self.closed = False

    def send(self, letter: Tensor) -> None:
        self.letters.append(unpacked(letter))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def among() -> Iterator[Processes]:
    """Give one of two processes."""
    at: Any = SimpleNamespace(address=Address("127.0.0.1", 1, 0, 2), patience=100.0, listener=None)
    at.where, at.leave_note = lambda rank: None, lambda: None
    with Processes(at) as found:
        found.are({1: "other"})
        yield found


@pytest.fixture
def other(among: Processes) -> RemoteProcess:
    return among.mates["other"]


def answering(run: tuple[int, int] | None = None) -> Any:
    user = coterie.User("me", torch.eye(2), torch.ones(2, 1))
    engine = InProcess(nn.Linear(2, 1), mse_loss, user, batch_size=2, seed=0, one_by_one=True)
    return functools.partial(_answer_mate, {"other": Responder(engine.peer("me"))}, run)


def test_who_is_not_linked_does_not_answer(among: Processes) -> None:
    asked = among.ask(["other"], "ready", timeout=100.0)
    assert asked.done()
    assert asked.wait() == {}


def test_an_answer_is_that_of_its_question(among: Processes, other: RemoteProcess) -> None:
    """One that came too late, or that nobody asked for, is dropped; a lost link answers nothing."""
    link: Any = Written()
    other.take(link)
    first, second = (among.ask(["other"], "ready", timeout=100.0) for _ in range(2))
    numbers = [letter["number"] for letter in link.letters]
    among._take(other, {"number": numbers[1], "answer": {"willing": True}})
    among._take(other, {"number": 77, "answer": {}})
    assert second.done()
    assert second.wait() == {"other": {"willing": True}}
    assert not first.done()
    other.take(None)
    assert link.closed
    assert first.wait() == {}


def test_what_was_said_is_said_again_to_who_comes_back(
    among: Processes, other: RemoteProcess
) -> None:
    among.say("before", {"it": 1})
    for _ in range(2):
        link: Any = Written()
        other.take(link, among._said.values())
        assert link.letters == [{"said": "before", "content": {"it": 1}}]
    among.say("then", {"it": np.arange(2)})
    assert link.letters[-1]["said"] == "then"
    among._take(other, {"said": "here", "content": {"n": 3}})
    assert among.hear(1, "here", n=int) == {"n": 3}
    for wrong in ({"n": str}, {"more": int}):
        with pytest.raises(coterie.errors.PeerLost, match="is missing or of another kind"):
            among.hear(1, "here", **wrong)


NONSENSE: list[Any] = [
    3,
    None,
    [],
    {},
    {"said": 3},
    {"number": "1"},
    {"number": True, "method": "ready"},
    {"number": 1, "method": "ready", "arguments": 3},
    {"number": [1]},
]


@pytest.mark.parametrize("content", NONSENSE)
def test_nonsense_cuts_the_link(content: Any, among: Processes, other: RemoteProcess) -> None:
    with pytest.raises(ValueError, match=r"letter|question"):
        among._take(other, content)


def request(batch_size: int = 2, seed: int = 0) -> dict[str, Any]:
    point = np.zeros((1, 3), dtype=np.float32)
    numbers = {"step": 0, "seed": seed, "batch_size": batch_size}
    return {"points": point, "buffers": {}, "frozen": None, **numbers}


def answers(
    among: Processes, other: RemoteProcess, questions: Any, answer: Any
) -> list[dict[str, Any]]:
    link: Any = Written()
    other.take(link)
    for number, (method, arguments) in enumerate(questions):
        letter = packed({"number": number, "method": method, "arguments": arguments})
        among._take(other, unpacked(letter))
    among._questions.put(None)
    among._answer_all(answer)
    assert sorted(letter["number"] for letter in link.letters) == list(range(len(questions)))
    return [one["answer"] for one in sorted(link.letters, key=lambda one: one["number"])]


def test_every_question_is_answered(among: Processes, other: RemoteProcess) -> None:
    """Also one that makes no sense; and the last one, after which it asks no more."""
    questions = [
        ("gradients", {"request": request(), "caller": "somebody else"}),
        ("gradients", {"request": 3}),
        ("ready", {"more": 1}),
        ("peer", {}),
        ("__init__", {}),
        ("ready", {}),
        ("done", {}),
    ]
    found = answers(among, other, questions, answering())
    np.testing.assert_allclose(found[0]["gradients"], [[-1.0, -1.0, -2.0]])
    refused = ["refused" in answer for answer in found]
    assert refused == [False, True, True, True, True, False, False]
    assert other.is_done


def test_nobody_asks_for_one_row_at_a_time(among: Processes, other: RemoteProcess) -> None:
    """The exploit: batches of one row, or draws that the asker has chosen by their seed."""
    asked = [request(), request(batch_size=1), request(seed=7), request(batch_size=-1)]
    questions = [("gradients", {"request": one}) for one in asked]
    found = answers(among, other, questions, answering(run=(2, 0)))
    assert ["gradients" in answer for answer in found] == [True, False, False, False]
    assert all("batches of at least 2" in answer["refused"] for answer in found[1:])


def test_more_questions_than_can_wait_are_refused(among: Processes, other: RemoteProcess) -> None:
    """The exploit: questions without end, each with its points, kept in memory."""
    found = answers(among, other, [("ready", {})] * (MOST_QUESTIONS + 5), answering())
    refused = ["refused" in answer for answer in found]
    assert refused == [False] * MOST_QUESTIONS + [True] * 5
    for k in range(MOST_QUESTIONS):
        among._take(other, {"said": str(k), "content": {}})
    with pytest.raises(ValueError, match="it says too much"):
        among._take(other, {"said": "one more", "content": {}})


def test_who_leaves_waits_for_nobody(among: Processes) -> None:
    among.finish()
    (last,) = [thread for thread in threading.enumerate() if thread.name == LAST_THREAD]
    assert last.is_alive()
    among.leave()
    last.join(30.0)
    assert not last.is_alive()
