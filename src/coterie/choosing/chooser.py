"""The contracts of what looks at the data.

A chooser, before the first step, or what learns as the run goes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from coterie.engines.engine import Engine
from coterie.engines.in_process.forward_options import ForwardOptions
from coterie.learners.learner import Learner
from coterie.learners.spec import RunSpec
from coterie.recording.costs import Costs
from coterie.rules import Rule
from coterie.theory.estimates import Estimates


@dataclass(frozen=True)
class Choice:
    """A rule that was chosen, and the reasons."""

    rule: Rule
    account: Mapping[str, Any]  # how it was chosen, as plain data; `sentence` says it in words
    estimates: Estimates | None = None  # the constants measured on the way


@runtime_checkable
class Chooser(Protocol):
    """What chooses a rule from the data before the first step."""

    def choose(self, spec: RunSpec, engine: Engine, progress: bool | None = None) -> Choice:
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


@runtime_checkable
class TellsCost(Protocol):
    """What asks more of the peers than the training itself, and says so before."""

    def cost_in_words(self) -> str:
        """Return in a line what it will ask, and how to lower that."""


@runtime_checkable
class MakesLearner(Protocol):
    """What takes the steps of a run in its own way, by a learner of its own kind, such as `AdaptiveAveraging`."""

    def check(self, engine: Engine) -> None:
        """Refuse an engine that cannot give what this needs."""

    def instead(self, spec: RunSpec, engine: Engine | None = None) -> Choice | None:
        """Return a rule to follow instead, where this cannot serve, else None.

        Where the engine is open it may have a say.
        """

    def learner(
        self,
        spec: RunSpec,
        engine: Engine,
        costs: Costs,
        *,
        guarded: bool,
        forward_options: ForwardOptions,
    ) -> Learner:
        """Return the learner of a run that is prepared.

        Under a guard it may serve the model trained alone.
        """
