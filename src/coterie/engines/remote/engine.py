"""The one engine for peers elsewhere.

It asks sites, whatever carries the messages, and reads their answers.
"""

import collections
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from coterie.arguments import COUNT, POSITIVE
from coterie.engines.compression import COMPRESS, HALVES, Compress, Rounding, relative_error
from coterie.engines.engine import Answers, Capabilities, Question
from coterie.engines.in_process.engine import InProcess
from coterie.engines.remote.masked import MaskedGroups, SecureSums
from coterie.engines.remote.messages import pack_request, read_reply
from coterie.engines.remote.sites import CountedTransport, Liveness, Replies, Sites, seconds_told
from coterie.engines.requests import Request, noise_told, promise_told, whole_number
from coterie.errors import KnobError, printable
from coterie.gradients.gradients import Gradients, add_up, is_finite
from coterie.gradients.parameters import frozen_digest
from coterie.privacy.masked_sums import MaskedSums
from coterie.recording.costs import Traffic
from coterie.users.user import Loss, User, check_names

logger = logging.getLogger(__name__)

"""What numbers may be rounded to on the way."""


Given: TypeAlias = dict[tuple[int, int], Tensor]
"""Gradients by place: of the point, and of the site among all."""

Kind: TypeAlias = tuple[int, int, str]
"""What takes about as long to answer: so many points, so many steps of one's own, such an E-step."""

SLACK = 4.0
"""How much longer than of late an answer may take."""


class Remote:
    """Gradients of peers elsewhere, who may be late, gone, or wrong.

    A site that does not answer within `timeout` is left out of that step, and its weight goes back
    to g_0. One that has answered the like before is waited for less long: unless it is slow, it
    costs one `timeout` in all until it is dropped. After `misses` steps in a row without an answer
    it is no longer waited for; a short question in the background, every `probe_every` steps, finds
    out whether it is back. One that says so and again gives nothing is dropped at once, for twice
    as long each time. With fewer than `minimum` answers a step is taken alone.

    Args:
        model, loss, me, batch_size, seed: as for `InProcess`; the model has the same parameters as
        at the sites.
        peers: none, as their examples are at the sites.
        sites: what carries the messages.
        names: the sites that may take part.
        timeout: seconds to wait for a site in one step.
        misses: steps in a row without an answer after which a site is not waited for.
        probe_every: steps from one question whether it is back to the next.
        minimum: how many peers must answer for a step to use their gradients.
        compress: send points and gradients in "bf16" or "fp16"; what a message loses is added to
            the next.
        secure_sums: see the weighted sum of the sites' gradients only, by masks; see `MaskedSums`
            for who is lost. τ then stays as it is for the run. Or groups of sites by name: each
            then stands as one peer, whose gradient is the mean of the group's, at several points
            too; see `MaskedGroups`.
        largest: with `secure_sums` what no entry of a gradient may exceed; the error of a sum is
            about 1e-9 of it.
        one_by_one: of user 0's own gradients, as for `InProcess`.
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
        one_by_one: bool = False,
    ) -> None:
        self.timeout, self.compress = POSITIVE("timeout", timeout), COMPRESS("compress", compress)
        self.misses, self.probe_every = COUNT("misses", misses), COUNT("probe_every", probe_every)
        self.minimum = COUNT("minimum", minimum)
        if compress and secure_sums:
            raise KnobError("`compress` must be None with `secure_sums`: a masked sum is exact")
        if peers:
            raise KnobError(
                f"`peers` must be empty, got {len(peers)}: the peers' examples are at their sites"
            )
        check_names([me.name, *names])
        self.groups = {} if isinstance(secure_sums, bool) else dict(secure_sums)
        if self.groups:
            how: dict[str, Any] = {"timeout": timeout, "misses": misses}
            how |= {"largest": largest, "batch_size": batch_size}
            sites, names = MaskedGroups(sites, self.groups, names, **how), tuple(self.groups)
            check_names([me.name, *names])
        self.names = tuple(names)
        own: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "one_by_one": one_by_one}
        self.own = InProcess(model, loss, me, **own)
        self.batch_size, self.seed, self._alone = batch_size, seed, False
        self._transport = CountedTransport(sites, timeout, me.name, self.names)
        self._mine = self._transport.mine
        self._liveness = Liveness(
            self._transport, self.names, misses=misses, probe_every=probe_every
        )
        self._rounding = None if compress is None else Rounding(HALVES[compress])
        self._examples: dict[str, int | None] = dict(self.own.capabilities.examples)
        self._noise: dict[str, float] = {}
        self._took: dict[tuple[str, Kind], float] = {}  # how long answers have taken of late
        self._no_e_steps = "no site has said that it answers E-steps"
        self._frozen = frozen_digest(model)
        self._sums: SecureSums | None = None
        if secure_sums and not self.groups:
            sums = MaskedSums(misses=misses, minimum=minimum, largest=largest)
            self._sums = SecureSums(sums, self._transport, batch_size)
        self._ask_sizes()

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do.

        Numbers of examples, and noise, as far as sites have told them.
        """
        told = self._examples
        if self._sums is not None:
            return Capabilities(
                rows=False, batch_size=self.batch_size, examples=told, no_e_steps=self._no_e_steps
            )
        return Capabilities(
            rows_at_hand=True,
            batch_size=self.batch_size,
            many_points=True,
            examples=told,
            noise=self._noise,
            local_work=not self.groups,
            no_e_steps=self._no_e_steps,
        )

    @property
    def dropped(self) -> tuple[str, ...]:
        """The sites that are not waited for."""
        return self._liveness.dropped

    def gradients(
        self, x: Tensor, step: int, weights: Mapping[str, float], rows: bool = False
    ) -> Gradients:
        """Return everybody's gradients at x; see `Engine.gradients`."""
        if self._sums is not None:
            return self._with_sum(self._sums, x, step, weights, rows=rows)
        given = torch.tensor(
            [[weights.get(name, math.nan) for name in self.names]], dtype=torch.float64
        )
        answers = self._asked(Question(x[None], step, given)) if weights else None
        began = time.perf_counter()
        mine = self.own.gradients(x, step, {})
        self._mine.seconds_computing += time.perf_counter() - began
        if answers is None:
            return mine
        given_by, left_out = answers()
        kept = {self.names[peer]: row for (_, peer), row in given_by.items()}
        names = tuple(name for name in weights if name in kept)
        if not rows:  # in the order of the weights: the same bits wherever the peers are
            arriving = ((name, kept[name]) for name in names)
            peers, share, _ = add_up(mine.own, arriving, weights)
            return replace(mine, peers=peers, answered=share, left_out=left_out)
        matrix = torch.stack([kept[name] for name in names]) if names else x.new_empty(0, len(x))
        return mine.with_peers(matrix, names, weights, left_out, rows=rows)

    def ask(self, question: Question) -> Callable[[], Answers]:
        """Ask each site at those points where it has a weight, in one exchange; see `Asks.ask`."""
        if question.e_step is not None and self._sums is not None:
            return self._summed_e_step(self._sums, question)
        if self._sums is not None:
            raise KnobError(
                "masked sums are of gradients at one point, and have no rows; ask by `gradients`"
            )
        question = question if question.e_step is None else replace(question, rows=True)
        waiting = self._asked(question)

        def answers() -> Answers:
            given_by, left_out = waiting()
            return Answers.over(question, given_by, len(self.names), left_out)

        return answers

    def _asked(self, question: Question) -> Callable[[], tuple[Given, dict[str, str]]]:
        """Ask each site, and return what waits for those gradients that can be used, and for who is left out."""
        step, wanted_by = question.step, (~question.weights.isnan()).T.cpu()
        asked = {
            name: wanted for name, wanted in zip(self.names, wanted_by, strict=True) if wanted.any()
        }
        left_out = self._liveness.not_asked(asked, step)
        alike: dict[tuple[bool, ...], list[str]] = {}
        for name, wanted in asked.items():
            if name not in left_out:
                alike.setdefault(tuple(wanted.tolist()), []).append(name)
        points = question.points.detach()
        exact = self._rounding is None or question.e_step is not None
        sent = None if exact or self._rounding is None else self._rounding(points)
        if sent is not None:
            self._mine.rounding = max(self._mine.rounding, relative_error(points, sent))
        waiting = [
            (names, time.monotonic(), self._send(names, question, list(wanted), sent))
            for wanted, names in alike.items()
        ]
        return partial(self._answers, question, asked, waiting, left_out)

    def _summed_e_step(self, masked: SecureSums, question: Question) -> Callable[[], Answers]:
        """Let sites answer an E-step under masks: their sum comes."""
        sums, form = masked.sums, question.form
        weights = dict(zip(self.names, question.weights[0].nan_to_num().tolist(), strict=True))
        request = self._request(question.points.detach(), question.step, e_step=question.e_step)
        waiting = masked.ask(pack_request(request), weights)

        def answers() -> Answers:
            summed, left_out = waiting()
            if summed is None:
                return Answers(torch.zeros_like(form), form.new_zeros(1), sums.lost | left_out)
            answered = sum(weight for name, weight in weights.items() if name not in sums.lost)
            return Answers(summed.reshape(form.shape), form.new_tensor([answered]), sums.lost)

        return answers

    def describe(self) -> dict[str, Any]:
        """Return what the record should say of how gradients are computed."""
        knobs = {
            name: getattr(self, name) for name in ("timeout", "misses", "probe_every", "minimum")
        }
        knobs |= {} if self.compress is None else {"compress": self.compress}
        knobs |= {} if self._sums is None else {"largest": self._sums.sums.largest}
        knobs |= (
            {"groups": {name: list(group) for name, group in self.groups.items()}}
            if self.groups
            else {}
        )
        masked = ", masked sums" if self._sums is not None or self.groups else ""
        about = {"engine": f"elsewhere{masked}"}
        return (
            self.own.describe()
            | about
            | {"peers": dict.fromkeys(self.names, "at its site")}
            | knobs
        )

    def traffic(self) -> Mapping[str, Traffic]:
        """Return what has travelled so far, by user; a site's waiting is not known here."""
        return self._transport.traffic

    def promises(self) -> Mapping[str, Mapping[str, float]]:
        """Ask private sites what they promise and have spent, and return it with the noise they told."""
        # who has spent all, and refuses, too; all, where the last steps were another job's
        heard = self._noise or dict.fromkeys(self.names, 1.0)
        asked = [name for name, noise in heard.items() if noise]
        if not asked or self._sums is not None or self.groups:
            return {}
        replies = self._transport.ask(asked, "ready").wait()
        terms = {
            name: reply.get("promise") for name, reply in replies.items() if isinstance(reply, dict)
        }
        told = {
            name: promise for name in terms if (promise := promise_told(terms[name])) is not None
        }
        noise = {name: {"noise": told} for name, told in self._noise.items()}
        return {name: promise | noise.get(name, {}) for name, promise in told.items()}

    def close(self) -> None:
        """Do nothing: the sites are let go where the job ends."""

    def _with_sum(
        self, sums: SecureSums, x: Tensor, step: int, weights: Mapping[str, float], *, rows: bool
    ) -> Gradients:
        """Return the own gradient and the sites' masked sum at x."""
        if rows:
            raise KnobError(
                "masked sums have no rows; use a rule that needs none, with `rows=False`"
            )
        waiting = (
            sums.ask(pack_request(self._request(x.detach()[None], step)), weights)
            if weights
            else None
        )
        began = time.perf_counter()
        mine = self.own.gradients(x, step, {})
        computed = time.perf_counter()
        self._mine.seconds_computing += computed - began
        if waiting is None:
            return mine
        given = waiting()
        self._mine.seconds_waiting += time.perf_counter() - computed
        return sums.sums.with_sum(mine, *given, weights)

    def _request(self, points: Tensor, step: int, **more: Any) -> Request:
        """Return what sites are asked at some points, with the model's buffers."""
        buffers = {name: buffer[None] for name, buffer in self.own.passes.model.named_buffers()}
        how: dict[str, Any] = {
            "batch_size": self.batch_size,
            "buffers": buffers,
            "frozen": self._frozen,
        }
        return Request(points, step, self.seed, **how | more)

    def _ask_sizes(self) -> None:
        """Ask how many examples sites have, by which a rule may weigh them, and if they answer E-steps."""
        why_not = {}
        for name, terms in self._transport.ask(self.names, "ready").wait().items():
            if name in self.names and isinstance(terms, Mapping):
                self._examples[name] = whole_number(terms.get("size"))
                said = terms.get("no_e_steps")
                why_not[name] = printable(said, 100) if isinstance(said, str) else "it knows none"
        if why_not:
            self._no_e_steps = "; ".join(f"{name}: {why}" for name, why in why_not.items() if why)

    def _send(
        self, names: Sequence[str], question: Question, wanted: list[bool], sent: Tensor | None
    ) -> Replies:
        """Send a question to sites that are asked at the same points.

        `sent` are these where they are rounded.
        """
        work = (
            None
            if question.work is None
            else question.work.at([k for k, yes in enumerate(wanted) if yes])
        )
        points = question.points.detach()
        how: dict[str, Any] = {"work": work, "e_step": question.e_step}
        request = self._request(points if all(wanted) else points[wanted], question.step, **how)
        moved = {name: rows[wanted] for name, rows in question.buffers.items()}
        request = replace(
            request,
            buffers={**request.buffers, **moved},
            batch_size=self.batch_size if question.batch_size is None else question.batch_size,
        )
        rounded = None if sent is None else sent[wanted]
        # a copy: a late site may still be sent to when points have moved
        message = pack_request(request, rounded)
        patience = self._patience([(name, _kind(question)) for name in names])
        return self._transport.send(names, "gradients", message, patience=patience)

    def _patience(self, asked: Sequence[tuple[str, Kind]]) -> float:
        """Return how long to wait for sites, by how long they took to answer the like."""
        took = max(self._took.get(one, math.inf) for one in asked)
        least: float = self.timeout / self.misses
        seconds: float = min(self.timeout, max(least, SLACK * took))
        return seconds

    def _answers(
        self,
        question: Question,
        asked: Mapping[str, Tensor],
        waiting: Sequence[tuple[Sequence[str], float, Replies]],
        left_out: dict[str, str],
    ) -> tuple[Given, dict[str, str]]:
        """Wait for the sites, and return what can be used of their answers, and who is left out."""
        form, began = question.form, time.perf_counter()
        usable: Given = {}
        for names, since, sent in waiting:
            replies = sent.wait()
            if all(name in replies for name in names):
                took, kind = time.monotonic() - since, _kind(question)
                for name in names:
                    self._took[name, kind] = max(took, 0.9 * self._took.get((name, kind), 0.0))
            for name in names:
                places = asked[name].nonzero().flatten().tolist()
                answer = self._read(
                    name, replies.get(name), question.step, form[:1].expand(len(places), -1)
                )
                if isinstance(answer, str):
                    left_out[name] = answer
                    continue
                finite = {
                    place: row for place, row in zip(places, answer, strict=True) if is_finite(row)
                }
                usable |= {(place, self.names.index(name)): row for place, row in finite.items()}
                if len(finite) < len(places):
                    left_out[name] = "not finite"
        self._mine.seconds_waiting += time.perf_counter() - began
        return self._where_enough(question, usable, asked, left_out), left_out

    def _where_enough(
        self,
        question: Question,
        usable: Given,
        asked: Mapping[str, Tensor],
        left_out: dict[str, str],
    ) -> Given:
        """Use nobody's gradient at a point where fewer than `minimum` answered, and tell when a step is alone."""
        numbers = collections.Counter(place for place, _ in usable)
        few = [place for place in range(len(question.points)) if numbers[place] < self.minimum]
        for name, wanted in asked.items():
            if name not in left_out and bool(wanted[few].any()):
                left_out[name] = f"fewer than {self.minimum} peers answered"
        usable = {(place, peer): row for (place, peer), row in usable.items() if place not in few}
        if self._alone == bool(usable):
            self._alone = not self._alone
            said = "going on alone" if self._alone else "no longer alone"
            logger.warning("step %d: %s", question.step, said)
        return usable

    def _read(self, name: str, reply: Any, step: int, points: Tensor) -> Tensor | str:
        """Return a site's gradients, or why there are none."""
        answer = read_reply(name, reply, step, points)
        if answer is None or (isinstance(answer, str) and answer.startswith("refused")):
            self._liveness.miss(name, step, answer)
        else:
            self._liveness.answered(name)
        if isinstance(answer, Tensor):
            self._transport.received(name, reply["gradients"].nbytes)
            self._examples[name] = whole_number(reply.get("examples"))
            self._noise[name] = noise_told(reply.get("noise"))
            traffic = self._transport.traffic[name]
            traffic.rounding = max(traffic.rounding, noise_told(reply.get("rounding")))
            traffic.seconds_computing += seconds_told(reply.get("seconds"), self.timeout)
        return "no answer" if answer is None else answer


def _kind(question: Question) -> Kind:
    work, e_step = question.work, question.e_step
    steps = 0 if work is None else work.count
    return len(question.points), steps, "" if e_step is None else e_step.told
