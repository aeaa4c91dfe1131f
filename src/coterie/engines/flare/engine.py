"""Between organisations: peers are sites that NVFLARE reaches, each with its own data, over mutual TLS."""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from coterie.engines.engine import Capabilities
from coterie.engines.flare.messages import pack_request, read_reply
from coterie.engines.flare.sites import Replies, Sites
from coterie.engines.in_process.engine import InProcess
from coterie.engines.peer import Request, frozen_digest
from coterie.errors import KnobError
from coterie.gradients.gradients import Gradients, receive
from coterie.recording.traffic import Traffic
from coterie.users.user import Loss, User, check_names

logger = logging.getLogger(__name__)


class Flare:
    """Gradients of peers in other organisations, who may be late, gone, or wrong.

    A site that does not answer within `timeout` is left out of that step, and its weight goes back to g_0. After
    `misses` steps in a row without an answer it is no longer waited for; a short question in the background, every
    `probe_every` steps, finds out whether it is back. One that says so and again gives nothing is dropped at once,
    for twice as long each time. With fewer than `minimum` answers a step is taken alone.

    Args:
        model, loss, me, batch_size, seed: as for `InProcess`; the model has the same parameters as at the sites.
        peers: none, as their examples are at the sites.
        sites: what carries the messages.
        names: the sites that may take part.
        timeout: seconds to wait for a site in one step.
        misses: steps in a row without an answer after which a site is not waited for.
        probe_every: steps from one question whether it is back to the next.
        minimum: how many peers must answer for a step to use their gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        me: User,
        peers: Sequence[User] = (),
        *,
        sites: Sites,
        names: Sequence[str],
        batch_size: int = 32,
        seed: int = 0,
        timeout: float = 10.0,
        misses: int = 3,
        probe_every: int = 10,
        minimum: int = 1,
    ) -> None:
        for knob, value in {"misses": misses, "probe_every": probe_every, "minimum": minimum}.items():
            if value < 1:
                raise KnobError(f"`{knob}` must be at least 1, got {value}")
        if not timeout > 0:
            raise KnobError(f"`timeout` must be positive, got {timeout}")
        if peers:
            raise KnobError(f"`peers` must be empty, got {len(peers)}: the peers' examples are at their sites")
        self.names = tuple(names)
        check_names([me.name, *names])
        self.own = InProcess(model, loss, me, batch_size=batch_size, seed=seed)
        self.sites, self.batch_size, self.seed = sites, batch_size, seed
        self.timeout, self.misses, self.probe_every, self.minimum = timeout, misses, probe_every, minimum
        self._traffic = {name: Traffic() for name in (me.name, *self.names)}
        self._mine = self._traffic[me.name]
        self._standing = {name: _Standing(probe_every) for name in self.names}
        self._alone = False
        self.capabilities = Capabilities(batch_size=batch_size)
        self._frozen = frozen_digest(model)

    @property
    def dropped(self) -> tuple[str, ...]:
        """The sites that are not waited for."""
        return tuple(name for name, site in self._standing.items() if site.missed >= self.misses)

    def gradients(self, x: Tensor, step: int, weights: Mapping[str, float], rows: bool = False) -> Gradients:
        """Return everybody's gradients at x; see `Engine.gradients`."""
        self._take_back(step, weights)
        dropped = self.dropped
        # One that missed this step at another point is not waited for at this one.
        silent = [name for name in weights if self._standing[name].silent_at == step and name not in dropped]
        asked = [name for name in weights if name not in dropped and name not in silent]
        replies = self._ask(asked, x, step) if asked else None
        began = time.perf_counter()
        mine = self.own.gradients(x, step, {})
        computed = time.perf_counter()
        answers = self._read(replies.wait() if replies else {}, asked, step, mine.own)
        self._mine.seconds_computing += computed - began
        self._mine.seconds_waiting += time.perf_counter() - computed
        if not weights:
            return mine
        gradients = {name: answer for name, answer in answers.items() if not isinstance(answer, str)}
        matrix, names, left_out = receive(mine.own, gradients)
        left_out |= {name: answer for name, answer in answers.items() if isinstance(answer, str)}
        left_out |= {name: "not waited for" for name in weights if name in dropped}
        left_out |= dict.fromkeys(silent, "no answer")
        if len(names) < self.minimum:
            left_out |= dict.fromkeys(names, f"fewer than {self.minimum} peers answered")
            matrix, names = matrix[:0], ()
        if self._alone == bool(names):
            self._alone = not names
            logger.warning("step %d: %s", step, "no longer alone" if names else "going on alone")
        return mine.with_peers(matrix, names, weights, left_out, rows=rows)

    def describe(self) -> dict[str, Any]:
        """Return what the record should say of how gradients are computed."""
        knobs = {name: getattr(self, name) for name in ("timeout", "misses", "probe_every", "minimum")}
        peers = dict.fromkeys(self.names, "at its site")
        return self.own.describe() | {"engine": "NVFLARE", "peers": peers} | knobs

    def traffic(self) -> Mapping[str, Traffic]:
        """Return what has travelled so far, by user; a site's waiting is not known here."""
        return self._traffic

    def close(self) -> None:
        """Do nothing: the sites are let go where the job ends."""

    def _ask(self, names: Sequence[str], x: Tensor, step: int) -> Replies:
        buffers = dict(self.own.passes.model.named_buffers())
        request = Request(x, step, self.seed, self.batch_size, buffers, self._frozen)
        message = pack_request(request)  # a copy: a late site may still be sent to when x has moved on
        size = message["x"].nbytes + sum(buffer.nbytes for buffer in message["buffers"].values())
        self._mine.bytes_sent += size * len(names)
        for name in names:
            self._traffic[name].bytes_received += size
        return self.sites.ask(names, "gradient", self.timeout, request=message)

    def _read(
        self, replies: Mapping[str, Any], asked: Sequence[str], step: int, own: Tensor
    ) -> dict[str, Tensor | str | None]:
        """Return for each site asked its gradient, what is wrong with its reply, or None where there is none."""
        read = {}
        for name in asked:
            reply = replies.get(name)
            gradient = read[name] = read_reply(name, reply, step, own)
            if gradient is None or (isinstance(gradient, str) and gradient.startswith("refused")):
                self._miss(name, step)
            else:
                self._standing[name] = _Standing(self.probe_every)
            if isinstance(gradient, Tensor) and isinstance(reply, dict):
                self._mine.bytes_received += gradient.nbytes
                self._traffic[name].bytes_sent += gradient.nbytes
                self._traffic[name].seconds_computing += _seconds(reply.get("seconds"), self.timeout)
        return read

    def _miss(self, name: str, step: int) -> None:
        site = self._standing[name]
        site.missed, site.silent_at = site.missed + 1, step
        if site.missed >= self.misses:
            site.since = step
            logger.warning("step %d: %s gave nothing %d times, not waited for", step, name, self.misses)

    def _take_back(self, step: int, weights: Iterable[str]) -> None:
        """Take back the sites that have answered a question in the background, and put it to the others."""
        dropped = self.dropped
        for name in [name for name in weights if name in dropped]:
            site = self._standing[name]
            if site.probe is not None and site.probe.done():
                answer = site.probe.wait().get(name)
                site.probe, site.since = None, step
                # One more miss and it is dropped again, for twice as long.
                if isinstance(answer, dict) and answer.get("willing") is True:
                    site.missed, site.pause = self.misses - 1, 2 * site.pause
                    logger.warning("step %d: %s is back", step, name)
            elif site.probe is None and step - site.since >= site.pause:
                site.probe = self.sites.ask([name], "ready", self.timeout)


@dataclass
class _Standing:
    """How a site stands."""

    pause: int  # steps to let pass before it is asked whether it is back
    missed: int = 0  # steps in a row without an answer
    since: int = 0  # the step that the pause is counted from
    silent_at: int = -1  # the last step that it missed
    probe: Replies | None = None  # the question whether it is back, where one is on its way


def _seconds(reported: Any, most: float) -> float:
    """Return the seconds that a site says it computed, as far as they can be true."""
    return reported if isinstance(reported, float) and 0 <= reported <= most else 0.0
