"""Train a personal model for every user, each with all others as its peers."""

import copy
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from torch import nn

from coterie.arguments import listed, takes_fields_of
from coterie.choosing import Mixture
from coterie.choosing.adaptive.adaptive_learner import AdaptiveLearner
from coterie.choosing.chooser import with_a_sample
from coterie.choosing.mixture import ClosedForm
from coterie.choosing.sampled_gradients import OnParts
from coterie.engines.in_process.engine import InProcess
from coterie.engines.in_process.sampler import check_alike
from coterie.errors import DataError, GradientError, KnobError, UserCodeError
from coterie.everyone.folders import POOLED, align, folder_names
from coterie.everyone.runs import Runs
from coterie.learners.spec import LOSS, MODEL, RunSettings, RunSpec
from coterie.recording.claim import claimed
from coterie.recording.progress import Show, interruptible, progress_bar
from coterie.rules import Alone
from coterie.training.algorithm import Followed
from coterie.training.loop import Loop, OngoingRun
from coterie.training.run import Run
from coterie.training.together import HeldOutTogether, SharedAnswers
from coterie.training.train import check, set_up, train_spec, with_named_rule
from coterie.users.examples import Examples, InMemory
from coterie.users.trees import form, joined
from coterie.users.user import USER, Loss, User, check_names


@dataclass(frozen=True, eq=False)
class EveryoneSpec(RunSettings):
    """Everybody's runs, described. The fields are the arguments of `coterie.train_everyone`.

    Args:
        model: Any module; everybody starts from its parameters. It is not changed.
        loss: The mean loss of a batch from (output, target).
        users: Everybody. To the others a user gives gradients of its training examples only;
            its validation and test sets are its own.
        rule: As in `train`, the same for all, or by name one for each; when None, the default
            of `train`.
    """

    model: Annotated[nn.Module, MODEL]
    loss: Annotated[Loss, LOSS]
    users: Annotated[Sequence[User], listed(USER, "a list of `coterie.User`s")]
    rule: Followed | str | Mapping[str, Followed | str] | None = None

    def runs(self) -> list[RunSpec]:
        """Return each user's run, in which nobody is a peer yet."""
        check_names([user.name for user in self.users])
        rules = _rules(self.rule, self.users)
        settings = {each.name: getattr(self, each.name) for each in fields(RunSettings)}
        return [
            RunSpec(self.model, self.loss, me, (), rules[me.name], **settings) for me in self.users
        ]


@takes_fields_of(EveryoneSpec)
def train_everyone(spec: EveryoneSpec) -> Runs:
    """Train a personal model for every user.

    Each is user 0 of a run in which all others are its peers. In closed form each of more than 257
    users asks a sample of 256 others, or of as many as `sample` says.

    Everybody gets what `train` gives it: weights of its own over the others, a guard, and a verdict
    on its own held-out examples. All start from the same model. Beside theirs there is one on
    everybody's examples alike, for users who join later. In the folder `out` every user has one of
    its own, named after it. See docs/everyone.md.

    Example:
        >>> import coterie
        >>> import torch
        >>> inputs = torch.eye(4).repeat(5, 1)
        >>> held_out = inputs[:4], inputs[:4].sum(1, keepdim=True)
        >>> names = ("Bern", "Basel", "Chur")
        >>> users = [User(name, inputs, inputs.sum(1, keepdim=True), test=held_out) for name in names]
        >>> rule = coterie.WeightedAveraging(alpha=0.5)
        >>> runs = coterie.train_everyone(nn.Linear(4, 1), nn.functional.mse_loss, users, rule, lr=0.1, steps=100)
        >>> runs.weights.loc["Bern"].to_dict()
        {'Bern': 0.0, 'Basel': 0.5, 'Chur': 0.5}
        >>> sorted(runs.models)
        ['Basel', 'Bern', 'Chur']
    """
    able, left_out = _able(spec.runs())
    runs = [_with_others(run, list(able)) for run in able.values()]
    out = None if spec.out is None else Path(spec.out)
    with nullcontext() if out is None else claimed(out):
        return _trained(runs, out, left_out)


MOST_ASKED = 256
"""How many others a user asks in closed form at most, where `sample` does not say it.

A prior over users is known about as well from so many as from all, and their work does not grow
with the square of their number.
"""


def _with_others(spec: RunSpec, everybody: Sequence[User]) -> RunSpec:
    """Return a user's run with all others as its peers; in closed form with a sample of them."""
    spec = replace(spec, peers=[user for user in everybody if user is not spec.me])
    few = with_a_sample(replace(spec, sample=spec.sample or MOST_ASKED))
    if len(few.peers) < len(spec.peers):
        few = with_named_rule(few)  # all users' examples would be looked at for each
        if isinstance(few.rule, Mixture) and few.rule.fallback(few) is None:
            return few
    return with_named_rule(spec)


def _rules(
    rule: Followed | str | Mapping[str, Followed | str] | None, users: Sequence[User]
) -> Mapping[str, Followed | str | None]:
    """Return everybody's rule."""
    names = [user.name for user in users]
    if not isinstance(rule, Mapping):
        return dict.fromkeys(names, rule)
    for name in set(names) ^ set(rule):
        raise KnobError(f"`rule` must name every user and nobody else, but {name!r} is in one only")
    return rule


def _able(specs: Sequence[RunSpec]) -> tuple[dict[User, RunSpec], dict[str, str]]:
    """Return the users who can learn, and the others, each told in a warning, with the reason."""
    able, left_out = {}, {}
    for spec in specs:
        try:
            check(spec)
            able[spec.me] = spec
        except DataError as error:
            left_out[spec.me.name] = str(error)
    for user, why in _unlike_most(list(able)).items():
        left_out[user.name] = why
        del able[user]
    for name, why in left_out.items():
        warnings.warn(f"the user {name!r} is left out: {why}", stacklevel=3)
    if len(able) < 2:
        others = "".join(f"; {name!r} is left out: {why}" for name, why in left_out.items())
        raise DataError(
            f"`users` must be two or more who can learn from each other, got {len(able)}{others}"
        )
    return able, {name: f"left out: {why}" for name, why in left_out.items()}


def _unlike_most(users: Sequence[User]) -> dict[User, str]:
    """Say who could not be passed through the model of the one whom most are like, and why."""
    alike, unlike = dict[Any, list[User]](), dict[User, str]()
    for user in users:
        held = user.examples
        if not isinstance(held, InMemory):
            return {}  # what has to be read may be like anything
        alike.setdefault((form(held.inputs), form(held.targets)), []).append(user)
    for user in users if len(alike) > 1 else ():
        try:
            check_alike(max(alike.values(), key=len)[0], user.examples, repr(user.name))
        except DataError as error:
            unlike[user] = str(error)
    return unlike


def _trained(specs: Sequence[RunSpec], out: Path | None, left_out: Mapping[str, str]) -> Runs:
    """Train everybody together, at last on everybody's examples.

    After Ctrl-C others are not begun.
    """
    names = [spec.me.name for spec in specs]
    places = folder_names(names)
    specs = [replace(spec, out=out and out / places[spec.me.name]) for spec in specs]
    by_place, errors, stopped = train_together(specs)
    runs = {name: by_place[place] for place, name in enumerate(names) if place in by_place}
    pooled, of_all = None, pooled_spec(specs)
    if of_all is not None and not stopped and not errors:
        try:
            pooled = train_spec(replace(of_all, out=out and out / POOLED))
        except GradientError as error:  # the others must not be lost with it
            pooled = error.run
        except UserCodeError as error:
            pooled = error.run if isinstance(error.run, Run) else None
            errors.append(error)
    waiting = {name: "not begun, because of Ctrl-C" for name in names if name not in runs}
    result = Runs(runs, pooled, {**left_out, **waiting}, specs=specs, out=out)
    if errors:
        raise UserCodeError(f"{errors[0]}; all runs are in this error's `run`", result) from errors[
            0
        ].__cause__
    return result


def train_together(specs: Sequence[RunSpec]) -> tuple[dict[int, Run], list[UserCodeError], bool]:
    """Train everybody's runs, as one program as far as they can be.

    The others after them, one by one.

    Return the runs by place, errors of the runs' own code, and whether Ctrl-C was pressed.
    """
    began = time.monotonic()
    ended, errors, stopped = dict[int, Run](), list[UserCodeError](), False

    def go(runs: Mapping[int, OngoingRun]) -> bool:
        """Take the steps of some runs; return whether Ctrl-C was pressed."""
        nonlocal began
        loop = _loop(runs, specs, show, began)
        loop.run(interrupted)
        ended.update(loop.ended)
        errors.extend(loop.errors)
        began = time.monotonic()
        return loop.stopped

    with ExitStack() as held, ExitStack() as stack:
        if specs[0].resume:
            align([Path(spec.out) for spec in specs if spec.out is not None])
        interrupted = stack.enter_context(interruptible())
        bar = progress_bar(specs[0].progress, f"{len(specs)} users", specs[0].steps)
        show = stack.enter_context(bar)
        waiting, like = dict[int, OngoingRun](), _over_everybody(specs)
        known: dict[str, OnParts] = {}  # everybody starts at the same point
        for place, spec in enumerate(specs):
            if stopped := stopped or interrupted():
                break
            engine = InProcess if like is None else partial(InProcess, like=like)
            with ExitStack() as its_own:
                own = replace(spec, progress=False, engine=engine)
                run = set_up(own, its_own, its_own, known=known)
                if like is None and isinstance(run.learner.engine, InProcess):
                    like = run.learner.engine
                if isinstance(run.learner, ClosedForm):  # of many users none is held ready
                    stopped = go({place: run})
                else:
                    waiting[place] = run
                    held.enter_context(its_own.pop_all())
        members = _members(waiting, len(specs))
        alone = [{place: run} for place, run in waiting.items() if place not in members]
        for group in [members, *alone]:
            if group and not stopped:
                stopped = go(group)
        return ended, errors, stopped


def _over_everybody(specs: Sequence[RunSpec]) -> InProcess | None:
    """Return an engine over all users, where each asks only some; None where each asks all others."""
    first, *others = specs
    if len(first.peers) == len(others):
        return None
    return replace(first, peers=[spec.me for spec in others]).prepared().in_process()


def _loop(
    runs: Mapping[int, OngoingRun], specs: Sequence[RunSpec], show: Show, began: float
) -> Loop:
    """Return the loop of some runs, whose records are begun: one that goes by itself, or those that go together."""
    ask, held_out, together = None, None, f"one program of {len(runs)}"
    first, *others = runs.values()
    engine = first.learner.engine
    if not others:
        why = _why_by_itself(first) or "its peers are not those of the others"
        together = f"by itself: {why}"
    elif isinstance(engine, InProcess):
        copies = engine.copies()
        ask = SharedAnswers(copies, specs, runs).ask
        held_out = HeldOutTogether(copies, list(runs.values())).scores
    for run in runs.values():
        run.configuration = replace(run.configuration, runs=together)
        run.open()
    return Loop(runs, ask=ask, held_out=held_out, show=show, began=began)


def _members(runs: Mapping[int, OngoingRun], users: int) -> dict[int, OngoingRun]:
    """Return the runs that can be taken together; none where there are fewer than two."""
    able = {
        place: run
        for place, run in runs.items()
        if len(run.spec.peers) == users - 1 and _why_by_itself(run) is None
    }
    return able if len(able) > 1 else {}


def _why_by_itself(run: OngoingRun) -> str | None:
    """Say why a run cannot be taken together with others; None where it can."""
    learner, rule = run.learner, run.learner.followed
    adaptive = isinstance(learner, AdaptiveLearner)
    one_by_one = isinstance(learner, AdaptiveLearner) and learner.own is not None
    able = adaptive or getattr(rule, "in_rows", False)
    reasons = {
        f"`{type(rule).__name__}` is not a rule that runs can follow together": not able,
        "every peer's gradient is needed": (not adaptive and getattr(rule, "needs_rows", False)),
        "its copies are trained one after the other": one_by_one,
        "its steps are captured": run.captured is not None,
        "it has exchanges of its own (`exchange_every`, `local_steps`)": (
            not adaptive and max(learner.exchange_every, learner.local_steps) > 1
        ),
    }
    why = next((reason for reason, holds in reasons.items() if holds), None)
    return learner.engine.capabilities.not_stacked or why


def pooled_spec(specs: Sequence[RunSpec]) -> RunSpec | None:
    """Return the run that trains on everybody's examples; None where these are not all in memory.

    Its batches are as large as those of all users together, so that a step costs what a step of one
    user does.
    """
    users = [spec.me for spec in specs]
    examples = _joined([user.examples for user in users])
    if examples is None:
        return None
    all_of = copy.copy(users[0])
    all_of.name, all_of.examples = "everyone", examples
    all_of.validation, all_of.test = (
        _joined([part for part in parts if part is not None])
        for parts in zip(*((user.validation, user.test) for user in users), strict=True)
    )
    size, closed = specs[0].batch_size * len(users), isinstance(specs[0].rule, Mixture)
    rule = Mixture(monotonic_cst=specs[0].rule.monotonic_cst) if closed else Alone()
    return replace(specs[0], me=all_of, peers=(), rule=rule, batch_size=size, exchange_every=1)


def _joined(parts: Sequence[Examples]) -> InMemory | None:
    """Return several sets as one; None where one of them is not in memory, or there is none."""
    held = [part for part in parts if isinstance(part, InMemory)]
    if not held or len(held) < len(parts):
        return None
    return InMemory(joined([part.inputs for part in held]), joined([part.targets for part in held]))
