"""Ask the peers E-steps, wherever they are, and note what that cost and who was missing."""

import functools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.engines.engine import AllRows, Answers, Asks, Engine, Question
from coterie.mixture.answers import EStep
from coterie.mixture.families import Family
from coterie.mixture.prior import Heard, PriorAnswer, PriorQuestion
from coterie.mixture.scaling import Scaling
from coterie.recording.costs import Costs
from coterie.recording.progress import TimeLeft

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 5.0
"""How often it is told how many exchanges are left."""


@dataclass(eq=False)
class ESteps:
    """Questions about all rows of every peer, each an exchange.

    Args:
        engine: where the peers are; it is an `Asks`.
        costs: what exchanges are counted in.
        x: the point that questions name; rows go through the layers before a layer at it.
        whole: how many exchanges there will be, for who waits.
        first: the number of the first exchange.
        before_each: is called before each exchange.
    """

    engine: Engine
    costs: Costs
    x: Tensor
    whole: int
    first: int = 0
    exchanges: int = 0
    before_each: Callable[[], None] | None = None
    left_out: dict[str, str] = field(default_factory=dict)  # with the last reason, and how often
    _missed: Counter[str] = field(default_factory=Counter)
    _said: float = field(default_factory=time.monotonic)  # when it was told how much is left

    def __post_init__(self) -> None:
        self._left = TimeLeft(0, self.whole)

    def asking(
        self, family: Family, scaling: Scaling, layer: str = ""
    ) -> Callable[[PriorQuestion], PriorAnswer]:
        """Return what asks the peers for sums over posteriors."""
        heard = Heard()

        def ask(asked: PriorQuestion) -> PriorAnswer:
            question = EStep(family.name, scaling, asked.priors, asked.told, self.largest, layer)
            answers = self.exchange(question, 2 * asked.priors.mean.size, asked.weights.T != 0)
            self.note(answers.left_out)
            if answers.rows is not None:
                rows = answers.rows[0].reshape(-1, *question.shape)
                return heard.answer(asked, question, rows.numpy())
            sums = question.read(sums_of(answers).reshape(question.shape).numpy())
            answered = answers.answered.expand(len(asked.priors.noise)).numpy()
            return PriorAnswer(sums, answered)

        return ask

    @functools.cached_property
    def largest(self) -> float:
        """How many examples a peer has at most, as far as they tell."""
        told = self.engine.capabilities.examples
        return float(max([told.get(name) or 1 for name in self.engine.names], default=1))

    @functools.cached_property
    def _by_size(self) -> dict[int | None, list[str]]:
        """The peers, by how many examples they told of at first."""
        told, by_size = self.engine.capabilities.examples, dict[int | None, list[str]]()
        for name in self.engine.names:
            by_size.setdefault(told.get(name), []).append(name)
        return by_size

    def exchange(
        self, asked: AllRows, sent: int, counting: NDArray[np.bool_] | None = None
    ) -> Answers:
        """Ask all peers, who count alike; `sent` is how many numbers the question has.

        `counting`, (N, P), says under which priors each peer counts.
        """
        engine = self.engine
        if self.before_each is not None:
            self.before_each()
        if not isinstance(engine, Asks):
            raise TypeError(f"{type(engine).__name__} has no `ask`")
        can, point, peers = engine.capabilities, self.x.detach()[None], len(engine.names)
        alike = torch.full((1, peers), 1 / max(1, peers)).double()
        self.costs.exchange(engine.names, down=sent, up=math.prod(asked.shape))
        step = self.first + self.exchanges
        answers = engine.ask(Question(point, step, alike, e_step=asked, counting=counting))()
        self.exchanges += 1
        if not can.local and time.monotonic() - self._said > SECONDS_BETWEEN_LINES:
            left, self._said = self._left(self.exchanges), time.monotonic()
            logger.warning("exchange %d of %d%s", self.exchanges, self.whole, left)
        for many, names in self._by_size.items():
            gave = [name for name in names if name not in answers.left_out]
            self.costs.compute(gave, many, times=asked.gradients)
        return answers

    def note(self, left_out: Mapping[str, str]) -> None:
        """Note who was left out of an exchange."""
        self._missed.update(list(left_out))
        self.left_out |= {
            name: f"{why}, in {self._missed[name]} exchanges" for name, why in left_out.items()
        }


def sums_of(answers: Answers) -> Tensor:
    """Return the sums of answers that have them."""
    if answers.sums is None:
        raise AssertionError("rows or sums were asked for")
    return answers.sums
