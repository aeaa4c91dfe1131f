"""Everybody's runs taken together: which of them can be, and the loops that take them."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from coterie.choosing.adaptive.adaptive_learner import AdaptiveLearner
from coterie.choosing.sampled_gradients import OnParts
from coterie.engines.in_process.engine import InProcess
from coterie.errors import UserCodeError
from coterie.everyone.folders import align
from coterie.learners.spec import RunSpec
from coterie.recording.progress import Show, interruptible, progress_bar
from coterie.training.loop import Loop
from coterie.training.ongoing import OngoingRun
from coterie.training.run import Run
from coterie.training.together import HeldOutTogether, SharedAnswers
from coterie.training.train import SetUpRun, set_up


def train_together(specs: Sequence[RunSpec]) -> tuple[dict[int, Run], list[UserCodeError], bool]:
    """Train everybody's runs, as one program as far as they can be.

    The others after them, one by one.

    Return the runs by place, errors of the runs' own code, and whether Ctrl-C was pressed.
    """
    began = time.monotonic()
    with ExitStack() as held, ExitStack() as stack:
        if specs[0].resume:
            align([Path(spec.out) for spec in specs if spec.out is not None])
        runs: list[SetUpRun] = []
        known: dict[str, OnParts] = {}  # everybody starts at the same point
        for spec in specs:
            like = runs[0].ongoing.learner.engine if runs else None
            engine = partial(InProcess, like=like) if isinstance(like, InProcess) else InProcess
            own = replace(spec, progress=False, engine=engine)
            runs.append(set_up(own, held, stack, known=known))
        places = _members(runs)
        interrupted = stack.enter_context(interruptible())
        bar = progress_bar(specs[0].progress, f"{len(runs)} users", specs[0].steps)
        show = stack.enter_context(bar)
        ended, errors, stopped = dict[int, Run](), list[UserCodeError](), False
        for group in [places, *([place] for place in range(len(runs)) if place not in places)]:
            if group and not stopped:
                loop = _loop(runs, group, show, began)
                loop.run(interrupted)
                ended, errors, stopped = ended | loop.ended, errors + loop.errors, loop.stopped
                began = time.monotonic()
        return ended, errors, stopped


def _loop(runs: Sequence[SetUpRun], places: Sequence[int], show: Show, began: float) -> Loop:
    """Return the loop of some runs, whose records are begun: one that goes by itself, or those that go together."""
    ongoing = {place: runs[place].ongoing for place in places}
    asks, held_out, together = None, None, f"one program of {len(places)}"
    engine = ongoing[places[0]].learner.engine
    if len(places) == 1:
        why = _why_by_itself(ongoing[places[0]]) or "its peers are not those of the others"
        together = f"by itself: {why}"
    elif isinstance(engine, InProcess):
        copies = engine.copies()
        asks = SharedAnswers(copies, [run.spec for run in runs], ongoing)
        held_out = HeldOutTogether(copies, list(ongoing.values()))
    for place in places:
        run = runs[place]
        replace(run, configuration=replace(run.configuration, runs=together)).open()
    return Loop(ongoing, asks=asks, held_out=held_out, show=show, began=began)


def _members(runs: Sequence[SetUpRun]) -> list[int]:
    """Return the places of the runs that can be taken together.

    None where there are fewer than two.
    """
    everybody = {run.spec.me.name for run in runs}
    able = []
    for place, run in enumerate(runs):
        all_others = {peer.name for peer in run.spec.peers} == everybody - {run.spec.me.name}
        if all_others and _why_by_itself(run.ongoing) is None:
            able.append(place)
    return able if len(able) > 1 else []


def _why_by_itself(run: OngoingRun) -> str | None:
    """Say why a run cannot be taken together with others; None where it can."""
    learner, rule = run.learner, run.learner.followed
    adaptive = isinstance(learner, AdaptiveLearner)
    able = adaptive or getattr(rule, "in_rows", False)
    reasons = {
        f"`{type(rule).__name__}` is not a rule that runs can follow together": not able,
        "every peer's gradient is needed": (not adaptive and getattr(rule, "needs_rows", False)),
        "its steps are captured": run.captured is not None,
        "it has exchanges of its own (`exchange_every`, `local_steps`)": (
            not adaptive and max(learner.exchange_every, learner.local_steps) > 1
        ),
    }
    told = next((reason for reason, holds in reasons.items() if holds), None)
    return learner.engine.capabilities.not_stacked or told
