"""Before the first step: a rule is chosen, and the theory's constants are measured."""

from dataclasses import replace

from coterie.choosing import Algorithm, RuleChoice
from coterie.choosing.measuring import before_training
from coterie.choosing.sampled_gradients import OnParts
from coterie.engines.capabilities import require
from coterie.engines.engine import Engine
from coterie.errors import DataError
from coterie.gradients.parameters import Parameters
from coterie.learners.spec import RunSpec
from coterie.recording.configuration import Configuration
from coterie.training.algorithm import algorithm_of

MAX_GRADIENT_BYTES = 2**30
"""How many bytes of peers' gradients may be held to measure constants that no knob waits for."""


def choose(
    spec: RunSpec, engine: Engine, configuration: Configuration
) -> tuple[Algorithm, Configuration]:
    """Return what to follow, chosen now or before, and the configuration with the account of the choice."""
    algorithm = algorithm_of(spec.rule)
    choice = algorithm.choose(spec, engine, configuration.choice, spec.progress)
    if choice is None:
        return algorithm, configuration
    return algorithm_of(choice.rule), with_choice(configuration, choice)


def with_choice(configuration: Configuration, choice: RuleChoice) -> Configuration:
    """Return a configuration with the account of a choice, and with the constants measured for it, if any."""
    estimates = configuration.estimates if choice.estimates is None else choice.estimates.to_plain()
    return replace(configuration, choice=dict(choice.account), estimates=estimates)


def with_estimates(
    configuration: Configuration,
    spec: RunSpec,
    engine: Engine,
    algorithm: Algorithm,
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
    if not algorithm.averages:
        why = "they are for a rule that averages gradients of peers" if anywhere else ""
        return replace(configuration, not_measured=why)
    if not (engine.capabilities.local or anywhere):
        return configuration
    if not engine.capabilities.local:
        require(engine, "rows", "`measure`")
    parameters = Parameters(spec.model)
    held = len(engine.names) * parameters.size * parameters.dtype.itemsize
    if held > MAX_GRADIENT_BYTES and not algorithm.needs_rows:
        why = f"every peer's gradient at once would take {held / 2**30:.1f} GiB"
        return replace(configuration, not_measured=why)
    try:
        return replace(
            configuration, estimates=before_training(engine, spec, known=known).to_plain()
        )
    except DataError as error:
        return replace(configuration, not_measured=str(error))
