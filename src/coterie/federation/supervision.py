"""User 0's command: submit jobs, show how they go, and go on with what is left where one ends early."""

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
from coterie.errors import CoterieError, KnobError
from coterie.federation.everyone.relay import MEMBERS, unfinished
from coterie.federation.job import write_job
from coterie.federation.lead import NEXT, RECORD, REFUSED, RUN, SUMMARY, lead, rule_of
from coterie.federation.provisioning import LEAD
from coterie.federation.settings import MIXTURE, lead_settings, members_of
from coterie.federation.watching import Joined, RunWatch
from coterie.federation.workspace import SECONDS_BETWEEN_SIGNS_OF_LIFE, require_nvflare
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

SUBMITTED = "submitted.txt"
"""NVFLARE's names of the jobs that run, in user 0's folder; they are to end where it is gone."""


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

    NVFLARE ends a whole job when one site's worker dies, and a site that starts anew is in no job
    that runs. What is left is then submitted again, from the last checkpoint, to the sites that are
    there. With none left, user 0 goes on alone. Where everyone trains, who has ended answers the
    others.

    Args:
        folder: user 0's, or the server's where everyone trains.
        resume: go on with the run that is there.
        attach: follow the job that runs already.
        wait: how many seconds the server and the sites have to connect.
        attempts: how many jobs in a row may end early with no step further; those ended for a site
            that is back do not count.
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
    with progress_bar(has_bar, title, steps) as show:
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
    jobs = _submitted(path)
    path.unlink()  # whoever follows it submits no other
    with session_of(folder / "lead", wait) as session, _errors_told(folder):
        running = [job for job in jobs if not _status(session, job).startswith("FINISHED")]
        for job in running:
            session.abort_job(job)
    return bool(running)


def _submitted(path: Path) -> list[str]:
    """Return NVFLARE's names of the job that runs, and of one that is to go on from it."""
    return path.read_text(encoding="utf-8").splitlines()


def _running(session: Any, jobs: Sequence[str]) -> list[str]:
    """Return which of these jobs have not ended; a server that was started anew may not know one."""
    states = {}
    for job in jobs:
        with contextlib.suppress(Exception):  # NVFLARE raises several kinds
            states[job] = _status(session, job)
    return [job for job, state in states.items() if not state.startswith("FINISHED")]


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
        self.joined = Joined(folder / "server", names)
        self.asked = set(names)  # who is in the job
        self.pause, self.next_at = SECONDS_TO_RECONNECT, 0.0  # of a job that goes on from another

    def bring_to_end(self, attempts: int, *, attach: bool) -> bool:
        """Submit jobs until the run has ended, and say whether it has; so many may end early."""
        if attach and not (self.path.exists() and _submitted(self.path)):
            raise KnobError(f"no job of {self.folder} runs; `coterie federate run` submits one")
        if not attach and self.path.exists():
            with session_of(self.folder / "lead", self.wait) as session:
                if _running(session, _submitted(self.path)):
                    raise KnobError(
                        f"a job of {self.folder} runs already: follow it (`coterie federate attach"
                        f" {self.folder}`), or end it (`coterie federate stop {self.folder}`)"
                    )
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
                self.show_line(
                    f"the job has ended early ({status}){without}; going on from the last"
                    " checkpoint"
                )
        finally:
            self.path.unlink(missing_ok=True)
        self.why = f"{attempts} jobs in a row have ended early"
        return False

    def _step(self) -> int:
        """Return the step of the run's last point."""
        points = Record.load(self.out / RECORD).points if (self.out / RECORD).exists() else []
        return points[-1].step if points else -1

    def left(self) -> list[str]:
        """Return who has not ended, where everyone trains."""
        if not self.everyone:
            return []
        return unfinished(self.out) if (self.out / MEMBERS).exists() else list(self.names)

    def _begin(self, session: Any, *, again: bool) -> bool:
        """Submit a job to those who are connected, and say whether they are enough."""
        here = _connected(
            session, self.names, self.wait, SECONDS_TO_RECONNECT if again else self.wait
        )
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
            self.asked = set(here)
            self.path.write_text(f"{self._submit(session, here)}\n", encoding="utf-8")
        return enough

    def _submit(self, session: Any, here: Collection[str]) -> str:
        """Submit a job to these sites, and return NVFLARE's name of it."""
        self.joined()
        self.joined.names.clear()
        job = write_job(self.folder.absolute() / "job", sorted(here), everyone=self.everyone)
        return str(session.submit_job(str(job)))

    def _note(self, *jobs: str) -> None:
        """Write down the jobs that run, unless `stop` has taken the file away."""
        with contextlib.suppress(FileNotFoundError), self.path.open("r+", encoding="utf-8") as file:
            file.truncate()
            file.write("".join(f"{job}\n" for job in jobs))

    def _watch(self, session: Any) -> str:
        """Show the run until NVFLARE says that the job has ended, and return how.

        A site that has joined since a job began is in no job. What is left is submitted anew, with
        all who are here; the job ends once the next one waits for that. Ctrl-C ends all.
        """
        (job, *later), asked_later = _submitted(self.path), self.asked
        try:
            while True:
                self.show_new()
                try:
                    states = [_status(session, each) for each in (job, *later)]
                    here = _heard(session, self.names)
                except Exception as error:  # NVFLARE raises several kinds
                    return f"the server does not answer, {type(error).__name__}"
                if any((self.out / name).exists() for name in (SUMMARY, REFUSED)):
                    return states[0]  # NVFLARE takes some seconds more to clear up
                over = [state.startswith("FINISHED") for state in states]
                if all(over):
                    return states[0]
                _check_wanted(self.path)
                if later and (over[0] or (self.out / NEXT).exists()):
                    self._abort(session, job)
                    job, later, self.asked = later[0], [], asked_later
                    self.pause = SECONDS_TO_RECONNECT
                    self._note(job)
                elif any(over):  # the next one has not begun: another try, later each time
                    later, self.next_at = [], time.monotonic() + self.pause
                    self.pause *= 2
                    self._note(job)
                back = self.joined() | (here - self.asked)
                if back and not later and self._has_begun() and time.monotonic() >= self.next_at:
                    names = ", ".join(sorted(back))
                    self.show_line(f"back: {names}; going on in a job with all that are here")
                    (self.out / NEXT).unlink(missing_ok=True)
                    self.asked, asked_later = self.asked - back, here | back
                    later = [self._submit(session, asked_later)]
                    self._note(job, *later)
                time.sleep(SECONDS_BETWEEN_POLLS)
        except KeyboardInterrupt:
            later += [job]  # else the sites would go on giving gradients, with nobody to see it
            raise
        finally:
            self._abort(session, *later)

    @staticmethod
    def _abort(session: Any, *jobs: str) -> None:
        for job in jobs:
            with contextlib.suppress(Exception):  # the server, or the job, may be gone
                session.abort_job(job)

    def _has_begun(self) -> bool:
        return (self.out / (MEMBERS if self.everyone else RECORD)).exists()


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


def _check_wanted(path: Path) -> None:
    """End where `stop` has taken the job's name away."""
    if not path.exists():
        raise KeyboardInterrupt


def _status(session: Any, job: str) -> str:
    return str(session.get_job_meta(job).get("status"))
