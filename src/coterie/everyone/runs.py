"""What `train_everyone` gives: everybody's run, who listens to whom, and who gains."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from coterie.everyone.gains import Gain, Overall, by_chance, counted, gain_of, overall
from coterie.learners.spec import RunSpec
from coterie.mixture.contributions import Contribution
from coterie.reporting.whom import heard
from coterie.training.run import Run, Stopped
from coterie.users.user import User

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
                peer.name: peer.share for peer in heard(run.record.configuration, run.record.end)
            }
            rows.append([shares.get(name, 0.0) for name in names])
        return pd.DataFrame(rows, index=names, columns=names)

    @property
    def gains(self) -> list[Gain]:
        """What each user has of the others."""
        return [gain_of(name, run) for name, run in self.runs.items()]

    @property
    def overall(self) -> list[Overall]:
        """The mean over all users and the worst-off of them, in the chosen metric and in loss."""
        return overall(self.gains)

    def summary(self) -> str:
        """Return in a few lines who gains and who does not, the mean over users, and the worst-off user."""
        gains = self.gains
        lines = [counted(gains), *map(str, self.overall)]
        lines += [line for line in (by_chance(gains),) if line]
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
        from coterie.everyone.newcomer import joined

        return joined(self, user, steps)

    def report(self, path: Path | str) -> Path:
        """Write one HTML page: who gains, who listens to whom, the cost; and return its path."""
        from coterie.everyone.everyone_page import write_everyone_page

        return write_everyone_page(Path(path), self)


def gifts(given: Mapping[str, Mapping[str, Contribution]]) -> "pd.DataFrame":
    """Return a row for each user, of the Shapley values that others have for it."""
    import pandas as pd

    values = [[one[k].shapley.value if k in one else 0.0 for k in given] for one in given.values()]
    return pd.DataFrame(values, index=list(given), columns=list(given))
