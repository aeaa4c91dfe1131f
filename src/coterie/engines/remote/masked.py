"""Masked sums over sites.

User 0 sees the sum of the sites' gradients, or of each group's, and nobody's own.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np
from torch import Tensor

from coterie.engines.remote.messages import answer_form, read_part
from coterie.engines.remote.sites import CountedTransport, LocalReplies, Replies, Sites
from coterie.engines.requests import noise_told, whole_number
from coterie.errors import KnobError
from coterie.privacy.masked_sums import MaskedSums


class SecureSums:
    """The masked sums of one job over sites; see `MaskedSums`.

    Args:
        sums: who takes part.
        transport: what carries the messages, and counts them.
        batch_size: how many examples a gradient is of, which says how much noise it needs.
    """

    def __init__(self, sums: MaskedSums, transport: CountedTransport, batch_size: int) -> None:
        self.sums, self._transport = sums, transport
        self._offer = {"batch_size": batch_size}
        self.told: dict[str, Mapping[str, Any]] = {}  # the last answers of those who gave a part
        self._round = 0  # it goes on over agreements, so that a late request is of none but its own

    def ask(
        self, request: dict[str, Any], weights: Mapping[str, float]
    ) -> Callable[[], tuple[Tensor | None, dict[str, str]]]:
        """Ask sites for their parts, by a message.

        Return at once what waits for the sum, or why there is none.
        """
        agreed = self.sums.agree(weights, request["step"], self._asked)
        if agreed is None:
            return lambda: (None, {})
        self._round += 1
        names = list(agreed.weights)
        sent = self._transport.send(names, "part", request | {"round": self._round})
        return partial(self._added, sent, names, request, self._round)

    def _asked(self, names: Sequence[str], method: str, **arguments: Any) -> Mapping[str, Any]:
        arguments |= self._offer if method == "offer" else {}
        return self._transport.ask(names, method, **arguments).wait()

    def _added(
        self, sent: Replies, names: Sequence[str], request: dict[str, Any], round_: int
    ) -> tuple[Tensor | None, dict[str, str]]:
        replies, step, size = sent.wait(), request["step"], answer_form(request).size
        read = {name: read_part(name, replies.get(name), step, round_, size) for name in names}
        parts = {name: part for name, part in read.items() if not isinstance(part, str)}
        for name, part in parts.items():
            self._transport.received(name, part.nbytes)
        missing = {name: part for name, part in read.items() if isinstance(part, str)}
        self.told = {name: replies[name] for name in parts}
        words = None if missing else reduce(np.add, parts.values())
        summed, left_out = self.sums.added(words, missing, step)
        if summed is not None and "e_step" in request:  # numbers of at most 1
            summed = summed / self.sums.largest
        return summed, left_out


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
        sums = {name: MaskedSums(misses=misses, largest=largest) for name in groups}
        self._sums = {name: SecureSums(each, transport, batch_size) for name, each in sums.items()}

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
        here = [site for site in self._tau[name] if site not in self._sums[name].sums.lost]
        told = [
            reply
            for reply in self._sites.ask(here, "ready", timeout).wait().values()
            if isinstance(reply, dict)
        ]
        sizes = [whole_number(reply.get("size")) for reply in told]
        why_not = [str(reply.get("no_e_steps")) for reply in told if reply.get("no_e_steps") != ""]
        return {
            "willing": len(here) > 1,
            "size": None if None in sizes else sum(n or 0 for n in sizes),
            "no_e_steps": next(iter(why_not), ""),
        }

    def _mean(
        self,
        name: str,
        request: Mapping[str, Any],
        waiting: Callable[[], tuple[Tensor | None, dict[str, str]]],
    ) -> dict[str, Any]:
        """Return the reply of a group.

        The mean over the sites that are left of it, or why there is none.
        """
        summed, left_out = waiting()
        if summed is None:
            reasons = left_out or self._sums[name].sums.lost
            return {
                "refused": (
                    "; ".join(f"{site}: {why}" for site, why in reasons.items()) or "too few sites"
                )
            }
        form, told, tau = answer_form(request), self._sums[name].told, self._tau[name]
        share = math.fsum(tau[site] for site in told)
        counts = [whole_number(reply.get("examples")) for reply in told.values()]
        noise = math.hypot(
            *(tau[site] * noise_told(reply.get("noise")) for site, reply in told.items())
        )
        about = {
            "examples": None if None in counts else sum(n or 0 for n in counts),
            "noise": noise / share,
        }
        mean = (summed / share).numpy().reshape(form.shape).astype(form.dtype)
        return {"gradients": mean, "site": name, "step": request["step"], "seconds": 0.0, **about}


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
