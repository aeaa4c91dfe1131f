"""A process with all that a job needs loaded, which waits for one: a job then starts at once.

NVFLARE starts a process for every job. Loading torch and the rest takes most of its time.
"""

import importlib
import json
import os
import runpy
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.job_launcher_spec import JobHandleSpec
from nvflare.app_common.job_launcher.process_launcher import ProcessHandle, ProcessJobLauncher
from nvflare.utils import job_launcher_utils

SECONDS_TO_THE_NEXT = 5.0
"""After the start of a job, so that loading for the next does not slow it down."""

COMMAND = {
    "server": job_launcher_utils.generate_server_command,
    "site": job_launcher_utils.generate_client_command,
}


class SpareLauncher(ProcessJobLauncher):  # type: ignore[misc]  # NVFLARE has no types
    """Starts the process of a job, of which NVFLARE's own ends with this one.

    Args:
        whose: "server" or "site".
        modules: what is loaded before there is a job, all of it installed here.
    """

    def __init__(self, whose: str, modules: Sequence[str]) -> None:
        super().__init__()
        self.whose, self.modules = whose, list(modules)
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
        return ProcessHandle(process=spare)

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
