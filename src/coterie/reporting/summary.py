"""A run in a few lines of text, from its record."""

from collections.abc import Mapping

from coterie.recording.record import Record
from coterie.recording.traffic import Traffic
from coterie.reporting.verdict import verdict
from coterie.theory import plan_for_peers
from coterie.theory.estimates import Estimates
from coterie.theory.phrases import in_short


def summary(record: Record, weight: float | None = None) -> list[str]:
    """Return the lines of an ended run's summary, with the peers' weight in the last step where there is one."""
    configuration, end = record.configuration, record.end
    peers, steps = len(configuration.peers), end.step
    lines = [f"{configuration.rule}, {peers} peers, {steps} steps of {configuration.optimizer}"]
    if configuration.choice:
        lines.append(configuration.choice["sentence"])
    if end.account and end.guard is not None:
        lines.append(end.account["sentence"])
    if end.stopped:
        lines.append(f"stopped by {end.stopped} at step {steps} of {configuration.steps}")
    validation = _validation(record)
    if end.account and validation:
        lines.append(f"validation: {_numbers(validation)}")
    elif end.account:
        lines.append("nothing held out for validation: the own examples judged, each where it was not seen")
    elif validation:
        lines.append(f"best at step {end.best_step} by validation loss: {_numbers(validation)}")
    else:
        lines.append("nothing held out for validation: the model is the last one")
    if end.test:
        lines.append(f"test: {_numbers(end.test)} ({configuration.me.test} examples)")
    if weight is not None:
        lines.append(f"weight on peers in the last step: {weight:.3g}")
    lines += _constants(record)
    lines.append(verdict(record))
    lines += _traffic(configuration.me.name, end.traffic)
    if end.left_out:
        counts = (f"{name} in {sum(reasons.values())} steps" for name, reasons in end.left_out.items())
        lines.append("left out: " + ", ".join(counts))
    return lines


def _constants(record: Record) -> list[str]:
    """Say in two lines what was measured, and what the theory makes of it."""
    configuration = record.configuration
    if configuration.not_measured:
        return [f"constants not measured: {configuration.not_measured}"]
    if not configuration.estimates:
        return []
    estimates, steps = Estimates.from_plain(configuration.estimates), configuration.steps
    advice = in_short(plan_for_peers(estimates.constants(steps), steps))
    return [estimates.sentence(), f"the theory's plan for that: {advice}"]


def _validation(record: Record) -> Mapping[str, float]:
    """Return loss and metrics of the model that is served, on the validation set."""
    best = next((point for point in record.points if point.step == record.end.best_step), None)
    if best is None:
        return {}
    if record.end.guard is not None and record.end.guard.served == "alone" and best.guard is not None:
        return {"loss": best.guard.alone_loss}
    return best.validation


def _traffic(me: str, traffic: Mapping[str, Traffic]) -> list[str]:
    """Say what travelled, where something did."""
    if not traffic:
        return []
    own, rounding = traffic[me], max(each.rounding for each in traffic.values())
    rounded = f"; rounded on the way by {rounding:.2g} at most" if rounding else ""
    return [
        f"sent {own.bytes_sent / 1e6:.3g} MB and received {own.bytes_received / 1e6:.3g} MB; computed for "
        f"{own.seconds_computing:.3g} s, waited for the peers for {own.seconds_waiting:.3g} s{rounded}"
    ]


def _numbers(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())
