"""What training reports while a run goes on, and what it gives when it ends."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from coterie.learners.spec import RunSpec
from coterie.mixture.contributions import Contribution
from coterie.recording.record import Record
from coterie.recording.result import Point
from coterie.reporting.summary import summary
from coterie.reporting.verdict import Verdict, verdict
from coterie.rules import State


class Stopped(StrEnum):
    """What ended a run before its last step."""

    CTRL_C = "Ctrl-C"
    HOOK = "a hook"
    NOT_FINITE = "a non-finite gradient"
    PEER_LOST = "a lost peer"
    USER_CODE = "an error of your own code"


@dataclass(frozen=True)
class Step:
    """What hooks are told of a step."""

    step: int  # how many steps are done
    own_loss: float  # user 0's loss on its batch
    weight: float  # the weight that the peers had
    left_out: Mapping[str, str]  # the peers left out of this step, each with the reason
    point: Point | None  # what was recorded after this step, where something was
    model: nn.Module  # the model as it is now
    best_loss: float | None = None  # the least validation loss so far, where something is held out
    # gives each peer's share of the peers' weight, by name
    tau: Callable[[], Mapping[str, float]] = dict


@dataclass(frozen=True)
class Run:
    """The result of `train`."""

    # the personal model: the best by validation loss, or the last where nothing is held out
    model: nn.Module = field(repr=False)
    record: Record
    state: State = field(repr=False)  # the rule's state after the last step
    step: int  # how many steps were taken
    best_step: int  # the step that `model` is of
    # loss and metrics on the test set, evaluated once, when the run has ended
    test: Mapping[str, float]
    stopped: Stopped | None = None  # what ended the run early
    # of every user, where a method makes them
    models: Mapping[str, nn.Module] = field(default_factory=dict, repr=False)
    # the one trained alone beside it, with which the verdict compares
    alone: nn.Module | None = field(default=None, repr=False)
    # what could not be written to `out`, and why; empty where all of the run is there
    unwritten: str = ""
    # what was asked for, with everybody's examples
    spec: RunSpec | None = field(default=None, repr=False)
    # the loss of each own example under models that did not see it, where the rule fits in folds
    out_of_fold: NDArray[np.float64] | None = field(default=None, repr=False)

    @property
    def verdict(self) -> Verdict:
        """Whether the model is better than the one trained alone, and how sure that is."""
        return verdict(self.record.configuration, self.record.end)

    def summary(self) -> str:
        """Return the run in a few lines of text, the verdict first."""
        missing = (
            [f"Not all of this run is in its folder: {self.unwritten}."] if self.unwritten else []
        )
        return "\n".join([*summary(self.record, self.state.get("weight")), *missing])

    def contributions(
        self, groups: Mapping[str, Sequence[str]] | None = None, permutations: int = 20
    ) -> dict[str, Contribution]:
        """Return what each peer, or each of these groups of peers, adds to user 0's model.

        By name, the change of the out-of-fold loss without it, and its Shapley value over so many
        orders. With N players at most N + 2 + N · `permutations` coalitions, and never more than
        2ᴺ: a fit of a fraction of a second each where the model is linear, and else four runs like
        this one each, from the model as it was given. See docs/contributions.md for what it does
        not say.

        Example:
            >>> import coterie, torch
            >>> inputs = torch.arange(60.0).sin()[:, None]
            >>> targets = 2 * inputs + 0.1 * torch.arange(60.0)[:, None].cos()
            >>> rows = {"me": slice(0, 10), "alike": slice(10, 60)}
            >>> me, peer = (coterie.User(n, inputs[at], targets[at]) for n, at in rows.items())
            >>> loss = torch.nn.functional.mse_loss
            >>> run = coterie.train(torch.nn.Linear(1, 1), loss, me, [peer], measure=False)
            >>> run.contributions()["alike"].shapley.value > 0
            True
        """
        from coterie.errors import KnobError
        from coterie.training.many import contributions_to

        if self.spec is None:
            raise KnobError("this run does not hold its examples; train it in this process")
        return contributions_to(self.spec, groups, permutations)

    def plot(self, *quantities: str) -> Any:
        """Return the curves of the record as a Matplotlib figure.

        The losses where nothing is named.

        Quantities are the columns of `run.record.frame()`; `run.plot().savefig("curves.png")`
        writes a file.
        """
        from coterie.reporting.figures import curves

        return curves(self.record, quantities)

    def report(self, path: Path | str) -> Path:
        """Write one HTML page.

        The verdict, whom the model listens to, the cost, details; and return its path.
        """
        from coterie.reporting.run_page import write_run_page

        return write_run_page(Path(path), self.record, self.state.get("weight"))
