"""coterie over Flower: user 0 is the ServerApp, every peer a SuperNode.

A SuperNode gives gradients, and takes steps of its own, by the same `Peer` as everywhere, within
its caps and with its privacy. Flower carries the messages: its TLS and its node keys say who may
take part. Its deployment starts a process for every message, about 20 s; so ask rarely there
(`local_steps`, a method in rounds). See docs/flower.md.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from coterie.arguments import COUNT, POSITIVE
from coterie.engines.in_process.passes import Passes
from coterie.engines.peer import Caps, Peer
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.responder import Responder
from coterie.errors import DataError, KnobError
from coterie.privacy.privacy import Privacy
from coterie.users.user import Loss, User

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid
except ImportError as error:
    raise ImportError(
        "coterie.flower needs Flower: install flwr 1.41, the extra `flower` of coterie"
    ) from error

__all__ = ["FlowerGrid", "FlowerSites", "client_app"]

POLL = 0.02
"""Seconds between two looks for replies."""


def client_app(
    user_of: Callable[[Context], User],
    model_of: Callable[[Context], nn.Module],
    loss: Loss,
    *,
    caps: Caps | None = None,
    privacy: Privacy | None = None,
    log_of: Callable[[Context], Path] | None = None,
) -> ClientApp:
    """Return the ClientApp of a peer, which answers user 0.

    Args:
        user_of: the peer's examples under its name, from Flower's context (`context.node_config`).
        model_of: a model with the same parameters as user 0's.
        loss: as in `train`.
        caps: what the peer gives at most; see `Caps`.
        privacy: what the peer promises about each example; see `Privacy`.
        log_of: the file in which requests are counted; the secret by which batches are drawn is
            beside it. Caps and privacy need it, since Flower forgets a ClientApp after each
            message: with a new secret each time, user 0 could compare other draws.

    Example:
        >>> import torch, coterie.flower  # doctest: +SKIP
        >>> app = coterie.flower.client_app(my_user, my_model, torch.nn.CrossEntropyLoss())  # doctest: +SKIP
    """
    if log_of is None and (privacy is not None or caps not in (None, Caps())):
        raise KnobError(
            "`log_of` must name a file: Flower forgets a ClientApp after each message, and so its"
            " counts and the secret by which it draws batches"
        )
    # where Flower keeps the process, the model is built once
    known: dict[tuple[int, int], Responder] = {}

    def responder(context: Context) -> Responder:
        place = context.run_id, context.node_id
        if place not in known:
            log = None if log_of is None else log_of(context)
            passes = Passes(model_of(context), loss)
            known[place] = Responder(Peer(user_of(context), passes, caps, log, privacy=privacy))
        return known[place]

    app = ClientApp()

    @app.query("name")
    def name(message: Message, context: Context) -> Message:
        return Message(to_record({"name": user_of(context).name}), reply_to=message)

    @app.query("ready")
    def ready(message: Message, context: Context) -> Message:
        return answered("ready", message, context)

    @app.query("gradients")
    def gradients(message: Message, context: Context) -> Message:
        return answered("gradients", message, context)

    def answered(method: str, message: Message, context: Context) -> Message:
        answer = responder(context).answer(method, from_record(message.content))
        return Message(to_record(answer), reply_to=message)

    return app


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
        knobs: further arguments of `Remote`, such as `minimum`. Masked sums need a process that
            stays, which a SuperNode is not; Flower has secure aggregation of its own.

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
        for name in {"secure_sums", "compress"} & set(self.knobs):
            raise KnobError(
                f"`{name}` must be left out over Flower: it needs a peer whose process stays"
                " between messages"
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
        replies = unnamed.ask(list(unnamed.nodes), "name", max(POLL, ends - began)).wait()
        seconds = time.monotonic() - began
        names: dict[str, int] = {}
        for node, reply in sorted(replies.items()):
            name = reply.get("name") if isinstance(reply, dict) else None
            if not isinstance(name, str) or name in names or not (name and name.isprintable()):
                raise DataError(
                    f"the SuperNode {node} gave the name {name!r:.100}; every peer must have a name"
                    " of its own, of printable text"
                )
            names[name] = int(node)
        if len(names) < self.peers:
            raise DataError(
                f"{len(names)} of {self.peers} SuperNodes told their names; see the logs of the"
                " others"
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
    """The SuperNodes that can be asked, by name; see `Sites`."""

    def __init__(self, grid: Grid, nodes: Mapping[str, int]) -> None:
        self.grid, self.nodes = grid, nodes

    def ask(
        self, names: Sequence[str], method: str, timeout: float, **arguments: Any
    ) -> "FlowerReplies":
        """Send a message to SuperNodes; see `Sites.ask`."""
        content = to_record(arguments)
        sent = {
            name: Message(content, self.nodes[name], f"query.{method}", ttl=timeout + 1)
            for name in names
            if name in self.nodes
        }
        # An id is empty where Flower did not take the message, such as to a node that has left.
        ids = dict(zip(self.grid.push_messages(sent.values()), sent, strict=False))
        return FlowerReplies(self.grid, ids, timeout)


class FlowerReplies:
    """The replies of SuperNodes to one message, as they come; see `Replies`."""

    def __init__(self, grid: Grid, ids: Mapping[str, str], timeout: float) -> None:
        self.grid, self.ends, self.replies = grid, time.monotonic() + timeout, dict[str, Any]()
        self.waiting = {one: name for one, name in ids.items() if one}

    def done(self) -> bool:
        """Say whether every SuperNode has answered, failed or run out of time."""
        for message in self._pulled():
            name = self.waiting.pop(message.metadata.reply_to_message_id, None)
            if name is not None and not message.has_error():
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
    """Return plain data and arrays as Flower carries them.

    Arrays by number, and JSON that refers to them.
    """
    arrays: dict[str, Array] = {}

    def plain(part: Any) -> Any:
        if isinstance(part, np.ndarray):
            arrays[str(len(arrays))] = Array(part)
            return {"array": str(len(arrays) - 1)}
        if isinstance(part, Mapping):
            return {"fields": {str(name): plain(each) for name, each in part.items()}}
        if isinstance(part, list | tuple):
            return {"items": [plain(each) for each in part]}
        return {"value": part}

    tree = json.dumps(plain(value))
    return RecordDict({"arrays": ArrayRecord(arrays), "tree": ConfigRecord({"json": tree})})


def from_record(record: RecordDict) -> Any:
    """Return what `to_record` packed.

    None where the record is no such thing, as a wrong sender may make it.
    """

    def full(part: Any) -> Any:
        ((kind, held),) = part.items()
        if kind == "array":
            return record.array_records["arrays"][held].numpy()
        if kind == "fields":
            return {name: full(each) for name, each in held.items()}
        return [full(each) for each in held] if kind == "items" else held

    try:
        return full(json.loads(str(record.config_records["tree"]["json"])))
    except Exception:  # NumPy raises what zipfile, tokenize and the allocation of memory do
        return None
