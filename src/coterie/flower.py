"""coterie over Flower: user 0 is the ServerApp, every peer a SuperNode.

A SuperNode gives gradients, and takes steps of its own, by the same `Peer` as everywhere, within
its caps and with its privacy. Flower carries the messages: its TLS and its node keys say who may
take part. Its deployment starts a process for every message, about 20 s; so ask rarely there
(`local_steps`, a method in rounds). See docs/flower.md.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from coterie.arguments import COUNT, POSITIVE
from coterie.engines.in_process.passes import Passes
from coterie.engines.messages import from_bytes, to_bytes
from coterie.engines.peer import Caps, Peer
from coterie.engines.peer.ledger import owner_only
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.responder import METHODS, Responder
from coterie.errors import DataError, KnobError, printable
from coterie.privacy.privacy import Privacy
from coterie.privacy.sums import SumsOnly
from coterie.recording.files import wait_for_lock
from coterie.users.user import Loss, User

try:
    from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid
except ImportError as error:
    raise ImportError(
        "coterie.flower needs Flower: install flwr 1.41, the extra `flower` of coterie"
    ) from error

__all__ = ["FlowerGrid", "FlowerSites", "client_app"]

POLL = 0.02
"""Seconds between two looks for replies."""

LETTER = "letter"
"""What a message holds."""

SUMS = {"offer", "join", "part"}
"""What a peer must remember."""


def client_app(
    user_of: Callable[[Context], User],
    model_of: Callable[[Context], nn.Module],
    loss: Loss,
    *,
    caps: Caps | None = None,
    privacy: Privacy | None = None,
    sums: SumsOnly | None = None,
    log_of: Callable[[Context], Path] | None = None,
) -> ClientApp:
    """Return the ClientApp of a peer, which answers user 0.

    Args:
        user_of: the peer's examples under its name, from Flower's context (`context.node_config`).
        model_of: a model with the same parameters as user 0's.
        loss: as in `train`.
        caps: what the peer gives at most; see `Caps`.
        privacy: what the peer promises about each example; see `Privacy`.
        sums: give masked sums only, and which; see `SumsOnly`.
        log_of: the file in which requests are counted; the secret by which batches are drawn, and
            the keys of masked sums, are beside it. Caps, privacy and sums need it, since Flower
            forgets a ClientApp after each message: with a new secret each time, user 0 could
            compare other draws.

    Example:
        >>> import torch, coterie.flower  # doctest: +SKIP
        >>> app = coterie.flower.client_app(my_user, my_model, torch.nn.CrossEntropyLoss())  # doctest: +SKIP
    """
    if log_of is None and (privacy is not None or sums is not None or caps not in (None, Caps())):
        raise KnobError(
            "`log_of` must name a file: Flower forgets a ClientApp after each message, and so its"
            " counts, its keys and the secret by which it draws batches"
        )
    # where Flower keeps the process, the model is built once
    known: dict[tuple[int, int], Responder] = {}

    def responder(context: Context) -> Responder:
        place = context.run_id, context.node_id
        if place not in known:
            passes = Passes(model_of(context), loss)
            peer = Peer(user_of(context), passes, caps, log_of and log_of(context), privacy=privacy)
            known[place] = Responder(peer, sums)
        return known[place]

    return app_of(responder, log_of)


def app_of(
    responder_of: Callable[[Context], Responder], log_of: Callable[[Context], Path] | None
) -> ClientApp:
    """Return the ClientApp of which each question is answered by a `Responder`."""
    app = ClientApp()

    def answers(method: str) -> None:
        @app.query(method)
        def answer(message: Message, context: Context) -> Message:
            responder, asked = responder_of(context), from_record(message.content)
            if method == "name":
                reply: dict[str, Any] = {"name": responder.peer.user.name}
            elif method not in SUMS:
                reply = responder.answer(method, asked)
            elif log_of is None:
                reply = {"refused": "it keeps no log, without which it takes part in no masked sum"}
            else:
                with _kept(responder, log_of(context), context.run_id):
                    reply = responder.answer(method, asked)
            return Message(to_record(reply), reply_to=message)

    for method in ("name", *METHODS):
        answers(method)
    return app


@contextmanager
def _kept(responder: Responder, log: Path, run: int) -> Iterator[None]:
    """Let what a peer has agreed to, and the masks that it has used, outlive the process.

    One process at a time: no mask is used twice.
    """
    path = log.with_name(f"{log.name}.sums")
    with open(path, "a+b", opener=owner_only) as file:
        wait_for_lock(file.fileno())  # closing the file lets it go
        file.seek(0)
        kept = json.loads(file.read() or b"{}")
        responder.member.go_on(kept.get("member", {}) if kept.get("run") == run else {})
        yield
        file.truncate(0)
        file.write(json.dumps({"run": run, "member": responder.member.kept()}).encode())


@dataclass(frozen=True)
class FlowerGrid:
    """What makes an engine over the SuperNodes of a run.

    `train(…, engine=FlowerGrid(grid))` in a ServerApp.

    Args:
        grid: what Flower hands to the ServerApp.
        peers: how many SuperNodes to wait for.
        patience: seconds to wait for them, and for their names.
        timeout: seconds to wait for a SuperNode in one exchange.
        longest: seconds that the exchanges of a run may take, by how long the SuperNodes took to
            tell their names; a run beyond it is refused before its first step.
        knobs: further arguments of `Remote`, such as `minimum` or `secure_sums`.

    Example:
        >>> import coterie.flower  # doctest: +SKIP
        >>> run = coterie.train(model, loss, me, engine=coterie.flower.FlowerGrid(grid, 3))  # doctest: +SKIP
    """

    grid: Grid
    peers: int = 1
    patience: float = 120.0
    timeout: float = 120.0
    longest: float = 3600.0
    knobs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        COUNT("peers", self.peers)
        POSITIVE("patience", self.patience)
        POSITIVE("timeout", self.timeout)
        POSITIVE("longest", self.longest)
        if "compress" in self.knobs:
            raise KnobError(
                "`compress` must be left out over Flower: what a message loses is added to the next"
                " by a process that stays"
            )

    def __call__(
        self,
        model: nn.Module,
        loss: Loss,
        me: User,
        peers: Sequence[User] = (),
        *,
        batch_size: int = 32,
        seed: int = 0,
    ) -> Remote:
        """Wait for the SuperNodes, ask for their names, and return the engine."""
        names, seconds = self._named()
        sites = FlowerSites(self.grid, names)
        settings: dict[str, Any] = {
            "batch_size": batch_size,
            "seed": seed,
            "timeout": self.timeout,
            **self.knobs,
        }
        engine = FlowerRemote(model, loss, me, peers, sites=sites, names=list(names), **settings)
        engine.exchange_seconds, engine.longest = seconds, self.longest
        return engine

    def _named(self) -> tuple[dict[str, int], float]:
        """Return the SuperNodes by the names of their users, and how long they took to tell."""
        ends = time.monotonic() + self.patience
        while len(nodes := list(self.grid.get_node_ids())) < self.peers:
            if time.monotonic() > ends:
                raise DataError(
                    f"{len(nodes)} of {self.peers} SuperNodes are connected after {self.patience:g}"
                    " s; start the others, or lower `peers`"
                )
            time.sleep(POLL)
        unnamed = FlowerSites(self.grid, {str(node): node for node in nodes})
        began = time.monotonic()
        sent = unnamed.ask(list(unnamed.nodes), "name", max(POLL, ends - began))
        enough = ends  # one that was killed is listed for a minute, and does not answer
        while not sent.done() and time.monotonic() < enough:
            if len(sent.replies) >= self.peers:
                enough = min(enough, 2 * time.monotonic() - began)
            time.sleep(POLL)
        seconds = time.monotonic() - began
        names: dict[str, int] = {}
        for node, reply in sorted(sent.replies.items()):
            name = reply.get("name") if isinstance(reply, dict) else None
            if not isinstance(name, str) or name in names or not (name and name.isprintable()):
                raise DataError(
                    f"the SuperNode {node} gave the name {name!r:.100}; every peer must have a name"
                    " of its own, of printable text"
                )
            names[name] = int(node)
        if len(names) < self.peers:
            why = "".join(f"; {node}: {printable(said)}" for node, said in sent.failed.items())
            raise DataError(
                f"{len(names)} of {self.peers} SuperNodes told their names; see the logs of the"
                f" others, or let them take longer (`patience`){why}"
            )
        return dict(sorted(names.items())), seconds


class FlowerRemote(Remote):
    """Peers at SuperNodes, who may need seconds for each exchange."""

    exchange_seconds = 0.0
    longest = math.inf

    def check_exchanges(self, exchanges: int) -> None:
        """Refuse a run whose exchanges would take too long; see `LimitsExchanges`."""
        if exchanges * self.exchange_seconds > self.longest:
            hours = exchanges * self.exchange_seconds / 3600
            raise KnobError(
                f"{exchanges} exchanges of {self.exchange_seconds:.0f} s would take {hours:.1f} h,"
                " since Flower's deployment starts a process for every message: take fewer `steps`"
                " with `local_steps=20`, or a method in rounds such as `FedAvg(local_steps=20)`, or"
                " ask less often (`exchange_every`); sites of NVFLARE stay, for single steps. Or"
                " let it take longer (`FlowerGrid(longest=…)`)"
            )


class FlowerSites:
    """The SuperNodes that can be asked, by name; see `Sites`.

    One that is started again has another number, unless Flower knows it by a key: who is new is
    asked for its name, and takes the place of the one of this name that is gone.
    """

    def __init__(self, grid: Grid, nodes: Mapping[str, int]) -> None:
        self.grid, self.nodes = grid, dict(nodes)
        self._met, self._unnamed = set(self.nodes.values()), dict[int, FlowerReplies]()

    def ask(
        self, names: Sequence[str], method: str, timeout: float, **arguments: Any
    ) -> "FlowerReplies":
        """Send a message to SuperNodes; see `Sites.ask`."""
        self._meet(timeout)
        content = to_record(arguments)
        sent = {
            name: Message(content, self.nodes[name], f"query.{method}", ttl=timeout + 1)
            for name in names
            if name in self.nodes
        }
        # An id is empty where Flower did not take the message, such as to a node that has left.
        ids = dict(zip(self.grid.push_messages(sent.values()), sent, strict=False))
        return FlowerReplies(self.grid, ids, timeout)

    def _meet(self, timeout: float) -> None:
        """Ask who is new for its name, and give those who have told theirs their place."""
        there = set(self.grid.get_node_ids())
        for node in there - self._met:
            self._met.add(node)
            message = Message(to_record({}), node, "query.name", ttl=timeout + 1)
            ids = dict.fromkeys(self.grid.push_messages([message]), "name")
            self._unnamed[node] = FlowerReplies(self.grid, ids, timeout)
        for node, asked in [*self._unnamed.items()]:
            if not asked.done():
                continue
            reply = asked.replies.get("name")
            name = reply.get("name") if isinstance(reply, dict) else None
            if not isinstance(name, str):
                self._met.discard(node)  # it may answer later
            elif self.nodes.get(name) in there:
                continue  # the one of this name may yet go
            elif name in self.nodes:
                self.nodes[name] = node
            del self._unnamed[node]


class FlowerReplies:
    """The replies of SuperNodes to one message, as they come; see `Replies`."""

    def __init__(self, grid: Grid, ids: Mapping[str, str], timeout: float) -> None:
        self.grid, self.ends, self.replies = grid, time.monotonic() + timeout, dict[str, Any]()
        self.failed = dict[str, str]()  # why
        self.waiting = {one: name for one, name in ids.items() if one}

    def done(self) -> bool:
        """Say whether every SuperNode has answered, failed or run out of time."""
        for message in self._pulled():
            name = self.waiting.pop(message.metadata.reply_to_message_id, None)
            if name is not None and message.has_error():
                self.failed[name] = str(message.error.reason)
            elif name is not None:
                self.replies[name] = from_record(message.content)
        return not self.waiting or time.monotonic() > self.ends

    def wait(self) -> Mapping[str, Any]:
        """Wait until it is done, and return the replies by name."""
        while not self.done():
            time.sleep(POLL)
        return self.replies

    def _pulled(self) -> Iterable[Message]:
        return self.grid.pull_messages(list(self.waiting)) if self.waiting else ()


def to_record(value: Mapping[str, Any]) -> RecordDict:
    """Return plain data and arrays as Flower carries them: a letter, as between processes."""
    letter = to_bytes(value)
    array = Array(dtype="uint8", shape=(len(letter),), stype=LETTER, data=letter)
    return RecordDict({LETTER: ArrayRecord({LETTER: array})})


def from_record(record: RecordDict) -> Any:
    """Return what `to_record` packed.

    None where the record is no such thing, as a wrong sender may make it.
    """
    try:
        return from_bytes(record.array_records[LETTER][LETTER].data)
    except Exception:  # NumPy raises several kinds, also of too large a shape
        return None
