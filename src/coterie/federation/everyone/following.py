"""The organiser's command where everyone trains: submit the job, show how it goes, and go on with what is left."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError, KnobError
from coterie.federation.everyone.relay import MEMBERS, unfinished
from coterie.federation.job import write_job
from coterie.federation.lead import NEWS, REFUSED, RUN, SUMMARY
from coterie.federation.settings import members_of
from coterie.federation.supervision import SECONDS_BETWEEN_POLLS, session_of, watch
from coterie.federation.watching import NewLines

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

    Where a job ends and somebody has not, because NVFLARE has ended it early or a site was lost, it is submitted
    again once that site is there: whoever has ended answers it. `wait` is how many seconds the server and the sites
    have to connect, `attempts` how often the job is submitted.
    """
    names, out = members_of(folder), folder / RUN
    if (out / MEMBERS).exists() and not resume:
        raise KnobError(
            f"{out} already holds a run; go on with it (`--resume`), or move it away, as all sites must"
        )
    job, left = write_job(folder.absolute() / "job", everyone=True), list(names)
    news = NewLines(out / NEWS)

    def show_new() -> None:
        for line in news():
            show_line(line)

    for attempt in range(attempts):
        with session_of(folder / "lead", wait) as session:
            here = _connected(session, names, wait)
            if not attempt and len(here) < 2:
                raise CoterieError(
                    f"{len(here)} of {len(names)} sites are connected after {wait:g} s; they start with "
                    "`federate site`"
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
        f"no end of {', '.join(left)}; its `run/refused.txt` or `nvflare/nvflare.log` may say why. Once it is "
        f"started (`coterie federate site`), `coterie federate run {folder} --resume` goes on"
    )


def _connected(session: Any, names: Sequence[str], wait: float) -> set[str]:
    """Wait until all sites are connected, or the time is over, and return those that are."""
    until = time.monotonic() + wait
    while True:
        oldest = time.time() - SECONDS_A_SIGN_OF_LIFE_LASTS
        clients = session.get_system_info().client_info
        here = {client.name for client in clients if (client.last_connect_time or 0) > oldest} & set(names)
        if len(here) == len(names) or time.monotonic() > until:
            return here
        time.sleep(SECONDS_BETWEEN_POLLS)
