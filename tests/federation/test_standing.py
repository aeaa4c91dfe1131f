"""A site that is connected anew gets into the job that runs: NVFLARE is a stand-in; test_consortium.py has it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare")

from nvflare.apis.client import Client
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import RunProcessKey
from nvflare.apis.fl_context import FLContext
from nvflare.private.admin_defs import Message, MsgHeader, ReturnCode
from nvflare.private.defs import RequestHeader, TrainingTopic

from coterie.federation import launching


class Server:
    """NVFLARE's server with one job, at which basel and bern take part; what it sends is kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clients = [Client("basel", "1"), Client("bern", "2")]
        self.process = {RunProcessKey.PARTICIPANTS: {c.token: c for c in self.clients}}
        deployed = {"app": ["server", "basel", "bern", "chur"]}
        job = SimpleNamespace(
            job_id="job 1",
            meta={},
            deploy_map=deployed,
            get_deployment=lambda: deployed,
            get_application=lambda app, context: b"three files",
        )
        self.job_runner = SimpleNamespace(running_jobs={"job 1": job})
        self.run_processes: dict[str, Any] = {"job 1": self.process}
        self.server = SimpleNamespace(
            admin_server=SimpleNamespace(send_requests_and_get_reply_dict=self._deploy)
        )
        self.sent: list[tuple[str, str]] = []
        self.takes = ReturnCode.OK
        self.begun: Callable[[], object] = lambda: None
        monkeypatch.setattr(launching, "set_message_security_data", lambda *_: None)

    def get_clients(self) -> list[Client]:
        return self.clients

    @contextmanager
    def new_context(self) -> Any:
        yield FLContext()

    def _deploy(self, requests: dict[str, Message], timeout_secs: float) -> dict[str, Message]:
        ((token, message),) = requests.items()
        assert message.topic == TrainingTopic.DEPLOY
        assert message.body == b"three files"
        assert message.get_header(RequestHeader.JOB_ID) == "job 1"
        self.begun()
        self.sent.append(("deploy", token))
        reply = Message("reply", "it said why")
        reply.set_header(MsgHeader.RETURN_CODE, self.takes)
        return {token: reply}

    def check_client_resources(self, job: Any, asked: Any, context: Any) -> Any:
        return dict.fromkeys(asked, (True, "a token"))

    def start_client_job(self, job: Any, sites: Any, context: Any) -> None:
        assert all(site.token == "a token" for site in sites.values())  # noqa: S105
        there = {c.name: c.token for c in self.process[RunProcessKey.PARTICIPANTS].values()}
        self.sent += [("start", there[name]) for name in sites]

    def hears(self, of: Rejoining) -> None:
        """Let a site give a sign of life, and wait for what comes of it."""
        before = set(threading.enumerate())
        of.handle_event(
            EventType.CLIENT_HEARTBEAT_PROCESSED, SimpleNamespace(get_engine=lambda: self)
        )
        for thread in set(threading.enumerate()) - before:
            thread.join()


Rejoining = launching.Rejoining


def test_who_is_connected_anew_gets_the_job_once(monkeypatch: pytest.MonkeyPatch) -> None:
    server, rejoining = Server(monkeypatch), Rejoining()
    server.hears(rejoining)
    assert server.sent == [], "all are in it"
    server.clients = [Client("basel", "1"), Client("bern", "3"), Client("stranger", "4")]
    server.hears(rejoining)
    server.hears(rejoining)
    assert server.sent == [("deploy", "3"), ("start", "3")]
    assert set(server.process[RunProcessKey.PARTICIPANTS]) == {"1", "3"}, "the old token is gone"
    server.clients = [*server.clients, Client("chur", "5")]  # which was not there before
    server.hears(rejoining)
    assert server.sent[2:] == [("deploy", "5"), ("start", "5")]


def test_a_site_that_refuses_the_job_is_not_in_it_and_another_try_follows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server, rejoining = Server(monkeypatch), Rejoining()
    server.clients[1] = Client("bern", "3")
    server.takes = ReturnCode.ERROR
    server.hears(rejoining)
    assert server.sent == [("deploy", "3")]
    assert "bern has not taken the job: it said why" in caplog.text
    assert set(server.process[RunProcessKey.PARTICIPANTS]) == {"1", "2"}
    server.takes = ReturnCode.OK
    server.hears(rejoining)
    assert server.sent[1:] == [("deploy", "3"), ("start", "3")]


def test_a_job_that_is_on_its_way_is_not_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life go on coming while a site takes a job."""
    server, rejoining = Server(monkeypatch), Rejoining()
    server.clients[1] = Client("bern", "3")
    server.begun = lambda: server.hears(rejoining)
    server.hears(rejoining)
    assert server.sent == [("deploy", "3"), ("start", "3")]


def test_a_job_that_has_ended_meanwhile_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    server, rejoining = Server(monkeypatch), Rejoining()
    server.clients[1] = Client("bern", "3")
    server.run_processes.clear()
    server.hears(rejoining)
    assert server.sent == []
