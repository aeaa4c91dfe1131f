"""What training tells while it goes and gives when it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import nn

from coterie.record import Record
from coterie.rules import State


@dataclass(frozen=True)
class Step:
    """What a callback is told after a step.

    Args:
        step: how many steps are done.
        own_loss: user 0's loss on its batch.
        weight: the weight that the peers had.
        left_out: the peers left out of this step, each with the reason.
        point: what was recorded after this step, where something was.
        model: the model as it is now.
    """

    step: int
    own_loss: float
    weight: float
    left_out: Mapping[str, str]
    point: Mapping[str, Any] | None
    model: nn.Module


Callback: TypeAlias = Callable[[Step], object]
"""Called after every step; training stops when it returns True."""


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
        stopped: what ended the run early ("Ctrl-C", "a callback", "a non-finite gradient"), or None.
        models: the last personal model of every user, by name, where a method makes them for all.
    """

    model: nn.Module
    record: Record
    state: State
    step: int
    best_step: int
    test: Mapping[str, float]
    stopped: str | None = None
    models: Mapping[str, nn.Module] = field(default_factory=dict)

    def summary(self) -> str:
        """Return the run in a few lines of text."""
        config, end = self.record.configuration, self.record.end
        lines = [f"{config['rule']}, {len(config['peers'])} peers, {self.step} steps of {config['optimizer']}"]
        if config.get("choice"):
            lines.append(config["choice"]["sentence"])
        if self.stopped:
            lines.append(f"stopped by {self.stopped} at step {self.step} of {config['steps']}")
        held_out = self._validation()
        if held_out:
            lines.append(f"best at step {self.best_step} by validation loss: {_numbers(held_out)}")
        else:
            lines.append("nothing held out for validation: the model is the last one")
        if self.test:
            lines.append(f"test: {_numbers(self.test)} ({config['me']['test']} examples)")
        if "weight" in self.state:
            lines.append(f"weight on peers in the last step: {self.state['weight']:.3g}")
        lines.append(self._verdict())
        if end.get("left_out"):
            counts = (f"{name} in {sum(why.values())} steps" for name, why in end["left_out"].items())
            lines.append("left out for bad gradients: " + ", ".join(counts))
        return "\n".join(lines)

    def _verdict(self) -> str:
        """Say whether collaboration helped, as far as the guard knows."""
        end, config = self.record.end, self.record.configuration
        if "served" not in end:
            return f"guard {config['guard']}"
        change, error, n = end["difference"], end["error"], config["me"]["validation"]
        word = "helped" if change < -2 * error else "hurt" if change > 2 * error else "made no clear difference"
        which = "trained with peers" if end["served"] == "collaborative" else "trained alone"
        return (
            f"collaboration {word}: validation loss {change:+.3g} ± {error:.2g} against alone ({n} examples, one "
            f"standard error, paired); the model {which} is served"
        )

    def _validation(self) -> dict[str, float]:
        points = (point for point in self.record.points if point["step"] == self.best_step)
        best = next(points, {})
        if self.record.end.get("served") == "alone":
            return {"loss": best["alone_validation_loss"]}
        return {k.removeprefix("validation_"): v for k, v in best.items() if k.startswith("validation_")}


def _numbers(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())
