"""User 0's command: submit the job, show how it goes, and go on with what is left where NVFLARE ends it early."""

import io
import logging
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
from coterie.federation.lead import NEWS, REFUSED, RUN, SUMMARY, lead, rule_of
from coterie.federation.provisioning import LEAD
from coterie.federation.settings import MIXTURE, lead_settings, members_of
from coterie.federation.watching import NewLines, RunWatch
from coterie.federation.workspace import require_nvflare
from coterie.recording.progress import progress_bar

SECONDS_BETWEEN_POLLS = 0.5
"""How long to wait from one poll of the run to the next."""


def supervise(
    folder: Path,
    *,
    resume: bool = False,
    wait: float = 60.0,
    attempts: int = 5,
    show_line: Callable[[str], None] = print,
    progress: bool | None = None,
) -> str:
    """Submit the job, follow it to its end, and return the result in a few lines.

    NVFLARE ends a whole job when one site's worker dies. What is left is then submitted again, from
    the last checkpoint, to the sites that are still there; with none left, user 0 goes on alone.
    `wait` is how many seconds the server and the sites have to connect, `attempts` how often the
    job is submitted.
    """
    settings = lead_settings(folder)
    out = folder / RUN
    if (out / "record.jsonl").exists() and not resume:
        raise KnobError(f"{out} already holds a run; go on with it (`--resume`), or move it away")
    for name in (SUMMARY, REFUSED):
        (out / name).unlink(missing_ok=True)
    job = write_job(folder.absolute() / "job")
    # a closed form is one step, whose exchanges are told as news
    steps = 1 if settings.training.rule == MIXTURE else settings.training.steps
    has_bar = sys.stderr.isatty() if progress is None else progress
    why = f"{attempts} jobs have ended early"
    with progress_bar(has_bar, type(rule_of(settings)).__name__, steps) as show:
        show_new = RunWatch(out, steps, show, show_line, tenths=not has_bar)
        for attempt in range(attempts):
            with session_of(folder / "lead", wait) as session:
                if not _connected(session, len(settings.sites), wait):
                    if not attempt:
                        raise CoterieError(
                            f"no site is connected after {wait:g} s; they start with `federate"
                            " site`"
                        )
                    why = "no site is left"
                    break
                status = watch(session, session.submit_job(str(job)), out, show_new)
            show_new()
            if (out / REFUSED).exists():
                raise KnobError((out / REFUSED).read_text(encoding="utf-8"))
            if (out / SUMMARY).exists():
                return (out / SUMMARY).read_text(encoding="utf-8")
            show_line(
                f"job {attempt + 1} has ended early ({status}); going on from the last checkpoint"
            )
    show_line(f"{why}; going on alone")
    lead(folder, LocalSites({}))
    show_new()
    return (out / SUMMARY).read_text(encoding="utf-8")


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


def _connected(session: Any, wanted: int, wait: float) -> int:
    """Wait until all sites are connected, or the time is over, and return how many are."""
    until = time.monotonic() + wait
    while True:
        n_connected = len(session.get_system_info().client_info)
        if n_connected >= wanted or time.monotonic() > until:
            return n_connected
        time.sleep(SECONDS_BETWEEN_POLLS)


def watch(session: Any, job: str, out: Path, show_new: Callable[[], None]) -> str:
    """Show the run until NVFLARE says that the job has ended, and return how.

    Ctrl-C ends the job.
    """
    try:
        while True:
            show_new()
            try:
                status = str(session.get_job_meta(job).get("status"))
            except Exception as error:  # NVFLARE raises several kinds
                return f"the server does not answer, {type(error).__name__}"
            if status.startswith("FINISHED") or any(
                (out / name).exists() for name in (SUMMARY, REFUSED)
            ):  # NVFLARE takes some seconds more to clear up
                return status
            time.sleep(SECONDS_BETWEEN_POLLS)
    except KeyboardInterrupt:  # else the sites would go on giving gradients, with nobody to see it
        session.abort_job(job)
        raise


SECONDS_A_SIGN_OF_LIFE_LASTS = 25.0
"""NVFLARE's clients send one every 10 seconds."""


def follow_everyone(
    folder: Path,
    *,
    resume: bool = False,
    wait: float = 60.0,
    attempts: int = 5,
    show_line: Callable[[str], None] = print,
) -> str:
    """Submit the job, follow it to its end, and return in a few lines who has ended.

    Where a job ends and somebody has not, because NVFLARE has ended it early or a site was lost, it
    is submitted again once that site is there: whoever has ended answers it. `wait` is how many
    seconds the server and the sites have to connect, `attempts` how often the job is submitted.
    """
    names, out = members_of(folder), folder / RUN
    if (out / MEMBERS).exists() and not resume:
        raise KnobError(
            f"{out} already holds a run; go on with it (`--resume`), or move it away, as all sites"
            " must"
        )
    job, left = write_job(folder.absolute() / "job", everyone=True), list(names)
    news = NewLines(out / NEWS)

    def show_new() -> None:
        for line in news():
            show_line(line)

    for attempt in range(attempts):
        with session_of(folder / "lead", wait) as session:
            here = _members_connected(session, names, wait)
            if not attempt and len(here) < 2:
                raise CoterieError(
                    f"{len(here)} of {len(names)} sites are connected after {wait:g} s; they start"
                    " with `federate site`"
                )
            if attempt and not here & set(left):
                break
            for name in (SUMMARY, REFUSED):  # by which an end is known
                (out / name).unlink(missing_ok=True)
            status = watch(session, session.submit_job(str(job)), out, show_new)
        show_new()
        if (out / REFUSED).exists():
            raise KnobError((out / REFUSED).read_text(encoding="utf-8"))
        left = unfinished(out) if (out / MEMBERS).exists() else left
        if (out / SUMMARY).exists() and not left:
            return (out / SUMMARY).read_text(encoding="utf-8")
        show_line(f"job {attempt + 1} has ended ({status}), without the end of {', '.join(left)}")
    raise CoterieError(
        f"no end of {', '.join(left)}; its `run/refused.txt` or `nvflare/nvflare.log` may say why."
        f" Once it is started (`coterie federate site`), `coterie federate run {folder} --resume`"
        " goes on"
    )


def _members_connected(session: Any, names: Sequence[str], wait: float) -> set[str]:
    """Wait until all sites are connected, or the time is over, and return those that are."""
    until = time.monotonic() + wait
    while True:
        oldest = time.time() - SECONDS_A_SIGN_OF_LIFE_LASTS
        clients = session.get_system_info().client_info
        here = {
            client.name for client in clients if (client.last_connect_time or 0) > oldest
        } & set(names)
        if len(here) == len(names) or time.monotonic() > until:
            return here
        time.sleep(SECONDS_BETWEEN_POLLS)
