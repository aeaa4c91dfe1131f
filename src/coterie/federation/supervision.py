"""User 0's command: submit a job, show how it goes, and go on with what is left where it ends early."""

import contextlib
import io
import logging
import math
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from coterie.engines.remote.sites import LocalSites
from coterie.errors import CoterieError, FileError, KnobError
from coterie.federation.lead import RECORD, REFUSED, RUN, SUMMARY, lead, rule_of
from coterie.federation.provisioning import LEAD
from coterie.federation.relay import MEMBERS, progress_of, unfinished
from coterie.federation.settings import MIXTURE, lead_settings, members_of
from coterie.federation.watching import RunWatch
from coterie.federation.workspace import SECONDS_BETWEEN_SIGNS_OF_LIFE, require_nvflare, write_job
from coterie.recording.claim import claimed
from coterie.recording.progress import progress_bar
from coterie.recording.record import Record

SECONDS_BETWEEN_POLLS = 0.5
"""How long to wait from one poll of the run to the next."""

SECONDS_TO_RECONNECT = 10.0
"""How long sites that were connected before have to connect again, once one of them is."""

SECONDS_A_SIGN_OF_LIFE_LASTS = 4 * SECONDS_BETWEEN_SIGNS_OF_LIFE

NO_SERVER = (
    "the server does not answer: {}; start it (`coterie federate server {}`); a run that was on its"
    " way goes on with `coterie federate run --resume`"
)

RUNS_ALREADY = (
    "a job of {0} runs already: follow it (`coterie federate attach {0}`), or end it (`coterie"
    " federate stop {0}`)"
)

SUBMITTED = "submitted.txt"
"""NVFLARE's name of the job that runs, in user 0's folder; it is to end where this is gone."""


def follow(
    folder: Path,
    *,
    resume: bool = False,
    attach: bool = False,
    wait: float = 60.0,
    attempts: int = 5,
    show_line: Callable[[str], None] = print,
    progress: bool | None = None,
) -> str:
    """Submit the job, follow it to its end, and return the result in a few lines.

    Sites come and go in a job. Where it ends early, as with the server's process, what is left is
    submitted again, from the last checkpoint. With no site left, user 0 goes on alone. Where
    everyone trains, who has ended answers the others.

    Args:
        folder: user 0's, or the server's where everyone trains.
        resume: go on with the run that is there.
        attach: follow the job that runs already.
        wait: how many seconds the server and the sites have to connect.
        attempts: how many jobs in a row may end early with no step further.
        show_line: shows a line.
        progress: whether to draw a bar; None: where standard error is a terminal.
    """
    members, out = members_of(folder), folder / RUN
    if (out / (MEMBERS if members else RECORD)).exists() and not (resume or attach):
        what = " as all sites must" if members else ""
        raise KnobError(
            f"{out} already holds a run; go on with it (`--resume`), or move it away{what}"
        )
    if members:
        names, title, steps, has_bar = members, "", 1, False
    else:
        settings = lead_settings(folder)
        names, title = settings.sites, type(rule_of(settings)).__name__
        # a closed form is one step, whose exchanges are told as news
        steps = 1 if settings.training.rule == MIXTURE else settings.training.steps
        has_bar = sys.stderr.isatty() if progress is None else progress
    with contextlib.ExitStack() as life:
        if not attach:
            try:
                life.enter_context(claimed(folder / "job"))  # by whom the first job is submitted
            except FileError as error:
                raise KnobError(RUNS_ALREADY.format(folder)) from error
        show = life.enter_context(progress_bar(has_bar, title, steps))
        show_new = RunWatch(out, steps, show, show_line, tenths=not has_bar)
        jobs = Jobs(folder, names, wait, show_new, show_line, everyone=bool(members))
        if jobs.bring_to_end(attempts, attach=attach):
            return (out / SUMMARY).read_text(encoding="utf-8")
        if members:
            raise CoterieError(
                f"no end of {', '.join(jobs.left())}; its `run/refused.txt` or"
                " `nvflare/nvflare.log` may say why. Once it is started (`coterie federate site`),"
                f" `coterie federate run {folder} --resume` goes on"
            )
        show_line(f"{jobs.why}; going on alone")
        lead(folder, LocalSites({}))
        show_new()
    return (out / SUMMARY).read_text(encoding="utf-8")


def stop(folder: Path, wait: float = 60.0) -> bool:
    """End the job that runs, and say whether there was one; whoever follows it ends too."""
    path = folder / SUBMITTED
    if not path.exists():
        return False
    job = path.read_text(encoding="utf-8").strip()
    try:
        with session_of(folder / "lead", wait) as session, _errors_told(folder):
            runs = not _status(session, job).startswith("FINISHED")
            path.unlink(missing_ok=True)
            if runs:
                session.abort_job(job)
            return runs
    finally:
        path.unlink(missing_ok=True)  # whoever follows it submits no other


def _runs(session: Any, job: str) -> bool:
    """Say whether a job has not ended; a server that was started anew may not know it."""
    with contextlib.suppress(Exception):  # NVFLARE raises several kinds
        return not _status(session, job).startswith("FINISHED")
    return False


class Jobs:
    """The jobs of one run, one after the other."""

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        wait: float,
        show_new: Callable[[], None],
        show_line: Callable[[str], None],
        *,
        everyone: bool = False,
    ) -> None:
        self.folder, self.names, self.wait = folder, names, wait
        self.show_new, self.show_line, self.everyone = show_new, show_line, everyone
        self.out, self.path, self.why = folder / RUN, folder / SUBMITTED, ""
        self.job = self.path.read_text(encoding="utf-8").strip() if self.path.exists() else ""

    def bring_to_end(self, attempts: int, *, attach: bool) -> bool:
        """Submit jobs until the run has ended, and say whether it has; so many may end early."""
        if attach and not self.job:
            raise KnobError(f"no job of {self.folder} runs; `coterie federate run` submits one")
        if not attach and self.job:
            with session_of(self.folder / "lead", self.wait) as session:
                if _runs(session, self.job):
                    raise KnobError(RUNS_ALREADY.format(self.folder))
        failed, begun, furthest = 0, attach, self._step()
        try:
            while failed < attempts:
                with _signals_interrupt(), session_of(self.folder / "lead", self.wait) as session:
                    if not attach and not self._begin(session, again=begun):
                        self.why = "no site is left"
                        return False
                    attach, begun = False, True
                    status = self._watch(session)
                self.show_new()
                if (self.out / REFUSED).exists():
                    raise KnobError((self.out / REFUSED).read_text(encoding="utf-8"))
                left = self.left()
                if (self.out / SUMMARY).exists() and not left:
                    return True
                failed = failed + 1 if self._step() <= furthest else 1
                furthest = max(furthest, self._step())
                without = f", without the end of {', '.join(left)}" if left else ""
                going_on = "going on from the last checkpoint"
                self.show_line(f"the job has ended early ({status}){without}; {going_on}")
        finally:
            self.path.unlink(missing_ok=True)
        self.why = f"{attempts} jobs in a row have ended early"
        return False

    def _step(self) -> int:
        """Return the step of the run's last point; where everyone trains, the sum of all."""
        if self.everyone:
            return sum(progress_of(self.out).values()) if (self.out / MEMBERS).exists() else -1
        points = Record.load(self.out / RECORD).points if (self.out / RECORD).exists() else []
        return points[-1].step if points else -1

    def left(self) -> list[str]:
        """Return who has not ended, where everyone trains."""
        if not self.everyone:
            return []
        return unfinished(self.out) if (self.out / MEMBERS).exists() else list(self.names)

    def _begin(self, session: Any, *, again: bool) -> bool:
        """Submit a job to those who are connected, and say whether they are enough."""
        patience = SECONDS_TO_RECONNECT if again else self.wait
        here = _connected(session, self.names, self.wait, patience)
        left = self.left()  # where everyone trains, who begins needs another one
        enough = len(here & set(left or self.names)) >= (2 if len(left) == len(self.names) else 1)
        if not enough and not again:
            raise CoterieError(
                f"{len(here)} of {len(self.names)} sites are connected after {self.wait:g} s; they"
                " start with `federate site`"
            )
        if enough:
            for name in (SUMMARY, REFUSED):  # by which an end is known
                (self.out / name).unlink(missing_ok=True)
            job = write_job(self.folder.absolute() / "job", self.names, everyone=self.everyone)
            self.job = str(session.submit_job(str(job)))
            self.path.write_text(self.job, encoding="utf-8")
        return enough

    def _watch(self, session: Any) -> str:
        """Show the run until NVFLARE says that the job has ended, and return how; Ctrl-C ends it."""
        try:
            while True:
                self.show_new()
                try:
                    status = _status(session, self.job)
                except Exception as error:  # NVFLARE raises several kinds
                    return f"the server does not answer, {type(error).__name__}"
                if any((self.out / name).exists() for name in (SUMMARY, REFUSED)):
                    return status  # NVFLARE takes some seconds more to clear up
                if status.startswith("FINISHED"):
                    return status
                self._check_wanted()
                time.sleep(SECONDS_BETWEEN_POLLS)
        except KeyboardInterrupt:
            # else the sites would go on giving gradients, with nobody to see it
            with contextlib.suppress(Exception):  # the server, or the job, may be gone
                session.abort_job(self.job)
            raise

    def _check_wanted(self) -> None:
        """End where `stop` has taken the job's name away."""
        if not self.path.exists():
            raise KeyboardInterrupt


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Let the end of this process, and of its terminal, end the job as Ctrl-C does."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    kinds = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {}
    with contextlib.suppress(ValueError):  # not in the main thread: whoever has it decides
        before = {kind: signal.signal(kind, interrupt) for kind in kinds}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


@contextmanager
def session_of(kit: Path, wait: float) -> Iterator[Any]:
    """Connect to the server as the one who may submit jobs."""
    require_nvflare()
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    logging.getLogger("nvflare").setLevel(logging.CRITICAL)  # what it has to say is raised as well
    try:
        with redirect_stdout(io.StringIO()):  # it says that it connects
            session = new_secure_session(LEAD, str(kit.absolute()), timeout=wait)
    except Exception as error:  # NVFLARE raises several kinds
        raise CoterieError(NO_SERVER.format(error, kit.parent)) from error
    try:
        yield session
    finally:
        session.close()


@contextmanager
def _errors_told(folder: Path) -> Iterator[None]:
    """Say in words that the server has gone in the middle of a question."""
    try:
        yield
    except Exception as error:  # NVFLARE raises several kinds
        told = f"{type(error).__name__}: {error}"
        raise CoterieError(NO_SERVER.format(told, folder)) from error


def _heard(session: Any, names: Collection[str]) -> set[str]:
    """Return the sites that the server hears now; a clock that went back makes nobody alive."""
    now, clients = time.time(), session.get_system_info().client_info
    ages = {client.name: abs(now - (client.last_connect_time or 0)) for client in clients}
    return {name for name in names if ages.get(name, math.inf) < SECONDS_A_SIGN_OF_LIFE_LASTS}


def _connected(session: Any, names: Sequence[str], wait: float, patience: float) -> set[str]:
    """Return the sites that are connected: all, those after `patience` seconds, or after `wait` none."""
    begun = time.monotonic()
    while True:
        here = _heard(session, names)
        waited = time.monotonic() - begun
        if here >= set(names) or waited > (patience if here else wait):
            return here
        time.sleep(SECONDS_BETWEEN_POLLS)


def connected_sites(folder: Path, names: Sequence[str], wait: float) -> set[str]:
    """Return which sites the server hears now."""
    with session_of(folder / "lead", wait) as session, _errors_told(folder):
        return _heard(session, names)


def _status(session: Any, job: str) -> str:
    return str(session.get_job_meta(job).get("status"))
