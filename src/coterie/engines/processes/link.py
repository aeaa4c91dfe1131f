"""A link between two processes: letters both ways over a connection, until either is gone or silent."""

import contextlib
import hmac
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from coterie.errors import PeerLost

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
        ours = _HELLO.pack(_MAGIC, *run, token, secrets.token_bytes(16))
        connection.sendall(ours)
        theirs = bytes(_received(connection, bytearray(_HELLO.size)))
        magic, number, size, rank, their_token, _ = _HELLO.unpack(theirs)
        if magic != _MAGIC or (number, size) != run[:2] or rank not in others:
            raise PeerLost("it is no process of this run")
        both = ours + theirs if dials else theirs + ours
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
