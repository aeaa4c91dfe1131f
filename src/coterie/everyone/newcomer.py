"""A user who comes later.

Whose model it begins from, and its run, in which the others only give gradients.
"""

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import nn

from coterie.engines.in_process.sampler import check_alike
from coterie.errors import DataError, KnobError, blaming
from coterie.evaluation.comparing import paired_error
from coterie.evaluation.evaluate import example_losses
from coterie.everyone.folders import folder_names
from coterie.everyone.runs import Runs
from coterie.recording.claim import claimed
from coterie.training.setup import check
from coterie.training.train import train_spec
from coterie.users.user import USER, Loss, User, check_names

POOLED = "the pooled model"


def joined(runs: Runs, user: User, steps: int | None) -> Runs:
    """Return the runs with one for a newcomer; see `Runs.join`."""
    USER("user", user)
    if not runs.specs:
        raise DataError(
            "nobody has trained yet whom a newcomer could join; call `train_everyone` first"
        )
    check_names([*(spec.me.name for spec in runs.specs), user.name])
    if user.is_stream:
        raise DataError(
            f"{user.name!r} is a stream, and examples judge which model a newcomer begins from;"
            " give some"
        )
    like = runs.specs[0]
    check_alike(like.me, user.examples, f"the newcomer {user.name!r}")
    with blaming(f"a model that the newcomer {user.name!r} could begin from, on its examples,"):
        whose, model = best_start(runs, user, like.loss)
    spec = replace(like, model=model, me=user, peers=[each.me for each in runs.specs])
    if any(each.rule is not like.rule and each.rule != like.rule for each in runs.specs):
        raise KnobError(
            "everybody has a rule of its own, so that none is the newcomer's; train with one"
            " for all"
        )
    spec = spec if steps is None else replace(spec, steps=steps)
    check(spec)
    not_trained = {name: why for name, why in runs.not_trained.items() if name != user.name}
    place = folder_names([*runs.runs, *not_trained, user.name])[user.name]
    with nullcontext() if runs.out is None else claimed(runs.out):
        run = train_spec(replace(spec, out=runs.out and runs.out / place))
    return replace(
        runs,
        runs={**runs.runs, user.name: run},
        not_trained=not_trained,
        began_from={**runs.began_from, user.name: whose},
        specs=[*runs.specs, replace(spec, model=like.model)],
    )


def best_start(runs: Runs, user: User, loss: Loss) -> tuple[str, nn.Module]:
    """Return whose model a newcomer begins from, and the model.

    Nobody's model has seen its training examples, so that these judge all of them alike. The pooled
    model is left only for one that is better on them by more than a standard error, paired by
    example: of many models one looks best by chance.
    """
    losses = {
        name: example_losses(run.model, loss, user.examples) for name, run in runs.runs.items()
    }
    losses = {name: each for name, each in losses.items() if bool(each.isfinite().all())}
    best = min(losses, key=lambda name: float(losses[name].mean()), default=None)
    if runs.pooled is None:
        if best is None:
            raise DataError(
                f"nobody's model gives a finite loss on the examples of {user.name!r}; look at"
                " those"
            )
        return f"the model of {best}", runs.models[best]
    if best is not None:
        change = losses[best] - example_losses(runs.pooled.model, loss, user.examples)
        if not torch.isfinite(change).all() or float(change.mean()) < -paired_error(change):
            return f"the model of {best}", runs.models[best]
    return POOLED, runs.pooled.model
