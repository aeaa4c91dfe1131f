"""User 0's command: submit jobs, show how they go, and go on with what is left where one ends early."""

import contextlib
import io
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from coterie.engines.remote.sites import LocalSites
from coterie.errors import CoterieError, KnobError
from coterie.federation.everyone.relay import MEMBERS, unfinished
from coterie.federation.job import write_job
from coterie.federation.lead import NEWS, RECORD, REFUSED, RUN, SUMMARY, lead, rule_of
from coterie.federation.provisioning import LEAD
from coterie.federation.settings import MIXTURE, lead_settings, members_of
from coterie.federation.watching import Joined, NewLines, RunWatch
from coterie.federation.workspace import require_nvflare
from coterie.recording.progress import progress_bar

SECONDS_BETWEEN_POLLS = 0.5
"""How long to wait from one poll of the run to the next."""

SECONDS_TO_RECONNECT = 10.0
"""How long sites that were connected before have to connect again, once one of them is."""

SECONDS_A_SIGN_OF_LIFE_LASTS = 25.0
"""NVFLARE's clients send one every 10 seconds."""

SUBMITTED = "submitted.txt"
"""NVFLARE's name of the job that runs, in user 0's folder; the job is to end where it is gone."""


def supervise(
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
    there; with none left, user 0 goes on alone.

    Args:
        folder: user 0's.
        resume: go on with the run that is there.
        attach: follow the job that runs already.
        wait: how many seconds the server and the sites have to connect.
        attempts: how many jobs may end early; those ended for a site that is back do not count.
        show_line: shows a line.
        progress: whether to draw a bar; None: where standard error is a terminal.
    """
    settings = lead_settings(folder)
    out = folder / RUN
    if (out / RECORD).exists() and not (resume or attach):
        raise KnobError(f"{out} already holds a run; go on with it (`--resume`), or move it away")
    jobs = _Jobs(folder, settings.sites, wait, attempts, show_line, attach=attach)
    for name in (SUMMARY, REFUSED) if not attach else ():
        (out / name).unlink(missing_ok=True)
    # a closed form is one step, whose exchanges are told as news
    steps = 1 if settings.training.rule == MIXTURE else settings.training.steps
    has_bar = sys.stderr.isatty() if progress is None else progress
    with progress_bar(has_bar, type(rule_of(settings)).__name__, steps) as show:
        show_new = RunWatch(out, steps, show, show_line, tenths=not has_bar)
        for _ in jobs.ended(show_new, lambda here: len(here) >= 1):
            if (out / SUMMARY).exists():
                return (out / SUMMARY).read_text(encoding="utf-8")
    show_line(f"{jobs.why}; going on alone")
    lead(folder, LocalSites({}))
    show_new()
    return (out / SUMMARY).read_text(encoding="utf-8")


def follow_everyone(
    folder: Path,
    *,
    resume: bool = False,
    attach: bool = False,
    wait: float = 60.0,
    attempts: int = 5,
    show_line: Callable[[str], None] = print,
) -> str:
    """Submit the job in which everyone trains, follow it, and return in a few lines who has ended.

    Where a job ends and somebody has not, it is submitted again once that site is there: whoever
    has ended answers it. For the arguments see `supervise`.
    """
    names, out = members_of(folder), folder / RUN
    if (out / MEMBERS).exists() and not (resume or attach):
        raise KnobError(
            f"{out} already holds a run; go on with it (`--resume`), or move it away, as all sites"
            " must"
        )
    left, news = list(names), NewLines(out / NEWS)
    jobs = _Jobs(folder, names, wait, attempts, show_line, attach=attach, everyone=True)

    def show_new() -> None:
        for line in news():
            show_line(line)

    def enough(here: set[str]) -> bool:
        for name in (SUMMARY, REFUSED):  # by which an end is known
            (out / name).unlink(missing_ok=True)
        return len(here) >= 2 if len(left) == len(names) else bool(here & set(left))

    for status in jobs.ended(show_new, enough):
        left[:] = unfinished(out) if (out / MEMBERS).exists() else left
        if (out / SUMMARY).exists() and not left:
            return (out / SUMMARY).read_text(encoding="utf-8")
        show_line(f"a job has ended ({status}), without the end of {', '.join(left)}")
    raise CoterieError(
        f"no end of {', '.join(left)}; its `run/refused.txt` or `nvflare/nvflare.log` may say why."
        f" Once it is started (`coterie federate site`), `coterie federate run {folder} --resume`"
        " goes on"
    )


def stop(folder: Path, wait: float = 60.0) -> bool:
    """End the job that runs, and say whether there was one; whoever follows it ends too."""
    path = folder / SUBMITTED
    if not path.exists():
        return False
    job = path.read_text(encoding="utf-8")
    path.unlink()  # whoever follows it submits no other
    with session_of(folder / "lead", wait) as session:
        running = not _status(session, job).startswith("FINISHED")
        if running:
            session.abort_job(job)
    return running


class _Jobs:
    """The jobs of one run, one after the other."""

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        wait: float,
        attempts: int,
        show_line: Callable[[str], None],
        *,
        attach: bool = False,
        everyone: bool = False,
    ) -> None:
        self.folder, self.names, self.wait, self.attempts = folder, names, wait, attempts
        self.show_line, self.path = show_line, folder / SUBMITTED
        self.why = f"{attempts} jobs have ended early"
        self.first = ""
        if attach:
            if not self.path.exists():
                raise KnobError(f"no job of {folder} runs; `coterie federate run` submits one")
            self.first = self.path.read_text(encoding="utf-8")
        self.job = write_job(folder.absolute() / "job", everyone=everyone)

    def ended(
        self, show_new: Callable[[], None], enough: Callable[[set[str]], bool]
    ) -> Iterator[str]:
        """Yield how each job has ended, as long as there are enough sites for another."""
        failed, started, out = 0, bool(self.first), self.folder / RUN
        try:
            while failed < self.attempts:
                joined = Joined(self.folder / "server", self.names)
                with _signals_interrupt(), session_of(self.folder / "lead", self.wait) as session:
                    if not self.first:
                        patience = SECONDS_TO_RECONNECT if started else self.wait
                        here = _connected(session, self.names, self.wait, patience)
                        if not enough(here):
                            if not started:
                                raise CoterieError(
                                    f"{len(here)} of {len(self.names)} sites are connected after"
                                    f" {self.wait:g} s; they start with `federate site`"
                                )
                            self.why = "no site is left"
                            return
                        joined()
                        joined.names.clear()  # these are in the job
                        self.path.write_text(session.submit_job(str(self.job)), encoding="utf-8")
                    self.first, started = "", True
                    status = watch(session, self.path, out, show_new, joined)
                show_new()
                if (out / REFUSED).exists():
                    raise KnobError((out / REFUSED).read_text(encoding="utf-8"))
                yield status
                if joined.names:
                    back = ", ".join(sorted(joined.names))
                    self.show_line(
                        f"started anew: {back}; going on in a job with all that are here"
                    )
                else:
                    failed += 1
                    self.show_line(
                        f"job {failed} has ended early ({status}); going on from the last checkpoint"
                    )
        finally:
            self.path.unlink(missing_ok=True)


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
        raise CoterieError(
            f"the server does not answer: {error}; start it (`coterie federate server"
            f" {kit.parent}`); a run that was on its way goes on with `coterie federate run"
            " --resume`"
        ) from error
    try:
        yield session
    finally:
        session.close()


def _connected(session: Any, names: Sequence[str], wait: float, patience: float) -> set[str]:
    """Return the sites that are connected: all, those after `patience` seconds, or after `wait` none."""
    begun = time.monotonic()
    while True:
        oldest = time.time() - SECONDS_A_SIGN_OF_LIFE_LASTS
        clients = session.get_system_info().client_info
        here = {client.name for client in clients if (client.last_connect_time or 0) > oldest}
        waited = time.monotonic() - begun
        if here >= set(names) or waited > (patience if here & set(names) else wait):
            return here & set(names)
        time.sleep(SECONDS_BETWEEN_POLLS)


def connected_sites(folder: Path, names: Sequence[str], wait: float) -> set[str]:
    """Return which sites the server hears now."""
    with session_of(folder / "lead", wait) as session:
        return _connected(session, names, 0.0, 0.0)


def watch(session: Any, path: Path, out: Path, show_new: Callable[[], None], joined: Joined) -> str:
    """Show the run until NVFLARE says that the job has ended, and return how.

    Ctrl-C ends the job, and so does a site that has joined since it began: it is in no job yet.
    """
    job = path.read_text(encoding="utf-8")
    try:
        while True:
            show_new()
            try:
                status = _status(session, job)
            except Exception as error:  # NVFLARE raises several kinds
                return f"the server does not answer, {type(error).__name__}"
            if status.startswith("FINISHED") or any(
                (out / name).exists() for name in (SUMMARY, REFUSED)
            ):  # NVFLARE takes some seconds more to clear up
                joined.names.clear()
                return status
            _check_wanted(path)
            if joined() and (out / RECORD).exists():
                session.abort_job(job)
                return status
            time.sleep(SECONDS_BETWEEN_POLLS)
    except KeyboardInterrupt:  # else the sites would go on giving gradients, with nobody to see it
        session.abort_job(job)
        raise


def _check_wanted(path: Path) -> None:
    """End where `stop` has taken the job's name away."""
    if not path.exists():
        raise KeyboardInterrupt


def _status(session: Any, job: str) -> str:
    return str(session.get_job_meta(job).get("status"))
