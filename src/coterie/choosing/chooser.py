"""The contracts of what a run follows: a chooser, before the first step, or what learns as the run goes."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from coterie.engines.engine import Engine
from coterie.engines.in_process.engine import InProcess
from coterie.errors import KnobError
from coterie.learners.learner import Learner
from coterie.learners.spec import RunSpec
from coterie.recording.configuration import StepSettings
from coterie.recording.costs import Costs
from coterie.rules import Rule
from coterie.theory.estimates import Estimates
from coterie.users.sampling import random_key


@dataclass(frozen=True)
class RuleChoice:
    """What was chosen to be followed, and the reasons."""

    rule: Any
    account: Mapping[str, Any]  # how it was chosen, as plain data; `sentence` says it in words
    estimates: Estimates | None = None  # the constants measured on the way


@runtime_checkable
class Chooser(Protocol):
    """What chooses a rule from the data before the first step."""

    def choose(self, spec: RunSpec, engine: Engine, progress: bool | None = None) -> RuleChoice:
        """Choose a rule; model and optimizer stay as they are.

        An engine that cannot serve is a `KnobError`.
        """

    def rule_from(self, account: Mapping[str, Any]) -> Rule:
        """Return the rule that an earlier account stands for, so that a resumed run does not choose again."""


@runtime_checkable
class TellsGradients(Protocol):
    """A chooser that says beforehand what it asks of peers elsewhere, who may give so many gradients only."""

    def gradients_before(self, steps: int) -> int:
        """Return how many gradients it asks of each peer at most, before the first step of a run of so many."""


class Algorithm(ABC):
    """What a run follows, as the run sees it: what it needs, and a learner that asks and takes the steps.

    `AdaptiveAveraging` and `Mixture` are algorithms; `training.algorithm.algorithm_of` makes one of
    a rule, a chooser or a federated method.
    """

    counts: Literal["steps", "rounds"] = "steps"
    """What is counted; in a round users take steps of their own."""
    guards_itself: bool = False
    """Whether its learner judges models trained alone beside the others, and needs no guard."""
    plans_by_steps: bool = False
    """Whether a run of more steps is another run from its first step on."""
    needs_rows: bool = True
    """Whether every peer's gradient is needed, not only their weighted sum."""
    alone: bool = False
    """Whether no peer is asked."""
    averages: bool = True
    """Whether it averages gradients of peers, so that the theory's constants say something of it."""
    gradients_a_round: int = 1
    """How many gradients user 0 computes in a round."""
    in_rows: bool = False
    """Whether many runs can follow it as rows of one matrix; see `train_many`."""
    keeps_memory: bool = False
    """Whether it trains within the memory that it may hold."""
    rule: Rule | None = None
    """The rule that makes directions, where there is one."""
    followed: Any = None
    """What was given to be followed, where that is another thing."""

    def completed(self, spec: RunSpec) -> RunSpec:
        """Return the run with the settings that this needs; refuse those that have no effect."""
        return spec

    def sampled(self, spec: RunSpec) -> RunSpec:
        """Return a run with `sample` as this takes it: one of its peers, for all exchanges."""
        here = spec.engine is InProcess or (callable(spec.engine) and bool(spec.peers))
        if not here:
            raise KnobError(
                f"`{type(self.followed or self).__name__}` asks the same peers all along, and"
                " `sample` draws them where they are in this process; give those to ask, or a rule"
                " such as `WeightedAveraging`"
            )
        return with_a_sample(spec)

    @abstractmethod
    def check(self, spec: RunSpec, engine: Engine) -> None:
        """Refuse an engine that cannot give what this needs."""

    def cost_in_words(self) -> str:
        """Return in a line what this asks of the peers beside the gradients of one run; empty: nothing."""
        return ""

    def fallback(self, spec: RunSpec) -> RuleChoice | None:
        """Return what is followed instead where this cannot serve, else None."""
        return None

    def choose(
        self, spec: RunSpec, engine: Engine, earlier: Mapping[str, Any], progress: bool | None
    ) -> RuleChoice | None:
        """Return what is followed instead, chosen from the data; None: this.

        `earlier` is the account of the same choice in a run that is resumed.
        """
        return self.fallback(spec)

    def gradients_asked(self, me: str, peers: Sequence[str], settings: StepSettings) -> int:
        """Return how many gradients a run asks of each peer elsewhere, at most."""
        return math.ceil(settings.steps / settings.exchange_every) * settings.local_steps

    @abstractmethod
    def learner(self, spec: RunSpec, engine: Engine, costs: Costs) -> Learner:
        """Return the learner of a run that is prepared."""


def check_local_steps(spec: RunSpec) -> None:
    """Refuse local steps where peers are judged by gradients."""
    if spec.local_steps > 1:
        raise KnobError(
            "adaptive averaging judges its peers by gradients, not by local steps: leave"
            " `local_steps` out for `exchange_every`, or give a rule with its weights set, such as"
            " `WeightedAveraging`"
        )


def with_a_sample(spec: RunSpec) -> RunSpec:
    """Return a run with as many of its peers as `sample` says, drawn by the seed and user 0's name."""
    if spec.sample is None or len(spec.peers) <= spec.sample:
        return spec
    random = np.random.default_rng(random_key(spec.seed, f"{spec.me.name}/sample"))
    drawn = random.choice(len(spec.peers), spec.sample, replace=False)
    return replace(spec, peers=[spec.peers[k] for k in sorted(drawn.tolist())])
