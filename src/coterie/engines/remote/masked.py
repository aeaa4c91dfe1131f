"""Masked sums over sites.

User 0 sees the sum of the sites' gradients, or of each group's, and nobody's own.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from coterie.engines.messages import NO_ANSWER, read_array, read_e_step, size_told, whole_number
from coterie.engines.remote.sites import CountedTransport, LocalReplies, Replies, Sites
from coterie.errors import KnobError, MaskError, printable
from coterie.privacy.keys import Offer, check_installed
from coterie.privacy.masks import N_CHECKS, Agreement, revealed
from coterie.privacy.sums import LARGEST, ROUNDING

logger = logging.getLogger(__name__)

MASKED = "masked by one that is missing"
TOO_FEW = "too few sites for a sum"

Summed: TypeAlias = tuple[Tensor | None, dict[str, str]]
"""A sum, None where there is none, and the sites that are not in it, each with the reason."""


class MaskedSums:
    """The sites of one job, who agree on keys, which user 0 passes on, and on τ, which stays.

    Without the part of one site the others' are noise: a step in which one is missing is taken
    alone. One that gives no answer is lost for this job, and so is one that refuses `misses` times
    in a row; the others then agree on new keys.

    Args:
        transport: what carries the messages, and counts them.
        batch_size: how many examples a gradient is of, which says how much noise it needs.
        misses: steps in a row after which a site that refuses is lost.
        minimum: how many sites there must be for a sum.
        largest: what no entry of a sum may exceed; a step with one that does is taken alone.

    Example:
        >>> from coterie.engines.remote.sites import LocalSites
        >>> sums = MaskedSums(CountedTransport(LocalSites({}), 1.0, "me", ["basel", "bern"]), 32)
        >>> request = {"step": 0, "points": np.zeros((1, 2)), "buffers": {}}
        >>> sums.ask(request, {"basel": 0.5, "bern": 0.5})()
        (None, {'basel': 'no answer', 'bern': 'no answer'})
    """

    def __init__(
        self,
        transport: CountedTransport,
        batch_size: int,
        *,
        misses: int = 3,
        minimum: int = 1,
        largest: float = LARGEST,
    ) -> None:
        if not 0 < largest < 1e30:
            raise KnobError(f"`largest` must be positive, got {largest}")
        check_installed()
        self._transport, self._batch_size = transport, batch_size
        self.misses, self.minimum, self.largest = misses, minimum, float(largest)
        self.lost: dict[str, str] = {}  # why
        self.told: dict[str, Mapping[str, Any]] = {}  # the last answers of those who gave a part
        self._tau: dict[str, float] = {}  # that of the first step
        self._agreed: Agreement | None = None
        self._refusals: dict[str, int] = {}  # in a row
        self._spoiled = 0  # sums in a row
        self._round = 0  # it goes on over agreements, so that a late request is of none but its own

    def ask(self, request: Mapping[str, Any], weights: Mapping[str, float]) -> Callable[[], Summed]:
        """Ask sites for their parts, by a message, and return at once what waits for the sum."""
        step = request["step"]
        tau = {name: float(weight) for name, weight in weights.items() if weight}
        if self._tau and tau != self._tau:
            raise KnobError(
                f"`tau` must stay as it is where sums are masked: step {step} has other weights"
            )
        self._tau = tau
        while self._agreed is None and len(here := self._here()) >= max(2, self.minimum):
            self._agreed = self._agreement(here, step)
        if self._agreed is None:
            return lambda: (None, dict.fromkeys(tau, TOO_FEW) | self.lost)
        self._round += 1
        numbered = {**request, "round": self._round}
        sent = self._transport.send(list(self._agreed.weights), "part", numbered)
        return partial(self._added, sent, self._agreed, numbered)

    def _added(self, sent: Replies, agreed: Agreement, request: Mapping[str, Any]) -> Summed:
        replies, step = sent.wait(), request["step"]
        shape = (answer_form(request).size + N_CHECKS,)
        parts: dict[str, np.ndarray[Any, Any]] = {}
        missing: dict[str, str] = {}
        for name in agreed.weights:
            numbers = {"step": step, "round": request["round"]}
            part = read_array(name, replies.get(name), "part", shape, **numbers)
            if isinstance(part, np.ndarray) and part.dtype != np.uint32:
                part = "not a masked part"
            if isinstance(part, str):
                missing[name] = part
            else:
                parts[name] = part
                self._transport.received(name, part.nbytes)
        self.told = {name: replies[name] for name in parts}
        for name in agreed.weights:
            self._refusals[name] = self._refusals.get(name, 0) + 1 if name in missing else 0
        for name, reason in missing.items():  # no answer at all, or nonsense, is not forgiven
            if not reason.startswith("refused") or self._refusals[name] >= self.misses:
                self._lose(name, step, reason)
        if missing:
            masked = {name: missing.get(name, MASKED) for name in agreed.weights}
            return None, self.lost | masked
        try:
            summed = torch.from_numpy(revealed(reduce(np.add, parts.values()), agreed))
        except MaskError as error:
            self._spoiled += 1
            logger.warning("step %d is taken alone: %s", step, error)
            for name in agreed.weights if self._spoiled >= self.misses else ():
                self._lose(name, step, printable(error))
            return None, self.lost | dict.fromkeys(agreed.weights, printable(error))
        self._spoiled = 0
        # numbers of an E-step are at most 1
        return (summed / self.largest if "e_step" in request else summed), dict(self.lost)

    def _here(self) -> list[str]:
        return [name for name in self._tau if name not in self.lost]

    def _agreement(self, here: Sequence[str], step: int) -> Agreement | None:
        """Let these sites agree on keys; None where one of them is lost over it."""
        offers, terms = {}, {"batch_size": self._batch_size}
        replies = self._transport.ask(here, "offer", **terms).wait()
        for name in here:
            try:
                offers[name] = Offer.read(name, replies.get(name))
            except MaskError as error:
                self._lose(name, step, NO_ANSWER if replies.get(name) is None else str(error))
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
        replies = self._transport.ask(here, "join", agreement=agreed.message()).wait()
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


def answer_form(message: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """Return something like what is answered to a request of one's own."""
    if "e_step" in message:
        return np.zeros((1, math.prod(read_e_step(message["e_step"]).shape)))
    points: np.ndarray[Any, Any] = message["points"]
    return points


def _noise_of(reply: Any) -> tuple[float, int] | None:
    """Return the noise that a sum must have for a site, in units of its gradient, and the margin.

    None without.
    """
    fields = reply if isinstance(reply, dict) else {}
    noise, margin = fields.get("noise"), whole_number(fields.get("margin"), 0)
    if type(noise) is not float or not 0 < noise < math.inf or margin is None:
        return None
    return noise, margin


def _why_not_joined(reply: Any, agreed: Agreement) -> str | None:
    fields = reply if isinstance(reply, dict) else {}
    joined, refused = fields.get("joined"), fields.get("refused")
    if isinstance(joined, str) and joined == agreed.digest.hex():
        return None
    if isinstance(refused, str):
        return "refused: " + printable(refused, 150)
    return NO_ANSWER if reply is None else "has not joined the sum"


class MaskedGroups:
    """What carries messages to groups of sites.

    To each site, and back the masked mean of those of a group.

    A site is in one group, and keeps its group for the job. So whatever user 0 makes of the groups'
    means, at whatever weights, is a sum in which all sites of a group weigh alike.

    Args:
        sites: what carries messages to sites.
        groups: the sites of each group, by a name for the group.
        names: the sites that may take part.
        timeout, batch_size, misses, largest: as for `Remote`.
    """

    def __init__(
        self,
        sites: Sites,
        groups: Mapping[str, Sequence[str]],
        names: Sequence[str],
        *,
        timeout: float,
        batch_size: int,
        misses: int,
        largest: float,
    ) -> None:
        members = [site for group in groups.values() for site in group]
        if stray := [site for site in members if site not in names]:
            raise KnobError(
                f"`secure_sums` names an unknown site {stray[0]!r}; the sites are"
                f" {', '.join(names)}"
            )
        if twice := [site for site in members if members.count(site) > 1]:
            raise KnobError(
                f"`secure_sums` must have a site in one group, got {twice[0]!r} in more: they would"
                " tell"
            )
        if lone := [name for name, group in groups.items() if len(group) < 2]:
            raise KnobError(
                f"`secure_sums` must have at least two sites in a group, got {len(groups[lone[0]])}"
                f" in {lone[0]!r}: nothing hides one alone; most sites want three"
            )
        self._sites = sites
        self._tau = {name: dict.fromkeys(group, 1 / len(group)) for name, group in groups.items()}

        # `Remote` counts what groups send and get, as one site each
        transport = CountedTransport(sites, timeout, "", names)
        self._sums = {
            name: MaskedSums(transport, batch_size, misses=misses, largest=largest)
            for name in groups
        }

    def ask(self, names: Sequence[str], method: str, timeout: float, **arguments: Any) -> Replies:
        """Ask the sites of these groups; see `Sites.ask`. Seconds are those of `Remote`."""
        if method != "gradients":
            return LocalReplies({name: self._ready(name, timeout) for name in names})
        request = arguments["request"]
        asked = {name: self._sums[name].ask(request, self._tau[name]) for name in names}
        return GroupReplies(
            {name: partial(self._mean, name, request, waiting) for name, waiting in asked.items()}
        )

    def _ready(self, name: str, timeout: float) -> dict[str, Any]:
        """Say whether a group has a sum to give, and how many examples its sites say they have."""
        here = [site for site in self._tau[name] if site not in self._sums[name].lost]
        told = [
            reply
            for reply in self._sites.ask(here, "ready", timeout).wait().values()
            if isinstance(reply, dict)
        ]
        why_not = [str(reply.get("no_e_steps")) for reply in told if reply.get("no_e_steps") != ""]
        return {
            "willing": len(here) > 1,
            "size": _added_up(reply.get("size") for reply in told),
            "no_e_steps": next(iter(why_not), ""),
        }

    def _mean(
        self, name: str, request: Mapping[str, Any], waiting: Callable[[], Summed]
    ) -> dict[str, Any]:
        """Return the reply of a group.

        The mean over the sites that are left of it, or why there is none.
        """
        summed, left_out = waiting()
        if summed is None:
            return {"refused": "; ".join(f"{site}: {why}" for site, why in left_out.items())}
        form, told, tau = answer_form(request), self._sums[name].told, self._tau[name]
        share = math.fsum(tau[site] for site in told)
        noise = math.hypot(
            *(tau[site] * size_told(reply.get("noise")) for site, reply in told.items())
        )
        return {
            "gradients": (summed / share).numpy().reshape(form.shape).astype(form.dtype),
            "site": name,
            "step": request["step"],
            "seconds": 0.0,
            "examples": _added_up(reply.get("examples") for reply in told.values()),
            "noise": noise / share,
        }


def _added_up(reported: Iterable[Any]) -> int | None:
    """Return how many examples sites have together, as they say; None where one does not."""
    counts = [whole_number(each) for each in reported]
    return None if None in counts else sum(n or 0 for n in counts)


@dataclass(frozen=True)
class GroupReplies:
    """The replies of groups, each of which has to be waited for."""

    waiting: Mapping[str, Callable[[], Any]]

    def done(self) -> bool:
        """Say that they can be waited for; sites have their own time."""
        return True

    def wait(self) -> Mapping[str, Any]:
        """Wait for all groups."""
        return {name: wait() for name, wait in self.waiting.items()}
