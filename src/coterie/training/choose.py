"""Before the first step: a rule is chosen, and the theory's constants are measured."""

from dataclasses import replace
from typing import TypeAlias, cast

from coterie.choosing import Choice, MakesLearner, chooser_for
from coterie.choosing.measuring import before_training
from coterie.choosing.sampled_gradients import OnParts
from coterie.engines.capabilities import require
from coterie.engines.engine import Engine
from coterie.errors import DataError
from coterie.gradients.parameters import Parameters
from coterie.learners.spec import RunSpec
from coterie.methods.rounds import Method
from coterie.recording.configuration import Configuration
from coterie.rules import Alone, Rule

Followed: TypeAlias = Rule | Method | MakesLearner
"""What a learner follows, once everything is chosen that is chosen before the first step."""

MAX_GRADIENT_BYTES = 2**30
"""How many bytes of peers' gradients may be held to measure constants that no knob waits for."""


def choose(
    spec: RunSpec, engine: Engine, configuration: Configuration, *, progress: bool | None
) -> tuple[Followed, Configuration]:
    """Return the rule to follow, chosen now or before, and the configuration with the account of the choice."""
    if isinstance(spec.rule, MakesLearner):
        other = spec.rule.instead(spec, engine)
        return (
            (spec.rule, configuration)
            if other is None
            else (other.rule, with_choice(configuration, other))
        )
    chooser = chooser_for(spec.rule)
    if chooser is None:
        return cast("Rule | Method", spec.rule), configuration
    if not configuration.choice:
        configuration = with_choice(configuration, chooser.choose(spec, engine, progress))
    return chooser.rule_from(configuration.choice), configuration


def with_choice(configuration: Configuration, choice: Choice) -> Configuration:
    """Return a configuration with the account of a choice, and with the constants measured for it, if any."""
    estimates = configuration.estimates if choice.estimates is None else choice.estimates.to_plain()
    return replace(configuration, choice=dict(choice.account), estimates=estimates)


def with_estimates(
    configuration: Configuration,
    spec: RunSpec,
    engine: Engine,
    rule: Followed,
    *,
    anywhere: bool = False,
    known: dict[str, OnParts] | None = None,
) -> Configuration:
    """Return a configuration with the constants at the start, or with why they are not measured.

    Elsewhere gradients may have a price: only `anywhere` measures on an engine whose users are not
    in this process. For `known` see `before_training`.
    """
    if configuration.estimates or configuration.not_measured:
        return configuration
    if isinstance(rule, Alone | Method):
        why = "they are for a rule that averages gradients of peers" if anywhere else ""
        return replace(configuration, not_measured=why)
    if not (engine.capabilities.local or anywhere):
        return configuration
    if not engine.capabilities.local:
        require(engine, "rows", "`measure`")
    parameters = Parameters(spec.model)
    held = len(engine.names) * parameters.size * parameters.dtype.itemsize
    if held > MAX_GRADIENT_BYTES and not getattr(rule, "needs_rows", False):
        why = f"every peer's gradient at once would take {held / 2**30:.1f} GiB"
        return replace(configuration, not_measured=why)
    try:
        return replace(
            configuration, estimates=before_training(engine, spec, known=known).to_plain()
        )
    except DataError as error:
        return replace(configuration, not_measured=str(error))
