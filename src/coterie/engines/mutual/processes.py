"""The other processes, seen from one of them.

It asks them, and answers what they ask, until all are done.
"""

import atexit
import itertools
import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from coterie.engines.mutual.letters import packed, unpacked
from coterie.engines.mutual.link import Link
from coterie.engines.mutual.meeting import Meeting, Notes
from coterie.engines.remote.responder import Responder
from coterie.errors import PeerLost

logger = logging.getLogger(__name__)

METHODS = {"ready": False, "gradients": True, "offer": False, "join": True, "part": True}
"""What can be asked of a `Responder`, and whether it wants to know who asks."""
DONE = "done"
"""What a process asks when it has asked for its last gradient."""
LAST_THREAD = "coterie answers the others"
"""The thread that ends when all are done."""
_WAITING_IS_TOLD_AFTER = 5.0
_ENDING = 2.0
"""Seconds that threads have to end once links are cut.

One that comes back from gloo while Python ends aborts.
"""


class Mate:
    """One other process."""

    def __init__(self, rank: int, name: str, responder: Responder) -> None:
        self.rank, self.name, self.responder = rank, name, responder
        self.is_done = False  # it asks for no more gradients
        self.knows = False  # that this process does not, either
        self.last_asked = time.monotonic()
        self.linked = threading.Event()
        self._link: Link | None = None
        self._asked: dict[int, futures.Future[Any]] = {}
        self._lock = threading.Lock()

    def ask(self, number: int, letter: Tensor, answer: futures.Future[Any]) -> None:
        """Send a question; the answer is None where there will be none."""
        with self._lock:
            if self._link is None:
                answer.set_result(None)
                return
            self._asked[number] = answer
            self._link.send(letter)

    def answered(self, number: Any, value: Any) -> None:
        """Take an answer; one that nobody waits for is dropped."""
        with self._lock:
            answer = self._asked.pop(number, None)
        if answer is not None:
            answer.set_result(value)

    def reply(self, letter: Tensor) -> None:
        """Send an answer, as long as there is a link."""
        with self._lock:
            if self._link is not None:
                self._link.send(letter)

    def take(self, link: Link | None) -> None:
        """Go on over a link, or without one: what was asked before is then not answered."""
        with self._lock:
            before, self._link = self._link, link
            lost = [] if link is not None else list(self._asked.values())
            if link is None:
                self._asked.clear()
                self.linked.clear()
            else:
                self.knows = False  # it may be another process now
                self.linked.set()
        for answer in lost:
            answer.set_result(None)
        if before is not None:
            before.close()


@dataclass(frozen=True)
class Awaited:
    """The answers of several processes, as they come.

    See `coterie.engines.remote.sites.Replies`.
    """

    answers: Mapping[str, futures.Future[Any]]
    end: float  # by `time.monotonic`

    def done(self) -> bool:
        """Say whether every process has answered, is lost or has run out of time."""
        return time.monotonic() >= self.end or all(
            answer.done() for answer in self.answers.values()
        )

    def wait(self) -> Mapping[str, Any]:
        """Wait until it is done, and return the answers by name."""
        futures.wait(self.answers.values(), max(0.0, self.end - time.monotonic()))
        there = {name: answer.result() for name, answer in self.answers.items() if answer.done()}
        return {name: value for name, value in there.items() if value is not None}


class Processes:
    """All other processes; what `coterie.engines.remote.sites.Sites` asks for.

    Threads of their own read what comes, so that a process answers also while its own training
    waits, evaluates or is over. One of them computes the answers, one after the other.

    Args:
        meeting: who this process is.
        mates: the others.
        longest: how many bytes a letter may have.
    """

    def __init__(self, meeting: Meeting, mates: Sequence[Mate], longest: int) -> None:
        self.meeting, self._longest = meeting, longest
        self.mates = {mate.name: mate for mate in mates}
        self._numbers = itertools.count()
        self._questions: queue.SimpleQueue[tuple[Mate, int, str, dict[str, Any]] | None] = (
            queue.SimpleQueue()
        )
        self._ending, self._over = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def _all(self) -> list[Mate]:
        return list(self.mates.values())

    def connect(self) -> None:
        """Begin to answer, and wait until all are linked; `PeerLost` where one is not in time."""
        self._threads = [threading.Thread(target=self._answer_all, daemon=True)]
        for mate in self._all:
            self._threads.append(
                threading.Thread(target=self._stay_linked, args=(mate,), daemon=True)
            )
        for thread in self._threads:
            thread.start()
        end = time.monotonic() + self.meeting.patience
        missing = [
            mate for mate in self._all if not mate.linked.wait(max(0.0, end - time.monotonic()))
        ]
        if missing:
            self.leave()
            shown = ", ".join(f"{mate.name!r} (rank {mate.rank})" for mate in missing)
            raise PeerLost(
                f"{shown} did not connect within {self.meeting.patience:g} s; start it again, and"
                " look for a firewall between the machines",
                [mate.name for mate in missing],
            )

    def ask(self, names: Sequence[str], method: str, timeout: float, **arguments: Any) -> Awaited:
        """Send a question to processes and return at once; see `Sites.ask`."""
        number = next(self._numbers)
        letter = packed({"number": number, "method": method, "arguments": arguments})
        answers: dict[str, futures.Future[Any]] = {name: futures.Future() for name in names}
        for name, answer in answers.items():
            self.mates[name].ask(number, letter, answer)
        return Awaited(answers, time.monotonic() + timeout)

    def finish(self) -> None:
        """Ask no more, and answer in the background until the others are done too.

        The process ends no sooner.
        """
        if not self._ending.is_set():
            self._ending.set()
            self._last = threading.Thread(
                target=self._until_all_are_done, name=LAST_THREAD, daemon=True
            )
            self._last.start()
            atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        """Let the process live until all are done, or until Ctrl-C."""
        try:
            self._last.join()
        except KeyboardInterrupt:
            self.leave()
            self._last.join(_ENDING)

    def leave(self) -> None:
        """Cut all links, and wait a moment for the threads that read from them."""
        self._ending.set()
        self._over.set()
        for mate in self._all:
            mate.take(None)
        self._questions.put(None)
        end = time.monotonic() + _ENDING
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _until_all_are_done(self) -> None:
        began, told = time.monotonic(), False
        while not self._over.is_set():
            waiting = [mate for mate in self._all if self._is_needed(mate, began)]
            if not waiting:
                break
            for mate in waiting:
                if mate.linked.is_set() and not mate.knows:
                    mate.knows = DONE in self.ask([mate.name], DONE, 1.0).wait().get(mate.name, ())
            if not told and time.monotonic() - began > _WAITING_IS_TOLD_AFTER:
                told = True
                names = ", ".join(mate.name for mate in waiting)
                logger.warning("done; answers %s until they are, too", names)
            self._over.wait(0.05)
        self.leave()

    def _is_needed(self, mate: Mate, began: float) -> bool:
        """Say whether another process may still ask this one, or wait for its word."""
        if mate.is_done:
            return mate.linked.is_set() and not mate.knows
        return time.monotonic() - max(began, mate.last_asked) < self.meeting.patience

    def _stay_linked(self, mate: Mate) -> None:
        """Link with another process, read what it sends, and link again where that ends."""
        notes = Notes(self.meeting)

        def goes_on() -> bool:
            return not self._over.is_set() and not (self._ending.is_set() and mate.is_done)

        while goes_on():
            linked = notes.link_to(mate.rank, goes_on)
            if linked is None:
                return
            pair, seals = linked
            link = Link(pair, int(mate.rank > self.meeting.place.rank), seals, self._longest)
            mate.take(link)
            try:
                while not self._over.is_set():
                    self._take(mate, unpacked(link.read()))
            except (PeerLost, ValueError) as error:
                if goes_on():
                    logger.warning("lost the link to %s (%s)", mate.name, error)
            mate.take(None)

    def _take(self, mate: Mate, content: Any) -> None:
        """Take a question or an answer."""
        if not isinstance(content, dict):
            raise ValueError("not a letter of a process")  # noqa: TRY004  # of what came, not of an argument
        number, method, arguments = (
            content.get(name) for name in ("number", "method", "arguments")
        )
        if type(number) is not int:
            raise ValueError("a letter without a number")
        if method is None:
            mate.answered(number, content.get("answer"))
        elif isinstance(method, str) and isinstance(arguments, dict):
            mate.last_asked = time.monotonic()
            self._questions.put((mate, number, method, arguments))

    def _answer_all(self) -> None:
        """Answer one question after the other."""
        while (asked := self._questions.get()) is not None:
            mate, number, method, arguments = asked
            try:
                answer = self._answer(mate, method, arguments)
            except Exception as error:  # its text may tell of an example
                logger.exception("could not answer %s", mate.name)
                answer = {"refused": f"it failed with {type(error).__name__}"}
            mate.reply(packed({"number": number, "answer": answer}))
            mate.is_done |= method == DONE  # once it is told so

    def _answer(self, mate: Mate, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if method == DONE:
            return {DONE: True}
        if method not in METHODS:
            return {"refused": "there is no such question"}
        named = {"caller": mate.name} if METHODS[method] else {}
        answer: dict[str, Any] = getattr(mate.responder, method)(**{**arguments, **named})
        return answer
