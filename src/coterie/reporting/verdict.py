"""The verdict: whether the model served is better than one trained alone.

Nothing else speaks of that.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from scipy import special
from torch import nn

from coterie.evaluation.evaluate import compare, constant_loss
from coterie.learners.spec import RunSpec
from coterie.mixture.candidates import ALONE_KINDS
from coterie.recording.configuration import Configuration, counted
from coterie.recording.result import Comparison, Difference, End

LEVEL = 0.05
"""How often a verdict of better or worse may be made by chance, both measures counted."""

Finding = Literal["better", "worse", "mixed", "unclear", "alone", "unknown", "constant"]

HEADLINES: dict[Finding, str] = {
    "better": "Better than alone",
    "worse": "Worse than alone",
    "mixed": "Better in one measure, worse in the other",
    "unclear": "No clear difference to training alone",
    "alone": "Trained alone",
    "unknown": "Not compared with training alone",
    "constant": "No better than a constant",
}

ADVICE: dict[Finding, str] = {
    "better": "Use this model, and keep the peers.",
    "worse": "Do not use this model: train alone, or leave out peers that do harm.",
    "mixed": "Decide which of the two measures matters to you, and go by it.",
    "unclear": "Either model will do; to know, test on more rows, or repeat the splits.",
    "alone": "Use this model: nothing is gained from the peers here.",
    "unknown": "Hold out test rows before you rely on it.",
    "constant": "Do not use it: more rows, or columns that say more of the target, come first.",
}
"""What to do about a verdict, in one sentence."""
DOUBT = (
    "Do not rely on it yet, it may be no better than a constant: more rows, or columns that say"
    " more of the target, come first."
)
"""What to do where it is not clear that the model is better than a constant."""


@dataclass(frozen=True)
class Verdict:
    """What may be said of the model served beside one trained alone."""

    finding: Finding
    sentence: str
    comparison: Comparison | None = None  # what it rests on, where there is such a thing
    # in which measures it is clear, and whether better
    clear: Mapping[str, bool] = field(default_factory=dict)
    doubtful: bool = False  # whether it may be no better than a constant

    @property
    def advice(self) -> str:
        """What to do, in one sentence."""
        return DOUBT if self.doubtful and self.finding != "worse" else ADVICE[self.finding]

    @property
    def measures(self) -> Mapping[str, Difference]:
        """The chosen metric, where there is one, and the loss."""
        return {} if self.comparison is None else _judging(self.comparison)


def verdict(configuration: Configuration, end: End) -> Verdict:
    """Say whether the model served is better than one trained alone, and how sure that is.

    It is judged by the chosen metric and by the loss: on the test examples, else on validation
    examples or on own examples that the copies judged had not seen, and it says which.
    """
    if (none := _no_better_than_a_constant(configuration, end)) is not None:
        return none
    found = _beside_alone(configuration, end)
    line = end.account.get("leaderboard", {}).get("constant", {})
    if "high" not in line or line["high"] < 0:
        return found
    doubt = (
        " It is not clear whether it is better than a constant: on own examples that were held out"
        f" in turn, loss {line['difference']:+.2g}, by 95 % between {line['low']:+.2g} and"
        f" {line['high']:+.2g}."
    )
    return replace(found, sentence=found.sentence + doubt, doubtful=True)


def _beside_alone(configuration: Configuration, end: End) -> Verdict:
    """Return the verdict beside the model trained alone, where what is served is no constant."""
    name = configuration.me.name
    if asks_nobody(configuration):
        why = "no peer was given weight before the first step"
        if configuration.alone:
            why = "no peer was asked"
        return Verdict(
            "alone",
            f"The model for {name} was trained alone:"
            f" {why}.{_learned(end, 'It was never', end.best_step)}",
        )
    if serves_alone(end):
        sentence = f"{name} gets the model trained without peers: {_why_alone(configuration, end)}."
        sentence += _learned(end, "It was never", _best_alone(end))
        if end.comparison is None:
            return Verdict("alone", sentence)
        over_splits = judged(name, end.comparison)
        return replace(over_splits, finding="alone", sentence=f"{sentence} {over_splits.sentence}")
    comparison = end.comparison or _from_account(configuration, end.account)
    if comparison is None:
        why = (
            f"the run was stopped by {end.stopped}"
            if end.stopped
            else _why_unknown(configuration, end.account)
        )
        return Verdict(
            "unknown",
            f"Whether the model for {name} is better than one trained alone is not known: {why}.",
        )
    found = judged(name, comparison)
    which = "Neither was ever" if end.best_step == 0 else "The model trained alone was never"
    return replace(found, sentence=f"{found.sentence}{_learned(end, which, _best_alone(end))}")


def _no_better_than_a_constant(configuration: Configuration, end: End) -> Verdict | None:
    """Return the verdict where a constant is served, or is as good as what is; else None."""
    name = configuration.me.name
    if end.account.get("constant"):
        comparison = end.comparison or _from_account(configuration, end.account)
        loss = end.account["leaderboard"]["constant"]["loss"]
        sentence = (
            f"A constant is served to {name}: no model was better than it on its own examples"
        )
        return Verdict("constant", f"{sentence} (loss {loss:.4g}).", comparison)
    which, loss = f"{end.judged_on[0]} loss", end.judged_on[1].get("loss", 0.0)
    if end.comparison is not None and end.comparison.splits:
        which, loss = f"loss on {end.comparison.on}", end.comparison.measures["loss"].ours
    if end.constant is not None and not loss < end.constant:
        sentence = f"The model for {name} is no better than a constant: its {which} is"
        sentence += f" {loss:.4g}, a constant has {end.constant:.4g}."
        best = 0 if 0 in (end.best_step, _best_alone(end)) else None
        sentence += _learned(end, "It was never", best)
        return Verdict("constant", sentence, end.comparison)
    return None


def asks_nobody(configuration: Configuration) -> bool:
    """Say whether the rule is `Alone`, or what was chosen before the first step gives no peer weight."""
    return configuration.alone or configuration.choice.get("tau") == {}


ALONE_LINES = (*ALONE_KINDS, "served")
"""Lines of a leaderboard that are no candidates that ask a peer."""


def serves_alone(end: End) -> bool:
    """Say whether what is served is the model trained alone beside the other."""
    by_guard = end.guard is not None and end.guard.served == "alone"
    asked = weight_of_peers(end)
    return by_guard or (asked is not None and asked < 0.005)


def weight_of_peers(end: End) -> float | None:
    """Return how much of a mixture is of models that follow peers; None where none is served."""
    board = end.account.get("leaderboard")
    return board and sum(one["weight"] for kind, one in board.items() if kind not in ALONE_LINES)


def _learned(end: End, which: str, best: int | None) -> str:
    """Say which model was never better than before its first step, where it is at its best there.

    Else "".
    """
    sentence = (
        f" {which} better than before its first step: steps may be too long, try a lower `lr`."
    )
    return sentence if best == 0 < end.step else ""


def _best_alone(end: End) -> int | None:
    """Return the last step of which there is anything in the model trained alone.

    None where it is not known.
    """
    return None if end.guard is None else end.guard.alone_step


def chance(one: Difference, examples: int) -> float:
    """Return how often chance alone shows a difference as large, by Student's t, two-sided.

    With n examples no difference is rarer by chance than 2^(1 − n): as often do n differences have
    one sign.

    Example:
        >>> round(chance(Difference(ours=0.5, alone=0.4, error=0.05, less_is_better=False), 31), 3)
        0.055
    """
    if not one.difference or not math.isfinite(one.error) or examples < 2:
        return 1.0
    least = 2.0 ** (1 - examples)
    if one.error:
        return max(least, float(2 * special.stdtr(examples - 1, -abs(one.difference) / one.error)))
    return least


def interval(one: Difference, examples: int, measures: int = 1) -> tuple[float, float]:
    """Return the interval of ours less alone by which a difference is clear: it leaves out 0.

    That which was told, else Student's t of the error, at 95 % for all measures together.

    Example:
        >>> one = Difference(ours=0.5, alone=0.4, error=0.05, less_is_better=False)
        >>> [round(end, 3) for end in interval(one, 31)]
        [-0.002, 0.202]
    """
    if one.low is not None and one.high is not None:
        return one.low, one.high
    if not math.isfinite(one.error) or examples < 2 or measures * 2.0 ** (1 - examples) >= LEVEL:
        return -math.inf, math.inf
    reach = _least_clear(one, examples, measures)
    return one.difference - reach, one.difference + reach


def judged(name: str, comparison: Comparison, unit: str = "example") -> Verdict:
    """Return the verdict on a comparison of somebody's model with one trained alone, on so many of a unit."""
    measures, n = _judging(comparison), comparison.examples
    p = {key: min(1.0, len(measures) * chance(one, n)) for key, one in measures.items()}
    ends = {key: interval(one, n, len(measures)) for key, one in measures.items()}
    clear = {
        key: _is_better(one)
        for key, one in measures.items()
        if one.difference and not ends[key][0] <= 0 <= ends[key][1]
    }
    numbers = ", ".join(f"{key} {difference(one)}" for key, one in measures.items())
    paired = "corrected for the overlap of the splits" if comparison.splits else "paired"
    evidence = f"{numbers} on {comparison.on} (one standard error, {paired})"
    bounded = {key for key, one in measures.items() if one.low is not None}
    if bounded:
        between = ", ".join(f"{ends[key][0]:+.2g} and {ends[key][1]:+.2g}" for key in bounded)
        evidence = f"{numbers}, by 95 % between {between}, on {comparison.on}"
    which = f"{'a' if comparison.splits else 'the'} model for {name}"
    if not clear:
        least = {
            key: _least_clear(one, n, len(measures))
            for key, one in measures.items()
            if one.error and key not in bounded
        }
        could = ", ".join(f"{value:.2g} in {key}" for key, value in least.items())
        if len(measures) * 2.0 ** (1 - n) >= LEVEL:
            few = counted(n, "split" if comparison.splits else unit)
            evidence += f"; {few} {'is' if n == 1 else 'are'} too few to be sure"
        elif could:
            evidence += f"; clear would be {could}"
        sentence = (
            f"It is not clear whether {which} is better or worse than one trained alone:"
            f" {evidence}."
        )
        return Verdict("unclear", sentence, comparison)
    which = which[0].upper() + which[1:]
    if len(set(clear.values())) > 1:
        good, bad = (
            next(key for key, better in clear.items() if better is wanted)
            for wanted in (True, False)
        )
        sentence = (
            f"{which} is better than one trained alone in {good} and worse in {bad}: {evidence}."
        )
        return Verdict("mixed", sentence, comparison, clear)
    finding: Literal["better", "worse"] = "better" if all(clear.values()) else "worse"
    if not bounded & set(clear):
        evidence = f"{evidence}; {_by_chance(min(p[key] for key in clear))}"
    return Verdict(
        finding, f"{which} is {finding} than one trained alone: {evidence}.", comparison, clear
    )


def difference(one: Difference) -> str:
    """Return a difference with its standard error.

    Example:
        >>> difference(Difference(ours=0.75, alone=0.5, error=0.02, less_is_better=False))
        '+0.250 ± 0.020'
    """
    return with_error(one.difference, one.error)


def with_error(value: float, error: float) -> str:
    """Return a value with its sign and its standard error, to two digits of the error.

    Alone where none is known; a dash for what cannot be computed.

    Example:
        >>> with_error(-0.07154, 0.0384), with_error(1234.5, 321.0), with_error(0.0, 0.0), with_error(0.5, math.nan)
        ('-0.072 ± 0.038', '+1234 ± 321', '+0 ± 0', '+0.5')
        >>> with_error(1.234e-9, 5.6e-11)
        '+1.23e-09 ± 5.6e-11'
        >>> with_error(3616538624.0, 18609725676.0)
        '+3.62e+09 ± 1.9e+10'
    """
    if math.isnan(value):
        return "–"
    if not math.isfinite(error):
        return f"{value:+.3g}"
    if not 1e-6 <= error < 1e6:  # too many digits
        return f"{value:+.3g} ± {error:.2g}"
    decimals = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:+.{decimals}f} ± {error:.{decimals}f}"


def _judging(comparison: Comparison) -> dict[str, Difference]:
    """Return the measures that a verdict is made by: the first metric and the loss."""
    metrics = [name for name in comparison.measures if name != "loss"]
    return {
        name: comparison.measures[name]
        for name in [*metrics[:1], "loss"]
        if name in comparison.measures
    }


def _is_better(one: Difference) -> bool:
    return (one.difference < 0) is one.less_is_better


def _least_clear(one: Difference, examples: int, measures: int) -> float:
    """Return from what difference on this many examples would be enough for a verdict."""
    return float(special.stdtrit(max(1, examples - 1), 1 - LEVEL / 2 / measures)) * one.error


def _by_chance(p: float) -> str:
    often = "less than 1 of 1000" if p < 0.001 else f"1 of {1 / p:.0f}"
    return f"chance alone would show as much in {often} such comparisons"


def _from_account(configuration: Configuration, account: Mapping[str, Any]) -> Comparison | None:
    """Return the comparison in loss by own examples in turn."""
    if "difference" not in account:
        return None
    n = int(str(configuration.me.examples))
    ours = account["out_of_fold"]
    difference = account["difference"]
    on = f"{n} own examples, each by models that were fitted and mixed without it"
    loss = Difference(
        ours=ours,
        alone=ours - difference,
        error=account["error"],
        less_is_better=True,
        low=account.get("low"),
        high=account.get("high"),
    )
    return Comparison(on=on, examples=n, measures={"loss": loss})


def _why_alone(configuration: Configuration, end: End) -> str:
    board, validation = end.account.get("leaderboard"), configuration.me.validation
    if board and set(board) <= {*ALONE_LINES}:
        return "no model that followed peers was judged"
    held_out = counted(validation, "validation example")
    if end.guard is not None and end.guard.served == "alone":
        loss = with_error(end.guard.difference, end.guard.error)
        return f"on {held_out} the collaborative model was not better (loss {loss})"
    where = "its held-out examples" + (f" and {held_out}" if validation else "")
    return f"on {where} the collaborative model was not better"


def _why_unknown(configuration: Configuration, account: Mapping[str, Any]) -> str:
    if account:
        few = counted(int(str(configuration.me.examples)), "own example")
        return f"{few} cannot tell; give user 0 a test set"
    return f"no model was trained alone beside it (guard {configuration.guard})"


def with_verdict(
    end: End, configuration: Configuration, spec: RunSpec, model: nn.Module, alone: nn.Module | None
) -> End:
    """Return how a run ended with the comparison of its model with the one trained alone, and the verdict."""
    if alone is not None and not serves_alone(end):
        end = replace(end, comparison=_compared(end, spec, model, alone))
    end = replace(end, constant=_constant(end, spec, model))
    return replace(end, verdict=verdict(configuration, end).sentence)


def _constant(end: End, spec: RunSpec, model: nn.Module) -> float | None:
    """Return the loss of the best constant of the training examples, where the model was judged."""
    examples = spec.me.test if end.test else spec.me.validation
    if examples is None or not any(end.judged_on[1]) or "leaderboard" in end.account:
        return None
    if spec.me.is_stream:  # of which there is no whole to find a constant of
        return None
    return constant_loss(model, spec.loss, spec.me.examples, examples)


def _compared(end: End, spec: RunSpec, model: nn.Module, alone: nn.Module) -> Comparison | None:
    """Compare on the test examples where there are any, else on the validation examples, which also chose."""
    test, validation = spec.me.test, spec.me.validation
    if end.test and test is not None:
        on = f"{counted(len(test), 'test example')} that neither was chosen by"
        return compare(model, alone, spec.loss, test, spec.metrics, on=on)
    if test is None and validation is not None and not end.account:
        on = (
            f"{len(validation)} validation examples, which also chose both, so that it may look"
            " larger than it is"
        )
        return compare(model, alone, spec.loss, validation, spec.metrics, on=on)
    return None
