"""Between organisations: peers are sites that NVFLARE reaches, each with its own data, over mutual TLS."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from coterie.engines.engine import Answers, Capabilities, Question
from coterie.engines.flare.masked_groups import MaskedGroups
from coterie.engines.flare.messages import pack_request, read_reply, request_bytes
from coterie.engines.flare.secure_sums import SecureSums
from coterie.engines.flare.sites import Replies, Sites
from coterie.engines.flare.standing import Standing, seconds_told, whole_number
from coterie.engines.in_process.engine import InProcess
from coterie.engines.requests import Request, noise_told, promise_told
from coterie.engines.rounding import HALVES, Compress, Rounding, relative_error
from coterie.errors import KnobError
from coterie.gradients.gradients import Gradients, is_finite
from coterie.gradients.trained_part import frozen_digest
from coterie.privacy.masked_sums import MaskedSums
from coterie.recording.traffic import Traffic
from coterie.users.user import Loss, User, check_names

logger = logging.getLogger(__name__)

MASKED_NVFLARE = "NVFLARE, masked sums"


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
        compress: send points and gradients in "bf16" or "fp16"; what a message loses is added to the next.
        secure_sums: see the weighted sum of the sites' gradients only, by masks; see `MaskedSums` for who is lost.
            τ then stays as it is for the run. Or groups of sites by name: each then stands as one peer, whose
            gradient is the mean of the group's, at several points too; see `MaskedGroups`.
        largest: with `secure_sums` what no entry of a gradient may exceed; the error of a sum is about 1e-9 of it.
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
        compress: Compress | None = None,
        secure_sums: bool | Mapping[str, Sequence[str]] = False,
        largest: float = 16.0,
    ) -> None:
        for knob, value in {"misses": misses, "probe_every": probe_every, "minimum": minimum}.items():
            if value < 1:
                raise KnobError(f"`{knob}` must be at least 1, got {value}")
        if not timeout > 0:
            raise KnobError(f"`timeout` must be positive, got {timeout}")
        if compress not in (None, *HALVES):
            raise KnobError(f'`compress` must be "bf16", "fp16" or None, got {compress!r}')
        if compress and secure_sums:
            raise KnobError("`compress` must be None with `secure_sums`: a masked sum is exact")
        if peers:
            raise KnobError(f"`peers` must be empty, got {len(peers)}: the peers' examples are at their sites")
        check_names([me.name, *names])
        self.groups = {} if isinstance(secure_sums, bool) else dict(secure_sums)
        if self.groups:
            how: dict[str, Any] = {
                "timeout": timeout,
                "misses": misses,
                "largest": largest,
                "batch_size": batch_size,
            }
            sites, names = MaskedGroups(sites, self.groups, names, **how), tuple(self.groups)
            check_names([me.name, *names])
        self.names = tuple(names)
        self.own = InProcess(model, loss, me, batch_size=batch_size, seed=seed)
        self.sites, self.batch_size, self.seed = sites, batch_size, seed
        self.timeout, self.misses, self.probe_every, self.minimum = timeout, misses, probe_every, minimum
        self._traffic = {name: Traffic() for name in (me.name, *self.names)}
        self._mine = self._traffic[me.name]
        self._standing = {name: Standing(probe_every) for name in self.names}
        self._alone, self.compress = False, compress
        self._rounding = None if compress is None else Rounding(HALVES[compress])
        self._examples: dict[str, int | None] = dict(self.own.capabilities.examples)
        self._noise: dict[str, float] = {}
        self._frozen = frozen_digest(model)
        self._sums: SecureSums | None = None
        if secure_sums and not self.groups:
            sums = MaskedSums(misses=misses, minimum=minimum, largest=largest)
            self._sums = SecureSums(
                sums, sites, timeout, batch_size=batch_size, send=self._post, received=self._received
            )
        else:
            self._ask_sizes()

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do; numbers of examples, and noise, as far as sites have told them."""
        told = self._examples
        if self._sums is not None:
            return Capabilities(rows=False, batch_size=self.batch_size, examples=told)
        return Capabilities(
            rows_at_hand=True,
            batch_size=self.batch_size,
            many_points=True,
            examples=told,
            noise=self._noise,
            local_work=not self.groups,
        )

    @property
    def dropped(self) -> tuple[str, ...]:
        """The sites that are not waited for."""
        return tuple(name for name, site in self._standing.items() if site.missed >= self.misses)

    def gradients(self, x: Tensor, step: int, weights: Mapping[str, float], rows: bool = False) -> Gradients:
        """Return everybody's gradients at x; see `Engine.gradients`."""
        if self._sums is not None:
            return self._with_sum(self._sums, x, step, weights, rows=rows)
        given = torch.tensor([[weights.get(name, math.nan) for name in self.names]], dtype=torch.float64)
        answers = self.ask(Question(x[None], step, given, rows=True)) if weights else None
        began = time.perf_counter()
        mine = self.own.gradients(x, step, {})
        self._mine.seconds_computing += time.perf_counter() - began
        if answers is None:
            return mine
        found = answers()
        matrix = mine.own.new_empty(0) if found.rows is None else found.rows[0]
        there = matrix.isfinite().all(1).tolist()
        kept = {name: row for name, row, yes in zip(self.names, matrix, there, strict=True) if yes}
        names = tuple(name for name in weights if name in kept)
        matrix = torch.stack([kept[name] for name in names]) if names else matrix[:0]
        return mine.with_peers(matrix, names, weights, found.left_out, rows=rows)

    def ask(self, question: Question) -> Callable[[], Answers]:
        """Ask each site at those points where it has a weight, in one exchange; see `AsksAtPoints.ask`."""
        if self._sums is not None:
            raise KnobError("masked sums are of gradients at one point, and have no rows; ask by `gradients`")
        step, wanted_by = question.step, (~question.weights.isnan()).T.cpu()
        asked = {name: wanted for name, wanted in zip(self.names, wanted_by, strict=True) if wanted.any()}
        self._take_back(step, asked)
        dropped = self.dropped
        # One that missed this step at another point is not waited for at this one.
        silent = [name for name in asked if self._standing[name].silent_at == step and name not in dropped]
        left_out = dict.fromkeys(silent, "no answer")
        left_out |= {name: "not waited for" for name in asked if name in dropped}
        alike: dict[tuple[bool, ...], list[str]] = {}
        for name, wanted in asked.items():
            if name not in left_out:
                alike.setdefault(tuple(wanted.tolist()), []).append(name)
        points = question.points.detach()
        sent = None if self._rounding is None else self._rounding(points)
        if sent is not None:
            self._mine.rounding = max(self._mine.rounding, relative_error(points, sent))
        waiting = [(names, self._send(names, question, list(wanted), sent)) for wanted, names in alike.items()]
        return partial(self._answers, question, asked, waiting, left_out)

    def local_work(self, question: Question) -> Callable[[], Answers]:
        """Let sites take steps of their own; see `WorksLocally.local_work`."""
        return self.ask(question)

    def describe(self) -> dict[str, Any]:
        """Return what the record should say of how gradients are computed."""
        knobs = {name: getattr(self, name) for name in ("timeout", "misses", "probe_every", "minimum")}
        knobs |= {} if self.compress is None else {"compress": self.compress}
        knobs |= {} if self._sums is None else {"largest": self._sums.sums.largest}
        knobs |= {"groups": {name: list(group) for name, group in self.groups.items()}} if self.groups else {}
        masked = self._sums is not None or self.groups
        peers, name = dict.fromkeys(self.names, "at its site"), MASKED_NVFLARE if masked else "NVFLARE"
        return self.own.describe() | {"engine": name, "peers": peers} | knobs

    def traffic(self) -> Mapping[str, Traffic]:
        """Return what has travelled so far, by user; a site's waiting is not known here."""
        return self._traffic

    def promises(self) -> Mapping[str, Mapping[str, float]]:
        """Ask the sites that told of noise what they promise and have spent, and return it with that noise."""
        asked = [name for name, noise in self._noise.items() if noise and name not in self.dropped]
        if not asked:
            return {}
        replies = self.sites.ask(asked, "ready", self.timeout).wait()
        terms = {name: reply.get("promise") for name, reply in replies.items() if isinstance(reply, dict)}
        told = {name: promise for name in terms if (promise := promise_told(terms[name])) is not None}
        return {name: {**promise, "noise": self._noise[name]} for name, promise in told.items()}

    def close(self) -> None:
        """Do nothing: the sites are let go where the job ends."""

    def _with_sum(
        self, sums: SecureSums, x: Tensor, step: int, weights: Mapping[str, float], *, rows: bool
    ) -> Gradients:
        """Return the own gradient and the sites' masked sum at x."""
        if rows:
            raise KnobError("masked sums have no rows; use a rule that needs none, with `rows=False`")
        waiting = sums.ask(pack_request(self._request(x.detach()[None], step)), weights) if weights else None
        began = time.perf_counter()
        mine = self.own.gradients(x, step, {})
        self._mine.seconds_computing += time.perf_counter() - began
        return mine if waiting is None else sums.sums.with_sum(mine, *waiting(), weights)

    def _request(self, points: Tensor, step: int, **more: Any) -> Request:
        """Return what sites are asked at some points, with the model's buffers."""
        buffers = {name: buffer[None] for name, buffer in self.own.passes.model.named_buffers()}
        how: dict[str, Any] = {"batch_size": self.batch_size, "buffers": buffers, "frozen": self._frozen}
        return Request(points, step, self.seed, **how | more)

    def _ask_sizes(self) -> None:
        """Ask how many examples sites have: a rule may weigh them by it in its first step."""
        for name, terms in self.sites.ask(self.names, "ready", self.timeout).wait().items():
            if name in self.names and isinstance(terms, Mapping):
                self._examples[name] = whole_number(terms.get("size"))

    def _send(self, names: Sequence[str], question: Question, wanted: list[bool], sent: Tensor | None) -> Replies:
        """Send a question to sites that are asked at the same points; `sent` are these where they are rounded."""
        work = None if question.work is None else question.work.at([k for k, yes in enumerate(wanted) if yes])
        request = self._request(question.points.detach()[wanted], question.step, work=work)
        moved = {name: rows[wanted] for name, rows in question.buffers.items()}
        request = replace(
            request,
            buffers={**request.buffers, **moved},
            batch_size=self.batch_size if question.batch_size is None else question.batch_size,
        )
        rounded = None if sent is None else sent[wanted]
        message = pack_request(request, rounded)  # a copy: a late site may still be sent to when points have moved
        return self._post(names, "gradients", message)

    def _post(self, names: Sequence[str], method: str, message: dict[str, Any]) -> Replies:
        """Send a request to sites, and count it."""
        size = request_bytes(message)
        self._mine.bytes_sent += size * len(names)
        self._mine.messages += len(names)
        for name in names:
            self._traffic[name].bytes_received += size
        return self.sites.ask(names, method, self.timeout, request=message)

    def _received(self, name: str, size: int) -> None:
        """Count a message of a site."""
        self._mine.bytes_received += size
        self._traffic[name].bytes_sent += size
        self._traffic[name].messages += 1

    def _answers(
        self,
        question: Question,
        asked: Mapping[str, Tensor],
        waiting: Sequence[tuple[Sequence[str], Replies]],
        left_out: dict[str, str],
    ) -> Answers:
        """Wait for the sites, and return what can be used of their answers."""
        points, began = question.points, time.perf_counter()
        rows = points.new_full((len(points), len(self.names), points.shape[1]), math.nan)
        for names, sent in waiting:
            replies = sent.wait()
            for name in names:
                wanted = asked[name].to(points.device)
                answer = self._read(name, replies.get(name), question.step, points[wanted])
                if isinstance(answer, str):
                    left_out[name] = answer
                    continue
                rows[wanted, self.names.index(name)] = answer
                if not is_finite(answer):
                    left_out[name] = "not finite"
        self._mine.seconds_waiting += time.perf_counter() - began
        usable = rows.isfinite().all(2)
        self._check_minimum(question, usable, asked, left_out)
        weights = question.weights.to(points).masked_fill(~usable, 0.0)
        if question.rows:
            return Answers(None, weights.sum(1), left_out, rows.masked_fill(~usable[:, :, None], math.nan))
        rows = rows.masked_fill(~usable[:, :, None], 0.0)
        return Answers(torch.bmm(weights[:, None], rows).squeeze(1), weights.sum(1), left_out)

    def _check_minimum(
        self, question: Question, usable: Tensor, asked: Mapping[str, Tensor], left_out: dict[str, str]
    ) -> None:
        """Use nobody's gradient at a point where fewer than `minimum` answered, and tell when a step is alone."""
        few = (usable.sum(1) < self.minimum).cpu()
        for name, wanted in asked.items():
            if name not in left_out and bool((few & wanted).any()):
                left_out[name] = f"fewer than {self.minimum} peers answered"
        usable[few.to(usable.device)] = False
        if self._alone == bool(usable.any()):
            self._alone = not self._alone
            said = "going on alone" if self._alone else "no longer alone"
            logger.warning("step %d: %s", question.step, said)

    def _read(self, name: str, reply: Any, step: int, points: Tensor) -> Tensor | str:
        """Return a site's gradients, or why there are none."""
        answer = read_reply(name, reply, step, points)
        if answer is None or (isinstance(answer, str) and answer.startswith("refused")):
            self._miss(name, step)
        else:
            self._standing[name] = Standing(self.probe_every)
        if isinstance(answer, Tensor):
            self._received(name, reply["gradients"].nbytes)
            self._examples[name] = whole_number(reply.get("examples"))
            self._noise[name] = noise_told(reply.get("noise"))
            self._traffic[name].seconds_computing += seconds_told(reply.get("seconds"), self.timeout)
        return "no answer" if answer is None else answer

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
