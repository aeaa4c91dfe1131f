"""Masked sums as user 0 has them, whatever carries the messages.

Who takes part, who is lost, what the sum is.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from coterie.errors import KnobError, MaskError, printable
from coterie.gradients.gradients import Gradients, complete
from coterie.privacy.keys import Offer, check_installed
from coterie.privacy.masks import Agreement, Words, revealed
from coterie.privacy.sums import LARGEST, ROUNDING

logger = logging.getLogger(__name__)

MASKED = "masked by one that is missing"

Ask: TypeAlias = Callable[..., Mapping[str, Any]]
"""What asks sites, by name, for "offer", or for "join" with an `agreement`, and returns the replies by site."""


class MaskedSums:
    """The sites of one job, who agree on keys, which user 0 passes on, and on τ, which stays.

    Without the part of one site the others' are noise: a step in which one is missing is taken
    alone. One that gives no answer is lost for this job, and so is one that refuses `misses` times
    in a row; the others then agree on new keys.

    Args:
        misses: steps in a row after which a site that refuses is lost.
        minimum: how many sites there must be for a sum.
        largest: what no entry of a sum may exceed; a step with one that does is taken alone.

    Example:
        >>> sums = MaskedSums()
        >>> sums.agree({"basel": 0.5, "bern": 0.5}, 0, lambda names, method, **agreement: {}) is None
        True
        >>> sums.lost
        {'basel': 'no answer', 'bern': 'no answer'}
    """

    def __init__(self, *, misses: int = 3, minimum: int = 1, largest: float = LARGEST) -> None:
        for knob, least in {"misses": misses, "minimum": minimum}.items():
            if least < 1:
                raise KnobError(f"`{knob}` must be at least 1, got {least}")
        if not 0 < largest < 1e30:
            raise KnobError(f"`largest` must be positive, got {largest}")
        check_installed()
        self.misses, self.minimum, self.largest = misses, minimum, float(largest)
        self.lost: dict[str, str] = {}  # why
        self._tau: dict[str, float] = {}  # that of the first step
        self._agreed: Agreement | None = None
        self._refusals: dict[str, int] = {}  # in a row
        self._spoiled = 0  # sums in a row

    def agree(self, weights: Mapping[str, float], step: int, ask: Ask) -> Agreement | None:
        """Return what the sites that are left have agreed on, now or before.

        None where too few are left.
        """
        tau = {name: float(weight) for name, weight in weights.items() if weight}
        if self._tau and tau != self._tau:
            raise KnobError(
                f"`tau` must stay as it is where sums are masked: step {step} has other weights"
            )
        self._tau = tau
        while self._agreed is None and len(here := self._here()) >= max(2, self.minimum):
            self._agreed = self._agreement(here, step, ask)
        return self._agreed

    def added(
        self, words: Words | None, missing: Mapping[str, str], step: int
    ) -> tuple[Tensor | None, dict[str, str]]:
        """Return the sum, from the parts of all, and why there is none.

        Args:
            words: all parts, added up; None where one is missing.
            missing: the sites that gave none, each with the reason.
            step: the step.
        """
        agreed = self._agreed
        if agreed is None:
            raise TypeError("parts of a sum that nobody has agreed on")
        for name in agreed.weights:
            self._refusals[name] = self._refusals.get(name, 0) + 1 if name in missing else 0
        for name, reason in missing.items():  # no answer at all, or nonsense, is not forgiven
            if not reason.startswith("refused") or self._refusals[name] >= self.misses:
                self._lose(name, step, reason)
        if missing or words is None:
            return None, {name: missing.get(name, MASKED) for name in agreed.weights}
        try:
            summed = torch.from_numpy(revealed(words, agreed))
        except MaskError as error:
            self._spoiled += 1
            logger.warning("step %d is taken alone: %s", step, error)
            for name in agreed.weights if self._spoiled >= self.misses else ():
                self._lose(name, step, printable(error))
            return None, dict.fromkeys(agreed.weights, printable(error))
        self._spoiled = 0
        return summed, {}

    def with_sum(
        self,
        mine: Gradients,
        summed: Tensor | None,
        left_out: Mapping[str, str],
        weights: Mapping[str, float],
    ) -> Gradients:
        """Return user 0's gradient together with the sum.

        With its own in the place of what is missing.
        """
        reasons = self.lost | dict(left_out)
        if summed is None:
            reasons = dict.fromkeys(weights, "too few sites for a sum") | reasons
        answered = (
            0.0 if summed is None or self._agreed is None else sum(self._agreed.weights.values())
        )
        peers, answered = complete(
            mine.own, mine.own if summed is None else summed.to(mine.own), answered
        )
        asked = {name: reason for name, reason in reasons.items() if name in weights}
        return replace(mine, peers=peers, answered=answered, left_out=asked)

    def _here(self) -> list[str]:
        return [name for name in self._tau if name not in self.lost]

    def _agreement(self, here: Sequence[str], step: int, ask: Ask) -> Agreement | None:
        """Let these sites agree on keys; None where one of them is lost over it."""
        offers, replies = {}, ask(here, "offer")
        for name in here:
            try:
                offers[name] = Offer.read(name, replies.get(name))
            except MaskError as error:
                self._lose(name, step, "no answer" if replies.get(name) is None else str(error))
        split = {name: asked for name in offers if (asked := _noise_of(replies[name])) is not None}
        if split and len(split) < len(offers):
            for name in offers.keys() - split.keys():
                self._lose(name, step, "adds no share of the noise that the others split")
        if self.lost.keys() & set(here):
            return None
        noise = max((self._tau[name] * needed for name, (needed, _) in split.items()), default=0.0)
        margin = max((margin for _, margin in split.values()), default=0)
        tau = {name: self._tau[name] for name in here}
        agreed = Agreement(tau, self.largest, offers, noise * (1 + ROUNDING), margin)
        replies = ask(here, "join", agreement=agreed.message())
        for name in here:
            if (reason := _why_not_joined(replies.get(name), agreed)) is not None:
                self._lose(name, step, reason)
        if self.lost.keys() & set(here):
            return None
        logger.warning("step %d: masked sums of %s", step, ", ".join(here))
        return agreed

    def _lose(self, name: str, step: int, reason: str) -> None:
        self.lost[name], self._agreed = reason, None
        logger.warning("step %d: %s is lost (%s); the others agree on new keys", step, name, reason)


def _noise_of(reply: Any) -> tuple[float, int] | None:
    """Return the noise that a sum must have for a site, in units of its gradient, and the margin.

    None without.
    """
    noise, margin = (
        (reply.get("noise"), reply.get("margin")) if isinstance(reply, dict) else (None, None)
    )
    if (
        type(noise) is not float
        or not 0 < noise < math.inf
        or type(margin) is not int
        or margin < 0
    ):
        return None
    return noise, margin


def _why_not_joined(reply: Any, agreed: Agreement) -> str | None:
    fields = reply if isinstance(reply, dict) else {}
    joined, refused = fields.get("joined"), fields.get("refused")
    if isinstance(joined, str) and joined == agreed.digest.hex():
        return None
    if isinstance(refused, str):
        return "refused: " + printable(refused, 150)
    return "no answer" if reply is None else "has not joined the sum"
