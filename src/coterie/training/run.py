"""What training tells while it goes and gives when it ends."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from torch import nn

from coterie.recording.record import Record
from coterie.recording.result import Point
from coterie.reporting.summary import summary
from coterie.rules import State


class Stopped(StrEnum):
    """What ended a run before its last step."""

    CTRL_C = "Ctrl-C"
    HOOK = "a hook"
    NOT_FINITE = "a non-finite gradient"
    PEER_LOST = "a lost peer"


@dataclass(frozen=True)
class Step:
    """What hooks are told of a step.

    Args:
        step: how many steps are done.
        own_loss: user 0's loss on its batch.
        weight: the weight that the peers had.
        left_out: the peers left out of this step, each with the reason.
        point: what was recorded after this step, where something was.
        model: the model as it is now.
        best_loss: the least validation loss so far, where something is held out.
        tau: gives each peer's share of the peers' weight, by name.
    """

    step: int
    own_loss: float
    weight: float
    left_out: Mapping[str, str]
    point: Point | None
    model: nn.Module
    best_loss: float | None = None
    tau: Callable[[], Mapping[str, float]] = dict


@dataclass(frozen=True)
class Run:
    """The result of `train`.

    Args:
        model: the personal model: the best by validation loss, or the last where nothing is held out.
        record: configuration and curves.
        state: the rule's state after the last step.
        step: how many steps were taken.
        best_step: the step that `model` is of.
        test: loss and metrics on user 0's test set, looked at once, when the run has ended; else empty.
        stopped: what ended the run early, or None.
        models: the last personal model of every user, by name, where a method makes them for all.
    """

    model: nn.Module
    record: Record
    state: State
    step: int
    best_step: int
    test: Mapping[str, float]
    stopped: Stopped | None = None
    models: Mapping[str, nn.Module] = field(default_factory=dict)

    def summary(self) -> str:
        """Return the run in a few lines of text."""
        return "\n".join(summary(self.record, self.state.get("weight")))

    def report(self, path: Path | str) -> Path:
        """Write one HTML page with the run's curves, weights, measured constants and plan, and return its path.

        Args:
            path: of the file; it needs no other.
        """
        from coterie.reporting.run_page import write_run_page

        return write_run_page(Path(path), self.record, self.summary().splitlines())
