"""How processes of jobs start: what NVFLARE's own processes, at the server and at a site, have of coterie.

NVFLARE starts a process for every job. Loading torch and the rest takes most of its time, so one
waits with all loaded. A process that is killed would end the job of all; here the next one takes
its place in it. A site that has connected since is given the job that runs.
"""

import importlib
import json
import logging
import os
import runpy
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import AdminCommandNames, FLContextKey, RunProcessKey
from nvflare.apis.job_launcher_spec import JobHandleSpec
from nvflare.apis.job_scheduler_spec import DispatchInfo
from nvflare.app_common.job_launcher.process_launcher import ProcessHandle, ProcessJobLauncher
from nvflare.private.admin_defs import Message, MsgHeader, ReturnCode
from nvflare.private.defs import RequestHeader, TrainingTopic
from nvflare.private.fed.utils.fed_utils import extract_participants, set_message_security_data
from nvflare.utils import job_launcher_utils
from nvflare.utils.process_utils import ProcessAdapter

SECONDS_TO_THE_NEXT = 5.0
"""After the start of a job, so that loading for the next does not slow it down."""

SECONDS_TO_REPLY = 10.0
"""How long a site has to take a job."""

SECONDS_TO_LIVE = 10.0
"""A process of a job that was killed sooner is not started again: it may always be."""

logger = logging.getLogger(__name__)

COMMAND = {
    "server": job_launcher_utils.generate_server_command,
    "site": job_launcher_utils.generate_client_command,
}


class SpareLauncher(ProcessJobLauncher):  # type: ignore[misc]  # NVFLARE has no types
    """Starts the process of a job, of which NVFLARE's own ends with this one.

    Args:
        whose: "server" or "site".
        modules: what is loaded before there is a job, all of it installed here.
        again: whether one that was killed is started again.
    """

    def __init__(self, whose: str, modules: Sequence[str], *, again: bool = True) -> None:
        super().__init__()
        self.whose, self.modules, self.again = whose, list(modules), again
        self._spare: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def handle_event(self, event_type: str, fl_ctx: Any) -> None:
        """Begin to load when the participant starts; it is told of no such event in a job's process."""
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.SYSTEM_BOOTSTRAP:
            self._load()

    def get_command(self, job_meta: Any, fl_ctx: Any) -> str:
        """Return the command by which NVFLARE starts the process of a job."""
        return str(COMMAND[self.whose](fl_ctx))

    def launch_job(self, job_meta: Any, fl_ctx: Any) -> JobHandleSpec:
        """Give the job to the process that waits for one."""
        _, _, command = self.get_command(job_meta, fl_ctx).partition(" -m ")
        secrets = fl_ctx.get_prop(FLContextKey.JOB_PROCESS_ARGS) or {}
        job = {"argv": shlex.split(command), "env": job_launcher_utils.get_credential_env(secrets)}
        if not self.again:
            return ProcessHandle(process=self._given(job))
        return StandingProcess(lambda: self._given(job))

    def _given(self, job: Mapping[str, Any]) -> "subprocess.Popen[str]":
        """Return the process that had waited, which has a job now."""
        for _ in range(2):  # it may have been killed meanwhile
            spare = self._load()
            with self._lock:
                self._spare = None
            try:
                with spare.stdin:  # type: ignore[union-attr]  # a pipe
                    spare.stdin.write(json.dumps(job))  # type: ignore[union-attr]
                break
            except BrokenPipeError:
                spare.wait()
        after = threading.Timer(SECONDS_TO_THE_NEXT, self._load)
        after.daemon = True
        after.start()
        return spare

    def _load(self) -> "subprocess.Popen[str]":
        """Return a process that waits, or will when it has loaded."""
        with self._lock:
            if self._spare is not None and self._spare.poll() is not None:
                self._spare.stdin.close()  # type: ignore[union-attr]  # a pipe
                self._spare = None
            if self._spare is None:
                self._spare = subprocess.Popen(  # noqa: S603  # our own arguments
                    [sys.executable, "-u", "-m", __spec__.name, *self.modules],
                    stdin=subprocess.PIPE,
                    text=True,
                    start_new_session=True,  # NVFLARE ends a job with its whole group
                )
            return self._spare


class StandingProcess(ProcessHandle):  # type: ignore[misc]  # NVFLARE has no types
    """The process of a job, or the one in its place, for NVFLARE to wait for; `start` returns one."""

    def __init__(self, start: "Callable[[], subprocess.Popen[str]]") -> None:
        super().__init__(process=start())
        self.adapter: ProcessAdapter
        self._start, self._ended = start, False

    def terminate(self) -> None:
        """End it for good."""
        self._ended = True
        super().terminate()

    def wait(self) -> None:
        """Wait for an end that is not by a signal from outside."""
        while True:
            begun = time.monotonic()
            super().wait()
            killed = (self.adapter.poll() or 0) < 0
            if self._ended or not killed or time.monotonic() - begun < SECONDS_TO_LIVE:
                return
            self.adapter = ProcessAdapter(process=self._start())


class Rejoining(FLComponent):  # type: ignore[misc]  # NVFLARE has no types
    """At the server: starts the job that runs at a site that has connected since."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def handle_event(self, event_type: str, fl_ctx: Any) -> None:
        """Look whenever a site gives a sign of life, and not twice at once."""
        if event_type == EventType.CLIENT_HEARTBEAT_PROCESSED and self._lock.acquire(
            blocking=False
        ):
            threading.Thread(target=self._look, args=(fl_ctx.get_engine(),), daemon=True).start()

    def _look(self, engine: Any) -> None:
        try:
            for job, client in list(_absent(engine)):
                logger.info("%s joins the job %s", client.name, job.job_id)
                _join(engine, job, client)
        except Exception:  # the next sign of life is another try
            logger.exception("a site could not join the job that runs")
        finally:
            self._lock.release()


def _absent(engine: Any) -> Iterator[tuple[Any, Client]]:
    """Return the jobs that run, each with a site of it that is connected and not in it."""
    for job_id, job in list(engine.job_runner.running_jobs.items()):
        process = engine.run_processes.get(job_id)
        if process is None:
            continue
        (named,) = (extract_participants(names) for names in job.deploy_map.values())
        for client in engine.get_clients():
            if client.name in named and client.token not in process[RunProcessKey.PARTICIPANTS]:
                yield job, client


def _join(engine: Any, job: Any, client: Client) -> None:
    """Give a site a job that runs, and let it start there."""
    with engine.new_context() as fl_ctx:
        fl_ctx.set_prop(FLContextKey.CURRENT_JOB_ID, job.job_id)
        ((app, _),) = job.get_deployment().items()
        message = Message(topic=TrainingTopic.DEPLOY, body=job.get_application(app, fl_ctx))
        for name, value in {
            RequestHeader.REQUIRE_AUTHZ: "true",
            RequestHeader.ADMIN_COMMAND: AdminCommandNames.SUBMIT_JOB,
            RequestHeader.JOB_ID: job.job_id,
            RequestHeader.APP_NAME: app,
        }.items():
            message.set_header(name, value)
        set_message_security_data(message, job, fl_ctx)
        reply = engine.server.admin_server.send_requests_and_get_reply_dict(
            {client.token: message}, timeout_secs=SECONDS_TO_REPLY
        ).get(client.token)
        if reply is None or reply.get_header(MsgHeader.RETURN_CODE, ReturnCode.OK) != ReturnCode.OK:
            raise RuntimeError(f"{client.name} has not taken the job: {reply and reply.body}")
        enough, token = engine.check_client_resources(job, {client.name: {}}, fl_ctx)[client.name]
        if not enough:
            raise RuntimeError(f"{client.name} cannot run the job: {token}")
        process = engine.run_processes[job.job_id]
        others = process[RunProcessKey.PARTICIPANTS].items()
        kept = {number: other for number, other in others if other.name != client.name}
        process[RunProcessKey.PARTICIPANTS] = {**kept, client.token: client}
        engine.start_client_job(job, {client.name: DispatchInfo(app, {}, token)}, fl_ctx)


def wait_for_job(modules: Sequence[str]) -> None:
    """Load modules, wait for a job on standard input, and be its process; end where none will come."""
    for name in modules:
        importlib.import_module(name)
    if not (sent := sys.stdin.read()):
        return
    job = json.loads(sent)
    os.environ.update(job["env"])
    module, *sys.argv[1:] = job["argv"]
    sys.modules.pop(module, None)  # it is run anew, as the main one
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    wait_for_job(sys.argv[1:])
