"""What training tells while it goes and gives when it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from coterie.recording.record import Record
from coterie.rules import State
from coterie.theory import plan_for_peers
from coterie.theory.estimates import Estimates
from coterie.theory.phrases import in_short


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
        if config.get("choice") and not self._by_cross_validation:
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
        lines += self._constants()
        lines.append(self._verdict() + self._who())
        lines += _traffic(config["me"]["name"], end.get("traffic", {}))
        if end.get("left_out"):
            counts = (f"{name} in {sum(why.values())} steps" for name, why in end["left_out"].items())
            lines.append("left out: " + ", ".join(counts))
        return "\n".join(lines)

    def report(self, path: Path | str) -> Path:
        """Write one HTML page with the run's curves, weights, measured constants and plan, and return its path.

        Args:
            path: of the file; it needs no other.
        """
        from coterie.reporting.page import write_page
        from coterie.reporting.run_page import sections

        title = f"A model for {self.record.configuration['me']['name']}"
        return write_page(Path(path), title, sections(self.record, self.summary().splitlines()))

    def _constants(self) -> list[str]:
        """Say in two lines what was measured, and what the theory makes of it."""
        found = self.record.configuration.get("estimates", {})
        if "not measured" in found:
            return [f"constants not measured: {found['not measured']}"]
        if not found:
            return []
        estimates, steps = Estimates.from_plain(found), self.record.configuration["steps"]
        advice = in_short(plan_for_peers(estimates.constants(steps), steps))
        return [estimates.sentence(), f"the theory's plan for that: {advice}"]

    def _verdict(self) -> str:
        """Say whether collaboration helped: by the guard, else by cross-validation, as far as either knows."""
        end, config = self.record.end, self.record.configuration
        if "served" in end:
            which = "trained with peers" if end["served"] == "collaborative" else "trained alone"
            n = config["me"]["validation"]
            return (
                f"{_helped(end)}: validation loss {end['difference']:+.3g} ± {end['error']:.2g} against alone ({n} "
                f"examples, one standard error, paired); the model {which} is served"
            )
        if self._by_cross_validation:
            choice = config["choice"]
            best = min(choice["candidates"], key=lambda one: float(one["loss"]))
            return f"{_helped(best)}: {choice['sentence']}" if choice["alpha"] else str(choice["sentence"])
        if config["rule"] == "Alone()":
            return "trained alone"
        return f"whether collaboration helped is not known: guard {config['guard']}"

    @property
    def _by_cross_validation(self) -> bool:
        """Whether cross-validation is all that says if collaboration helped."""
        choice = self.record.configuration.get("choice") or {}
        return "served" not in self.record.end and "candidates" in choice

    def _who(self) -> str:
        """Name the peers with most weight, where weights differ, and those with none."""
        tau, names = self.record.end.get("tau", {}), list(self.record.configuration["peers"])
        if not tau:
            return ""
        most = sorted(tau, key=tau.__getitem__, reverse=True)[:3]
        without = [name for name in names if tau.get(name, 0.0) < 0.001]
        shares = [tau[name] for name in tau if name not in without]
        said = ""
        if max(shares) > 1.01 * min(shares) or len(shares) == 1 < len(names):
            said = "; most weight among peers: " + ", ".join(
                f"{name} {tau[name]:.2g}" for name in most if tau[name]
            )
        if without:
            more = f" and {len(without) - 5} more" if len(without) > 6 else ""
            said += f"; left out: {', '.join(without[: 5 if more else None])}{more}"
        return said

    def _validation(self) -> dict[str, float]:
        points = (point for point in self.record.points if point["step"] == self.best_step)
        best = next(points, {})
        if self.record.end.get("served") == "alone":
            return {"loss": best["alone_validation_loss"]}
        return {k.removeprefix("validation_"): v for k, v in best.items() if k.startswith("validation_")}


def _traffic(me: str, traffic: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Say what travelled, where something did."""
    if not traffic:
        return []
    own, rounding = traffic[me], max(each["rounding"] for each in traffic.values())
    rounded = f"; rounded on the way by {rounding:.2g} at most" if rounding else ""
    return [
        f"sent {own['sent'] / 1e6:.3g} MB and received {own['received'] / 1e6:.3g} MB; computed for "
        f"{own['computing']:.3g} s, waited for the peers for {own['waiting']:.3g} s{rounded}"
    ]


def _numbers(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


def _helped(compared: Mapping[str, float]) -> str:
    change, error = compared["difference"], compared["error"]
    word = "helped" if change < -2 * error else "hurt" if change > 2 * error else "made no clear difference"
    return f"collaboration {word}"
