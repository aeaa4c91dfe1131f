"""Everybody trains at once.

Users in processes of their own, each user 0 of its own run, over torch.distributed.

For a trusted network only: nothing is encrypted, and whoever reaches the port can take part.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from coterie.engines.in_process.engine import InProcess
from coterie.engines.mutual.meeting import HELLO, Meeting
from coterie.engines.mutual.processes import Mate, Processes
from coterie.engines.peer import Caps, Peer
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.responder import Responder
from coterie.engines.requests import MAX_POINTS, whole_number
from coterie.engines.rounding import Compress
from coterie.errors import DataError, ModelError, printable
from coterie.gradients.parameters import Parameters
from coterie.privacy.sums import SumsOnly
from coterie.users.user import Loss, User

MAX_EXTRA_BYTES = 2**16
"""How many bytes a letter may have beside its numbers."""

_ENTRIES: dict[str, Any] = {
    "name": str,
    "examples": int | str,
    "size": int,
    "dtype": str,
    "token": str,
}
"""What a process says of itself, and of which types it is."""


class Mutual(Remote):
    """The gradients of users in other processes, each of which trains its own model in the same way.

    Every process calls `coterie.train(model, loss, me, [], …, engine=Mutual)` with its own user. It
    asks the others for gradients at its points, and answers them at theirs, in threads of its own.
    No process waits for another's step, and the answer to a question depends on nothing but the
    question: where nobody is late, everybody has the run that `coterie.train_everyone` gives it.
    One that is late or lost is left out as by `Remote`, and comes back by itself. Who is done first
    answers until the others are done.

    Args:
        model, loss, me, batch_size, seed: as for `InProcess`; examples stay in their process.
        peers: none, as their examples are elsewhere.
        timeout: seconds to wait for another process in one step. One that is lost is not waited
            for.
        misses, probe_every, minimum, compress, secure_sums, largest: as for `Remote`.
        caps, log: what this process gives the others; as for `serve`. There is no `privacy`: the
        points of its own
            run, which the others see, tell of its examples without noise.
        sums: give masked sums only, such as these; the others then need `secure_sums`.
        patience: seconds to wait for the others at the start, and at the end for one that asks
            nothing any more.
        meeting: where the processes have met before; with `patience` of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        me: User,
        peers: Sequence[User] = (),
        *,
        batch_size: int = 32,
        seed: int = 0,
        timeout: float = 30.0,
        misses: int = 3,
        probe_every: int = 10,
        minimum: int = 1,
        compress: Compress | None = None,
        secure_sums: bool = False,
        largest: float = 16.0,
        caps: Caps | None = None,
        log: Path | None = None,
        sums: SumsOnly | None = None,
        patience: float = 120.0,
        meeting: Meeting | None = None,
    ) -> None:
        mine = InProcess(
            copy.deepcopy(model), loss, me, batch_size=batch_size, seed=seed, one_by_one=True
        )
        peer = mine.peer(me.name, caps, log)
        meeting = meeting or Meeting(patience)
        hello = _hello(peer)
        hellos = meeting.exchange(HELLO, hello | {"token": meeting.token}, **_ENTRIES)
        _check(hello, hellos)
        names = {rank: hello["name"] for rank, hello in hellos.items()}
        how: dict[str, Any] = {
            "timeout": timeout,
            "misses": misses,
            "probe_every": probe_every,
            "minimum": minimum,
        }
        how |= {
            "batch_size": batch_size,
            "seed": seed,
            "compress": compress,
            "names": [*names.values()],
        }
        how |= {"secure_sums": secure_sums, "largest": largest}
        mates = [Mate(rank, name, Responder(peer, sums)) for rank, name in names.items()]
        self._others = Processes(meeting, mates, _longest(model))
        super().__init__(model, loss, me, peers, sites=self._others, **how)
        self._told = {hello["name"]: hello["examples"] for hello in hellos.values()}
        self._examples |= {name: whole_number(n) for name, n in self._told.items()}
        self._others.connect()

    def describe(self) -> dict[str, Any]:
        """Return what the record should say of how gradients are computed."""
        return super().describe() | {"peers": self._told}

    def close(self) -> None:
        """Ask no more; the others are answered until they are done, in the background."""
        self._others.finish()


def _hello(peer: Peer) -> dict[str, Any]:
    """Return what a process says of itself."""
    parameters, examples = peer.passes.parameters, peer.size
    told = "a stream" if examples is None else examples
    return {
        "name": peer.user.name,
        "examples": told,
        "size": parameters.size,
        "dtype": str(parameters.dtype),
    }


def _check(ours: Mapping[str, Any], hellos: Mapping[int, Mapping[str, Any]]) -> None:
    """Refuse processes whose models are not alike, and names that are none; each process does."""
    for rank, hello in hellos.items():
        if (hello["size"], hello["dtype"]) != (ours["size"], ours["dtype"]):
            raise ModelError(
                f"rank {rank} ({printable(hello['name'])!r}) has a model of {hello['size']}"
                f" parameters of {printable(hello['dtype'])}, this process one of {ours['size']} of"
                f" {ours['dtype']}; build the same model in every process"
            )
        if not hello["name"] or not hello["name"].isprintable():
            raise DataError(
                f"rank {rank} has the name {hello['name'][:80]!r}; a name must be printable text"
            )


def _longest(model: nn.Module) -> int:
    """Return how many bytes a question or an answer may have.

    Points, what is added to steps, and buffers.
    """
    numbers = 2 * Parameters(model).size + sum(buffer.numel() for buffer in model.buffers())
    return 8 * MAX_POINTS * numbers + MAX_EXTRA_BYTES
