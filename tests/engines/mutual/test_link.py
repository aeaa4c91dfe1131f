"""A link between two processes, here with queues in the place of gloo."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie.engines.mutual.link import Link
from coterie.engines.torch_distributed.seal import Seal
from coterie.errors import PeerLost


class Done:
    """What is done, or will be when it is waited for."""

    def __init__(
        self, box: queue.SimpleQueue[Tensor] | None = None, to: Tensor | None = None
    ) -> None:
        self.box, self.to = box, to

    def wait(self, timeout: timedelta) -> None:
        if self.box is not None and self.to is not None:
            try:
                self.to.copy_(self.box.get(timeout=min(5.0, timeout.total_seconds())))
            except queue.Empty:
                raise RuntimeError("Timed out") from None


class Queues:
    """One end of a pair."""

    def __init__(self, boxes: dict[int, queue.SimpleQueue[Tensor]]) -> None:
        self.boxes = boxes

    def send(self, tensors: Sequence[Tensor], other: int, tag: int) -> Any:
        self.boxes[2 * tag + other].put(tensors[0].clone())
        return Done()

    def recv(self, tensors: Sequence[Tensor], other: int, tag: int) -> Any:
        return Done(self.boxes[2 * tag + 1 - other], tensors[0])


def ends(
    secrets: tuple[bytes | None, bytes | None] = (None, None), longest: int = 100
) -> list[Link]:
    pair = Queues({place: queue.SimpleQueue() for place in range(8)})
    found = []
    for me, secret in enumerate(secrets):
        seals = None if secret is None else (Seal(secret, f"n {me}"), Seal(secret, f"n {1 - me}"))
        found.append(Link(pair, 1 - me, seals, longest))
    return found


def letter(n: int) -> Tensor:
    return torch.arange(n, dtype=torch.uint8)


@pytest.mark.parametrize("secret", [None, b"a secret of 16 bytes"])
def test_letters_arrive_in_order_both_ways(secret: bytes | None) -> None:
    one, two = ends((secret, secret))
    for n in (3, 100, 1):
        one.send(letter(n))
    two.send(letter(7))
    assert [len(two.read()) for _ in range(3)] == [3, 100, 1]
    assert torch.equal(one.read(), letter(7))
    for end in (one, two):
        end.close()


def test_a_letter_without_the_right_tag_ends_the_link() -> None:
    one, two = ends((b"one secret of 16", b"another of 16 by"))
    one.send(letter(3))
    with pytest.raises(PeerLost, match="no tag of this cluster's secret"):
        two.read()


def test_a_letter_that_is_too_long_is_not_read() -> None:
    one, two = ends(longest=50)
    one.send(letter(51))
    with pytest.raises(PeerLost, match="a letter of 51 bytes came, where 50 can be"):
        two.read()


def test_signs_of_life_are_no_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.engines.mutual.link.PULSE", 0.01)
    one, two = ends((b"a secret of 16 bytes",) * 2)
    assert one._outbox.empty()
    while two._pair.boxes[2].qsize() < 3:  # type: ignore[attr-defined]  # the heads for its other end
        pass
    one.send(letter(2))
    assert torch.equal(two.read(), letter(2))
    for end in (one, two):
        end.close()
