"""What `train_everyone` gives: everybody's run, who listens to whom, who gains; and who joins later."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from coterie.engines.in_process.sampler import check_alike
from coterie.errors import DataError, KnobError, attributing_errors_to
from coterie.evaluation.evaluate import compare, example_losses, paired_error
from coterie.everyone.folders import folder_names
from coterie.everyone.gains import (
    Gain,
    Overall,
    beside_pooled,
    by_chance,
    counted,
    gain_of,
    overall,
)
from coterie.learners.spec import RunSpec
from coterie.mixture.contributions import Contribution
from coterie.recording.claim import claimed
from coterie.recording.result import Difference
from coterie.reporting.whom import peer_shares
from coterie.training.run import Run, Stopped
from coterie.training.train import check, train_spec
from coterie.users.user import USER, Loss, User, check_names

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Runs:
    """The result of `train_everyone`: a run for every user, by name."""

    runs: Mapping[str, Run]
    pooled: Run | None = None  # on everybody's examples alike, where these are in memory
    not_trained: Mapping[str, str] = field(default_factory=dict)  # who has no run, and why
    # of those who joined later, whose model
    began_from: Mapping[str, str] = field(default_factory=dict)
    specs: Sequence[RunSpec] = field(default=(), repr=False)  # what was asked for, of each user
    out: Path | None = field(default=None, repr=False)  # the folder in which everybody has one

    @property
    def models(self) -> dict[str, nn.Module]:
        """Everybody's personal model."""
        return {name: run.model for name, run in self.runs.items()}

    @property
    def stopped(self) -> Stopped | None:
        """What ended the runs early, if anything."""
        every = [*self.runs.values(), *filter(None, [self.pooled])]
        return next((run.stopped for run in every if run.stopped), None)

    @property
    def weights(self) -> "pd.DataFrame":
        """Who listens to whom.

        In a user's row each other user's share of the weight that its peers have.

        A row of zeros is a user who is served the model trained alone, or whose rule gave no
        weights: methods have none.
        """
        import pandas as pd

        names = list(self.runs)
        rows = []
        for run in self.runs.values():
            shares = {
                peer.name: peer.share
                for peer in peer_shares(run.record.configuration, run.record.end)
            }
            rows.append([shares.get(name, 0.0) for name in names])
        return pd.DataFrame(rows, index=names, columns=names)

    @cached_property
    def gains(self) -> list[Gain]:
        """What each user has of the others, and of a model of its own beside the pooled one."""
        specs = {spec.me.name: spec for spec in self.specs}
        return [
            replace(gain_of(name, run), beside_pooled=self._beside_pooled(run, specs.get(name)))
            for name, run in self.runs.items()
        ]

    def _beside_pooled(self, run: Run, spec: RunSpec | None) -> Difference | None:
        """Return the loss of a user's model beside the pooled model's, on its test examples."""
        if self.pooled is None or spec is None or spec.me.test is None or self.pooled.stopped:
            return None
        models = run.model, self.pooled.model
        return compare(*models, spec.loss, spec.me.test, {}, on="test examples").measures["loss"]

    @property
    def overall(self) -> list[Overall]:
        """The mean over all users and the worst-off of them, in the chosen metric and in loss."""
        return overall(self.gains)

    def summary(self) -> str:
        """Return in a few lines who gains and who does not, the mean over users, and the worst-off user."""
        gains = self.gains
        lines = [counted(gains), *map(str, self.overall)]
        lines += [line for line in (by_chance(gains), beside_pooled(gains)) if line]
        lines += [f"{gain.name}: {gain.verdict.sentence}" for gain in gains]
        lines += [
            f"{name} joined later and began from {whose}" for name, whose in self.began_from.items()
        ]
        lines += [f"{name}: {why}" for name, why in self.not_trained.items()]
        return "\n".join(lines)

    def contributions(self, permutations: int = 20) -> "pd.DataFrame":
        """Return who gives what to whom: in a user's row the Shapley value of each other user.

        The sum of a row is what its user has of the others, the sum of a column what its user gives
        them; see `Run.contributions`.
        """
        return gifts(
            {name: run.contributions(None, permutations) for name, run in self.runs.items()}
        )

    def join(self, user: User, *, steps: int | None = None) -> "Runs":
        """Return the runs with one for a user who comes later; nobody else trains again.

        The newcomer's model begins from the pooled one, or from that of the user whose model suits
        its training examples best, where that is better by more than a standard error. Then it is
        trained as everybody was: the others give gradients at its points. Its verdict compares with
        a model trained alone from there.

        Args:
            user: the newcomer, with examples like everybody's; its validation and test sets are its
                own.
            steps: how many steps to take; as many as everybody took when None.

        Example:
            >>> import torch, coterie
            >>> inputs, loss = torch.eye(4).repeat(5, 1), torch.nn.functional.mse_loss
            >>> users = [User(name, inputs, inputs.sum(1, keepdim=True)) for name in ("Bern", "Basel", "Chur")]
            >>> rule = coterie.WeightedAveraging(alpha=0.5)
            >>> runs = coterie.train_everyone(torch.nn.Linear(4, 1), loss, users[:2], rule, lr=0.1, steps=50)
            >>> runs = runs.join(users[2], steps=5)
            >>> list(runs.began_from), sorted(runs.models)
            (['Chur'], ['Basel', 'Bern', 'Chur'])
        """
        return joined(self, user, steps)

    def report(self, path: Path | str) -> Path:
        """Write one HTML page: who gains, who listens to whom, the cost; and return its path."""
        from coterie.everyone.everyone_page import write_everyone_page

        return write_everyone_page(Path(path), self)


def gifts(contributions: Mapping[str, Mapping[str, Contribution]]) -> "pd.DataFrame":
    """Return a row for each user, of the Shapley values that others have for it."""
    import pandas as pd

    values = [
        [one[k].shapley.value if k in one else 0.0 for k in contributions]
        for one in contributions.values()
    ]
    return pd.DataFrame(values, index=list(contributions), columns=list(contributions))


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
    with attributing_errors_to(
        f"a model that the newcomer {user.name!r} could begin from, on its examples,"
    ):
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
