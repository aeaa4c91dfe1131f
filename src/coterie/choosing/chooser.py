"""The contract of a chooser: it looks at the data before the first step and returns a rule."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from coterie.engines.engine import Engine
from coterie.learners.spec import RunSpec
from coterie.rules import Rule
from coterie.theory.estimates import Estimates


@dataclass(frozen=True)
class Choice:
    """A rule that was chosen, and the reasons.

    Args:
        rule: the rule to follow.
        account: how it was chosen, as plain data for the record and the checkpoint; `sentence` says it in words.
        estimates: the constants measured on the way; None where none were.
    """

    rule: Rule
    account: Mapping[str, Any]
    estimates: Estimates | None = None


@runtime_checkable
class Chooser(Protocol):
    """What chooses a rule from the data before the first step."""

    def choose(self, spec: RunSpec, engine: Engine, progress: bool | None = None) -> Choice:
        """Choose a rule.

        Args:
            spec: the run that is about to start; its model and optimizer are not changed.
            engine: where its gradients come from. One that cannot give what is needed is a `KnobError`.
            progress: show a progress bar; None: when standard error is a terminal.
        """

    def rule_from(self, account: Mapping[str, Any]) -> Rule:
        """Return the rule that an earlier account stands for, so that a resumed run does not choose again."""
