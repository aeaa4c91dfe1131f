"""What a run follows becomes an `Algorithm`, chosen before the first step: the one place that tells kinds apart."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from coterie.choosing import Algorithm, Chooser, RuleChoice, TellsGradients, chooser_for
from coterie.choosing.measuring import before_training
from coterie.choosing.sampled_gradients import OnParts
from coterie.engines.engine import Engine, require
from coterie.errors import DataError, KnobError
from coterie.gradients.norm_bound import FACTOR
from coterie.gradients.parameters import Parameters
from coterie.learners.learner import Learner, RuleLearner
from coterie.learners.spec import RunSpec
from coterie.methods.clients import Clients
from coterie.methods.elsewhere import ClientsElsewhere, gradients_asked
from coterie.methods.fedavg import FineTuning, Sampled
from coterie.methods.own_variance import OwnVariance
from coterie.methods.rounds import LR, Method, Rounds
from coterie.recording.configuration import Configuration, StepSettings
from coterie.recording.costs import Costs
from coterie.rules import Alone, Rule

Followed: TypeAlias = Rule | Chooser | Algorithm | Method
"""What a run may follow."""


def algorithm_of(followed: object) -> Algorithm:
    """Return what a run follows in the form in which runs ask for it; a `TypeError` if it is none.

    Example:
        >>> from coterie.methods import FedAvg
        >>> algorithm_of(FedAvg()).counts, algorithm_of(Alone()).alone
        ('rounds', True)
    """
    if isinstance(followed, type):  # which has all methods of its instances, and is none
        raise TypeError("an instance is needed, not a class")
    if isinstance(followed, Algorithm):
        return followed
    if isinstance(followed, Method):
        return _OfMethod(followed)
    chooser = chooser_for(followed)
    if chooser is not None:
        return _OfChooser(followed, chooser)
    if isinstance(followed, Rule):
        return _OfRule(followed)
    raise TypeError("a rule, a chooser or a method is needed")


class _OfRule(Algorithm):
    """A rule: it makes directions of gradients at the model's point."""

    def __init__(self, rule: Rule) -> None:
        self.followed = self.rule = self._rule = rule
        self.needs_rows, self.in_rows = rule.needs_rows, getattr(rule, "in_rows", False)
        self.alone = type(rule) is Alone
        self.averages = not self.alone

    def completed(self, spec: RunSpec) -> RunSpec:
        if spec.exchange_every > 1 and self.alone:  # it may be one of many rules that are compared
            warnings.warn(
                "`exchange_every` has no effect with `Alone`, which asks nobody", stacklevel=7
            )
        return spec

    def sampled(self, spec: RunSpec) -> RunSpec:
        return spec  # the learner draws anew at each exchange

    def check(self, spec: RunSpec, engine: Engine) -> None:
        self._rule.weights(engine.names)  # an unknown name in `tau`
        if self.needs_rows:
            require(engine, "rows", f"`{type(self._rule).__name__}`")
        _check_local_steps(spec, engine, self)

    def learner(self, spec: RunSpec, engine: Engine, costs: Costs) -> Learner:
        if spec.sample is not None and self.needs_rows:
            raise KnobError(
                "`sample` is for rules that follow the peers' weighted sum, and"
                f" `{type(self._rule).__name__}` needs each peer's gradient; leave it out"
            )
        return RuleLearner(spec, self._rule, engine, costs)


class _OfChooser(Algorithm):
    """What chooses a rule before the first step."""

    def __init__(self, asked: Any, chooser: Chooser) -> None:
        self.followed, self.chooser = asked, chooser

    def sampled(self, spec: RunSpec) -> RunSpec:
        return spec  # of the rule that is chosen

    def check(self, spec: RunSpec, engine: Engine) -> None:
        _check_local_steps(spec, engine, self)  # all else it says when it chooses

    def choose(
        self, spec: RunSpec, engine: Engine, earlier: Mapping[str, Any], progress: bool | None
    ) -> RuleChoice:
        made = None if earlier else self.chooser.choose(spec, engine, progress)
        account = earlier if made is None else made.account
        estimates = None if made is None else made.estimates
        return RuleChoice(self.chooser.rule_from(account), account, estimates)

    def gradients_asked(self, me: str, peers: Sequence[str], settings: StepSettings) -> int:
        chooser, asked = self.chooser, super().gradients_asked(me, peers, settings)
        if isinstance(chooser, TellsGradients):
            asked += chooser.gradients_before(settings.steps)
        return asked

    def learner(self, spec: RunSpec, engine: Engine, costs: Costs) -> Learner:
        raise TypeError(f"`{type(self.followed).__name__}` chooses a rule, which is followed")


class _OfMethod(Algorithm):
    """A federated method: a step is a round, in which users take plain steps of their own."""

    counts = "rounds"
    averages = False

    def __init__(self, method: Method) -> None:
        self.followed = self.method = method
        self.needs_rows, self.alone = False, isinstance(method, OwnVariance)
        self.gradients_a_round = method.gradients_a_round

    def completed(self, spec: RunSpec) -> RunSpec:
        of_its_own = "a method takes plain gradient steps of its own: leave `{}` out"
        refused = {
            "a method has rounds of its own: leave `exchange_every` and `local_steps` out, and give"
            " its own knobs": max(spec.exchange_every, spec.local_steps) > 1,
            of_its_own.format("clip_norm"): spec.clip_norm is not None,
            "`norm_bound` is for gradients that a rule makes a direction of: leave it out; `FedAvg`"
            " takes a robust `aggregator`": spec.norm_bound not in (None, FACTOR),
            of_its_own.format("optimizer") + ", and give `lr`": spec.optimizer
            not in (None, torch.optim.SGD),
        }
        for why in (why for why, holds in refused.items() if holds):
            raise KnobError(why)
        method = self.method.method if isinstance(self.method, Sampled) else self.method
        if isinstance(method, FineTuning) and method.rounds >= spec.steps:
            never = f"`FineTuning(rounds={method.rounds})` would never tune in {spec.steps} rounds"
            raise KnobError(f"{never}; lower `rounds`, or raise `steps`")
        return replace(spec, optimizer=torch.optim.SGD, lr=LR if spec.lr is None else spec.lr)

    def sampled(self, spec: RunSpec) -> RunSpec:
        if spec.sample is None or isinstance(self.method, Sampled):
            return spec
        return replace(spec, rule=Sampled(self.method, spec.sample))

    def check(self, spec: RunSpec, engine: Engine) -> None:
        if engine.capabilities.local_work and not engine.capabilities.own_points:
            # one that needs more than peers elsewhere give is refused
            gradients_asked(self.method, spec.me.name, engine.names)
        else:
            require(engine, "own_points", f"`{type(self.method).__name__}`")

    def gradients_asked(self, me: str, peers: Sequence[str], settings: StepSettings) -> int:
        asked = gradients_asked(self.method, me, peers, rounds=settings.steps, seed=settings.seed)
        return max(1, *asked.values())  # a method of user 0 alone asks nobody

    def learner(self, spec: RunSpec, engine: Engine, costs: Costs) -> Learner:
        if engine.capabilities.own_points:
            return Rounds(spec, self.method, Clients(engine, spec.me, spec.peers, costs))
        own = replace(spec, peers=()).in_process()
        return Rounds(spec, self.method, ClientsElsewhere(engine, spec.me, costs, own=own))


def _check_local_steps(spec: RunSpec, engine: Engine, algorithm: Algorithm) -> None:
    if spec.local_steps > 1 and not algorithm.alone:
        require(engine, "local_work", "`local_steps`")


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

    Only where a rule's knobs could be set by them, and all users are in this process: elsewhere
    gradients may have a price. `anywhere` measures in any case. For `known` see `before_training`.
    """
    if configuration.estimates or configuration.not_measured:
        return configuration
    if not algorithm.averages:
        why = "they are for a rule that averages gradients of peers" if anywhere else ""
        return replace(configuration, not_measured=why)
    if not (anywhere or (engine.capabilities.local and not algorithm.guards_itself)):
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
