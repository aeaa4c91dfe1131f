"""One process among others, here with nobody at the other end."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import coterie
from coterie.engines.in_process.engine import InProcess
from coterie.engines.mutual.letters import packed, unpacked
from coterie.engines.mutual.processes import LAST_THREAD, Mate, Processes
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
def other() -> Mate:
    user = coterie.User("me", torch.eye(2), torch.ones(2, 1))
    engine = InProcess(nn.Linear(2, 1), mse_loss, user, batch_size=2, seed=0, one_by_one=True)
    return Mate(1, "other", Responder(engine.peer("me")))


def among(other: Mate) -> Processes:
    meeting: Any = SimpleNamespace(patience=100.0)
    return Processes(meeting, [other], longest=1000)


def test_who_is_not_linked_does_not_answer(other: Mate) -> None:
    asked = among(other).ask(["other"], "ready", timeout=100.0)
    assert asked.done()
    assert asked.wait() == {}


def test_an_answer_is_that_of_its_question(other: Mate) -> None:
    """One that came too late, or that nobody asked for, is dropped; a lost link answers nothing."""
    processes, link = among(other), Written()
    other.take(link)  # type: ignore[arg-type]
    first, second = (processes.ask(["other"], "ready", timeout=100.0) for _ in range(2))
    numbers = [letter["number"] for letter in link.letters]
    processes._take(other, {"number": numbers[1], "answer": {"willing": True}})
    processes._take(other, {"number": 77, "answer": {}})
    assert second.done()
    assert second.wait() == {"other": {"willing": True}}
    assert not first.done()
    other.take(None)
    assert link.closed
    assert first.wait() == {}


NONSENSE: list[Any] = [
    3,
    None,
    [],
    {},
    {"number": "1"},
    {"number": True, "method": "ready"},
    {"number": [1]},
]


@pytest.mark.parametrize("content", NONSENSE)
def test_nonsense_cuts_the_link(content: Any, other: Mate) -> None:
    with pytest.raises(ValueError, match="letter"):
        among(other)._take(other, content)


def test_every_question_is_answered(other: Mate) -> None:
    """Also one that makes no sense; and the last one, after which it asks no more."""
    processes, link = among(other), Written()
    other.take(link)  # type: ignore[arg-type]
    point = np.zeros((1, 3), dtype=np.float32)
    request = {
        "points": point,
        "step": 0,
        "seed": 0,
        "batch_size": 2,
        "buffers": {},
        "frozen": None,
    }
    questions = [
        ("gradients", {"request": request, "caller": "somebody else"}),
        ("gradients", {"request": 3}),
    ]
    questions += [
        ("ready", {"more": 1}),
        ("peer", {}),
        ("__init__", {}),
        ("ready", {}),
        ("done", {}),
    ]
    for number, (method, arguments) in enumerate(questions):
        letter = packed({"number": number, "method": method, "arguments": arguments})
        processes._take(other, unpacked(letter))
    processes._questions.put(None)
    processes._answer_all()
    answers = [letter["answer"] for letter in link.letters]
    assert [letter["number"] for letter in link.letters] == list(range(7))
    np.testing.assert_allclose(answers[0]["gradients"], [[-1.0, -1.0, -2.0]])
    assert ["refused" in answer for answer in answers] == [
        False,
        True,
        True,
        True,
        True,
        False,
        False,
    ]
    assert other.is_done


def test_who_leaves_waits_for_nobody(other: Mate) -> None:
    processes = among(other)
    processes.finish()
    (last,) = [thread for thread in threading.enumerate() if thread.name == LAST_THREAD]
    assert last.is_alive()
    processes.leave()
    last.join(30.0)
    assert not last.is_alive()
