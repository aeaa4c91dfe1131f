"""The other processes of a run, seen from one of them: it links with them, tells, asks and answers them."""

import atexit
import collections
import contextlib
import hmac
import itertools
import logging
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager, suppress
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor

from coterie.engines.messages import packed, unpacked
from coterie.engines.processes.rendezvous import Rendezvous
from coterie.engines.remote.sites import FutureReplies
from coterie.errors import PeerLost, printable

logger = logging.getLogger(__name__)

SILENCE = 30.0
"""Seconds without a sign of life after which the other process is taken for lost."""
PULSE = 5.0
"""Seconds without a letter after which a sign of life is sent."""
GREETING = 5.0
"""Seconds that two processes have to prove to each other who they are."""
MOST_WAITING = 256
"""How many letters may wait to be sent; the link is cut where the other does not read so many."""
TAG_BYTES = 32
_CHUNK = 2**22
_HELLO = struct.Struct("<16sIII16s16s")  # what it is, run, size, rank, token, what is new each time
_MAGIC = b"coterie link 1\n\n"


class Seal:
    """Tags of the messages one way over a link, in order.

    None can be made without the key, left out or sent again.

    Example:
        >>> sender, receiver = Seal(b"key"), Seal(b"key")
        >>> tag = sender.tag(b"message")
        >>> receiver.fits(b"message", tag), receiver.fits(b"message", tag)
        (True, False)
    """

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def tag(self, message: bytes | memoryview) -> bytes:
        """Return the tag of the next message."""
        self._count += 1
        mac = hmac.new(self._key, self._count.to_bytes(8, "little"), "sha256")
        mac.update(message)
        return mac.digest()

    def fits(self, message: bytes | memoryview, tag: bytes) -> bool:
        """Say whether a tag is that of the next message."""
        return hmac.compare_digest(tag, self.tag(message))


def greeted(
    connection: socket.socket,
    run: tuple[int, int, int],
    token: bytes,
    secret: bytes | None,
    *,
    others: Collection[int],
    dials: bool,
) -> tuple[int, bytes, tuple[Seal, Seal] | None]:
    """Exchange who is at either end, and prove it where there is a secret.

    Return the other's rank, its token and the seals of what is sent and of what comes. `PeerLost`
    where it is no process of this run.

    Args:
        connection: to the other.
        run: this process's number of the run, its number of processes and its rank.
        token: what is new whenever this process starts.
        secret: what all processes of the run share.
        others: the ranks that it may be.
        dials: this process has opened the connection.
    """
    connection.settimeout(GREETING)
    try:
        own_hello = _HELLO.pack(_MAGIC, *run, token, secrets.token_bytes(16))
        connection.sendall(own_hello)
        hello = bytes(_received(connection, bytearray(_HELLO.size)))
        magic, number, size, rank, their_token, _ = _HELLO.unpack(hello)
        if magic != _MAGIC or (number, size) != run[:2] or rank not in others:
            raise PeerLost("it is no process of this run")
        both = own_hello + hello if dials else hello + own_hello
        proofs = [hmac.digest(secret or b"", b"%d" % way + both, "sha256") for way in range(4)]
        mine, other = (0, 1) if dials else (1, 0)
        connection.sendall(proofs[mine])
        if not hmac.compare_digest(_received(connection, bytearray(TAG_BYTES)), proofs[other]):
            raise PeerLost("it does not have this cluster's secret")
    except OSError as error:
        raise PeerLost(f"it does not answer ({error})") from error
    seals = None if secret is None else (Seal(proofs[2 + mine]), Seal(proofs[2 + other]))
    return rank, their_token, seals


class Link:
    """The connection to one other process.

    Args:
        connection: once both ends have proved who they are.
        seals: of what is sent and of what comes, where there is a secret.
        longest: how many bytes a letter may have.
    """

    def __init__(
        self, connection: socket.socket, seals: tuple[Seal, Seal] | None, longest: int
    ) -> None:
        self._connection, self._seals, self.longest = connection, seals, longest
        connection.settimeout(SILENCE)
        with contextlib.suppress(OSError):  # where it is no TCP connection
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._outbox: queue.Queue[Tensor | None] = queue.Queue(MOST_WAITING)
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()

    def send(self, letter: Tensor) -> None:
        """Send a letter, as soon as those before it are sent; one that cannot be sent is lost."""
        try:
            self._outbox.put_nowait(letter)
        except queue.Full:
            self._cut()

    def read(self) -> Tensor | None:
        """Wait for a letter, and return it; None for a sign of life.

        `PeerLost` where none can come any more, or where it is forged.
        """
        try:
            head = _received(self._connection, bytearray(8 + TAG_BYTES))
            size = int.from_bytes(head[:8], "little")
            if size > self.longest:
                raise PeerLost(f"a letter of {size} bytes came, where {self.longest} can be")
            letter = torch.empty(size, dtype=torch.uint8)
            _received(self._connection, letter.numpy().data if size else bytearray())
        except OSError as error:
            raise PeerLost(str(error)) from error
        data = letter.numpy().data if size else b""
        if self._seals is not None and not self._seals[1].fits(data, bytes(head[8:])):
            raise PeerLost("a letter has no tag of this cluster's secret")
        return letter if size else None

    def close(self) -> None:
        """Send what is left to send, and cut the connection, which both ends notice at once."""
        with contextlib.suppress(queue.Full):
            self._outbox.put_nowait(None)
            if threading.current_thread() is not self._writer:
                self._writer.join(1.0)
        self._cut()

    def _cut(self) -> None:
        with contextlib.suppress(OSError):  # it may be cut at the other end
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _write(self) -> None:
        """Send the letters, and signs of life where there are none."""
        while True:
            try:
                letter = self._outbox.get(timeout=PULSE)
            except queue.Empty:
                letter = torch.empty(0, dtype=torch.uint8)
            if letter is None:
                return
            data: Any = letter.numpy().data if len(letter) else b""
            tag = bytes(TAG_BYTES) if self._seals is None else self._seals[0].tag(data)
            try:
                self._connection.sendall(len(letter).to_bytes(8, "little") + tag)
                for begin in range(0, len(letter), _CHUNK):  # each has its own time
                    self._connection.sendall(data[begin : begin + _CHUNK])
            except OSError:  # who reads notices too
                return self._cut()


def _received(connection: socket.socket, into: Any) -> Any:
    """Fill what is given with bytes that come."""
    view, filled = memoryview(into), 0
    while filled < len(view):
        n = connection.recv_into(view[filled:])
        if not n:
            raise ConnectionError("the connection is closed")
        filled += n
    return into


Connection: TypeAlias = tuple[socket.socket, bytes, tuple[Seal, Seal] | None]
"""A connection that is proved: the other's token, and the seals both ways."""
Answer: TypeAlias = Callable[["RemoteProcess", str, dict[str, Any]], Any]
"""What answers a question of another process: a method and its arguments."""

DONE = "done"
"""What a process asks when it has asked for its last gradient."""
LAST_THREAD = "coterie answers the others"
"""The thread that ends when all are done."""
MOST_QUESTIONS = 16
"""How many questions of one process may wait; those beyond are refused at once."""
MOST_STRANGERS = 32
"""How many connections may be proving who they are at the same time; beyond, the oldest is closed.

Were it the newest, so many that say nothing would lock out those who come.
"""
SHORT = 2**26
"""How many bytes a letter may have before it is known how long those of the run are."""
POLL = 0.05
"""Seconds from one look to the next."""
_WAITING_IS_TOLD_AFTER = 5.0
_ENDING = 2.0
"""Seconds that threads have to end once links are cut."""


class RemoteProcess:
    """One other process."""

    def __init__(self, rank: int) -> None:
        self.rank, self.name = rank, f"rank {rank}"
        self.is_done = False  # it asks for no more gradients
        self.knows = False  # that this process does not, either
        self.last_seen = time.monotonic()
        self.linked = threading.Event()
        self.said: dict[str, Any] = {}  # by subject
        self.token = b""  # new whenever it starts
        self.why = ""  # the last attempt to link failed
        self.room = threading.Semaphore(MOST_QUESTIONS)  # for questions that wait
        self._opened: Connection | None = None  # by the other, and not used yet
        self.link: Link | None = None
        self._asked: dict[int, futures.Future[Any]] = {}
        self._lock = threading.Lock()

    def opened(self, connection: Connection | None) -> None:
        """Keep a connection that the other has opened, in the place of one that is not used yet."""
        before = self.taken()
        if before is not None:
            before[0].close()
        self._opened = connection

    def taken(self) -> Connection | None:
        """Return the connection that the other has opened last, once."""
        with self._lock:
            connection, self._opened = self._opened, None
        return connection

    def ask(self, number: int, letter: Tensor, answer: futures.Future[Any]) -> None:
        """Send a question; the answer is None where there will be none."""
        with self._lock:
            if self.link is not None:
                self._asked[number] = answer
                self.link.send(letter)
                return
        answer.set_result(None)

    def answered(self, number: Any, value: Any) -> None:
        """Take an answer; one that nobody waits for is dropped."""
        with self._lock:
            answer = self._asked.pop(number, None)
        if answer is not None:
            answer.set_result(value)

    def send(self, letter: Tensor) -> None:
        """Send a letter that needs no answer, as long as there is a link."""
        with self._lock:
            if self.link is not None:
                self.link.send(letter)

    def take(self, link: Link | None, first: Iterable[Tensor] = ()) -> None:
        """Go on over a link, or without one: what was asked before is then not answered."""
        with self._lock:
            before, self.link = self.link, link
            lost = list(self._asked.values())
            self._asked.clear()
            if link is None:
                self.linked.clear()
            else:
                self.knows = False  # it may be another process now
                for letter in first:
                    link.send(letter)
                self.linked.set()
        for answer in lost:
            answer.set_result(None)
        if before is not None:
            before.close()


class Processes:
    """All other processes of a run; what `coterie.engines.remote.sites.Sites` asks for.

    Threads of their own link with each and read what comes, so that a process answers also while
    its own training waits, evaluates or is over. One of them computes the answers, one after the
    other. A process that was lost and is back is linked with again, and told all that was said.

    Args:
        rendezvous: where they meet.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        at = rendezvous.address
        self.rendezvous, self.rank, self.size = rendezvous, at.rank, at.size
        self.mates = {f"rank {rank}": RemoteProcess(rank) for rank in at.others}
        self.longest = SHORT
        self.token = secrets.token_bytes(16)
        self._said: dict[str, Tensor] = {}  # by subject
        self._heard = threading.Condition()
        self._numbers = itertools.count()
        self._questions: queue.SimpleQueue[tuple[RemoteProcess, int, str, Any] | None] = (
            queue.SimpleQueue()
        )
        self._strangers = collections.deque[socket.socket]()  # who have proved nothing yet
        self._ending, self._over = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []
        self._start(self._accept)
        for mate in self.mates.values():
            self._start(self._stay_linked, mate)

    def __enter__(self) -> Self:
        """Go on; at the end all links are cut."""
        return self

    def __exit__(self, *_: object) -> None:
        """Cut all links."""
        self.leave()

    @contextmanager
    def or_leave(self) -> Iterator[None]:
        """Cut all links where what is done fails."""
        try:
            yield
        except BaseException:
            self.leave()
            raise

    @property
    def others(self) -> list[int]:
        """The ranks of the other processes, in order."""
        return [mate.rank for mate in self.mates.values()]

    def of_rank(self, rank: int) -> RemoteProcess:
        """Return the process of a rank."""
        return next(mate for mate in self.mates.values() if mate.rank == rank)

    def are(self, names: Mapping[int, str]) -> None:
        """Take note of what the others are called; who is not among them takes no part."""
        known = {rank: self.of_rank(rank) for rank in names}
        for mate in self.mates.values():
            if mate.rank not in names:
                mate.is_done = mate.knows = True
                mate.take(None)
        for rank, name in names.items():
            known[rank].name = name
        self.mates = {mate.name: mate for mate in known.values()}

    # What is said to all, and heard of each.

    def say(self, subject: str, content: Mapping[str, Any]) -> None:
        """Tell all others something, also those that come or come back later."""
        letter = self._said[subject] = packed({"said": subject, "content": content})
        for mate in list(self.mates.values()):
            mate.send(letter)

    def hear(self, rank: int, subject: str, **entries: Any) -> dict[str, Any]:
        """Return what a process says on a subject, once it has said it.

        `PeerLost` where it does not come in time, or where that cannot be what it says.

        Args:
            rank: of the process.
            subject: what it is about.
            entries: of which type each entry is.
        """
        mate, patience = self.of_rank(rank), self.rendezvous.patience
        with self._heard:
            self._heard.wait_for(lambda: subject in mate.said, patience)
        if subject not in mate.said:
            missing = [m for m in self.mates.values() if not m.linked.is_set()] or [mate]
            shown = ", ".join(m.name + f" ({m.why})" * bool(m.why) for m in missing)
            raise PeerLost(
                f"{shown} did not come within {patience:g} s; start all {self.size} processes, with"
                " the same MASTER_ADDR, MASTER_PORT and secret, and look for a firewall",
                [m.name for m in missing],
            )
        note = mate.said[subject]
        fields = note if isinstance(note, dict) else {}
        wrong = [
            name for name, kinds in entries.items() if not isinstance(fields.get(name, ...), kinds)
        ]
        if wrong or not isinstance(note, dict):
            what = f"its {wrong[0]!r}" if wrong else "it"
            raise PeerLost(
                f"what {mate.name} says as {subject!r} is not what a process of this run says:"
                f" {what} is missing or of another kind"
            )
        return dict(note)

    def exchange(
        self, subject: str, mine: Mapping[str, Any], **entries: Any
    ) -> dict[int, dict[str, Any]]:
        """Say something, and return what each other says on the same subject, by rank."""
        self.say(subject, mine)
        return {rank: self.hear(rank, subject, **entries) for rank in self.others}

    # Questions and answers.

    def answer(self, answer: Answer) -> None:
        """Answer all questions from now on."""
        self._start(self._answer_all, answer)

    def connect(self) -> None:
        """Wait until all are linked; `PeerLost` where one is not in time."""
        end = time.monotonic() + self.rendezvous.patience
        for mate in self.mates.values():
            if not mate.linked.wait(max(0.0, end - time.monotonic())):
                why = f" ({mate.why})" * bool(mate.why)
                raise PeerLost(
                    f"{mate.name!r} (rank {mate.rank}) did not connect within"
                    f" {self.rendezvous.patience:g} s{why}; start it again, and look for a"
                    " firewall between the machines",
                    [mate.name],
                )

    def ask(
        self, names: Sequence[str], method: str, timeout: float, **arguments: Any
    ) -> FutureReplies:
        """Send a question to processes and return at once; see `Sites.ask`."""
        number = next(self._numbers)
        letter = packed({"number": number, "method": method, "arguments": arguments})
        answers: dict[str, futures.Future[Any]] = {name: futures.Future() for name in names}
        for name, answer in answers.items():
            self.mates[name].ask(number, letter, answer)
        return FutureReplies(answers, time.monotonic() + timeout)

    def reply(self, mate: RemoteProcess, number: int, answer: Any) -> None:
        """Send the answer to a question."""
        mate.send(packed({"number": number, "answer": answer}))

    # The end.

    def finish(self) -> None:
        """Ask no more, and answer in the background until the others are done too.

        The process ends no sooner.
        """
        if not self._ending.is_set():
            self._ending.set()
            self._last = threading.Thread(target=self.until_done, name=LAST_THREAD, daemon=True)
            self._last.start()
            atexit.register(self._at_exit)

    def until_done(self) -> None:
        """Ask no more, and answer until all others are done too, or are gone for long."""
        self._ending.set()
        began, told = time.monotonic(), False
        while not self._over.is_set():
            waiting = [mate for mate in self.mates.values() if self._is_needed(mate, began)]
            if not waiting:
                break
            for mate in waiting:
                if mate.linked.is_set() and not mate.knows:
                    mate.knows = DONE in self.ask([mate.name], DONE, 1.0).wait().get(mate.name, ())
            if not told and time.monotonic() - began > _WAITING_IS_TOLD_AFTER:
                told = True
                names = ", ".join(mate.name for mate in waiting)
                logger.info("done; answers %s until they are, too", names)
            self._over.wait(POLL)
        self.leave()

    def leave(self) -> None:
        """Cut all links, and wait a moment for the threads that read from them."""
        self._ending.set()
        self._over.set()
        for mate in list(self.mates.values()):
            mate.take(None)
            mate.opened(None)
        self._questions.put(None)
        end = time.monotonic() + _ENDING
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
        if self.rendezvous.listener is not None:
            self.rendezvous.listener.close()

    def _at_exit(self) -> None:
        """Let the process live until all are done, or until Ctrl-C."""
        try:
            self._last.join()
        except KeyboardInterrupt:
            self.leave()
            self._last.join(_ENDING)

    def _is_needed(self, mate: RemoteProcess, began: float) -> bool:
        """Say whether another process may still ask this one, or wait for its word."""
        if mate.is_done:
            return mate.linked.is_set() and not mate.knows
        unseen = time.monotonic() - max(began, mate.last_seen)
        return mate.linked.is_set() or unseen < self.rendezvous.patience

    # Links.

    def _start(self, work: Callable[..., object], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        """Take connections of others; whoever opens one has a moment to prove who it is."""
        while not self._over.is_set():
            if not all(mate.linked.is_set() for mate in list(self.mates.values())):
                self.rendezvous.leave_note()
            listener = self.rendezvous.listener
            if listener is None:
                self._over.wait(POLL)
                continue
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError:  # closed at the end
                return
            self._strangers.append(connection)
            if len(self._strangers) > MOST_STRANGERS:
                with suppress(IndexError, OSError):  # its own thread closes it
                    self._strangers.popleft().shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        """Hand a connection to the process that it is of."""
        try:
            higher = [rank for rank in self.others if rank > self.rank]
            try:
                rank, token, seals = self._greeted(connection, higher, dials=False)
            finally:
                with suppress(ValueError):  # it was the oldest
                    self._strangers.remove(connection)
            mate = self.of_rank(rank)
            link = mate.link
            mate.opened((connection, token, seals))
            if link is not None:  # the other has noticed sooner that it is lost
                link.close()
            if self._over.is_set():
                mate.opened(None)
        except PeerLost as error:
            logger.info("a connection came to nothing: %s", error)
            connection.close()

    def _greeted(self, connection: socket.socket, others: Collection[int], *, dials: bool) -> Any:
        run, secret = (self.rendezvous.number, self.size, self.rank), self.rendezvous.secret
        return greeted(connection, run, self.token, secret, others=others, dials=dials)

    def _connected(self, mate: RemoteProcess) -> Connection | None:
        """Return a connection to another process: the higher rank opens it. None where none is."""
        if mate.rank > self.rank:
            return mate.taken()
        if (where := self.rendezvous.where(mate.rank)) is None:
            return None
        connection = None
        try:
            connection = socket.create_connection(where, timeout=5.0)
            _, token, seals = self._greeted(connection, [mate.rank], dials=True)
        except (OSError, PeerLost) as error:
            mate.why = printable(error, 100)
            if connection is not None:
                connection.close()
            return None
        return connection, token, seals

    def _stay_linked(self, mate: RemoteProcess) -> None:
        """Link with another process, read what it sends, and link again where that ends."""

        def goes_on() -> bool:
            return not self._over.is_set() and not (self._ending.is_set() and mate.is_done)

        while goes_on():
            connected = self._connected(mate)
            if connected is None:
                self._over.wait(POLL)
                continue
            connection, mate.token, seals = connected
            link = Link(connection, seals, self.longest)
            mate.take(link, list(self._said.values()))
            try:
                while not self._over.is_set():
                    link.longest = self.longest
                    letter = link.read()
                    mate.last_seen = time.monotonic()
                    if letter is not None:
                        self._take(mate, unpacked(letter))
            except (PeerLost, ValueError) as error:
                if goes_on():
                    logger.warning("lost the link to %s (%s)", mate.name, error)
            mate.take(None)

    def _take(self, mate: RemoteProcess, content: Any) -> None:
        """Take a question, an answer, or what is said."""
        if not isinstance(content, dict):
            raise ValueError("not a letter of a process")  # noqa: TRY004  # of what came, not of an argument
        if isinstance(content.get("said"), str):
            if len(mate.said) >= MOST_QUESTIONS and content["said"] not in mate.said:
                raise ValueError("it says too much")
            with self._heard:
                mate.said[content["said"]] = content.get("content")
                self._heard.notify_all()
            return
        number, method, arguments = (
            content.get(name) for name in ("number", "method", "arguments")
        )
        if type(number) is not int:
            raise ValueError("a letter without a number")
        if method is None:
            mate.answered(number, content.get("answer"))
        elif not isinstance(method, str) or not isinstance(arguments, dict):
            raise ValueError("a question without a method and arguments")
        elif method == DONE:
            self.reply(mate, number, {DONE: True})
            mate.is_done = True  # once it is told so
        elif mate.room.acquire(blocking=False):
            self._questions.put((mate, number, method, arguments))
        else:
            refused = f"it has {MOST_QUESTIONS} questions of {mate.name} to answer already"
            self.reply(mate, number, {"refused": refused})

    def _answer_all(self, answer: Answer) -> None:
        """Answer one question after the other; None is an answer that comes later, or none."""
        while (asked := self._questions.get()) is not None:
            mate, number, method, arguments = asked
            try:
                found = answer(mate, method, arguments | {"number": number})
            except Exception as error:  # its text may tell of an example
                logger.exception("could not answer %s", mate.name)
                found = {"refused": f"it failed with {type(error).__name__}"}
            mate.room.release()
            if found is not None:
                self.reply(mate, number, found)
