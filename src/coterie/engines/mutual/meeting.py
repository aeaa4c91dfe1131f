"""How processes find each other, at first and again: by notes in a store, which may be lost and come back.

Every process says in a note who it is, with a token that is new whenever it starts. Of two, the one with the higher
rank asks for a link and the other agrees; then both connect. Where the keeper of the store was lost and is back,
everybody leaves its note again.
"""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore, Store

from coterie.engines.mutual.link import Pair
from coterie.engines.torch_distributed.group import Group
from coterie.engines.torch_distributed.place import Place, stay_on_loopback
from coterie.engines.torch_distributed.seal import Seal
from coterie.errors import PeerLost

HELLO: dict[str, Any] = {"name": str, "examples": int | str, "size": int, "dtype": str, "token": str}
"""The entries of a note that says who a process is, and of which types they are."""
POLL = 0.05
"""Seconds from one look at the notes to the next."""
CONNECTING = 10.0
"""Seconds that two processes who have agreed have to connect."""

_kept: dict[Place, Store] = {}
"""The stores that this process keeps: one for each address, as long as it lives."""


@dataclass(frozen=True)
class Meeting:
    """Who this process is, among whom."""

    place: Place
    hello: Mapping[str, Any] = field(repr=False)
    patience: float = 120.0  # seconds to wait for the others
    secret: bytes | None = field(default=None, repr=False)
    number: int = 0  # how many meetings these processes had before
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def keep_store(self) -> None:
        """Keep the store, where that is for this process to do."""
        if self.place.keeps_store and self.place not in _kept:
            _kept[self.place] = self.place.keep(timedelta(seconds=self.patience), all_come=False)


class Notes:
    """One thread's connection to the store. What cannot be read or left now is tried again later."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self._group: Group | None = None
        self._tried: dict[str, int] = {}  # by the two processes, how many links they have agreed on

    def hello_of(self, rank: int) -> dict[str, Any] | None:
        """Return who another process is; None while it is not there."""
        found: dict[str, Any] | None = self._read(f"hello/{rank}", f"rank {rank}", dict, **HELLO)
        return found

    def link_to(self, other: int, goes_on: Callable[[], bool]) -> tuple[Pair, tuple[Seal, Seal] | None] | None:
        """Connect with another process once both are there; None where this should not go on any more.

        The other is rank 1 of the two where it has the higher rank, else rank 0.
        """
        while goes_on():
            agreed = None
            with contextlib.suppress(PeerLost):  # a note that is nobody's
                agreed = self._agreed(other, goes_on)
            if agreed is None:
                time.sleep(POLL)
                continue
            group, name = agreed
            mine = int(self.meeting.place.rank > other)
            with contextlib.suppress(RuntimeError):  # the other is gone again
                stay_on_loopback()
                store = PrefixStore(name, group.store)
                pair = ProcessGroupGloo(store, mine, 2, timedelta(seconds=CONNECTING))
                return cast("Pair", pair), self._seals(name, mine)
        return None

    def _agreed(self, other: int, goes_on: Callable[[], bool]) -> tuple[Group, str] | None:
        """Return the name of a link that both processes have agreed on now."""
        hello, rank = self.hello_of(other), self.meeting.place.rank
        if hello is None:
            return None
        tokens = {rank: self.meeting.token, other: hello["token"]}
        two = "link/" + "/".join(f"{one} {tokens[one]}" for one in sorted(tokens))
        tried = self._tried.get(two, 0)
        if rank < other:
            wanted = self._read(f"{two}/want", f"rank {other}", int)
            if wanted is None or wanted <= tried or not self._leave(f"{two}/go/{wanted}", wanted):
                return None
        else:
            wanted = tried + 1
            while self._read(f"{two}/go/{wanted}", f"rank {other}", int) is None:
                if not goes_on() or self.hello_of(other) != hello or not self._leave(f"{two}/want", wanted):
                    return None
                time.sleep(POLL)
        self._tried[two] = wanted
        return None if self._group is None else (self._group, f"{two}/{wanted}")

    def _seals(self, name: str, mine: int) -> tuple[Seal, Seal] | None:
        secret = self.meeting.secret
        return None if secret is None else (Seal(secret, f"{name}/{mine}"), Seal(secret, f"{name}/{1 - mine}"))

    def _read(self, key: str, whose: str, kind: type, **entries: Any) -> Any:
        """Return a note; None while it is not there."""
        note = None
        with self._in_touch() as group:
            if group.store.check([key]):
                note = group.read_note(key, whose, kind, **entries)
        return note

    def _leave(self, key: str, note: Any) -> bool:
        """Leave a note, and say whether that could be done."""
        left = False
        with self._in_touch() as group:
            group.leave_note(key, note)
            left = True
        return left

    @contextlib.contextmanager
    def _in_touch(self) -> Iterator[Group]:
        """Give the notes, with this process's hello among them; a store that is gone is looked for anew later."""
        try:
            if self._group is None:
                self._group = self._opened()
            yield self._group
        except dist.DistError:
            self._group = None

    def _opened(self) -> Group:
        meeting, place = self.meeting, self.meeting.place
        store = PrefixStore(f"everyone {meeting.number}", place.reach(timedelta(seconds=CONNECTING)))
        group = Group(store, place.rank, place.size, CONNECTING, meeting.secret, meeting.number)
        group.leave_note(f"hello/{place.rank}", {**meeting.hello, "token": meeting.token})
        return group


def who_is_there(meeting: Meeting) -> dict[int, dict[str, Any]]:
    """Say who this process is, and return who the others are, by rank; `PeerLost` where one does not come."""
    meeting.keep_store()
    notes, place, patience = Notes(meeting), meeting.place, meeting.patience
    end, found = time.monotonic() + patience, dict[int, dict[str, Any]]()
    missing = [rank for rank in range(place.size) if rank != place.rank]
    while missing:
        for rank in missing:
            if (hello := notes.hello_of(rank)) is not None:
                found[rank] = hello
        missing = [rank for rank in missing if rank not in found]
        if missing and time.monotonic() > end:
            raise PeerLost(
                f"{', '.join(f'rank {rank}' for rank in missing)} did not come within {patience:g} s; start all "
                f"{place.size} processes, with the same MASTER_ADDR and MASTER_PORT",
                [f"rank {rank}" for rank in missing],
            )
        time.sleep(POLL if missing else 0)
    return dict(sorted(found.items()))
