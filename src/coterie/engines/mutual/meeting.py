"""How processes find each other, at first and again.

By notes in a store, which may be lost and come back.

Every process says in notes who it is, with a token that is new whenever it starts. Of two, the one
with the higher rank asks for a link and the other agrees; then both connect. Where the keeper of
the store was lost and is back, everybody leaves its notes again.
"""

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore

from coterie.engines.mutual.link import Pair
from coterie.engines.torch_distributed.group import Group, check_seconds
from coterie.engines.torch_distributed.place import Place, stay_on_loopback
from coterie.engines.torch_distributed.seal import Seal, shared_secret
from coterie.errors import PeerLost

HELLO = "hello"
"""The subject on which a process says its token, before it links."""
POLL = 0.05
"""Seconds from one look at the notes to the next."""
CONNECTING = 10.0
"""Seconds that two processes who have agreed have to connect."""


_meetings: dict[Place, int] = {}
"""For each address, how many meetings this process had."""


class Meeting:
    """Processes that tell each other who they are.

    Args:
        patience: seconds to wait for the others.
        place: where they meet; what their environment says when None.
    """

    def __init__(self, patience: float = 120.0, place: Place | None = None) -> None:
        check_seconds("patience", patience)
        self.place, self.patience, self.secret = place or Place.told(), patience, shared_secret()
        self.number = _meetings[self.place] = _meetings.get(self.place, -1) + 1
        self.token = secrets.token_hex(8)
        self.said: dict[str, Any] = {}  # by subject
        if self.place.keeps_store:
            self.place.keep(timedelta(seconds=patience), all_come=False)

    def exchange(
        self, subject: str, mine: Mapping[str, Any], **entries: Any
    ) -> dict[int, dict[str, Any]]:
        """Say something on a subject, and return what the others say, by rank.

        `PeerLost` where one does not come.

        Args:
            subject: what it is about.
            mine: a note, of plain data.
            entries: of which type each entry of a note is.
        """
        self.said[subject] = dict(mine)
        notes, heard, end = (
            Notes(self),
            dict[int, dict[str, Any]](),
            time.monotonic() + self.patience,
        )
        while missing := [rank for rank in self.place.others if rank not in heard]:
            said = {
                rank: notes.read(f"{subject}/{rank}", f"rank {rank}", **entries) for rank in missing
            }
            heard |= {rank: note for rank, note in said.items() if note is not None}
            if len(heard) < self.place.size - 1:
                if time.monotonic() > end:
                    raise self._not_come([rank for rank in missing if rank not in heard])
                time.sleep(POLL)
        return dict(sorted(heard.items()))

    def _not_come(self, missing: Sequence[int]) -> PeerLost:
        names = [f"rank {rank}" for rank in missing]
        return PeerLost(
            f"{', '.join(names)} did not come within {self.patience:g} s; start all"
            f" {self.place.size} processes, with the same MASTER_ADDR and MASTER_PORT",
            names,
        )


class Notes:
    """One thread's connection to the store.

    What cannot be read or left now is tried again later.
    """

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self._group: Group | None = None
        self._tried: dict[str, int] = {}  # by the two processes, how many links they have agreed on

    def link_to(
        self, other: int, goes_on: Callable[[], bool]
    ) -> tuple[Pair, tuple[Seal, Seal] | None] | None:
        """Connect with another process once both are there.

        None where this should not go on any more.

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
        hello, rank = self._hello_of(other), self.meeting.place.rank
        if hello is None:
            return None
        tokens = {rank: self.meeting.token, other: hello["token"]}
        two = "link/" + "/".join(f"{one} {tokens[one]}" for one in sorted(tokens))
        tried = self._tried.get(two, 0)
        if rank < other:
            wanted = self._number(f"{two}/want", other)
            if wanted is None or wanted <= tried or not self._leave(f"{two}/go/{wanted}", wanted):
                return None
        else:
            wanted = tried + 1
            while self._number(f"{two}/go/{wanted}", other) is None:
                if (
                    not goes_on()
                    or self._hello_of(other) != hello
                    or not self._leave(f"{two}/want", wanted)
                ):
                    return None
                time.sleep(POLL)
        self._tried[two] = wanted
        return None if self._group is None else (self._group, f"{two}/{wanted}")

    def _seals(self, name: str, mine: int) -> tuple[Seal, Seal] | None:
        secret = self.meeting.secret
        return (
            None
            if secret is None
            else (Seal(secret, f"{name}/{mine}"), Seal(secret, f"{name}/{1 - mine}"))
        )

    def read(self, key: str, whose: str, kind: type = dict, /, **entries: Any) -> Any:
        """Return a note, see `Group.read_note`; None while it is not there."""

        def read(group: Group) -> Any:
            return (
                group.read_note(key, whose, kind, **entries) if group.store.check([key]) else None
            )

        return self._in_touch(read)

    def _hello_of(self, rank: int) -> dict[str, Any] | None:
        hello: dict[str, Any] | None = self.read(f"{HELLO}/{rank}", f"rank {rank}", token=str)
        return hello

    def _number(self, key: str, rank: int) -> int | None:
        number: int | None = self.read(key, f"rank {rank}", int)
        return number

    def _leave(self, key: str, note: Any) -> bool:
        """Leave a note, and say whether that could be done."""

        def leave(group: Group) -> bool:
            group.leave_note(key, note)
            return True

        return bool(self._in_touch(leave))

    def _in_touch(self, do: Callable[[Group], Any]) -> Any:
        """Return what is done with the notes, this process's own among them.

        None where the store is gone now.
        """
        try:
            if self._group is None:
                self._group = self._opened()
            return do(self._group)
        except dist.DistError:  # it is looked for anew next time
            self._group = None
            return None

    def _opened(self) -> Group:
        meeting, place = self.meeting, self.meeting.place
        store = PrefixStore(
            f"everyone {meeting.number}", place.reach(timedelta(seconds=CONNECTING))
        )
        group = Group(store, place.rank, place.size, CONNECTING, meeting.secret, meeting.number)
        for subject, note in meeting.said.items():
            group.leave_note(f"{subject}/{place.rank}", note)
        return group
