"""A run in a few lines of text, from its record."""

import math
from collections.abc import Mapping

from coterie.recording.configuration import counted
from coterie.recording.costs import Traffic
from coterie.recording.record import Record
from coterie.recording.result import End
from coterie.reporting.verdict import difference, serves_alone, verdict
from coterie.reporting.whom import listened_to
from coterie.theory.estimates import Estimates


def summary(record: Record, weight: float | None = None) -> list[str]:
    """Return the lines of an ended run's summary, with the peers' weight in the last step where there is one."""
    configuration, end = record.configuration, record.end
    peers = counted(len(configuration.peers), "peer")
    length = length_of(record)
    if "exchanges" not in end.account:
        length += f" of {configuration.optimizer}"
    elif end.account["exchanges"]:
        length = f"in closed form by {length}"
    lines = [verdict(configuration, end).sentence, f"{configuration.rule}, {peers}, {length}"]
    if configuration.choice:
        lines.append(configuration.choice["sentence"])
    lines += [
        line for line in (end.account.get("sentence"), listened_to(configuration, end)) if line
    ]
    if board := leaderboard(end):
        lines.append("leaderboard: " + "; ".join(f"{row['']} {row['loss']}" for row in board))
    if "advice" in end.account:
        lines.append(end.account["advice"])
    if end.stopped:
        lines.append(f"stopped by {end.stopped} at step {end.step} of {configuration.steps}")
    lines.append(_validated(end))
    if end.test:
        lines.append(f"test: {_numbers(end.test)} ({counted(configuration.me.test, 'example')})")
    # else it is that of a model not served
    if weight is not None and not (serves_alone(end) or end.account):
        lines.append(f"weight on peers in the last step: {weight:.3g}")
    lines += _constants(record)
    lines += _traffic(configuration.me.name, end.traffic) + promised(end)
    if end.left_out:
        counts = (
            f"{name} in {counted(sum(reasons.values()), 'step')}"
            for name, reasons in end.left_out.items()
        )
        lines.append("left out: " + ", ".join(counts))
    return lines + end.shown()


def length_of(record: Record) -> str:
    """Say how long a run was: in steps, in rounds, or in exchanges where no optimizer took a step."""
    exchanges = record.end.account.get("exchanges")
    if exchanges is None:
        return counted(record.end.step, record.configuration.counts.removesuffix("s"))
    return counted(exchanges, "exchange") if exchanges else "no steps"


def beside_alone(record: Record) -> list[dict[str, str]]:
    """Return a row for each number of the model served, with that of the model trained alone where there is one."""
    comparison, end = record.end.comparison, record.end
    if comparison is not None:
        return [
            {
                "": name,
                "served": shown(one.ours),
                "alone": shown(one.alone),
                "difference": difference(one),
            }
            for name, one in comparison.measures.items()
        ]
    which, measures = end.judged_on
    return [{"": f"{which} {name}", "served": shown(value)} for name, value in measures.items()]


def shown(value: float) -> str:
    """Return a number in four digits, or a dash for what cannot be computed, of a class that is missing."""
    return "–" if math.isnan(value) else f"{value:.4g}"


def leaderboard(end: End) -> list[dict[str, str]]:
    """Return a row for each model that was judged: a constant, alone, what peers give, and what is served.

    Example:
        >>> from coterie.recording.result import Comparison, Difference
        >>> loss = Difference(ours=0.5, alone=0.75, error=0.1, less_is_better=True)
        >>> compared = Comparison(on="40 test examples", examples=40, measures={"loss": loss})
        >>> [row["loss"] for row in leaderboard(End(step=1, best_step=1, constant=1.5, comparison=compared))]
        ['1.5', '0.75', '0.5']
    """
    board = end.account.get("leaderboard")
    if board is None:
        loss = None if end.comparison is None else end.comparison.measures.get("loss")
        if loss is None:
            return []
        losses = {"constant": end.constant, "alone": loss.alone, "served": loss.ours}
        return [{"": name, "loss": f"{one:.4g}"} for name, one in losses.items() if one is not None]
    rows = []
    for name, one in board.items():
        row = {"": name, "loss": f"{one['loss']:.4g}"}
        if any("difference" in each for each in board.values()):
            row["served less this"] = (
                f"{one['difference']:+.3g} ({one['low']:+.2g} to {one['high']:+.2g})"
                if "difference" in one
                else ""
            )
        if "test" in one:
            row["on the test set"] = f"{one['test']:.4g}"
        rows.append({**row, "weight": f"{one['weight']:.0%}"})
    return rows


def promised(end: End) -> list[str]:
    """Say what private peers promise about each of their examples, and how much of it is spent.

    Example:
        >>> a, b = ({"epsilon": 4.0, "delta": 1e-5, "clip": 1.0, "spent": spent} for spent in (1.5, 1.25))
        >>> promised(End(step=1, best_step=1, promises={"a": a, "b": b}))
        ['private: 2 peers promise ε = 4 at δ = 1e-05 for each example; spent over all their runs:
        1.25 to 1.5']
    """
    alike: dict[str, dict[str, float]] = {}
    for name, one in end.promises.items():
        alike.setdefault(f"ε = {one['epsilon']:g} at δ = {one['delta']:g}", {})[name] = one["spent"]
    lines = []
    for promise, by_name in alike.items():
        least, most = (f"{value:.3g}" for value in (min(by_name.values()), max(by_name.values())))
        spent = least if least == most else f"{least} to {most}"
        who, whose = f"{len(by_name)} peers promise", "their"
        if len(by_name) == 1:
            who, whose = f"{next(iter(by_name))} promises", "its"
        lines.append(
            f"private: {who} {promise} for each example; spent over all {whose} runs: {spent}"
        )
    return lines


def _validated(end: End) -> str:
    """Say what was held out, and what the model served has there."""
    if end.validation:
        which = "validation" if end.account else f"best at step {end.best_step} by validation loss"
        return f"{which}: {_numbers(end.validation)}"
    judged = "the model is the last one"
    if end.account:
        judged = "the own examples judged, each where it was not seen"
    return f"nothing held out for validation: {judged}"


def _constants(record: Record) -> list[str]:
    """Say in a line what was measured."""
    configuration = record.configuration
    if configuration.not_measured:
        return [f"constants not measured: {configuration.not_measured}"]
    if configuration.estimates:
        return [Estimates.from_plain(configuration.estimates).sentence()]
    return []


def _traffic(me: str, traffic: Mapping[str, Traffic]) -> list[str]:
    """Say what travelled, where something did."""
    if not traffic:
        return []
    own, rounding = traffic[me], max(each.rounding for each in traffic.values())
    rounded = f"; rounded on the way by {rounding:.2g} at most" if rounding else ""
    # not always timed
    computed = f"computed for {own.seconds_computing:.3g} s, " if own.seconds_computing else ""
    return [
        f"sent {own.bytes_sent / 1e6:.3g} MB and received {own.bytes_received / 1e6:.3g} MB;"
        f" {computed}waited for the peers for {own.seconds_waiting:.3g} s{rounded}"
    ]


def _numbers(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {shown(value)}" for name, value in values.items())
