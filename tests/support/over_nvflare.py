"""Sites of NVFLARE in this process: its Collab and its messages, packed as it packs them, with no network."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace
from nvflare.app_common.decomposers import numpy_decomposers
from nvflare.collab.api.app import ClientApp, ServerApp
from nvflare.collab.api.proxy import Proxy
from nvflare.collab.runtime.cell_dispatcher import CellDispatcher
from nvflare.collab.runtime.defs import CallHeaderKey
from nvflare.collab.runtime.dispatch import _call_app_method
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.utils import decode_payload, encode_payload, new_cell_message
from nvflare.fuel.f3.message import Message

from coterie.engines.peer import Peer
from coterie.engines.remote.responder import Responder
from coterie.federation.jobs import CollabSites, Site, User0
from coterie.privacy.sums import SumsOnly

numpy_decomposers.register()


class OverNvflare:
    """User 0's job and a site's for each peer, as NVFLARE makes them, and a cell that hands messages over."""

    def __init__(self, peers: Mapping[str, Peer], sums: SumsOnly | None) -> None:
        self.peers, self.sums, self.calls = peers, sums, ThreadPoolExecutor(8 * len(peers))
        self.folder, self.lost = tempfile.TemporaryDirectory(), set[str]()
        for part in ("startup", "local"):
            (Path(self.folder.name) / part).mkdir()
        self.server, self.abort = ServerApp(User0()), Signal()
        self.apps: dict[str, ClientApp] = {}
        for name in peers:
            self.bring(name)
        self.server.new_context(self.server.name, self.server.name)

    def ask(self, names: Sequence[str], method: str, timeout: float, **arguments: Any) -> Any:
        return CollabSites().ask(names, method, timeout, **arguments)

    def lose(self, name: str) -> None:
        self.lost.add(name)

    def bring(self, name: str) -> None:
        """Start a site's job, in which nothing is known of an earlier one."""
        site = Site()
        site.responder = Responder(self.peers[name], self.sums)
        self.apps[name] = ClientApp(site)
        self.apps[name].name = name  # names of sites may have what those of objects may not
        self.lost.discard(name)
        for app in (self.server, *self.apps.values()):
            proxies = [self.proxy(app, other) for other in self.apps.values()]
            place = Workspace(self.folder.name)
            app.setup(place, self.proxy(app, self.server), proxies, self.abort)

    def proxy(self, caller: Any, target: Any) -> Proxy:
        at = CellDispatcher(self, None, caller.name, self, target.name, self.abort, self.calls)
        interface = target.get_collab_interface()
        whole = Proxy(caller, target.name, target.name, at, interface.pop(""))
        for name, part in interface.items():
            whole.add_child(name, Proxy(caller, f"{target.name}.{name}", "", at, part))
        return whole

    def send_request(self, *, target: str, request: Message, timeout: float, **_: Any) -> Message:
        """Carry a message to a site and its reply back, as a cell does."""
        if target in self.lost:
            return new_cell_message({MessageHeaderKey.RETURN_CODE: ReturnCode.TARGET_UNREACHABLE})
        request.set_header(CallHeaderKey.AUTHENTICATED_CALLER, self.server.name)
        app = self.apps[target]
        answer = self.calls.submit(_call_app_method, carried(request), app, app.logger)
        try:
            return carried(answer.result(timeout))
        except TimeoutError:
            return new_cell_message({MessageHeaderKey.RETURN_CODE: ReturnCode.TIMEOUT})

    def get_fqcn(self) -> str:
        return str(self.server.name)

    def close(self) -> None:
        self.abort.trigger("the end")
        self.calls.shutdown()
        self.folder.cleanup()


def carried(message: Message) -> Message:
    """Return a message as it arrives."""
    arrived = copy.copy(message)
    encode_payload(arrived)
    decode_payload(arrived)
    return arrived
