"""A link between two processes: letters both ways, over gloo, until either is gone or silent."""

import contextlib
import queue
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from coterie.engines.torch_distributed.group import in_short
from coterie.engines.torch_distributed.seal import TAG_BYTES, Seal
from coterie.errors import PeerLost

SILENCE = 30.0
"""Seconds without a sign of life after which the other process is taken for lost."""
PULSE = 5.0
"""Seconds without a letter after which a sign of life is sent."""
_SIZE = 8
_HEADS, _BODIES, _NOTHING = 1, 2, 3
"""What gloo tells messages apart by; nobody sends the last."""


class Pair(Protocol):
    """Two processes under gloo; torch does not say what can be done with them."""

    def send(self, tensors: Sequence[Tensor], other: int, tag: int, /) -> dist.Work:
        """Begin to send a tensor; what is returned must be kept until it is sent."""

    def recv(self, tensors: Sequence[Tensor], other: int, tag: int, /) -> dist.Work:
        """Begin to receive a tensor."""


class Link:
    """The connection to one other process.

    Args:
        pair: the two processes.
        other: the other's rank in it.
        seals: of what is sent and of what comes, where there is a secret.
        longest: how many bytes a letter may have.
    """

    def __init__(
        self, pair: Pair, other: int, seals: tuple[Seal, Seal] | None, longest: int
    ) -> None:
        self._pair, self._other, self._seals, self._longest = pair, other, seals, longest
        self._outbox: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()

    def send(self, letter: Tensor) -> None:
        """Send a letter, as soon as those before it are sent; one that cannot be sent is lost."""
        self._outbox.put(letter)

    def read(self) -> Tensor:
        """Wait for a letter, and return it.

        `PeerLost` where none can come any more, or where it is forged.
        """
        while True:
            head = self._received(torch.zeros(_SIZE + TAG_BYTES, dtype=torch.uint8), _HEADS)
            size = int.from_bytes(bytes(head[:_SIZE].tolist()), "little")
            if size > self._longest:
                raise PeerLost(f"a letter of {size} bytes came, where {self._longest} can be")
            letter = torch.empty(size, dtype=torch.uint8)
            if size:
                self._received(letter, _BODIES)
            if self._seals is not None and not self._seals[1].fits(letter, head[_SIZE:]):
                raise PeerLost("a letter has no tag of this cluster's secret")
            if size:
                return letter

    def close(self) -> None:
        """Send what is left to send, and cut the connection, which both ends notice at once."""
        self._outbox.put(None)
        self._writer.join(1.0)
        # a wait that fails closes all connections of a group
        with contextlib.suppress(RuntimeError):
            nothing = torch.zeros(1, dtype=torch.uint8)
            self._pair.recv([nothing], self._other, _NOTHING).wait(timedelta(milliseconds=1))

    def _received(self, message: Tensor, which: int) -> Tensor:
        try:
            self._pair.recv([message], self._other, which).wait(timedelta(seconds=SILENCE))
        except RuntimeError as error:
            raise PeerLost(in_short(str(error))) from error
        return message

    def _write(self) -> None:
        """Send the letters, and signs of life where there are none."""
        empty = torch.zeros(0, dtype=torch.uint8)
        while True:
            try:
                letter = self._outbox.get(timeout=PULSE)
            except queue.Empty:
                letter = empty
            if letter is None:
                return
            head = torch.zeros(_SIZE + TAG_BYTES, dtype=torch.uint8)
            head[:_SIZE] = torch.tensor(
                list(len(letter).to_bytes(_SIZE, "little")), dtype=torch.uint8
            )
            if self._seals is not None:
                head[_SIZE:] = self._seals[0].tag(letter)
            parts = [(head, _HEADS), (letter, _BODIES)] if len(letter) else [(head, _HEADS)]
            try:
                works = [self._pair.send([part], self._other, which) for part, which in parts]
                for work in works:
                    work.wait(timedelta(seconds=SILENCE))
            except RuntimeError:  # who reads notices too
                return
