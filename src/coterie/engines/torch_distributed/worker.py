"""A peer under torch.distributed: it answers user 0 with gradients of its own examples."""

import contextlib
import copy
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from coterie.engines.in_process.engine import InProcess
from coterie.engines.peer import Caps, Peer
from coterie.engines.requests import MAX_POINTS, Reply, Request
from coterie.engines.rounding import HALVES
from coterie.engines.sketch import SKETCH, Sketch, sketch_key
from coterie.engines.torch_distributed.group import Group, in_short, join, noting_sigterm
from coterie.engines.torch_distributed.hellos import PROMISE
from coterie.engines.torch_distributed.request import Ask
from coterie.engines.torch_distributed.seal import Seal
from coterie.engines.torch_distributed.secure_sums import MaskedPart, constants_of
from coterie.engines.torch_distributed.wire import Outcome, Wire
from coterie.errors import CoterieError, KnobError, PeerLost, blaming, printable
from coterie.gradients.parameters import Parameters
from coterie.privacy.member import check_margin
from coterie.privacy.privacy import Privacy
from coterie.privacy.sums import SumsOnly
from coterie.users.user import Loss, User

_BACKENDS = ("gloo", "nccl")
_RUN: dict[str, Any] = {
    "batch_size": int,
    "seed": int,
    "compress": str | None,
    "backend": str,
    "nonce": str,
}
_RUN |= {"moves_buffers": bool, "secure_sums": bool}
PRIVATE = "private"
"""What a private peer says in the place of a digest of its examples."""


def serve(
    model: nn.Module,
    loss: Loss,
    user: User,
    *,
    sums_only: bool | SumsOnly = False,
    secure_sums: bool = False,
    caps: Caps | None = None,
    log: Path | None = None,
    privacy: Privacy | None = None,
    timeout: float = 120.0,
    group: Group | None = None,
) -> int:
    """Answer user 0's requests with gradients of this user's examples, until the run ends.

    Return how many.

    Batches are drawn as user 0 says (batch size, seed, step); the examples stay here. `PeerLost`
    where user 0 or another peer is gone.

    Args:
        model: like user 0's, whose frozen parameters and buffers are taken over. It is not changed.
        loss: user 0's.
        user: whose examples are used; its name is the peer's name.
        sums_only: give gradients as part of a weighted sum only, never on their own; of at least 3
            peers, none of which has more than half of the weight, or as `SumsOnly` says. What is no
            such sum is refused.
        secure_sums: give gradients under masks only, as part of such a sum: neither user 0 nor
            another peer sees them. Where user 0 wants masks and this is False, it takes part too,
            and also gives what is not masked.
        caps: what is given at most; a request beyond is refused, and the run goes on without this
            peer.
        log: a file to which every request is added, one JSON object a line.
        privacy: what is promised about each example; it needs a log. See `Peer`.
        timeout: seconds after which user 0 is taken for lost when nothing comes.
        group: the processes, where they have already been joined.
    """
    group = group or join(timeout)
    with contextlib.ExitStack() as life:
        told_to_end = life.enter_context(noting_sigterm())
        life.callback(group.disconnect)
        try:
            given: dict[str, Any] = {"caps": caps, "log": log, "privacy": privacy}
            given |= {"sums_only": sums_only or secure_sums, "secure_sums": secure_sums}
            worker = _Worker(group, copy.deepcopy(model), loss, user, **given)
            while worker.answer(told_to_end.is_set()):
                pass
        except _CutOffError as error:
            group.answer_roll_call()
            raise PeerLost(
                f"{user.name!r} (rank {group.rank}) lost user 0 or another peer, and ends ({error})"
            ) from error
        except Exception as error:
            said = str(error) if isinstance(error, CoterieError) else f"{error!r}"
            if privacy is not None and not isinstance(
                error, PeerLost
            ):  # the text may tell of an example
                said = type(error).__name__
            group.answer_roll_call(said)
            raise
        return worker.answered


class _CutOffError(Exception):
    """A message to or from the others failed."""


class _Worker:
    """What carries user 0's requests to a peer, and its replies back."""

    def __init__(
        self,
        group: Group,
        model: nn.Module,
        loss: Loss,
        user: User,
        *,
        sums_only: bool | SumsOnly,
        secure_sums: bool,
        caps: Caps | None,
        log: Path | None,
        privacy: Privacy | None,
    ) -> None:
        self.group, self.position, self.given = group, group.rank - 1, (caps, log, privacy)
        self.sums_only, self.masked_only = (
            SumsOnly() if sums_only is True else sums_only or None,
            secure_sums,
        )
        run = self.run = group.read_note("run", "user 0", **_RUN)
        if (
            run["backend"] not in _BACKENDS
            or run["compress"] not in (None, *HALVES)
            or run["batch_size"] < 1
        ):
            raise PeerLost(f"user 0 asks for a run that there is none of: {printable(run)}")
        self.peer = self._introduced(model, loss, user)
        seal = None if group.secret is None else Seal(group.secret, run["nonce"])
        self.wire = Wire(
            model, group.size - 1, run["compress"], run["moves_buffers"], run["backend"], seal=seal
        )
        group.connect(run["backend"])
        self._over(lambda: self.wire.share_constants(mine=False))
        self._take_points(1)
        self._masked: MaskedPart | None = None
        if run["secure_sums"]:
            sums, constants = self.sums_only or SumsOnly(), constants_of(self.peer.passes.model)
            self._masked = MaskedPart(
                self.peer, sums, group, run, constants, masked_only=secure_sums
            )
        self.answered, self.since = 0, time.perf_counter()

    def answer(self, told_to_end: bool) -> bool:
        """Wait for a request and answer it; say whether the run goes on."""
        if told_to_end:
            raise PeerLost("told to end (SIGTERM) before the run was over")
        self._over(self.wire.receive_request)
        began = time.perf_counter()
        ask, step, sketched = self.wire.request.read()
        if ask in (Ask.END, Ask.NOTHING):
            if ask is Ask.END and self.peer.is_private:
                promise = self.peer.promise(self.run["batch_size"])
                self.group.leave_note(f"{PROMISE}/{self.group.rank}", promise)
            return ask is Ask.NOTHING
        if ask is Ask.POINTS:
            self._take_points(step, added=bool(sketched))
        elif ask in (Ask.OFFER, Ask.JOIN, Ask.PART):
            self._answer_masked(ask, step, began)
        else:
            self._answer(ask, step, sketched, began)
        return True

    def _answer(self, ask: Ask, step: int, sketched: int, began: float) -> None:
        """Send gradients, or a part of their sums, and sketches where they are asked for."""
        packed = self.wire.request
        if self.masked_only:
            raise PeerLost("asked for what is not masked, but gives masked sums only")
        if ask is Ask.ROWS and self.sums_only:
            raise PeerLost("asked for a gradient on its own, but gives sums only")
        if sketched and not self.sketch:
            raise PeerLost("asked for a sketch, though none was agreed on")
        asked, reply = ~packed.weights[:, self.position].isnan(), None
        if self.sums_only and asked.any():
            asked &= self.sums_only.allowed(packed.weights)
            if not asked.any():
                self.peer.refuse(f"it gives {self.sums_only}", step=step)
        if asked.any():
            request = self._request(step, asked)
            with blaming("the model or the loss"):
                reply = self.peer.answer(request)
            self.answered += 0 if reply.gradients is None else request.gradients
        sent = self.wire.answer(ask, self.position, asked, reply, self._seconds(began))
        self._over(lambda: self.wire.collect(ask, sent)[0].wait())  # noqa: PLW0108  # to begin may fail too
        if sketched:
            self._sketch(step, sketched, asked, reply)

    def _answer_masked(self, ask: Ask, step: int, began: float) -> None:
        """Agree on masked sums, or send the part of one."""
        if self._masked is None:
            raise PeerLost("asked for masked sums, in a run without")
        if ask is not Ask.PART:
            self._masked.agree(ask, step)
            return
        if self.wire.n_points != 1:
            raise PeerLost(
                f"asked for masked sums at {self.wire.n_points} points; it adds gradients at one"
            )
        words, outcome = self._masked.of(
            self._request(step, torch.tensor([True])), self.wire.request.body
        )
        self.answered += outcome is Outcome.GRADIENT
        self._seconds(began)  # which are not told: they are of this peer alone
        sent = self.wire.part(self.position, words, outcome, (0.0, 0.0))
        self._over(lambda: self.wire.collect(ask, sent)[0].wait())  # noqa: PLW0108  # as above

    def _seconds(self, began: float) -> tuple[float, float]:
        """Return how long this peer computed since it began, and how long it waited before."""
        ended = time.perf_counter()
        seconds, self.since = (ended - began, began - self.since), ended
        # they would tell how large the sample was
        return (0.0, 0.0) if self.given[2] is not None else seconds

    def _take_points(self, n: int, *, added: bool = False) -> None:
        """Let messages have so many points.

        Where it is one, the model's parameters lie in the message itself.
        """
        if not 1 <= n <= MAX_POINTS:
            raise PeerLost(f"asked at {n} points; it answers at {MAX_POINTS} at most")
        self.wire.take_points(n, added=added)
        points, parameters = self.wire.request.points, self.peer.passes.parameters
        self.same = (points.dtype, points.device) == (parameters.dtype, parameters.device)
        self.x = parameters.share(points[0] if self.same and n == 1 else None)

    def _request(self, step: int, asked: Tensor) -> Request:
        """Return what is asked of this peer."""
        packed = self.wire.request
        if len(asked) == 1:
            if not self.same:
                self.x.copy_(packed.points[0])
            points, buffers = self.x[None], packed.buffers
        else:
            points = packed.points[asked].to(self.x)
            buffers = {name: rows[asked] for name, rows in packed.buffers.items()}
        work = packed.work(self.x)
        work = None if work is None else work.at(asked.nonzero().flatten().tolist())
        size = packed.batch_size or self.run["batch_size"]
        return Request(points, step, self.run["seed"], size, buffers, work=work)

    def _sketch(self, step: int, n: int, asked: Tensor, reply: Reply | None) -> None:
        """Send sketches of the gradients at the first so many points.

        Not numbers where there are none.
        """
        k = self.sketch
        sketches = torch.full((n, k), math.nan, dtype=self.x.dtype, device=self.x.device)
        if reply is not None and reply.gradients is not None:
            there = asked.nonzero().flatten() < n
            made = Sketch(self.wire.size, k, sketch_key(self.run["seed"], step))(
                reply.gradients[there]
            )
            sketches[asked[:n].to(self.x.device)] = made
        self._over(lambda: self.wire.collect_sketches(n, k, sketches)[0].wait())  # noqa: PLW0108  # as above

    def _introduced(self, model: nn.Module, loss: Loss, user: User) -> Peer:
        """Introduce this user, and return its peer once the model fits and user 0 has agreed."""
        run, key, parameters = self.run, f"hello/{self.group.rank}", Parameters(model)
        caps = self.given[0] or Caps()
        examples = (
            "a stream" if user.is_stream else len(user) // caps.examples * caps.examples
        )  # as `Peer.size` tells
        hello: dict[str, Any] = {"name": user.name, "examples": examples}
        # who guesses could compare
        hello["data"] = user.fingerprint() if self.given[2] is None else PRIVATE
        hello |= {"size": parameters.size, "dtype": str(parameters.dtype)}
        hello["sums_only"] = (
            [self.sums_only.peers, self.sums_only.share] if self.sums_only else None
        )
        try:
            self._check_masks(user.name)
            engine = InProcess(
                model, loss, user, batch_size=run["batch_size"], seed=run["seed"], one_by_one=True
            )
            peer = engine.peer(user.name, *self.given)
        except CoterieError as error:
            # the text may tell of an example
            said = str(error) if self.given[2] is None else type(error).__name__
            self.group.leave_note(key, hello | {"refused": said})
            raise
        self.group.leave_note(
            key, hello | {"refused": None, "promise": peer.promise(run["batch_size"])}
        )
        go = self.group.read_note("go", "user 0", refused=str | None)
        if go["refused"]:
            raise PeerLost(f"user 0 began no run: {printable(go['refused'], 1000)}")
        sketch = go.get("sketch")
        self.sketch = sketch if isinstance(sketch, int) else 0
        if not 0 <= self.sketch <= max(SKETCH, parameters.size):
            raise PeerLost(f"asked for sketches of {self.sketch} numbers")
        if self.sums_only and self.sketch > max(1, parameters.size // 2):
            raise PeerLost(f"asked for sketches of {self.sketch} numbers, but gives sums only")
        return peer

    def _check_masks(self, name: str) -> None:
        """Refuse a run without masks that this peer gives nothing without."""
        if self.masked_only and not self.run["secure_sums"]:
            raise KnobError(f"{name!r} gives masked sums only; set `secure_sums` at user 0")
        privacy = self.given[2]
        if privacy is not None:
            check_margin(privacy.margin, self.sums_only if self.masked_only else None)

    def _over(self, message: Any) -> None:
        try:
            message()
        except (RuntimeError, dist.DistError) as error:
            raise _CutOffError(in_short(str(error))) from error
