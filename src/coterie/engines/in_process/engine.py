"""All users in one process: one pass for user 0 and one for all peers, on CPU or GPU."""

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from coterie.arguments import COUNT, SEED
from coterie.engines.cpu_threads import operations
from coterie.engines.engine import (
    NOT_IN_MEMORY,
    AllRows,
    Answers,
    Capabilities,
    LocalWork,
    Question,
)
from coterie.engines.in_process.by_layer import ByLayer
from coterie.engines.in_process.copies import Copies
from coterie.engines.in_process.forward_options import DEFAULT_FORWARD, ForwardOptions
from coterie.engines.in_process.model_support import (
    ModelSupport,
    check_classes,
    layers_of,
    probe,
)
from coterie.engines.in_process.passes import Passes, Weights
from coterie.engines.in_process.sampler import Batches, BatchSampler, with_own
from coterie.engines.in_process.side_stream import side_stream
from coterie.engines.messages import Request
from coterie.engines.peer import Caps, Peer
from coterie.engines.peer.linear_rows import LinearRows, rows_key
from coterie.errors import KnobError, ModelError
from coterie.evaluation.evaluate import evaluate
from coterie.gradients.gradients import Gradients, add_up, keep_finite
from coterie.gradients.parameters import FiniteLater, is_finite
from coterie.mixture.answers import EStep, StackedUsers
from coterie.privacy.privacy import Privacy
from coterie.recording.costs import Traffic
from coterie.users.examples import Examples
from coterie.users.sampling import seeded
from coterie.users.trees import Tree
from coterie.users.user import PEERS, USER, Loss, User, check_names


class InProcess:
    """Gradients of users whose data is in this process.

    Where the peers' weighted sum is enough, their batches go through the model together
    (*average*); where every peer's gradient is wanted, `torch.func` maps over users (*rows*).
    Models whose examples influence each other (BatchNorm) or that draw random numbers (dropout) are
    taken user by user, and only user 0's batches move running statistics.

    Args:
        model: any module. Its parameters are not touched; its buffers are moved by user 0's
            batches.
        loss: the mean loss of a batch from (output, target).
        me: user 0.
        peers: the others.
        batch_size: examples a user draws for one gradient; all of them where it has fewer.
        seed: what batches and dropout draw from, with the user's name and the step.
        one_by_one: take users one by one even where they could share a pass: slower, and to the
            same bits as where every user has a process of its own.
        forward_options: autocast, channels last and compilation, for training only.
        like: an engine over a model and users of the same form; what was found out about them is
            taken over.

    Example:
        >>> users = [User(name, torch.randn(9, 2), torch.randn(9, 1)) for name in ("me", "a", "b")]
        >>> engine = InProcess(nn.Linear(2, 1), nn.functional.mse_loss, users[0], users[1:])
        >>> g = engine.gradients(torch.zeros(3), step=0, weights={"a": 0.5, "b": 0.5})
        >>> g.own.shape, g.peers.shape, g.rows
        (torch.Size([3]), torch.Size([3]), None)
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        me: User,
        peers: Sequence[User] = (),
        *,
        batch_size: int = 32,
        seed: int = 0,
        one_by_one: bool = False,
        forward_options: ForwardOptions = DEFAULT_FORWARD,
        like: Self | None = None,
    ) -> None:
        me, peers = USER("me", me), PEERS("peers", peers)
        batch_size, seed = COUNT("batch_size", batch_size), SEED("seed", seed)
        self.names = tuple(peer.name for peer in peers)
        check_names([me.name, *self.names])
        self.me, self.seed, self.passes = me.name, seed, Passes(model, loss)
        self.parameters = self.passes.parameters
        device = self.parameters.device
        sizes: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "device": device}
        shared = None if like is None else like._sampler_of(me, peers, **sizes)
        self.sampler = shared or BatchSampler(me, peers, **sizes)
        self.users: Mapping[str, User] = self.sampler.users
        if like is None:
            with seeded(seed, me.name, 0, device):
                x, batch = self.parameters.vector(), self.sampler.one(me.name, 0)
                together = not one_by_one
                self._output, self.support = probe(
                    self.passes, x, batch, [me, *peers], together=together
                )
            if self.support.one_by_one is None and not self.passes.whole:
                self.passes.find_layers = self._layers
            if device.type == "cuda":  # a captured step could not find it out
                _ = self.passes.by_layer
        else:
            self._output, self.support = like._output, like.support
            self.passes.take_over(like.passes)
        self._tau: tuple[Any, Weights] | None = None
        self._held: HeldRows = HeldRows() if like is None or shared is None else like._held
        if shared is None:
            check_classes(loss, self._output, [me, *peers])
        self.passes.set_forward_options(forward_options)

    def _layers(self) -> ByLayer | None:
        """Find out, in full precision, whether rows can be had by layer."""
        alone = seeded(self.seed, self.me, 0, self.parameters.device)
        with torch.enable_grad(), alone, self.passes.without_options():
            return layers_of(self.passes, *self.sampler.one(self.me, 0))

    def _sampler_of(
        self, me: User, peers: Sequence[User], *, batch_size: int, seed: int, device: torch.device
    ) -> BatchSampler | None:
        """Return this engine's memory for another user 0; None where not all are the same."""
        same = self.sampler.batch_size, self.sampler.seed, self.sampler.device
        return self.sampler.of(me, peers) if same == (batch_size, seed, device) else None

    def operations(self) -> float:
        """Return about how many operations a forward pass over everybody's batches takes, on a CPU."""
        if self.parameters.device.type != "cpu":
            return 0.0
        with seeded(self.seed, self.me, 0):
            inputs, _ = self.sampler.one(self.me, 0)
            return operations(self.passes, self.parameters.vector(), inputs) * (1 + len(self.names))

    def gradients(
        self, x: Tensor, step: int, weights: Mapping[str, float], rows: bool = False
    ) -> Gradients:
        """Return everybody's gradients at x; see `Engine.gradients`."""
        names, together = tuple(weights), not self.support.one_by_one
        own_batch, batches = self.sampler.draw(names if together else (), step)
        self._tell_of_nothing(names, own_batch, batches)
        averaged = names and together and not rows
        peers = (
            self.passes.average(x, batches, self._weights(x, weights, batches))
            if averaged
            else None
        )
        finite = None if peers is None else FiniteLater(peers)
        own, loss, buffers = self._user_by_user.gradient(self.me, x, step, own_batch)
        if finite is not None and finite.read():
            return Gradients(own, peers, x=x, own_loss=loss)
        g = Gradients(own, x=x, own_loss=loss)
        if names and not rows and not together:
            asked = ((name, self._user_by_user.answer(name, x, step)) for name in names)
            peers, answered, left_out = add_up(own, asked, weights)
            g = replace(g, peers=peers, answered=answered, left_out=left_out)
        elif names:  # rows are wanted, or a peer's gradient was not finite and has to be located
            matrix, kept, left_out = keep_finite(self._rows(x, step, names, batches), names)
            g = g.with_peers(matrix, kept, weights, left_out, rows=rows)
        # after the peers, who see the model as user 0 did
        self._user_by_user.keep_buffers(own, buffers)
        return g

    @functools.cached_property
    def capabilities(self) -> Capabilities:
        """What this engine can do, which depends on the model and on where the examples are."""
        support, users = self.support, self.sampler.users
        examples = {name: None if user.is_stream else len(user) for name, user in users.items()}
        in_memory = None if self.sampler.in_memory else NOT_IN_MEMORY
        mean = (
            None
            if self.passes.per_example is not None
            else "the loss is not known to be a mean over examples"
        )
        rows = None if support.loop is None or self.passes.by_layer else support.loop
        plain = self.passes.forward_options == DEFAULT_FORWARD
        passed = None if plain else "options of the forward pass were given"
        return Capabilities(
            own_points=True,
            local=True,
            same_bits=support.one_by_one is not None,
            not_captured=in_memory or support.one_by_one,
            rows_not_captured=in_memory or support.one_by_one or rows,
            not_stacked=support.not_stacked or in_memory or mean or passed,
            examples=examples,
            batch_size=self.sampler.batch_size,
            batch_dependent=support.batch_dependent,
            local_work=True,
            no_e_steps="a user has a stream" if None in examples.values() else "",
        )

    @functools.cached_property
    def _user_by_user(self) -> "UserByUser":
        return UserByUser(self.passes, self.sampler, self.support)

    def indices(self, names: tuple[str, ...], step: int) -> Tensor:
        """Return the examples that user 0 and these peers draw in the next steps, a row for each step."""
        return self.sampler.indices(names, step)

    def gradients_of(
        self, x: Tensor, indices: Tensor, weights: Mapping[str, float], *, rows: bool
    ) -> Gradients:
        """Return all users' gradients on the examples of one row of `indices`, unchecked.

        No wait for the device.

        User 0's pass has a stream of its own on a GPU, so that a captured step takes it while the
        peers' goes on.
        """
        own_batch, others = self.sampler.at(tuple(weights), indices)
        with side_stream(x.device) as join:
            own, loss, _ = self._user_by_user.gradient(self.me, x, 0, own_batch)
        matrix = self.passes.rows(x, others) if weights and rows else None
        averaged = weights and not rows
        peers = (
            self.passes.average(x, others, self._weights(x, weights, others)) if averaged else None
        )
        join()
        return Gradients(own, peers, matrix, tuple(weights) if rows else (), x=x, own_loss=loss)

    def with_batch_size(self, size: int) -> Self:
        """Return the same users and model with batches of another size."""
        if size == self.sampler.batch_size:
            return self
        other = copy.copy(self)
        other.sampler, other._tau = self.sampler.with_batch_size(size), None
        other.__dict__.pop("capabilities", None)
        other.__dict__.pop("_user_by_user", None)
        return other

    def peer(
        self,
        name: str,
        caps: Caps | None = None,
        log: Path | None = None,
        privacy: Privacy | None = None,
    ) -> Peer:
        """Return one user by itself, with this engine's model; see `Peer`."""
        return Peer(self.sampler.users[name], self.passes, caps, log, self.support, privacy=privacy)

    def copies(self) -> Copies:
        """Return the model in many copies at once.

        Only where `capabilities.not_stacked` is None.
        """
        return Copies(self.passes)

    @functools.cached_property
    def _layered(self) -> Copies | None:
        """The model in copies that go through its layers together, where it has such layers."""
        copies = self.copies() if self.capabilities.not_stacked is None else None
        return copies if copies is not None and copies.in_layers else None

    def each(
        self, points: Tensor, step: int, names: Sequence[str] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of user 0 and of these peers, each at its row of `points`, and user 0's loss."""
        names = self.names[: len(points) - 1] if names is None else tuple(names)
        own_batch, batches = self.sampler.draw(() if self.support.loop else names, step)
        if names and self._layered is not None:
            rows, losses = self._layered.rows(points, with_own(own_batch, batches))
            return rows, losses[0]
        own, loss, buffers = self._user_by_user.gradient(self.me, points[0], step, own_batch)
        rows = self._rows(points[1:], step, names, batches) if names else points[1:]
        self._user_by_user.keep_buffers(own, buffers)
        return torch.cat([own.unsqueeze(0), rows]), loss

    def on(self, name: str, x: Tensor, indices: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return one user's gradient and loss at x on its examples at these indices.

        The step seeds randomness.
        """
        batch = self.sampler.users[name].take(indices, seed=self.seed, step=step)
        gradient, loss, buffers = self._user_by_user.gradient(name, x, step, batch)
        if name == self.me:
            self._user_by_user.keep_buffers(gradient, buffers)
        return gradient, loss

    def on_each(self, name: str, x: Tensor, indices: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return one user's gradients at x, (batches, d), on the examples of each row, and the mean loss."""
        if self.support.loop:
            answers = [self.on(name, x, batch, step + k) for k, batch in enumerate(indices)]
            return (
                torch.stack([g for g, _ in answers]),
                torch.stack([loss for _, loss in answers]).mean(),
            )
        inputs, targets = self.sampler.users[name].take(
            indices.flatten(), seed=self.seed, step=step
        )
        rows = self.passes.rows(x, [Batches(range(len(indices)), inputs, targets)])
        with torch.no_grad():
            return rows, self.passes.loss(self.passes.output(x, inputs), targets)

    def ask(self, question: Question) -> Callable[[], Answers]:
        """Ask the peers for steps of their own, or for an E-step; they answer at once. See `Asks.ask`."""
        if question.e_step is not None:
            return self._e_step(question.e_step, question)
        if question.batch_size is not None:
            other = self.with_batch_size(question.batch_size)
            return other.ask(replace(question, batch_size=None))
        places = [(point, peer) for point, peer in (~question.weights.isnan()).nonzero().tolist()]
        names, rows = tuple(self.names[peer] for _, peer in places), [point for point, _ in places]
        if len(set(names)) < len(names):
            raise ValueError("a peer takes steps from one point at a time")
        work = question.work or LocalWork(1, 1.0)
        points = question.points[rows]
        if self.support.loop:
            each = zip(names, points, rows, strict=True)
            given = [
                self._user_by_user.answer(name, x, question.step, work.at(row))
                for name, x, row in each
            ]
        else:
            given = [*self._worked(names, points, question.step, work.at(rows))]
        answers = Answers.of(question, dict(zip(places, given, strict=True)), self.names)
        return lambda: answers

    def _worked(self, names: tuple[str, ...], points: Tensor, step: int, work: LocalWork) -> Tensor:
        """Return what each peer's steps followed from its point, added up.

        All peers take a step together.
        """

        def gradients(at: Tensor, k: int) -> Tensor:
            batches, layered = self.sampler.draw(names, step + k)[1], self._layered
            return (
                self.passes.rows(at, batches) if layered is None else layered.rows(at, batches)[0]
            )

        return work.followed(points, gradients, slice(None))

    def _e_step(self, asked: AllRows, question: Question) -> Callable[[], Answers]:
        """Let peers answer an E-step."""
        weights = question.weights[0]
        rows = torch.full((1, len(self.names), math.prod(asked.shape)), math.nan).double()
        if isinstance(asked, EStep):
            for places, users in self._stacked_users(asked, question.points[0]):
                counting = None if question.counting is None else question.counting[places.numpy()]
                numbers = torch.from_numpy(asked.answers_that_count(users, counting))
                rows[0, places] = numbers.flatten(1)
                del numbers
        else:
            for place, peer in enumerate(self._linear_rows):
                rows[0, place] = self._fitting(peer, asked).answer(asked, question.points[0])
        there = rows[0].sum(1).isfinite() & ~weights.isnan()
        rows[0, ~there] = math.nan
        lost = (~there & ~weights.isnan()).nonzero().flatten().tolist()
        left_out = {self.names[peer]: "not finite" for peer in lost}
        answers = Answers(None, weights[there].sum()[None], left_out, rows)
        return lambda: answers

    def _stacked_users(self, asked: EStep, x: Tensor) -> list[tuple[Tensor, StackedUsers]]:
        """Return the peers' rows in stacks, each with the places of its peers; scaled once."""
        key, held = (self.names, rows_key(asked, x)), self._held
        if held.stacks is None or held.stacks[0] != key:
            peers = self._linear_rows
            for peer in peers[:1]:  # all have the same model
                self._fitting(peer, asked)
            scaled = None if asked.layer else _scaled(peers, asked)
            if scaled is None:
                rows = [self._fitting(peer, asked).rows(asked, x) for peer in peers]
                scaled = StackedUsers.by_size(rows)
            held.stacks = key, [(torch.from_numpy(places), users) for places, users in scaled]
        return held.stacks[1]

    @functools.cached_property
    def _linear_rows(self) -> list[LinearRows]:
        """The peers' rows, which are scaled or put in bins once."""
        of, users = self._held.rows, self.sampler.users
        for name in self.names:
            if name not in of:
                of[name] = LinearRows(users[name], self.passes)
        return [of[name] for name in self.names]

    def _fitting(self, peer: LinearRows, asked: AllRows) -> LinearRows:
        """Return a peer that can answer."""
        if why := peer.misfit(asked):
            raise ModelError(f"peer {peer.user.name!r} answers no E-step: {why}")
        return peer

    def losses(self, points: Tensor, step: int) -> Tensor:
        """Return every user's loss at its row of `points`, or those of the first.

        Buffers stay as they are.
        """
        each = zip((self.me, *self.names), points, strict=False)
        return torch.stack([self._user_by_user.loss(name, point, step) for name, point in each])

    def losses_over(self, examples: Examples, points: Tensor) -> Tensor:
        """Return the mean loss over some examples at each of these points."""
        before, losses = self.parameters.vector(), []
        for point in points:
            self.parameters.load(point)
            losses.append(evaluate(self.passes.model, self.passes.loss, examples, {})["loss"])
        self.parameters.load(before)
        return points.new_tensor(losses)

    def describe(self) -> dict[str, Any]:
        """Return how the model is passed, and why."""
        one_by_one, loop = self.support.one_by_one, self.support.loop
        rows = "attention as products" if self.passes.plain_attention else "one pass"
        return {
            "engine": "in process",
            "device": str(self.parameters.device),
            "average": f"user by user: {one_by_one}" if one_by_one else "one pass",
            "rows": f"loop: {loop}" if loop and self.passes.by_layer is None else rows,
            **{
                name: str(value)
                for name, value in vars(self.passes.forward_options).items()
                if value
            },
        }

    def traffic(self) -> Mapping[str, Traffic]:
        """Return nothing: nothing travels."""
        return {}

    def close(self) -> None:
        """Do nothing: everybody is here."""

    def _weights(self, x: Tensor, tau: Mapping[str, float], batches: Sequence[Batches]) -> Weights:
        """Return τ as tensors, kept from step to step while it is the same."""
        order = () if self.sampler.in_memory else tuple(tuple(batch.positions) for batch in batches)
        asked = tuple(tau.items()), order  # in order, which a comparison of mappings would not see
        if self._tau is None or self._tau[0] != asked or self._tau[1].users.dtype != x.dtype:
            self._tau = asked, Weights.of(list(tau.values()), batches, x)
        return self._tau[1]

    def _tell_of_nothing(
        self, names: Sequence[str], own: tuple[Tree, Tree], batches: Sequence[Batches]
    ) -> None:
        """Warn of batches in which the loss ignores everything, where there may be such."""
        if self.passes.per_example is None or self.passes.per_example.weights is None:
            return
        self.passes.tell_of_nothing(self.me, own[1])
        for batch in batches:
            for position, (_, targets) in zip(batch.positions, batch.each(), strict=True):
                self.passes.tell_of_nothing(names[position], targets)

    def _rows(
        self, x: Tensor, step: int, names: tuple[str, ...], batches: Sequence[Batches]
    ) -> Tensor:
        """Return the peers' gradients at x, one point for all or a row for each."""
        if not self.support.loop or (self.passes.by_layer is not None and x.ndim == 1):
            return self.passes.rows(x, batches)
        each = zip(names, x.expand(len(names), -1), strict=True)
        return torch.stack([self._user_by_user.answer(name, point, step) for name, point in each])


class UserByUser:
    """The gradients and losses of one user at a time.

    A random model draws what belongs to (seed, user, step). Every pass begins with the model's
    buffers, and what it leaves in them is returned; only `keep_buffers` moves the model's.
    """

    def __init__(self, passes: Passes, sampler: BatchSampler, support: ModelSupport) -> None:
        self.passes, self.sampler, self.support = passes, sampler, support
        self._peers: dict[str, Peer] = {}

    def gradient(
        self, name: str, x: Tensor, step: int, batch: tuple[Tree, Tree]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return a user's gradient and loss, and the buffers as its batch leaves them."""
        buffers = self.passes.buffers() if self.support.moves_buffers else {}
        with self._seeded(name, step, x.device):
            gradient, loss = self.passes.single(x, *batch, buffers)
        return gradient, loss, buffers

    def loss(self, name: str, x: Tensor, step: int) -> Tensor:
        """Return a user's loss on its batch of a step."""
        inputs, targets = self.sampler.one(name, step)
        buffers = self.passes.buffers() if self.support.moves_buffers else None
        with torch.no_grad(), self._seeded(name, step, x.device):
            return self.passes.loss(self.passes.output(x, inputs, buffers), targets)

    def answer(self, name: str, x: Tensor, step: int, work: LocalWork | None = None) -> Tensor:
        """Return a peer's gradient at x, as it would answer in a process of its own."""
        if name not in self._peers:
            self._peers[name] = Peer(self.sampler.users[name], self.passes, support=self.support)
        request = Request(x[None], step, self.sampler.seed, self.sampler.batch_size, work=work)
        reply = self._peers[name].answer(request)
        if reply.gradients is None:
            raise KnobError(f"{name!r} gives no gradient: {reply.refused}")
        return reply.gradients[0]

    def keep_buffers(self, own: Tensor, buffers: Mapping[str, Tensor]) -> None:
        """Let the model's buffers be what user 0's batch left, unless its gradient is of no use."""
        if self.support.moves_buffers and is_finite(own):
            for name, buffer in self.passes.model.named_buffers():
                buffer.copy_(buffers[name])

    def _seeded(self, name: str, step: int, device: torch.device) -> AbstractContextManager[None]:
        return (
            seeded(self.sampler.seed, name, step, device) if self.support.random else nullcontext()
        )


@dataclass(eq=False)
class HeldRows:
    """What engines of the same users share: their rows, and those that were scaled last."""

    rows: dict[str, LinearRows] = field(default_factory=dict)
    stacks: tuple[Any, list[tuple[Tensor, StackedUsers]]] | None = None


def _scaled(peers: Sequence[LinearRows], asked: EStep) -> list[tuple[Any, StackedUsers]] | None:
    """Return the peers' rows in stacks, scaled together; None where one is beyond all numbers."""
    if any(peer.user.is_stream for peer in peers):
        return None
    stacks = StackedUsers.by_size([peer.numbers(asked) for peer in peers])
    scaled = [(places, asked.scaled(users)) for places, users in stacks]
    kept = [(places, users) for places, users in scaled if users is not None]
    return kept if len(kept) == len(stacks) else None
