"""Train a personal model for every user, each with all others as its peers."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from coterie.arguments import listed
from coterie.choosing import Chooser, MakesLearner
from coterie.engines.in_process.sampler import check_alike
from coterie.errors import DataError, GradientError, KnobError, UserCodeError
from coterie.evaluation.metrics import Metric
from coterie.everyone.folders import POOLED, folder_names
from coterie.everyone.pooled import pooled_spec
from coterie.everyone.runs import Runs
from coterie.everyone.together import train_together
from coterie.gradients.norm_bound import FACTOR
from coterie.learners.spec import STEPS, OptimizerLike, RunSpec, Scheduler
from coterie.recording.claim import claimed
from coterie.rules import Rule
from coterie.training.checking import check
from coterie.training.run import Run, RunOptions
from coterie.training.train import train_spec
from coterie.users.user import USER, Loss, User, check_names

Followed: TypeAlias = Rule | Chooser | MakesLearner
"""What a user's model may follow."""

_USERS = listed(USER, "a list of `coterie.User`s")


def train_everyone(
    model: nn.Module,
    loss: Loss,
    users: Sequence[User],
    rule: Followed | Mapping[str, Followed] | None = None,
    *,
    optimizer: OptimizerLike | None = None,
    lr: float | None = None,
    scheduler: Scheduler | None = None,
    clip_norm: float | None = None,
    steps: int = STEPS,
    batch_size: int = 32,
    seed: int = 0,
    device: torch.device | str | None = None,
    metrics: Mapping[str, Metric] | None = None,
    evaluate_every: int | None = None,
    norm_bound: float | None = FACTOR,
    exchange_every: int = 1,
    local_steps: int = 1,
    out: Path | str | None = None,
    trackers: Sequence[str] | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
    progress: bool | None = None,
    guard: Literal["auto", "held-out", "off"] = "auto",
    measure: bool | None = None,
    threads: int | None = None,
) -> Runs:
    """Train a personal model for every user: each is user 0 of a run in which all others are its peers.

    Everybody gets what `train` gives it: weights of its own over the others, a guard, and a verdict on its own
    held-out examples. All start from the same model. Beside theirs there is one on everybody's examples alike, for
    users who join later. See docs/everyone.md.

    Args:
        model: as in `train`; everybody starts from its parameters.
        loss: as in `train`.
        users: everybody. To the others a user gives gradients of its training examples only; its validation and
            test sets are its own.
        rule: as in `train`, the same for all, or by name one for each; `AdaptiveAveraging` when None.
        optimizer: as in `train`.
        lr: as in `train`.
        scheduler: as in `train`.
        clip_norm: as in `train`.
        steps: how many steps everybody takes.
        batch_size: as in `train`.
        seed: as in `train`, the same for all.
        device: as in `train`.
        metrics: as in `train`.
        evaluate_every: as in `train`.
        norm_bound: as in `train`.
        exchange_every: as in `train`.
        local_steps: as in `train`.
        out: a folder, in which every user has one of its own, named after it.
        trackers: as in `train`.
        checkpoint_every: as in `train`.
        resume: go on with what is in `out`.
        progress: as in `train`.
        guard: as in `train`.
        measure: as in `train`.
        threads: as in `train`.

    Example:
        >>> import coterie
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
    users = _USERS("users", users)
    check_names([user.name for user in users])
    how: dict[str, Any] = {"optimizer": optimizer, "lr": lr, "scheduler": scheduler, "clip_norm": clip_norm}
    how |= {"norm_bound": norm_bound, "metrics": metrics, "evaluate_every": evaluate_every}
    how |= {"exchange_every": exchange_every, "local_steps": local_steps}
    how |= {"steps": steps, "batch_size": batch_size, "seed": seed, "device": device}
    rules = _rules(rule, users)
    able, left_out = _able([RunSpec(model, loss, me, (), rules[me.name], **how) for me in users])
    specs = [replace(spec, peers=[user for user in able if user is not spec.me]) for spec in able.values()]
    options = RunOptions(out, trackers, checkpoint_every, resume, progress, guard, measure, threads=threads)
    with nullcontext() if options.out is None else claimed(Path(options.out)):
        return _trained(specs, options, left_out)


def _rules(rule: Followed | Mapping[str, Followed] | None, users: Sequence[User]) -> dict[str, Followed | None]:
    """Return everybody's rule."""
    names = [user.name for user in users]
    if not isinstance(rule, Mapping):
        return dict.fromkeys(names, rule)
    for name in set(names) ^ set(rule):
        raise KnobError(f"`rule` must name every user and nobody else, but {name!r} is in one only")
    return dict(rule)


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
    for user, why in min(unlike.values(), key=len, default={}).items():  # as the one whom most are like sees it
        left_out[user.name] = why
        del able[user]
    for name, why in left_out.items():
        warnings.warn(f"the user {name!r} is left out: {why}", stacklevel=3)
    if len(able) < 2:
        told = "".join(f"; {name!r} is left out: {why}" for name, why in left_out.items())
        raise DataError(f"`users` must be two or more who can learn from each other, got {len(able)}{told}")
    return able, {name: f"left out: {why}" for name, why in left_out.items()}


def _unlike(me: User, other: User) -> str | None:
    """Say why another's examples could not be passed through a user's model; None where they could."""
    try:
        check_alike(me, other.examples, repr(other.name))
    except DataError as error:
        return str(error)
    return None


def _trained(specs: Sequence[RunSpec], options: RunOptions, left_out: Mapping[str, str]) -> Runs:
    """Train everybody together, at last on everybody's examples; after Ctrl-C others are not begun."""
    names = [spec.me.name for spec in specs]
    out = None if options.out is None else Path(options.out)
    places = folder_names(names)
    folders = [None if out is None else out / places[name] for name in names]
    by_place, errors, stopped = train_together(specs, options, folders)
    runs = {name: by_place[place] for place, name in enumerate(names) if place in by_place}
    pooled, of_all = None, pooled_spec(specs)
    if of_all is not None and not stopped and not errors:
        try:
            pooled = train_spec(of_all, replace(options, out=out and out / POOLED))
        except GradientError as error:  # the others must not be lost with it
            pooled = error.run
        except UserCodeError as error:
            pooled = error.run if isinstance(error.run, Run) else None
            errors.append(error)
    waiting = {name: "not begun, because of Ctrl-C" for name in names if name not in runs}
    result = Runs(runs, pooled, {**left_out, **waiting}, specs=specs, options=options)
    if errors:
        raise UserCodeError(f"{errors[0]}; all runs are in this error's `run`", result) from errors[0].__cause__
    return result
