"""Flower without processes: a grid that hands each message to a ClientApp at once, and sites over it."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("flwr") is None:  # then what needs it is skipped, and not an error
    pytest.skip("Flower is not installed: the extra `flower`", allow_module_level=True)
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from coterie.engines.peer import Peer
from coterie.engines.remote.responder import Responder
from coterie.flower import FlowerSites, app_of
from coterie.privacy.sums import SumsOnly

Reply = Callable[[Message, Context], Message]


class DirectGrid(Grid):
    """Nodes 1, 2, …, each with a ClientApp. One that raises gives an error, as with Flower."""

    def __init__(
        self,
        apps: Iterable[ClientApp | Reply],
        threads: ThreadPoolExecutor | None = None,
        *,
        packed: bool = False,
    ) -> None:
        self.apps = dict(enumerate(apps, 1))
        self.threads, self.replies = threads, dict[str, Future[Message]]()
        self.packed = packed  # as bytes, there and back
        self.asked: list[tuple[int, str]] = []
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return list(self.apps)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            node, name = message.metadata.dst_node_id, str(len(self.asked) + 1)
            self.asked.append((node, message.metadata.message_type))
            message.metadata.__dict__["_message_id"] = name
            context = Context(
                run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={}
            )
            if node not in self.apps:  # Flower takes no message to a node that has left
                ids.append("")
                continue
            ids.append(name)
            self.replies[name] = self._run(self.apps[node], self._carried(message), context)
        return ids

    def _run(self, app: Reply, *message: Any) -> Future[Message]:
        if self.threads is not None:
            return self.threads.submit(app, *message)
        done = Future[Message]()
        try:
            done.set_result(app(*message))
        except Exception as error:
            done.set_exception(error)
        return done

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        there = [one for one in message_ids if one in self.replies and self.replies[one].done()]
        done = [self.replies.pop(one) for one in there]
        # Flower makes an error of an exception, which carries nothing
        return [self._carried(one.result()) for one in done if one.exception() is None]

    def _carried(self, message: Message) -> Message:
        if not self.packed:
            return message
        carried = message_to_proto(message).SerializeToString()
        return message_from_proto(ProtoMessage.FromString(carried))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        raise NotImplementedError


class OverFlower:
    """Sites over Flower's messages; what answers one forgets everything after it, as a process does."""

    def __init__(self, peers: Mapping[str, Peer], sums: SumsOnly | None) -> None:
        self.folder, self.threads = (
            tempfile.TemporaryDirectory(),
            ThreadPoolExecutor(8 * len(peers)),
        )
        self.alone = {
            name: threading.Lock() for name in peers
        }  # a node runs one ClientApp at a time

        def app(name: str) -> Any:
            def answer(*message: Any) -> Any:
                with self.alone[name]:
                    log = Path(self.folder.name) / name
                    return app_of(lambda _: Responder(peers[name], sums), lambda _: log)(*message)

            return answer

        self.grid = DirectGrid([app(name) for name in peers], self.threads)
        self.nodes = {name: node for node, name in enumerate(peers, 1)}
        self.sites, self.lost = FlowerSites(self.grid, self.nodes), dict[str, Any]()

    def ask(self, names: Sequence[str], method: str, timeout: float, **arguments: Any) -> Any:
        return self.sites.ask(names, method, timeout, **arguments)

    def lose(self, name: str) -> None:
        self.lost[name] = self.grid.apps.pop(self.nodes[name])

    def bring(self, name: str) -> None:
        self.grid.apps[self.nodes[name]] = self.lost.pop(name)

    def close(self) -> None:
        self.threads.shutdown()
        self.folder.cleanup()
