"""The one engine for peers elsewhere.

It asks sites, whatever carries the messages, and reads their answers.
"""

import collections
import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from coterie.arguments import COUNT, POSITIVE, either, mapped
from coterie.engines.compression import COMPRESS, HALVES, Compress, Rounding, relative_error
from coterie.engines.engine import Answers, Capabilities, Question
from coterie.engines.in_process.engine import InProcess
from coterie.engines.in_process.passes import Passes
from coterie.engines.messages import (
    NO_ANSWER,
    Request,
    decoded,
    promise_told,
    read_array,
    size_told,
    whole_number,
)
from coterie.engines.peer import Caps, Peer
from coterie.engines.peer.ledger import Ledger
from coterie.engines.remote.masked import MaskedGroups, MaskedSums
from coterie.engines.remote.sites import (
    CountedTransport,
    Kind,
    Liveness,
    LocalSites,
    Replies,
    Sites,
)
from coterie.errors import KnobError, did_you_mean, printable
from coterie.gradients.gradients import Gradients, add_up, complete
from coterie.gradients.parameters import frozen_digest, is_finite
from coterie.privacy.privacy import PROMISE, Privacy
from coterie.recording.costs import Traffic
from coterie.users.user import PEERS, Loss, User, check_names

logger = logging.getLogger(__name__)

Places = dict[tuple[int, int], Tensor]
"""Gradients by place: of the point, and of the site among all."""


class RemoteSettings(TypedDict, total=False):
    """Settings of `Remote` that engines derived from it hand on."""

    misses: int
    probe_every: int
    minimum: int
    compress: Compress | None
    secure_sums: bool | Mapping[str, Sequence[str]]
    largest: float


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
            sites = MaskedGroups(
                *(sites, self.groups, names),
                timeout=timeout,
                batch_size=batch_size,
                misses=misses,
                largest=largest,
            )
            names = tuple(self.groups)
            check_names([me.name, *names])
        self.names = tuple(names)
        self.own = InProcess(
            model, loss, me, batch_size=batch_size, seed=seed, one_by_one=one_by_one
        )
        self.batch_size, self.seed, self._alone = batch_size, seed, False
        self._transport = CountedTransport(sites, timeout, me.name, self.names)
        self._mine = self._transport.mine
        self._liveness = Liveness(
            self._transport, self.names, misses=misses, probe_every=probe_every
        )
        self._rounding = None if compress is None else Rounding(HALVES[compress])
        self._examples: dict[str, int | None] = dict(self.own.capabilities.examples)
        self._noise: dict[str, float] = {}
        self._no_e_steps = "no site has said that it answers E-steps"
        self._frozen = frozen_digest(model)
        self._sums: MaskedSums | None = None
        if secure_sums and not self.groups:
            self._sums = MaskedSums(
                self._transport, batch_size, misses=misses, minimum=minimum, largest=largest
            )
        self._gives_sums = self._sums is not None  # of which no parts are seen
        self._ask_sizes()

    @functools.cached_property
    def capabilities(self) -> Capabilities:
        """What this engine can do.

        Numbers of examples, and noise, as far as sites have told them, grow with what they tell.
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
        if rows and not self.capabilities.rows:
            raise KnobError(
                "the peers give sums only, which have no rows; use a rule that needs none"
            )
        if not weights:
            return self._own_gradients(x, step)
        asked = [[weights.get(name, math.nan) for name in self.names]]
        question = Question(x.detach()[None], step, torch.tensor(asked, dtype=torch.float64))
        if self._gives_sums:
            summed = self._summed(question)
            mine, total = self._own_gradients(x, step), summed()
            left_out = total.left_out
            present = sum(weight for name, weight in weights.items() if name not in left_out)
            assert total.sums is not None  # noqa: S101  # no rows were asked for
            peers, answered = complete(mine.own, total.sums[0], present)
            return replace(mine, peers=peers, answered=answered, left_out=left_out)
        waiting = self._asked(question)
        mine = self._own_gradients(x, step)
        found, left_out = waiting()
        kept = {self.names[peer]: row for (_, peer), row in found.items()}
        names = tuple(name for name in weights if name in kept)
        if not rows:  # in the order of the weights: the same bits wherever the peers are
            arriving = ((name, kept[name]) for name in names)
            peers, answered, _ = add_up(mine.own, arriving, weights)
            return replace(mine, peers=peers, answered=answered, left_out=left_out)
        matrix = torch.stack([kept[name] for name in names]) if names else x.new_empty(0, len(x))
        return mine.with_peers(matrix, names, weights, left_out, rows=rows)

    def ask(self, question: Question) -> Callable[[], Answers]:
        """Ask each site at those points where it has a weight, in one exchange; see `Asks.ask`."""
        if self._gives_sums:
            if question.e_step is None and not self.capabilities.many_points:
                raise KnobError("masked sums are of gradients at one point; ask by `gradients`")
            return self._summed(question)
        question = question if question.e_step is None else replace(question, rows=True)
        waiting = self._asked(question)
        return lambda: Answers.over(question, len(self.names), *waiting())

    def _own_gradients(self, x: Tensor, step: int) -> Gradients:
        began = time.perf_counter()
        mine = self.own.gradients(x, step, {})
        self._mine.seconds_computing += time.perf_counter() - began
        return mine

    def _summed(self, question: Question) -> Callable[[], Answers]:
        """Ask for the sum of the sites' answers at one point, by masks."""
        assert self._sums is not None  # noqa: S101  # see `_gives_sums`
        weights = dict(zip(self.names, question.weights[0].nan_to_num().tolist(), strict=True))
        waiting, form = self._sums.ask(self._request(question).message(), weights), question.form

        def answers() -> Answers:
            began = time.perf_counter()
            summed, left_out = waiting()
            self._mine.seconds_waiting += time.perf_counter() - began
            there = sum(weight for name, weight in weights.items() if name not in left_out)
            total = torch.zeros_like(form) if summed is None else summed.reshape(form.shape)
            return Answers(total.to(form), form.new_tensor([there]), left_out)

        return answers

    def _asked(self, question: Question) -> Callable[[], tuple[Places, dict[str, str]]]:
        """Ask each site, and return what waits for those gradients that can be used, and for who is left out."""
        wanted_by = (~question.weights.isnan()).T.tolist()
        asked = {name: yes for name, yes in zip(self.names, wanted_by, strict=True) if any(yes)}
        left_out = self._liveness.not_asked(asked, question.step)
        alike: dict[tuple[bool, ...], list[str]] = {}
        for name, wanted in asked.items():
            if name not in left_out:
                alike.setdefault(tuple(wanted), []).append(name)
        work, e_step = question.work, question.e_step
        rounded = None if self._rounding is None else self._rounded(question, self._rounding)
        told = "" if e_step is None else e_step.told
        kind: Kind = len(question.points), 0 if work is None else work.count, told
        waiting, request = [], self._request(question)
        for wanted, names in alike.items():
            sent = None if rounded is None else rounded[list(wanted)]
            # a copy: a late site may still be sent to when points have moved
            these = request if all(wanted) else request.at(wanted)
            message = these.message(sent)
            since, patience = time.monotonic(), self._liveness.patience(names, kind)
            replies = self._transport.send(names, "gradients", message, patience=patience)
            waiting.append((names, since, replies))
        return partial(self._received, question, kind, asked, waiting, left_out)

    def _rounded(self, question: Question, rounding: Rounding) -> Tensor | None:
        """Return the points in the precision in which they are sent; None where it is their own."""
        if question.e_step is not None:
            return None
        points = question.points.detach()
        sent = rounding(points)
        self._mine.rounding = max(self._mine.rounding, relative_error(points, sent))
        return sent

    def _request(self, question: Question) -> Request:
        """Return what is asked at the points of a question, with the model's buffers."""
        held = self.own.passes.model.named_buffers()
        return Request(
            question.points.detach(),
            question.step,
            self.seed,
            self.batch_size if question.batch_size is None else question.batch_size,
            {name: buffer[None] for name, buffer in held} | dict(question.buffers),
            self._frozen,
            question.work,
            question.e_step,
        )

    def _received(
        self,
        question: Question,
        kind: Kind,
        asked: Mapping[str, Sequence[bool]],
        waiting: Sequence[tuple[Sequence[str], float, Replies]],
        left_out: dict[str, str],
    ) -> tuple[Places, dict[str, str]]:
        """Wait for the sites, and return what can be used of their answers, and who is left out."""
        form, usable = question.form[:1], Places()
        for names, since, sent in waiting:
            began = time.perf_counter()
            replies = sent.wait()
            self._mine.seconds_waiting += time.perf_counter() - began
            if all(name in replies for name in names):
                seconds, took = time.monotonic() - since, self._liveness.took
                for name in names:
                    took[name, kind] = max(seconds, 0.9 * took.get((name, kind), 0.0))
            for name in names:
                places = [place for place, yes in enumerate(asked[name]) if yes]
                like = form.expand(len(places), -1)
                rows = self._read(name, replies.get(name), question.step, like)
                if isinstance(rows, str):
                    left_out[name] = rows
                    continue
                peer = self.names.index(name)
                finite = {
                    (k, peer): row for k, row in zip(places, rows, strict=True) if is_finite(row)
                }
                usable |= finite
                if len(finite) < len(places):
                    left_out[name] = "not finite"
        numbers = collections.Counter(place for place, _ in usable)
        few = [place for place in range(len(question.points)) if numbers[place] < self.minimum]
        for name, wanted in asked.items():
            if name not in left_out and any(wanted[place] for place in few):
                left_out[name] = f"fewer than {self.minimum} peers answered"
        usable = {(place, peer): row for (place, peer), row in usable.items() if place not in few}
        if self._alone == bool(usable):
            self._alone = not self._alone
            said = "going on alone" if self._alone else "no longer alone"
            logger.warning("step %d: %s", question.step, said)
        return usable, left_out

    def _read(self, name: str, reply: Any, step: int, like: Tensor) -> Tensor | str:
        """Return a site's gradients, or why there are none, and take note of what it tells."""
        answer = read_array(name, reply, "gradients", like.shape, step=step)
        if isinstance(answer, str) and (answer == NO_ANSWER or answer.startswith("refused")):
            self._liveness.miss(name, step, answer)
            return answer
        self._liveness.answered(name)
        if isinstance(answer, str):
            return answer
        gradients = decoded(answer)
        if gradients is None:
            return "not of floating-point numbers"
        self._transport.received(name, answer.nbytes)
        self._examples[name] = whole_number(reply.get("examples"))
        self._noise[name] = size_told(reply.get("noise"))
        traffic = self._transport.traffic[name]
        traffic.rounding = max(traffic.rounding, size_told(reply.get("rounding")))
        traffic.seconds_computing += size_told(reply.get("seconds"), self.timeout)
        return gradients.to(like)

    def describe(self) -> dict[str, Any]:
        """Return what the record should say of how gradients are computed."""
        names = ("timeout", "misses", "probe_every", "minimum")
        knobs = {name: getattr(self, name) for name in names}
        if self.compress is not None:
            knobs["compress"] = self.compress
        if self._sums is not None:
            knobs["largest"] = self._sums.largest
        if self.groups:
            knobs["groups"] = {name: list(group) for name, group in self.groups.items()}
        masked = ", masked sums" if self._sums is not None or self.groups else ""
        about = {"engine": f"elsewhere{masked}", "peers": dict.fromkeys(self.names, "at its site")}
        return self.own.describe() | about | knobs

    def traffic(self) -> Mapping[str, Traffic]:
        """Return what has travelled so far, by user; a site's waiting is not known here."""
        return self._transport.traffic

    def promises(self) -> Mapping[str, Mapping[str, float]]:
        """Ask private sites what they promise and have spent, and return it with the noise they told."""
        # who has spent all, and refuses, too; all, where the last steps were another job's
        noisy = self._noise or dict.fromkeys(self.names, 1.0)
        asked = [name for name, noise in noisy.items() if noise]
        if not asked or self._sums is not None or self.groups:
            return {}
        promised = {}
        for name, terms in self._transport.ask(asked, "ready").wait().items():
            fields = terms if isinstance(terms, dict) else {}
            if (promise := promise_told(fields.get("promise"))) is not None:
                noise = {"noise": self._noise[name]} if name in self._noise else {}
                promised[name] = promise | noise
        return promised

    def close(self) -> None:
        """Do nothing: the sites are let go where the job ends."""

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


PROMISES = either(
    PROMISE, mapped(PROMISE, "a `coterie.privacy.Privacy`, or one by the name of each private peer")
)
"""What peers may promise."""


class PrivatePeers(Remote):
    """Gradients of users in this process whose peers promise (ε, δ).

    To find out what a promise costs.

    Peers answer and refuse as they would between organisations; what they spend is counted in
    memory, and is forgotten with the engine.

    Args:
        model, loss, me, peers, batch_size, seed: as for `InProcess`.
        privacy: what every peer promises, or by name what some do; the others' gradients are plain.
        gradients: how many gradients each private peer gives in all; `AdaptiveAveraging` asks for
            4.5 a step. The noise follows from it where `privacy` does not say it.

    Example:
        >>> import functools, torch, coterie
        >>> users = [User(name, torch.randn(40, 2), torch.randn(40, 1)) for name in ("me", "a", "b")]
        >>> promise = Privacy(epsilon=4.0, delta=1e-3, clip=1.0)
        >>> private = functools.partial(PrivatePeers, privacy=promise, gradients=90)
        >>> loss = nn.functional.mse_loss
        >>> run = coterie.train(nn.Linear(2, 1), loss, users[0], users[1:], steps=20, engine=private)
        >>> run.step
        20
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        me: User,
        peers: Sequence[User],
        *,
        privacy: Privacy | Mapping[str, Privacy],
        gradients: int | None = None,
        batch_size: int = 32,
        seed: int = 0,
    ) -> None:
        names = [peer.name for peer in PEERS("peers", peers)]
        PROMISES("privacy", privacy)
        self.privacy = (
            dict.fromkeys(names, privacy) if isinstance(privacy, Privacy) else dict(privacy)
        )
        if unknown := [name for name in self.privacy if name not in names]:
            raise KnobError(
                f"`privacy` names an unknown peer {unknown[0]!r}; the peers are {', '.join(names)}"
                f"{did_you_mean(unknown[0], names)}"
            )
        for promise in self.privacy.values():
            if promise.batch_size not in (None, batch_size):
                raise KnobError(
                    f"`batch_size` of `privacy`, {promise.batch_size}, must be that of the run,"
                    f" {batch_size}, or be left out: peers would refuse every gradient"
                )
        passes = Passes(model, loss)
        self.peers = {peer.name: self._peer(peer, passes, gradients) for peer in peers}
        sites = LocalSites(self.peers)
        super().__init__(
            model, loss, me, sites=sites, names=names, batch_size=batch_size, seed=seed
        )

    def describe(self) -> dict[str, Any]:
        """Return what the record should say of how gradients are computed."""
        promises = {name: privacy.in_words() for name, privacy in self.privacy.items()}
        return self.own.describe() | {"engine": "in process, private peers", "promises": promises}

    def traffic(self) -> Mapping[str, Traffic]:
        """Return nothing: nothing travels."""
        return {}

    def _peer(self, user: User, passes: Passes, gradients: int | None) -> Peer:
        privacy = self.privacy.get(user.name)
        if privacy is None:
            return Peer(user, passes)
        return Peer(user, passes, Caps(gradients=gradients), Ledger(), privacy=privacy)
