"""User 0's command: submit the job, show how it goes, and go on with what is left where NVFLARE ends it early."""

import io
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from coterie.engines.flare.sites import LocalSites
from coterie.errors import CoterieError, KnobError
from coterie.federation.job import write_job
from coterie.federation.lead import NEWS, REFUSED, RUN, SUMMARY, lead, rule_of
from coterie.federation.provisioning import LEAD
from coterie.federation.settings import lead_settings
from coterie.federation.watching import NewLines
from coterie.federation.workspace import require_nvflare
from coterie.recording.progress import Show, numbers_of, progress_bar
from coterie.recording.record import Record

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

    NVFLARE ends a whole job when one site's worker dies. What is left is then submitted again, from the last
    checkpoint, to the sites that are still there; with none left, user 0 goes on alone. `wait` is how many seconds
    the server and the sites have to connect, `attempts` how often the job is submitted.
    """
    settings = lead_settings(folder)
    out = folder / RUN
    if (out / "record.jsonl").exists() and not resume:
        raise KnobError(f"{out} already holds a run; go on with it (`--resume`), or move it away")
    for name in (SUMMARY, REFUSED):
        (out / name).unlink(missing_ok=True)
    job = write_job(folder.absolute() / "job")
    steps, has_bar = settings.training.steps, sys.stderr.isatty() if progress is None else progress
    with progress_bar(has_bar, type(rule_of(settings)).__name__, steps) as show:
        show_new = _Shown(out, steps, show, show_line, tenths=not has_bar)
        for attempt in range(attempts):
            with _session(folder / "lead", wait) as session:
                if not _connected(session, len(settings.sites), wait):
                    if not attempt:
                        raise CoterieError(
                            f"no site is connected after {wait:g} s; they start with `federate site`"
                        )
                    break
                status = _watch(session, session.submit_job(str(job)), out, show_new)
            show_new()
            if (out / REFUSED).exists():
                raise KnobError((out / REFUSED).read_text(encoding="utf-8"))
            if (out / SUMMARY).exists():
                return (out / SUMMARY).read_text(encoding="utf-8")
            show_line(f"job {attempt + 1} has ended early ({status}); going on from the last checkpoint")
    show_line("no site is left; going on alone")
    lead(folder, LocalSites({}))
    show_new()
    return (out / SUMMARY).read_text(encoding="utf-8")


class _Shown:
    """Show what is new of a run: the lines of its news, and how far it is."""

    def __init__(self, out: Path, steps: int, show: Show, show_line: Callable[[str], None], tenths: bool) -> None:
        self._record, self._news = out / "record.jsonl", NewLines(out / NEWS)
        self._steps, self._show, self._show_line = steps, show, show_line
        self._tenth = 0 if tenths else 11  # how many tenths of the run were told, where there is no bar

    def __call__(self) -> None:
        for line in self._news():
            self._show_line(line)
        points = Record.load(self._record).points if self._record.exists() else []
        if not points:
            return
        last, losses = points[-1], [point.validation["loss"] for point in points if point.validation]
        loss, weight = (math.nan if value is None else value for value in (last.own_loss, last.weight))
        best = min(losses, default=None)
        self._show(last.step, loss, weight, best)
        if 10 * last.step // self._steps > self._tenth:
            self._tenth = 10 * last.step // self._steps
            self._show_line(f"step {last.step} of {self._steps}: {numbers_of(loss, weight, best)}")


@contextmanager
def _session(kit: Path, wait: float) -> Iterator[Any]:
    require_nvflare()
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    logging.getLogger("nvflare").setLevel(logging.CRITICAL)  # what it has to say is raised as well
    try:
        with redirect_stdout(io.StringIO()):  # it says that it connects
            session = new_secure_session(LEAD, str(kit.absolute()), timeout=wait)
    except Exception as error:  # NVFLARE raises several kinds
        raise CoterieError(
            f"the server does not answer: {error}; start it (`coterie federate server {kit.parent}`); a run that "
            "was on its way goes on with `coterie federate run --resume`"
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


def _watch(session: Any, job: str, out: Path, show_new: Callable[[], None]) -> str:
    """Show the run until NVFLARE says that the job has ended, and return how."""
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
