"""What NVFLARE makes in the processes of a job, in which sites come and go.

NVFLARE starts a job at those who are connected and waits until all of them are ready; a site that
starts anew is in no job. Here each side knows what the other can be asked, so that it is ready by
itself, whenever it comes (`launching.Rejoining`). The code is installed everywhere; a job names it.
"""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from nvflare.apis.client import Client
from nvflare.collab import collab
from nvflare.collab.api.app import ClientApp, ServerApp
from nvflare.collab.runtime.controller import CollabController
from nvflare.collab.runtime.dispatch import make_participant_map, prepare_for_remote_call
from nvflare.collab.runtime.executor import CollabExecutor
from nvflare.collab.runtime.lifecycle import run_server
from nvflare.fuel.f3.cellnet.fqcn import FQCN

from coterie.engines.messages import from_bytes, to_bytes
from coterie.engines.remote.responder import Responder
from coterie.errors import PeerLost
from coterie.federation.lead import lead
from coterie.federation.member import REFUSAL, MemberRun
from coterie.federation.participants import responder_of
from coterie.federation.relay import relay
from coterie.registry import import_from_environment

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
main: Callable[[F], F] = collab.main
init: Callable[[F], F] = collab.init
publish: Callable[[F], F] = collab.publish

SECONDS_TO_BEGIN = 60.0
"""How long a run waits for sites that were connected when its job began."""
SECONDS_TO_SAY_SO, SECONDS_BETWEEN_QUESTIONS = 2.0, 0.1
"""How long each of them has to say that it is there, and when it is asked again."""
SECONDS_BETWEEN_LOOKS = 2.0
"""How often the server's process of a job asks who is in it."""


class User0:
    """Train at user 0's place."""

    @main
    def run(self) -> None:
        """Train with user 0's settings and data, which lie beside the server's folder."""
        import_from_environment()  # what user 0 named when it started the server
        sites = CollabSites()
        sites.wait_until_there()
        lead(folder_here(), sites)


class CollabSites:
    """The sites of this job, asked through NVFLARE's Collab.

    Args:
        relayed: this is a site that asks others through the server. Where one does not answer, it
            finds out whether the server does: without it nobody can be reached.
    """

    def __init__(self, *, relayed: bool = False) -> None:
        self.parent, self.relayed = os.getppid(), relayed

    def ask(
        self, names: Sequence[str], method: str, timeout: float, **arguments: Any
    ) -> "CollabReplies":
        """Send a request to sites and return at once.

        One that is not there does not answer.
        """
        here = {client.name for client in collab.clients}
        asked = [name for name in names if name in here]
        if not asked:
            return CollabReplies(None, self.parent)
        group = collab.get_clients(asked)(blocking=False, timeout=timeout)
        letter = to_bytes({"method": method, "arguments": arguments})
        patience = timeout if self.relayed else None
        return CollabReplies(group.asked(letter), self.parent, patience)

    def wait_until_there(self, seconds: float = SECONDS_TO_BEGIN) -> None:
        """Wait for those sites that were connected when the job began, which read their data first."""
        waited = {client.name for client in collab.fl_ctx.get_engine().get_clients()}
        end = time.monotonic() + seconds
        while waited and time.monotonic() < end:
            waited -= self.ask(sorted(waited), "ready", SECONDS_TO_SAY_SO).wait().keys()
            time.sleep(SECONDS_BETWEEN_QUESTIONS)  # one that is not there may fail at once


class CollabReplies:
    """What sites answer, as it comes."""

    def __init__(self, queue: Any, parent: int, patience: float | None = None) -> None:
        self.queue = queue  # Collab's, or None where nobody was asked
        # the process that this one was started by, without which no site can be reached
        self.parent = parent
        # how long to wait for the server's own answer; None where this is the server
        self.patience = patience

    def done(self) -> bool:
        """Say whether every site has answered, failed or run out of time."""
        return self.queue is None or bool(self.queue.num_whole_items_received >= self.queue.limit)

    def wait(self) -> Mapping[str, Any]:
        """Wait until it is done, and return the answers by site."""
        answers = {} if self.queue is None else {name: opened(reply) for name, reply in self.queue}
        if collab.is_aborted:  # calls fail at once from now on
            raise PeerLost("NVFLARE has ended the job")
        if os.getppid() != self.parent:
            raise PeerLost("the process of NVFLARE that started this one is gone")
        if self.patience is not None and self.queue is not None and len(answers) < self.queue.limit:
            self._find_server(self.patience)
        return answers

    def _find_server(self, patience: float) -> None:
        try:
            collab.server(timeout=patience).here()
        except Exception as error:  # Collab raises several kinds
            raise PeerLost(f"the server does not answer: {type(error).__name__}") from error


def opened(letter: Any) -> Any:
    """Return what is in a letter; None where it is none, as a wrong sender may make it."""
    try:
        return from_bytes(letter)
    except (TypeError, ValueError):
        return None


class Answering:
    """Answer what comes as a letter.

    NVFLARE's own way to carry arrays parses a text for each; CPython's parser fails when another
    thread comes into it (SystemError, "AST constructor recursion depth mismatch").
    """

    @publish
    def asked(self, letter: Any) -> bytes:
        """Answer a question, a letter, by one."""
        question = from_bytes(letter)
        return to_bytes(self.answer(str(question["method"]), dict(question["arguments"])))

    def answer(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Answer who may ask."""
        raise NotImplementedError


class Site(Answering):
    """Answer user 0, with gradients or with masked sums, one request at a time."""

    def __init__(self) -> None:
        self.responder: Responder | None = None
        self.lock = threading.Lock()

    @init
    def start(self) -> None:
        """Read the site's settings and its data.

        Where that fails the site refuses, and the others go on.
        """
        try:
            self.responder = responder_of(folder_here())
        except Exception:  # a loader of the site's own may raise anything
            logger.exception("this site gives no gradients, since its data or model cannot be read")

    def answer(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Answer user 0, who is at the server; NVFLARE knows the caller by its certificate."""
        if not by_server():  # somebody else would learn about these rows, and use up the caps
            logger.warning("refused %.100r: it answers user 0 only", str(collab.caller))
            return {"refused": "it answers user 0 only"}
        if self.responder is None:
            return {"refused": "its data or model cannot be read"}
        if method == "ready":  # also while a request is in work
            return self.responder.answer(method, arguments)
        with self.lock:  # a request that came late may still be in work
            return self.responder.answer(method, arguments, str(collab.caller))


def folder_here() -> Path:
    """Return the site's folder, in which NVFLARE has one to work in."""
    return Path(collab.workspace.get_root_dir()).parent


def by_server() -> bool:
    """Say whether the server asks."""
    return bool(collab.caller == collab.server.name)


class Relay:
    """Pass messages on."""

    @main
    def run(self) -> None:
        """Let all sites train, and stay until they have."""
        sites = CollabSites()
        sites.wait_until_there()
        relay(folder_here(), sites)

    @publish
    def here(self) -> bool:
        """Say that the server is there, to a site that another one has not answered."""
        return True


class MemberSite(Answering):
    """Train when the server says so, and answer the sites that this one names, by sealed calls.

    NVFLARE's server can say of any other call that a site made it.
    """

    def __init__(self) -> None:
        self.run: MemberRun | None = None

    @init
    def start(self) -> None:
        """Read the site's settings and its data.

        Where that fails the site does nothing, and the others go on.
        """
        try:
            import_from_environment()  # what this site named when it was started
            self.run = MemberRun(folder_here())
        except Exception:  # a loader of the site's own may raise anything
            logger.exception("this site takes no part, since its data or model cannot be read")

    def answer(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Answer a site by `call`, and the server, which knows nothing but how far the run is.

        `key` and `meet` exchange the sites' keys; `check` says why others would not answer to the
        end what this site plans; `train` returns when the run has ended, and `state` says how far
        it is.
        """
        run = self.run
        if run is not None and method == "call":
            return run.answer(arguments.get("call"))
        if not by_server() or method not in {"ready", "key", "meet", "check", "train", "state"}:
            return {"refused": REFUSAL}
        if run is None or method == "ready":
            return {"failed": "data that cannot be read"} if method == "state" else {}
        if method in {"check", "train"}:
            arguments = {"sites": CollabSites(relayed=True)}
        answer: dict[str, Any] = getattr(run, method)(**arguments)
        return answer


def _interface_of_other(app: ClientApp | ServerApp) -> dict[str, Any]:
    """Return what can be called at the other side: it has the class that stands beside this side's own."""
    own = type(app.obj)
    pairs = {"User0": "Site", "Relay": "MemberSite"}
    name = (pairs | {site: server for server, site in pairs.items()})[own.__name__]
    other = object.__new__(getattr(sys.modules[own.__module__], name))  # it is only looked at
    made = ServerApp(other) if isinstance(app, ClientApp) else ClientApp(other)
    interface: dict[str, Any] = made.get_collab_interface()
    return interface


class StandingController(CollabController):  # type: ignore[misc]  # NVFLARE has no types
    """Asks all sites of the consortium, whether they are there yet or not.

    Args:
        server_obj_id: what is made at the server.
        sites: all that may come.
    """

    def __init__(self, server_obj_id: str, sites: Sequence[str]) -> None:
        super().__init__(server_obj_id=server_obj_id)
        self.sites = list(sites)

    def control_flow(self, abort_signal: Any, fl_ctx: Any) -> None:
        """Make it possible to call every site and to be called by it, and run what is made at the server."""
        if self.server_app is None:
            self.log_error(fl_ctx, "the server's part could not be made")
            return
        engine, job, app = fl_ctx.get_engine(), fl_ctx.get_job_id(), self.server_app
        self.cell = engine.get_cell()
        clients = [Client(name, "") for name in self.sites]
        mine, theirs = app.get_collab_interface(), _interface_of_other(app)
        there = make_participant_map(self.cell.get_fqcn(), job, clients)
        prepare_for_remote_call(self.cell, app, self.logger, self.inbound_executor, there)
        server = self._prepare_server_proxy(job, abort_signal, mine, fl_ctx)
        proxies = [
            self._prepare_client_proxy(job, each, theirs, abort_signal, fl_ctx) for each in clients
        ]
        app.setup(fl_ctx.get_workspace(), server, proxies, abort_signal)
        threading.Thread(target=self._follow, args=(engine, abort_signal), daemon=True).start()
        run_server(app, self.logger)

    def _follow(self, engine: Any, abort_signal: Any) -> None:
        """Go on learning by which tokens sites are in this job: one that is back has another."""
        while not abort_signal.triggered:
            with contextlib.suppress(Exception):  # the server's main process may be gone
                engine.sync_clients_from_main_process()
            time.sleep(SECONDS_BETWEEN_LOOKS)


class StandingExecutor(CollabExecutor):  # type: ignore[misc]  # NVFLARE has no types
    """Answers as soon as a site has read its data, without being told who else is ready.

    Args:
        client_obj_id: what is made at the site.
        sites: all that may come.
    """

    def __init__(self, client_obj_id: str, sites: Sequence[str]) -> None:
        super().__init__(client_obj_id=client_obj_id)
        self.sites = list(sites)

    def _handle_start_run(self, event_type: str, fl_ctx: Any) -> None:
        super()._handle_start_run(event_type, fl_ctx)
        app = self.client_app
        if app is None:
            return
        cell, job = fl_ctx.get_engine().get_cell(), fl_ctx.get_job_id()
        stop = fl_ctx.get_run_abort_signal()
        server = FQCN.join([FQCN.ROOT_SERVER, job])
        clients = [Client(name, "") for name in self.sites]
        mine, theirs = app.get_collab_interface(), _interface_of_other(app)
        proxies = [
            self._prepare_client_proxy(job, cell, each, stop, mine, fl_ctx) for each in clients
        ]
        there = self._prepare_server_proxy(server, cell, theirs, stop, fl_ctx)
        app.setup(fl_ctx.get_workspace(), there, proxies, stop)
        context = app.new_context(app.name, app.name, set_call_ctx=False)
        app.initialize(context)
        self.client_ctx = context
        callers = make_participant_map(server, job, clients)
        prepare_for_remote_call(cell, app, self.logger, self.inbound_executor, callers)
