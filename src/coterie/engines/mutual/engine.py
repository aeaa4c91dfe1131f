"""Everybody trains at once: users in processes of their own, each user 0 of its own run, over torch.distributed.

For a trusted network only: nothing is encrypted, and whoever reaches the port can take part.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from coterie.engines.caps import Caps
from coterie.engines.flare.engine import Flare
from coterie.engines.in_process.engine import InProcess
from coterie.engines.mutual.meeting import Meeting, who_is_there
from coterie.engines.mutual.processes import Processes
from coterie.engines.peer import Peer
from coterie.engines.requests import MAX_POINTS
from coterie.engines.rounding import Compress
from coterie.engines.torch_distributed.place import Place
from coterie.engines.torch_distributed.seal import shared_secret
from coterie.errors import DataError, KnobError, ModelError, printable
from coterie.gradients.parameters import Parameters
from coterie.privacy.privacy import Privacy
from coterie.users.user import Loss, User

MAX_EXTRA_BYTES = 2**16
"""How many bytes a letter may have beside its numbers."""

_meetings: dict[Place, int] = {}
"""For each address, how many engines this process has made."""


class Mutual(Flare):
    """The gradients of users in other processes, each of which trains its own model in the same way.

    Every process calls `coterie.train(model, loss, me, [], …, engine=Mutual)` with its own user. It asks the others
    for gradients at its points, and answers them at theirs, in threads of its own. No process waits for another's
    step, and the answer to a question depends on nothing but the question: where nobody is late, everybody has the
    run that `coterie.train_everyone` gives it. One that is late or lost is left out as by `Flare`, and comes back
    by itself. Who is done first answers until the others are done.

    Args:
        model, loss, me, batch_size, seed: as for `InProcess`; examples stay in their process.
        peers: none, as their examples are elsewhere.
        timeout: seconds to wait for another process in one step. One that is lost is not waited for.
        misses, probe_every, minimum, compress: as for `Flare`.
        caps, log, privacy: what this process gives the others; as for `serve`.
        patience: seconds to wait for the others at the start, and at the end for one that asks nothing any more.
        place: where the processes meet; what their environment says when None.
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
        caps: Caps | None = None,
        log: Path | None = None,
        privacy: Privacy | None = None,
        patience: float = 120.0,
        place: Place | None = None,
    ) -> None:
        if not patience > 0:
            raise KnobError(f"`patience` must be a positive number of seconds, got {patience}")
        place = place or Place.told()
        mine = InProcess(copy.deepcopy(model), loss, me, batch_size=batch_size, seed=seed, one_by_one=True)
        peer = mine.peer(me.name, caps, log, privacy)
        number = _meetings[place] = _meetings.get(place, -1) + 1
        meeting = Meeting(place, _hello(peer), patience, shared_secret(), number)
        hellos = who_is_there(meeting)
        _check(meeting, hellos)
        names = {rank: hello["name"] for rank, hello in hellos.items()}
        how: dict[str, Any] = {"timeout": timeout, "misses": misses, "probe_every": probe_every, "minimum": minimum}
        how |= {"batch_size": batch_size, "seed": seed, "compress": compress, "names": [*names.values()]}
        self._others = Processes(meeting, names, peer, _longest(model))
        super().__init__(model, loss, me, peers, sites=self._others, **how)
        self._told = {hello["name"]: hello["examples"] for hello in hellos.values()}
        self._examples |= {name: None if isinstance(n, str) else n for name, n in self._told.items()}
        self._others.connect()

    def describe(self) -> dict[str, Any]:
        """Return what the record should say of how gradients are computed."""
        return super().describe() | {"engine": "torch.distributed, everybody trains", "peers": self._told}

    def close(self) -> None:
        """Ask no more; the others are answered until they are done, in the background."""
        self._others.finish()


def _hello(peer: Peer) -> dict[str, Any]:
    """Return what a process says of itself."""
    parameters, examples = peer.passes.parameters, peer.size
    told = "a stream" if examples is None else examples
    return {"name": peer.user.name, "examples": told, "size": parameters.size, "dtype": str(parameters.dtype)}


def _check(meeting: Meeting, hellos: Mapping[int, Mapping[str, Any]]) -> None:
    """Refuse processes whose models are not alike, and names that are none; each process does."""
    ours = meeting.hello
    for rank, hello in hellos.items():
        if (hello["size"], hello["dtype"]) != (ours["size"], ours["dtype"]):
            raise ModelError(
                f"rank {rank} ({printable(hello['name'])!r}) has a model of {hello['size']} parameters of "
                f"{printable(hello['dtype'])}, this process one of {ours['size']} of {ours['dtype']}; build the "
                "same model in every process"
            )
        if not hello["name"] or not hello["name"].isprintable():
            raise DataError(f"rank {rank} has the name {hello['name'][:80]!r}; a name must be printable text")


def _longest(model: nn.Module) -> int:
    """Return how many bytes a question or an answer may have: points, what is added to steps, and buffers."""
    numbers = 2 * Parameters(model).size + sum(buffer.numel() for buffer in model.buffers())
    return 8 * MAX_POINTS * numbers + MAX_EXTRA_BYTES
