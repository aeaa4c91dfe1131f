"""A link between two processes, here over a pair of sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

import pytest
import torch
from tests.support.intruders import forged_letters
from torch import Tensor

from coterie.engines.processes import processes as links
from coterie.engines.processes.processes import Link, Seal, greeted
from coterie.errors import PeerLost

SECRET = b"a secret of 16 bytes"


def ends(secrets: tuple[bytes | None, bytes | None] = (None, None), longest: int = 100) -> Any:
    found = []
    for me, (connection, key) in enumerate(zip(socket.socketpair(), secrets, strict=True)):
        seals = None if key is None else (Seal(key + b"%d" % me), Seal(key + b"%d" % (1 - me)))
        found.append(Link(connection, seals, longest))
    return found


def letter(n: int) -> Tensor:
    return torch.arange(n, dtype=torch.uint8)


def read(link: Link) -> Tensor:
    while (found := link.read()) is None:
        pass
    return found


@pytest.mark.parametrize("secret", [None, SECRET])
def test_letters_arrive_in_order_both_ways(secret: bytes | None) -> None:
    one, two = ends((secret, secret))
    for n in (3, 100, 1):
        one.send(letter(n))
    two.send(letter(7))
    assert [len(read(two)) for _ in range(3)] == [3, 100, 1]
    assert torch.equal(read(one), letter(7))
    for end in (one, two):
        end.close()


def test_a_letter_without_the_right_tag_ends_the_link() -> None:
    one, two = ends((b"one secret of 16", b"another of 16 by"))
    one.send(letter(3))
    with pytest.raises(PeerLost, match="no tag of this cluster's secret"):
        two.read()
    for end in (one, two):
        end.close()


def test_no_letter_that_was_altered_repeated_moved_or_left_out_is_believed() -> None:
    assert forged_letters(50, seed=0) == 0


def test_a_letter_that_is_too_long_is_not_read() -> None:
    one, two = ends(longest=50)
    one.send(letter(51))
    with pytest.raises(PeerLost, match="a letter of 51 bytes came, where 50 can be"):
        two.read()
    for end in (one, two):
        end.close()


def test_signs_of_life_are_no_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "PULSE", 0.01)
    one, two = ends((SECRET,) * 2)
    assert [two.read() for _ in range(3)] == [None] * 3
    one.send(letter(2))
    assert torch.equal(read(two), letter(2))
    for end in (one, two):
        end.close()


def test_who_does_not_read_is_cut_off_and_no_more_is_kept_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "MOST_WAITING", 4)
    one, two = ends(longest=10**8)
    for _ in range(20):
        one.send(torch.zeros(10**6, dtype=torch.uint8))
    assert one._outbox.qsize() <= 4
    came = 0
    with contextlib.suppress(PeerLost):
        while came < 20:
            came += two.read() is not None
    assert came < 20
    for end in (one, two):
        end.close()


# Who is at the other end.


def both(
    secrets: tuple[bytes | None, bytes | None], ranks: tuple[int, int] = (1, 0), number: int = 0
) -> list[Any]:
    """Return what each of two processes makes of the other."""
    found: list[Any] = [None, None]

    def greet(me: int, connection: socket.socket) -> None:
        run, others = (number * me, 2, ranks[me]), [1 - me]
        try:
            how: dict[str, Any] = {"others": others, "dials": me == 0}
            found[me] = greeted(connection, run, bytes(15) + b"%d" % me, secrets[me], **how)
        except PeerLost as error:
            found[me] = str(error)
            connection.close()

    pair = socket.socketpair()
    threads = [threading.Thread(target=greet, args=each) for each in enumerate(pair)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for connection in pair:
        connection.close()
    return found


def test_two_processes_of_a_run_prove_who_they_are_and_have_new_seals_each_time() -> None:
    tags = []
    for _ in range(2):
        one, two = both((SECRET, SECRET), ranks=(0, 1))
        assert (one[0], two[0]) == (1, 0)
        assert (one[1][-1:], two[1][-1:]) == (b"1", b"0")
        tags.append(one[2][0].tag(b"x"))
        assert two[2][1].fits(b"x", tags[-1])
    assert tags[0] != tags[1], "a letter of another link does not fit"
    assert both((None, None), ranks=(0, 1))[0][2] is None


@pytest.mark.parametrize(
    ("secrets", "ranks", "number", "why"),
    [
        ((SECRET, b"another of 16 by"), (0, 1), 0, "does not have this cluster's secret"),
        ((SECRET, None), (0, 1), 0, "does not have this cluster's secret"),
        ((SECRET, SECRET), (0, 0), 0, "no process of this run"),
        ((SECRET, SECRET), (0, 1), 1, "no process of this run"),
    ],
)
def test_who_is_not_of_this_run_is_refused(secrets: Any, ranks: Any, number: int, why: str) -> None:
    assert any(why in str(found) for found in both(secrets, ranks, number))


class Recording:
    """A connection that keeps what is sent over it."""

    def __init__(self, connection: socket.socket, heard: list[bytes]) -> None:
        self.connection, self.heard = connection, heard

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)

    def sendall(self, data: bytes) -> None:
        self.heard.append(data)
        self.connection.sendall(data)


def test_what_was_recorded_proves_nothing() -> None:
    """A replay of all that the other said before: the proof is of what is new at both ends."""
    heard: list[bytes] = []
    answers: list[Any] = []

    def greet(connection: socket.socket) -> None:
        try:
            answers.append(
                greeted(connection, (0, 2, 0), bytes(16), SECRET, others=[1], dials=False)
            )
        except PeerLost as error:
            answers.append(str(error))

    for is_replay in (False, True):
        ours, theirs = socket.socketpair()
        thread = threading.Thread(target=greet, args=(ours,))
        thread.start()
        if is_replay:
            theirs.sendall(b"".join(heard))
        else:
            recording: Any = Recording(theirs, heard)
            greeted(recording, (0, 2, 1), bytes(16), SECRET, others=[0], dials=True)
        thread.join()
        ours.close()
        theirs.close()
    assert answers[0][0] == 1
    assert "does not have this cluster's secret" in answers[1]
