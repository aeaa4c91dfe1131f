"""A Flower grid without processes: it hands each message to a ClientApp at once, packed as Flower does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

Reply = Callable[[Message, Context], Message]


class DirectGrid(Grid):
    """Nodes 1, 2, …, each with a ClientApp. One that raises gives an error, as with Flower."""

    def __init__(self, apps: Iterable[ClientApp | Reply]) -> None:
        self.apps = dict(enumerate(apps, 1))
        self.replies: dict[str, Message] = {}
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
            ids.append(name)
            try:
                self.replies[name] = self.apps[node](message, context)
            except Exception:  # noqa: S112  # Flower makes an error of it, which carries nothing
                continue
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.replies.pop(one) for one in message_ids if one in self.replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        raise NotImplementedError
