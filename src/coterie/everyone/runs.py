"""What `train_everyone` gives: everybody's run, who listens to whom, and who gains."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from coterie.everyone.gains import Gain, Overall, by_chance, counted, gain_of, overall
from coterie.reporting.whom import heard
from coterie.training.run import Run, Stopped

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Runs:
    """The result of `train_everyone`: a run for every user, by name."""

    runs: Mapping[str, Run]
    pooled: Run | None = None  # on everybody's examples alike, where these are in memory
    not_trained: Mapping[str, str] = field(default_factory=dict)  # who has no run, and why

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
        """Who listens to whom: in a user's row each other user's share of the weight that its peers have.

        A row of zeros is a user who is served the model trained alone.
        """
        import pandas as pd

        names = list(self.runs)
        rows = []
        for run in self.runs.values():
            shares = {peer.name: peer.share for peer in heard(run.record.configuration, run.record.end)}
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
        lines += [f"{name}: {why}" for name, why in self.not_trained.items()]
        return "\n".join(lines)

    def report(self, path: Path | str) -> Path:
        """Write one HTML page: who gains, who listens to whom, the cost; and return its path."""
        from coterie.everyone.page import write_everyone_page

        return write_everyone_page(Path(path), self.runs, self.weights)
