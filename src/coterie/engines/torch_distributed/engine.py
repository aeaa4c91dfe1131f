"""Users in processes of their own, on one machine or a cluster, over torch.distributed.

For a trusted network only: nothing is encrypted, and whoever reaches the port can take part.
"""

import contextlib
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from coterie.engines.engine import Answers, Capabilities, Question
from coterie.engines.in_process.engine import InProcess
from coterie.engines.requests import whole_number
from coterie.engines.rounding import Compress, relative_error
from coterie.engines.sketch import sketch_size
from coterie.engines.torch_distributed.exchange import Exchange
from coterie.engines.torch_distributed.group import Group, in_short, join, noting_sigterm
from coterie.engines.torch_distributed.hellos import (
    HELLO,
    PROMISE,
    check_hellos,
    promises_in,
    strictest,
)
from coterie.engines.torch_distributed.reading import Reading
from coterie.engines.torch_distributed.request import Ask
from coterie.engines.torch_distributed.seal import Seal
from coterie.engines.torch_distributed.secure_sums import SecureSums
from coterie.engines.torch_distributed.wire import Notes, Wire
from coterie.engines.torch_distributed.worker import serve
from coterie.errors import CoterieError, KnobError, PeerLost
from coterie.gradients.gradients import Gradients
from coterie.privacy.masked_sums import MaskedSums
from coterie.recording.costs import Traffic
from coterie.users.user import Loss, User

__all__ = ["TorchDistributed", "join", "serve"]


class TorchDistributed:
    """The gradients of peers in other processes, each of which calls `serve`; for user 0, rank 0.

    A step is one broadcast of x and one reduce of the peers' weighted gradients, or one gather
    where a rule needs every peer's. User 0 computes its own gradient meanwhile. One lost process
    ends the run with `PeerLost`, after which it can be resumed.

    Args:
        model, loss, me, batch_size, seed: as for `InProcess`; user 0's examples stay in this
        process.
        peers: who is expected, by name; whoever comes when empty.
        gather: collect every peer's gradient for an average too and add them up here, in order, to
            the same bits as `InProcess(one_by_one=True)`; the peers' share of the traffic is then
            no longer shared among them.
        compress: round x and the gradients to "bf16" or "fp16" on the way; what a message loses is
            added to the next. The largest relative error of each user is its `rounding` in the
            record's traffic.
        secure_sums: see the peers' weighted sum only, by masks, which hide the parts from all other
            processes too; see `MaskedSums`. τ then stays as it is for the run.
        misses: with `secure_sums`, steps in a row after which a peer that refuses is left out for
            good.
        largest: with `secure_sums` what no entry of a gradient may exceed; the error of a sum is
            about 1e-9 of it.
        backend: "gloo" or "nccl"; nccl where the model is on a GPU, when None.
        timeout: seconds after which a process that does not answer is taken for lost.
        group: the processes, where they have already been joined.
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
        gather: bool = False,
        compress: Compress | None = None,
        secure_sums: bool = False,
        misses: int = 3,
        largest: float = 16.0,
        backend: str | None = None,
        timeout: float = 120.0,
        group: Group | None = None,
    ) -> None:
        if secure_sums and (gather or compress):
            name = "gather" if gather else "compress"
            raise KnobError(
                f"`{name}` must be left out with `secure_sums`: masked parts are added up, exactly"
            )
        sums = MaskedSums(misses=misses, largest=largest) if secure_sums else None
        self.own = InProcess(model, loss, me, batch_size=batch_size, seed=seed, one_by_one=True)
        self.group = group or join(timeout)
        if self.group.rank:
            rank = self.group.rank
            raise KnobError(
                f"this process is rank {rank}; user 0 is rank 0, and every other must `serve`"
            )
        self.me, self.gather, self.compress, self.secure_sums = (
            me.name,
            gather,
            compress,
            secure_sums,
        )
        device = self.own.passes.parameters.device
        self.backend = backend or ("nccl" if device.type == "cuda" else "gloo")
        self.wire = self._announced(model, batch_size=batch_size, seed=seed)
        self.hellos = self._meet([peer.name for peer in peers])
        self.names = tuple(hello["name"] for hello in self.hellos)
        self.sums_only = strictest(self.hellos)
        self._promises = promises_in(self.hellos)
        self.capabilities = self._capabilities()
        self._reading = Reading(self.wire, self.names, compress)
        self._sums = None if sums is None else SecureSums(sums, self.group, self.wire, self.names)
        self._traffic = {name: Traffic() for name in (self.me, *self.names)}
        self._life = contextlib.ExitStack()
        self._told_to_end = self._life.enter_context(noting_sigterm())
        self._whole = True  # no message was left half done
        with self._telling_who_is_lost():
            self.group.connect(self.backend)
            self.wire.share_constants(mine=True)
        self._last = time.monotonic()

    def _announced(self, model: nn.Module, **run: Any) -> Wire:
        """Tell the peers of the run, and return what its messages are made in."""
        moves, nonce = self.own.support.moves_buffers, secrets.token_hex(16)
        seal = None if self.group.secret is None else Seal(self.group.secret, nonce)
        wire = Wire(model, self.group.size - 1, self.compress, moves, self.backend, seal=seal)
        run |= {"compress": self.compress, "nonce": nonce, "secure_sums": self.secure_sums}
        self.group.leave_note("run", run | {"moves_buffers": moves, "backend": self.backend})
        return wire

    def gradients(
        self, x: Tensor, step: int, weights: Mapping[str, float], rows: bool = False
    ) -> Gradients:
        """Return everybody's gradients at x; see `Engine.gradients`."""
        if rows and self._sums is not None:
            raise KnobError(
                "masked sums have no rows; use a rule that needs none, with `rows=False`"
            )
        if not weights or not self._agree(weights, step):
            self._check_told_to_end()
            self._stay_in_touch()
            mine = self.own.gradients(x, step, {})
            return (
                mine
                if self._sums is None or not weights
                else self._sums.sums.with_sum(mine, None, {}, weights)
            )
        before, began = self.own.passes.buffers() if self.wire.moving else {}, time.perf_counter()
        asked = torch.tensor(
            [[weights.get(name, math.nan) for name in self.names]], dtype=torch.float64
        )
        buffers = {name: buffer[None] for name, buffer in self.own.passes.model.named_buffers()}
        ask = Ask.ROWS if rows or self.gather else Ask.SUM if self._sums is None else Ask.PART
        exchange = self._begin(ask, Question(x.detach()[None], step, asked, buffers=buffers))
        g, computed = self.own.gradients(x, step, {}), time.perf_counter()
        try:
            answers, _, notes = self._end(exchange, (computed - began, computed))
        except PeerLost:
            for name, buffer in before.items():  # the step is not taken, and so moves nothing
                self.own.passes.model.get_buffer(name).copy_(buffer)
            raise
        if self._sums is not None:
            return self._sums.with_sum(g, answers, notes, weights, step)
        return self._reading.with_peers(g, answers, weights, notes, rows=rows)

    def ask(self, question: Question) -> Callable[[], Answers]:
        """Ask the peers at several points in one exchange; see `AsksAtPoints.ask`."""
        if self._sums is not None:
            raise KnobError(
                "masked sums are of gradients at one point, and have no rows; ask by `gradients`"
            )
        if self.sums_only is not None:
            # Who asks at many points finds the weights itself, and takes what can be had.
            question = replace(question, weights=self.sums_only.nearest(question.weights))
        exchange = self._begin(Ask.ROWS if question.rows or self.gather else Ask.SUM, question)
        return partial(self._answers, exchange)

    def local_work(self, question: Question) -> Callable[[], Answers]:
        """Let peers take steps of their own; see `WorksLocally.local_work`."""
        buffers = {name: buffer[None] for name, buffer in self.own.passes.model.named_buffers()}
        question = replace(question, buffers=buffers | dict(question.buffers))
        return partial(
            self._answers,
            self._begin(Ask.ROWS if question.rows or self.gather else Ask.SUM, question),
        )

    def _agree(self, weights: Mapping[str, float], step: int) -> bool:
        """Say whether there is a sum of these peers to be had.

        One that is masked they may have to agree on.
        """
        if self._sums is None:
            return True
        self._check_told_to_end()
        with self._telling_who_is_lost():
            return self._sums.agree(weights, step)

    def _begin(self, ask: Ask, question: Question) -> Exchange:
        """Begin to send a question and to collect the answers."""
        self._check_told_to_end()
        self._whole = False
        with self._telling_who_is_lost():
            return Exchange.begun(self.wire, ask, question, self.capabilities.sketch)

    def _end(
        self, exchange: Exchange, seconds: tuple[float, float]
    ) -> tuple[Tensor, Tensor | None, dict[str, Notes]]:
        """Wait for the answers, and return them with the sketches, if any, and the peers' notes.

        `seconds`: how long user 0 has computed meanwhile, and when it began to wait.
        """
        with self._telling_who_is_lost():
            exchange.wait()
        self._whole, self._last = True, time.monotonic()
        device = exchange.question.points.device
        answers = exchange.answers.to(device)
        sketches = None if exchange.sketches is None else exchange.sketches.to(device)
        return (
            answers,
            sketches,
            self._count(exchange, (seconds[0], time.perf_counter() - seconds[1])),
        )

    def _answers(self, exchange: Exchange) -> Answers:
        """Wait for the peers, and return what they answered at several points."""
        answers, sketches, notes = self._end(exchange, (0.0, time.perf_counter()))
        return self._reading.at_points(exchange.question, exchange.ask, answers, sketches, notes)

    def describe(self) -> dict[str, Any]:
        """Return how gradients travel, and who the peers are."""
        return {
            "engine": "torch.distributed",
            "backend": self.backend,
            "device": str(self.own.passes.parameters.device),
            "average": (
                "gather, added up in order"
                if self.gather
                else "reduce" + ", masked" * self.secure_sums
            ),
            "rows": "gather" if self.capabilities.rows else "none: sums only",
            "compress": self.compress,
            "peers": {hello["name"]: hello["examples"] for hello in self.hellos},
            "data": " ".join(
                [self.own.sampler.me.fingerprint(), *(hello["data"] for hello in self.hellos)]
            ),
        }

    def traffic(self) -> Mapping[str, Traffic]:
        """Return what has travelled so far, and the time it took, by user.

        Bytes are those of the messages, not what ranks pass on for each other in a broadcast or a
        reduce.
        """
        return self._traffic

    def close(self) -> None:
        """End the run for the peers."""
        with self._life:
            if self._whole:
                self._whole = False
                self.wire.request.ask(Ask.END)
                # whoever is gone need not be told
                with contextlib.suppress(RuntimeError, PeerLost):
                    self.wire.send_request().wait()
                    self._promises |= promises_in(self._last_words())
            self.group.disconnect()

    def promises(self) -> Mapping[str, Mapping[str, float]]:
        """Return what private peers promise and have spent.

        After `close` with what this run has cost.
        """
        return self._promises

    def _last_words(self) -> list[dict[str, Any]]:
        """Return what each private peer says when the run has ended, in the form of a hello."""
        ranks = {rank: name for rank, name in enumerate(self.names, 1) if name in self._promises}
        said = {
            name: self.group.read_note(f"{PROMISE}/{rank}", repr(name))
            for rank, name in ranks.items()
        }
        return [{"name": name, "promise": promise} for name, promise in said.items()]

    def _meet(self, expected: Sequence[str]) -> list[dict[str, Any]]:
        """Return what each peer says of itself, once all are there and fit together."""
        hellos = [
            self.group.read_note(f"hello/{rank}", f"rank {rank}", **HELLO)
            for rank in self.group.others
        ]
        try:
            check_hellos(self.me, self.wire, hellos, expected, gather=self.gather)
        except CoterieError as error:
            self.group.leave_note("go", {"refused": str(error)})
            raise
        rows = strictest(hellos) is None
        self.sketch = (
            None if self.gather or self.secure_sums else sketch_size(self.wire.size, rows=rows)
        )
        self.group.leave_note("go", {"refused": None, "sketch": self.sketch})
        return hellos

    def _capabilities(self) -> Capabilities:
        own = self.own.capabilities
        counts = {hello["name"]: whole_number(hello["examples"]) for hello in self.hellos}
        return Capabilities(
            rows=self.sums_only is None and not self.secure_sums,
            same_bits=self.gather and self.compress is None,
            examples={**own.examples, **counts},
            noise={name: promise["noise"] for name, promise in self._promises.items()},
            batch_size=own.batch_size,
            batch_dependent=own.batch_dependent,
            many_points=not self.secure_sums,
            sketch=self.sketch,
            local_work=not self.secure_sums,
        )

    def _stay_in_touch(self) -> None:
        """Tell peers that nobody asks, before they give up waiting, that the run goes on."""
        if self._whole and time.monotonic() - self._last > self.group.timeout / 3:
            self.wire.request.ask(Ask.NOTHING)
            self._last = time.monotonic()
            with self._telling_who_is_lost():
                self.wire.send_request().wait()

    def _count(self, exchange: Exchange, seconds: tuple[float, float]) -> dict[str, Notes]:
        """Add up what travelled, and return the peers' notes."""
        notes = dict(zip(self.names, self.wire.notes(exchange.ask, exchange.answers), strict=True))
        down, up, received = exchange.sizes(self.wire)
        rounding = relative_error(exchange.question.points, self.wire.request.points)
        self._traffic[self.me] += Traffic(down, received, seconds[1], seconds[0], rounding, 1)
        for name, note in notes.items():
            self._traffic[name] += Traffic(up, down, note.waiting, note.computing, note.rounding, 1)
        return notes

    def _check_told_to_end(self) -> None:
        if self._told_to_end.is_set():
            raise self._lost("this process was told to end")

    @contextlib.contextmanager
    def _telling_who_is_lost(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, PeerLost) as error:
            raise self._lost(str(error)) from error

    def _lost(self, cause: str) -> PeerLost:
        """Cut the connections, find out who is missing, and return the error that says so."""
        self._whole = False
        self.group.disconnect()
        missing = self.group.roll_call()
        names = [self.names[rank - 1] for rank in missing]
        known = zip(names, missing.items(), strict=True)
        shown = [
            f"{name!r} (rank {rank}: {why or 'no sign of life'})" for name, (rank, why) in known
        ]
        who = (
            f"lost {', '.join(shown)}"
            if shown
            else "lost the connection, though every peer still answers"
        )
        return PeerLost(f"{who} ({in_short(cause)})", names)
