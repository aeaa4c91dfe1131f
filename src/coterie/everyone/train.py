"""Train a personal model for every user, each with all others as its peers."""

import copy
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated

from torch import nn

from coterie.arguments import listed, takes_fields_of
from coterie.choosing import Mixture
from coterie.choosing.adaptive.adaptive_learner import AdaptiveLearner
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
from coterie.users.trees import joined
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

    Each is user 0 of a run in which all others are its peers.

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
    runs = [
        with_named_rule(replace(run, peers=[user for user in able if user is not run.me]))
        for run in able.values()
    ]
    out = None if spec.out is None else Path(spec.out)
    with nullcontext() if out is None else claimed(out):
        return _trained(runs, out, left_out)


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
    unlike = {me: {other: why for other in able if (why := _unlike(me, other))} for me in able}
    for user, why in min(
        unlike.values(), key=len, default={}
    ).items():  # as the one whom most are like sees it
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


def _unlike(me: User, other: User) -> str | None:
    """Say why another's examples could not be passed through a user's model.

    None where they could.
    """
    try:
        check_alike(me, other.examples, repr(other.name))
    except DataError as error:
        return str(error)
    return None


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
    with ExitStack() as held, ExitStack() as stack:
        if specs[0].resume:
            align([Path(spec.out) for spec in specs if spec.out is not None])
        runs: list[OngoingRun] = []
        known: dict[str, OnParts] = {}  # everybody starts at the same point
        for spec in specs:
            like = runs[0].learner.engine if runs else None
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


def _loop(runs: Sequence[OngoingRun], places: Sequence[int], show: Show, began: float) -> Loop:
    """Return the loop of some runs, whose records are begun: one that goes by itself, or those that go together."""
    ongoing = {place: runs[place] for place in places}
    ask, held_out, together = None, None, f"one program of {len(places)}"
    engine = ongoing[places[0]].learner.engine
    if len(places) == 1:
        why = _why_by_itself(ongoing[places[0]]) or "its peers are not those of the others"
        together = f"by itself: {why}"
    elif isinstance(engine, InProcess):
        copies = engine.copies()
        ask = SharedAnswers(copies, [run.spec for run in runs], ongoing).ask
        held_out = HeldOutTogether(copies, list(ongoing.values())).scores
    for run in ongoing.values():
        run.configuration = replace(run.configuration, runs=together)
        run.open()
    return Loop(ongoing, ask=ask, held_out=held_out, show=show, began=began)


def _members(runs: Sequence[OngoingRun]) -> list[int]:
    """Return the places of the runs that can be taken together.

    None where there are fewer than two.
    """
    everybody = {run.spec.me.name for run in runs}
    able = []
    for place, run in enumerate(runs):
        all_others = {peer.name for peer in run.spec.peers} == everybody - {run.spec.me.name}
        if all_others and _why_by_itself(run) is None:
            able.append(place)
    return able if len(able) > 1 else []


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
