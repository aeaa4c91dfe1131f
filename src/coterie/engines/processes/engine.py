"""Users in processes of their own, on one machine or a cluster: one trains, or all do.

For a trusted network only: nothing is encrypted. torchrun, or whoever sets its environment
variables, starts the processes.
"""

import contextlib
import copy
import functools
import logging
import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from coterie.arguments import COUNT
from coterie.engines.compression import sketch_size
from coterie.engines.engine import Answers, Capabilities, Question
from coterie.engines.in_process.engine import InProcess
from coterie.engines.messages import (
    MAX_POINTS,
    NO_ANSWER,
    message_bytes,
    promise_told,
    size_told,
    to_array,
    whole_number,
)
from coterie.engines.peer import Caps, Peer
from coterie.engines.processes.partial_sums import PartialSums, read_sum, strictest
from coterie.engines.processes.processes import SHORT, Processes, RemoteProcess
from coterie.engines.processes.rendezvous import Rendezvous
from coterie.engines.remote.engine import Remote, RemoteSettings
from coterie.engines.remote.responder import Responder
from coterie.errors import CoterieError, DataError, KnobError, ModelError, PeerLost, printable
from coterie.gradients.gradients import Gradients
from coterie.gradients.parameters import Parameters
from coterie.privacy.masks import check_margin
from coterie.privacy.privacy import Privacy
from coterie.privacy.sums import SumsOnly
from coterie.users.user import Loss, User, check_names

logger = logging.getLogger(__name__)

__all__ = ["Mutual", "TorchDistributed", "serve"]

PRIVATE = "private"
"""What a private peer says in the place of a digest of its examples."""
_HELLO: dict[str, Any] = {"name": str, "examples": int | str, "data": str, "size": int}
_HELLO |= {"dtype": str, "sums_only": list | None, "refused": str | None}
_RUN: dict[str, Any] = {"batch_size": int, "seed": int, "secure_sums": bool, "constants": dict}


class TorchDistributed(Remote):
    """The gradients of peers in other processes, each of which calls `serve`; for user 0, rank 0.

    User 0 sends x to all and computes its own gradient while they compute theirs, which it adds up
    in order: to the same bits as `InProcess(one_by_one=True)`. Peers that give sums only pass
    these from one to the next. A process that is late or lost is left out as by `Remote`, and
    comes back when it is started again.

    Args:
        model, loss, me, batch_size, seed: as for `InProcess`; user 0's examples stay in this
            process.
        peers: who is expected, by name; whoever comes when empty.
        timeout: seconds to wait for the others at the start, and for one that is silent in a step.
        misses, probe_every, minimum, compress, secure_sums, largest: as for `Remote`.
        processes: the others, where they have met before.
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
        timeout: float = 120.0,
        processes: Processes | None = None,
        **settings: Unpack[RemoteSettings],
    ) -> None:
        COUNT("batch_size", batch_size)  # told before the peers are
        masked = bool(settings.get("secure_sums"))
        self.others = processes or Processes(Rendezvous(timeout))
        self.others.longest = _longest(model)
        try:
            _check_rank(self.others.rank)
            run = {"batch_size": batch_size, "seed": seed, "secure_sums": masked}
            self.others.say("run", run | {"constants": _constants(model)})
            self._met(model, me.name, [peer.name for peer in peers], masked=masked)
            self.others.answer(_nothing)
            names = [hello["name"] for hello in self._hellos.values()]
            super().__init__(
                *(model, loss, me),
                sites=self.others,
                names=names,
                batch_size=batch_size,
                seed=seed,
                timeout=timeout,
                one_by_one=True,
                **settings,
            )
        except BaseException as error:
            if isinstance(error, CoterieError) and not isinstance(error, PeerLost):
                self.others.say("go", {"refused": str(error), "names": {}, "sums": False})
            self.others.leave()
            raise
        self._examples |= {h["name"]: whole_number(h["examples"]) for h in self._hellos.values()}
        for hello in self._hellos.values():
            if (told := hello.get("promise")) is not None and promise_told(told):
                self._noise[hello["name"]] = size_told(told.get("noise"))
        self._gives_sums |= self.sums_only is not None
        self._promised: Mapping[str, Mapping[str, float]] | None = None  # at the end
        self._life = contextlib.ExitStack()
        self._told_to_end = self._life.enter_context(_noting_sigterm())

    def _met(self, model: nn.Module, me: str, expected: Sequence[str], *, masked: bool) -> None:
        """Hear who the others are, and tell them who takes part once they fit."""
        hellos = {rank: self.others.hear(rank, "hello", **_HELLO) for rank in self.others.others}
        check_hellos(model, hellos)
        self._hellos, came = hellos, [hello["name"] for hello in hellos.values()]
        check_names([me, *came])
        if expected and sorted(expected) != sorted(came):
            raise DataError(f"expected the peers {', '.join(expected)}, but {', '.join(came)} came")
        limits = [SumsOnly(*hello["sums_only"]) for hello in hellos.values() if hello["sums_only"]]
        self.sums_only = None if masked else strictest(limits)
        names = {str(rank): hello["name"] for rank, hello in hellos.items()}
        self.others.say("go", {"refused": None, "names": names, "sums": self.sums_only is not None})
        self.others.are({rank: hello["name"] for rank, hello in hellos.items()})
        for mate in self.others.mates.values():  # peers ask nothing
            mate.is_done = True
        if self.sums_only is not None:  # they must be linked before a sum is passed on
            for rank in hellos:
                self.others.hear(rank, "linked")

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do."""
        can = replace(
            super().capabilities,
            same_bits=self.compress is None and self._sums is None and self.sums_only is None,
            batch_dependent=self.own.capabilities.batch_dependent,
            rows_at_hand=False,  # they are, but a run is that of one process, to the bit
        )
        sketch = sketch_size(self.own.parameters.size, rows=False)
        if self.sums_only is None:
            return can
        return replace(can, rows=False, sketch=sketch, no_e_steps="a peer gives sums only")

    def gradients(
        self, x: Tensor, step: int, weights: Mapping[str, float], rows: bool = False
    ) -> Gradients:
        """Return everybody's gradients at x; see `Engine.gradients`."""
        self._check_told_to_end()
        return super().gradients(x, step, weights, rows)

    def ask(self, question: Question) -> Callable[[], Answers]:
        """Ask the peers at several points in one exchange; see `Asks.ask`."""
        self._check_told_to_end()
        if self.sums_only is not None:
            # Who asks at many points finds the weights itself, and takes what can be had.
            question = replace(question, weights=self.sums_only.nearest(question.weights))
        return super().ask(question)

    def _summed(self, question: Question) -> Callable[[], Answers]:
        """Ask the peers for sums that they pass on."""
        if self.sums_only is None:
            return super()._summed(question)
        weights, step = question.weights.cpu().double(), question.step
        wanted = [name for k, name in enumerate(self.names) if not weights[:, k].isnan().all()]
        left_out = self._liveness.not_asked(wanted, step)
        for name in wanted:
            if name not in left_out and not self.others.mates[name].linked.is_set():
                left_out[name] = NO_ANSWER
                self._liveness.miss(name, step, NO_ANSWER)
            if name in left_out:
                weights[:, self.names.index(name)] = math.nan
        asked = [name for name in wanted if name not in left_out]
        sent = None if self._rounding is None else self._rounded(question, self._rounding)
        replies = self._transport.send(
            asked,
            "sum",
            self._request(question).message(sent),
            weights=to_array(weights),
            columns=list(self.names),
            sketched=question.sketched,
            sketch=sketch_size(self.own.parameters.size, rows=False) if question.sketched else 0,
        )

        def answers() -> Answers:
            replied = replies.wait(lambda reply: isinstance(reply, dict) and "outcomes" in reply)  # type: ignore[call-arg]
            fine = {name: reply for name, reply in replied.items() if isinstance(reply, dict)}
            for name in asked:
                if name in fine:
                    self._liveness.answered(name)
                    self._transport.received(name, message_bytes(fine[name]))
                else:
                    self._liveness.miss(name, step, NO_ANSWER)
            found = read_sum(replace(question, weights=weights), fine, self.names, asked)
            return replace(found, left_out=left_out | dict(found.left_out))

        return answers

    def describe(self) -> dict[str, Any]:
        """Return how gradients travel, and who the peers are."""
        peers = {hello["name"]: hello["examples"] for hello in self._hellos.values()}
        data = [self.own.sampler.me.fingerprint(), *(h["data"] for h in self._hellos.values())]
        added = (
            "passed on, added up on the way" if self.sums_only else "added up by user 0, in order"
        )
        return super().describe() | {
            "engine": "processes" + ", masked sums" * (self._sums is not None),
            "average": added,
            "peers": peers,
            "data": " ".join(data),
        }

    def promises(self) -> Mapping[str, Mapping[str, float]]:
        """Return what private peers promise and have spent; see `TellsPromises.promises`."""
        return super().promises() if self._promised is None else self._promised

    def close(self) -> None:
        """End the run for the peers."""
        with self._life:
            self._promised = self.promises()
            self.others.until_done()

    def _check_told_to_end(self) -> None:
        if self._told_to_end.is_set():
            raise PeerLost("this process was told to end")


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
    processes: Processes | None = None,
) -> int:
    """Answer user 0's requests with gradients of this user's examples, until the run ends.

    Return how many. Batches are drawn as user 0 says (batch size, seed, step); the examples stay
    here. `PeerLost` where user 0 is gone, and does not come back.

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
        timeout: seconds to wait for user 0, at the start and where it is lost.
        processes: the others, where they have met before.
    """
    sums = SumsOnly() if sums_only is True else sums_only or (SumsOnly() if secure_sums else None)
    with processes or Processes(Rendezvous(timeout)) as others:
        others.longest = _longest(model)
        run = others.hear(0, "run", **_RUN)
        if not run["batch_size"] > 0:
            raise PeerLost(f"user 0 asks for a run that there is none of: {printable(run)}")
        least = 1 if caps is None else caps.examples
        examples = "a stream" if user.is_stream else len(user) // least * least
        data = user.fingerprint() if privacy is None else PRIVATE
        hello = _hello(model, user.name, examples, data)
        if sums is not None:
            hello["sums_only"] = [sums.peers, sums.share]
        try:
            if secure_sums and not run["secure_sums"]:
                raise KnobError(
                    f"{user.name!r} gives masked sums only; set `secure_sums` at user 0"
                )
            if privacy is not None:
                check_margin(privacy.margin, sums if secure_sums else None)
            mine = _with_constants(model, run["constants"])
            sizes = {name: run[name] for name in ("batch_size", "seed")}
            alone = InProcess(mine, loss, user, **sizes, one_by_one=True)
            peer = alone.peer(user.name, caps, log, privacy)
        except CoterieError as error:
            # the text may tell of an example
            said = str(error) if privacy is None else type(error).__name__
            others.say("hello", hello | {"refused": said})
            with contextlib.suppress(PeerLost):  # once it was read
                others.hear(0, "go")
            raise
        before = peer.ledger.given
        member = _Member(others, peer, sums, masked_only=secure_sums)
        others.say("hello", hello | {"promise": peer.promise(run["batch_size"])})
        go = others.hear(0, "go", refused=str | None, names=dict, sums=bool)
        if go["refused"]:
            raise PeerLost(f"user 0 began no run: {printable(go['refused'], 1000)}")
        member.begin(go)
        others.until_done()
        if not member.lead.is_done:
            raise PeerLost(
                f"{user.name!r} (rank {others.rank}) lost user 0, and ends; start everybody again"
                " and resume"
            )
        return peer.ledger.given - before


class _Member:
    """A peer of user 0, which asks nobody but passes sums on."""

    def __init__(
        self, others: Processes, peer: Peer, sums: SumsOnly | None, *, masked_only: bool
    ) -> None:
        self.others, self.peer, self.lead = others, peer, others.of_rank(0)
        # in a masked run a peer that gives plain gradients too takes part by the sums it allows
        self.responder = Responder(peer, sums if masked_only else None)
        if not masked_only and sums is not None:
            self.responder.sums = sums
        self.sums = sums
        self.partial = PartialSums(peer, sums, self._pass_on)

    def begin(self, go: Mapping[str, Any]) -> None:
        """Begin to answer, once the names of the others are known."""
        names = {int(rank): str(name) for rank, name in go["names"].items()}
        if names.get(self.others.rank) != self.peer.user.name:
            raise PeerLost("user 0 has begun a run without this process")
        mates = {rank: name for rank, name in names.items() if rank != self.others.rank}
        self.others.are(mates | {0: "user 0"})
        for mate in self.others.mates.values():  # the other peers ask nothing
            mate.is_done = mate.knows = mate is not self.lead
        self.others.answer(self._answer)
        if go["sums"]:
            self.others.connect()
            self.others.say("linked", {})

    def _answer(self, mate: RemoteProcess, method: str, arguments: dict[str, Any]) -> Any:
        number = arguments.pop("number")
        if method == "passed" and mate is not self.lead:
            self.partial.passed(mate.name, **arguments)
            return None
        if mate is not self.lead:
            return {"refused": "it answers user 0 alone"}
        if method == "sum" and not self.responder.only_sums:
            answer = functools.partial(self.others.reply, mate, number)
            self.partial.asked(mate.name, answer, **arguments, number=number)
            return None
        if method == "gradients" and self.sums is not None and not self.responder.only_sums:
            return {"refused": self.peer.refuse(f"it gives {self.sums}", mate.name).refused}
        found = self.responder.answer(method, arguments, mate.name)
        if "joined" in found:  # to be compared by telephone
            shown = ", ".join(f"{name} {key}" for name, key in self.responder.known.items())
            logger.warning("%s: masked sums with the keys %s", self.peer.user.name, shown)
        return found

    def _pass_on(self, name: str, content: dict[str, Any]) -> None:
        self.others.ask([name], "passed", 0.0, **content)


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
        caps, log: what this process gives the others; as for `serve`. Without caps it answers for
            batches of the run's size and seed alone, so that nobody can ask for one row at a time.
            There is no `privacy`: the points of its own run, which the others see, tell of its
            examples without noise.
        sums: give masked sums only, such as these; the others then need `secure_sums`.
        patience: seconds to wait for the others at the start, and at the end for one that is lost.
        processes: the others, where they have met before; with `patience` of their own.
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
        caps: Caps | None = None,
        log: Path | None = None,
        sums: SumsOnly | None = None,
        patience: float = 120.0,
        processes: Processes | None = None,
        **settings: Unpack[RemoteSettings],
    ) -> None:
        mine = copy.deepcopy(model)
        alone = InProcess(mine, loss, me, batch_size=batch_size, seed=seed, one_by_one=True)
        peer = alone.peer(me.name, caps, log)
        self.others = processes or Processes(Rendezvous(patience))
        self.others.longest = _longest(model)
        with self.others.or_leave():
            size = peer.size
            hello = _hello(model, me.name, "a stream" if size is None else size)
            hellos = self.others.exchange("hello", hello, **_HELLO)
            check_hellos(model, hellos, "this process")
            self._told = {hello["name"]: hello["examples"] for hello in hellos.values()}
            check_names([me.name, *self._told])
            self.others.are({rank: hello["name"] for rank, hello in hellos.items()})
            run = None if caps is not None else (min(batch_size, size or batch_size), seed)
            # each asks for masked sums of its own
            responders = {name: Responder(peer, sums) for name in self._told}
            self.others.answer(functools.partial(_answer_mate, responders, run))
            self.others.connect()
            super().__init__(
                *(model, loss, me, peers),
                sites=self.others,
                names=[*self._told],
                batch_size=batch_size,
                seed=seed,
                timeout=timeout,
                **settings,
            )
        self._examples |= {name: whole_number(n) for name, n in self._told.items()}

    def describe(self) -> dict[str, Any]:
        """Return what the record should say of how gradients are computed."""
        return super().describe() | {"peers": self._told}

    def close(self) -> None:
        """Ask no more; the others are answered until they are done, in the background."""
        self.others.finish()


def _answer_mate(
    responders: Mapping[str, Responder],
    run: tuple[int, int] | None,
    mate: RemoteProcess,
    method: str,
    arguments: dict[str, Any],
) -> dict[str, Any]:
    """Answer a process that trains too; without caps for batches of the run alone."""
    del arguments["number"]
    responder, request = responders[mate.name], arguments.get("request")
    if run is not None and isinstance(request, dict):
        size, seed = request.get("batch_size"), request.get("seed")
        if type(size) is not int or size < run[0] or seed != run[1]:
            said = f"without caps it answers for batches of at least {run[0]}, and its own seed"
            return {"refused": responder.peer.refuse(said, mate.name, request.get("step")).refused}
    return responder.answer(method, arguments, mate.name)


def _check_rank(rank: int) -> None:
    if rank:
        raise KnobError(
            f"this process is rank {rank}; user 0 is rank 0, and every other must `serve`"
        )


def _hello(model: nn.Module, name: str, examples: int | str, data: str = "") -> dict[str, Any]:
    """Return what a process says of itself."""
    parameters = Parameters(model)
    hello = {"name": name, "examples": examples, "data": data, "size": parameters.size}
    return hello | {"dtype": str(parameters.dtype), "sums_only": None, "refused": None}


def _nothing(mate: RemoteProcess, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Answer a peer, to whom user 0 gives nothing."""
    return {"refused": "user 0 gives no gradients"}


def check_hellos(
    model: nn.Module, hellos: Mapping[int, Mapping[str, Any]], me: str = "user 0"
) -> None:
    """Refuse processes that do not fit this one, or whose names are none."""
    parameters = Parameters(model)
    ours = parameters.size, str(parameters.dtype)
    for rank, hello in hellos.items():
        who = f"rank {rank} ({printable(hello['name'], 80)!r})"
        if hello["refused"]:
            raise ModelError(f"{who} cannot take part: {printable(hello['refused'], 1000)}")
        if (hello["size"], hello["dtype"]) != ours:
            raise ModelError(
                f"{who} has a model of {hello['size']} parameters of {printable(hello['dtype'])},"
                f" {me} one of {ours[0]} of {ours[1]}; build the same model in every process"
            )
        if not hello["name"] or not hello["name"].isprintable():
            raise DataError(f"{who} has no name that is printable text")
        if (limits := hello["sums_only"]) is None:
            continue
        if len(limits) != 2 or not isinstance(limits[0], int):
            raise DataError(f"{who} says of itself what cannot be: {printable(limits)}")
        if SumsOnly(*limits).peers > len(hellos):
            raise KnobError(
                f"{who} gives sums of {limits[0]} peers or more, and there are {len(hellos)}; start"
                " more, or agree on fewer (`--min-peers`)"
            )


def _constants(model: nn.Module) -> dict[str, Any]:
    """Return the tensors of a model that are not trained, by name."""
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    return {name: to_array(tensor) for name, tensor in (*frozen.items(), *model.named_buffers())}


def _with_constants(model: nn.Module, constants: Mapping[str, Any]) -> nn.Module:
    """Return a copy of a model with what is not trained replaced by user 0's."""
    mine = copy.deepcopy(model)
    frozen = {name: p.data for name, p in mine.named_parameters() if not p.requires_grad}
    ours = {**frozen, **dict(mine.named_buffers())}
    for name, tensor in ours.items():
        array = constants.get(name)
        if not isinstance(array, np.ndarray) or array.shape != tuple(tensor.shape):
            raise ModelError(
                f"user 0's model has another {name!r}; build the same in every process"
            )
        tensor.copy_(torch.from_numpy(array.copy()))
    return mine


def _longest(model: nn.Module) -> int:
    """Return how many bytes a letter may have: points, what is added, buffers, what is frozen."""
    numbers = 2 * Parameters(model).size + sum(buffer.numel() for buffer in model.buffers())
    frozen = sum(parameter.numel() for parameter in model.parameters())
    return max(SHORT, 8 * (MAX_POINTS * numbers + frozen))


@contextlib.contextmanager
def _noting_sigterm() -> Iterator[threading.Event]:
    """Set an event at a SIGTERM, which torchrun sends where a process is gone, and do not end.

    Outside the main thread signals cannot be caught, and nothing changes.
    """
    noted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = signal.signal(signal.SIGTERM, lambda *_: noted.set())
    try:
        yield noted
    finally:
        signal.signal(signal.SIGTERM, before)
