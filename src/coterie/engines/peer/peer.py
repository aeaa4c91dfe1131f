"""A peer, wherever it is.

It answers a request with gradients of its own examples, on batches that it draws itself, within its
caps.

The worker of torch.distributed, the site of NVFLARE and `InProcess(one_by_one=True)` all answer by
this class. They differ only in what carries requests and replies.
"""

import functools
import math
import secrets
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from coterie.arguments import COUNT, POSITIVE, check_fields, optional, whole
from coterie.engines.compression import HALVES, Rounding
from coterie.engines.in_process.model_support import ModelSupport
from coterie.engines.in_process.passes import Passes
from coterie.engines.messages import RefusedError, Reply, Request
from coterie.engines.peer.ghost_norms import takes
from coterie.engines.peer.ledger import (
    Ledger,
    Spending,
    kept_secret,
    secret_bytes,
    secret_number,
)
from coterie.engines.peer.linear_rows import LinearRows
from coterie.engines.peer.private_gradients import PrivateGradients
from coterie.errors import KnobError
from coterie.evaluation.losses import known_per_example, simplest
from coterie.gradients.parameters import frozen_digest
from coterie.privacy.keys import Identity
from coterie.privacy.masks import NoiseShare
from coterie.privacy.privacy import PROMISE, Privacy
from coterie.users.examples import InMemory
from coterie.users.sampling import BatchStream, IndexTable, random_key, seeded
from coterie.users.user import User

MOST_PLANNED = 10**6
"""Of more gradients a private peer does not say whether it gives them.

The accountant would take minutes.
"""


@dataclass(frozen=True)
class Caps:
    """What a peer gives at most.

    Args:
        gradients: how many gradients in all, over every run that its log knows of; no limit when
            None.
        norm: the norm that a gradient is clipped to; not clipped when None.
        examples: how many examples must be behind a gradient.

    Example:
        >>> Caps(gradients=1000, norm=1.0, examples=20)
        Caps(gradients=1000, norm=1.0, examples=20)
    """

    gradients: int | None = None
    norm: float | None = None
    examples: int = 1

    def __post_init__(self) -> None:
        check_fields(
            self, {"gradients": optional(whole(0)), "norm": optional(POSITIVE), "examples": COUNT}
        )

    def in_words(self) -> str:
        """Return the caps in words.

        Example:
            >>> Caps(gradients=1000, examples=20).in_words()
            '1000 gradients in all, of any norm, each of 20 examples or more'
        """
        count = "any number of" if self.gradients is None else str(self.gradients)
        norm = "of any norm" if self.norm is None else f"clipped to norm {self.norm:g}"
        return f"{count} gradients in all, {norm}, each of {self.examples} examples or more"


def clipped(gradient: Tensor, max_norm: float | None) -> tuple[Tensor, float]:
    """Return a gradient of at most this norm, and the norm it had.

    Not finite where an entry is not.
    """
    norm, scale = float(gradient.norm()), 1.0
    if not math.isfinite(norm) and bool(gradient.isfinite().all()):  # the squares overflow
        scale = float(gradient.abs().max())
        norm = float((gradient / scale).double().norm())
    if max_norm is None or not math.isfinite(norm) or norm * scale <= max_norm:
        return gradient, norm * scale
    return gradient / scale * (max_norm / norm), norm * scale


GradientAt: TypeAlias = Callable[[Tensor, dict[str, Tensor]], Tensor]
"""What gives a gradient at a point, with the model's buffers there."""


class OwnDraws:
    """Batches of whole blocks of examples, drawn by a secret.

    The secret puts every example into one block of at least `least`, once and for all. A batch is
    some blocks as a whole, and the secret, the seed and the step say which. So whatever is asked,
    and however answers are combined, what one point tells is told of whole blocks: with 100
    examples in blocks of 50, there are two.

    Example:
        >>> draws = OwnDraws(b"a secret", 100, least=50)
        >>> batches = [draws.indices(60, seed, step=0) for seed in range(20)]
        >>> {len(batch) for batch in batches}, len({tuple(batch.tolist()) for batch in batches})
        ({50}, 2)
    """

    def __init__(self, secret: bytes, n: int, least: int) -> None:
        self._secret, self._n = secret, n
        order = self._generator("blocks").permutation(n)
        self._blocks = np.array_split(order, max(1, n // least))

    def indices(self, size: int, seed: int, step: int) -> Tensor:
        """Return which examples a batch of about `size` has.

        The nearest number of blocks, at least one.
        """
        n_blocks = len(self._blocks)
        wanted = min(n_blocks, max(1, round(size * n_blocks / self._n)))
        chosen = self._generator(f"{seed}/{step}").choice(n_blocks, wanted, replace=False)
        return torch.from_numpy(np.concatenate([self._blocks[k] for k in np.sort(chosen)]))

    def _generator(self, purpose: str) -> np.random.Generator:
        return np.random.default_rng(secret_number(self._secret, purpose))


class Peer:
    """One peer: its examples stay with it, gradients leave.

    Without caps it draws the batch of (seed, user, step), as user 0 would. With caps it draws by a
    secret of its own; see `OwnDraws`.

    Args:
        user: the examples, under the name that batches are drawn from.
        passes: through a model of the same parameters as user 0's.
        caps: what it gives at most.
        log: a file to which every request is added; it counts against `caps.gradients`, see
            `Ledger`. The secret is kept beside it, so that a resumed run has the same batches;
            without a log it lasts as long as the peer. A `Ledger()` counts in memory, for peers
            that are simulated.
        support: what is known of the model. Where it is not given, and the classes of model and loss
            do not show it, the model may draw random numbers and move buffers.
        privacy: what is promised about each example. Every gradient is then a sum of clipped
            gradients over a sample of its own, with noise, both by secret randomness: no run has
            the same bits again. What it costs is written to the log, which there must be, before
            anything is computed; what exceeds ε is refused.

    Example:
        >>> from torch import nn
        >>> user = User("a", torch.eye(2), torch.ones(2, 1))
        >>> peer = Peer(user, Passes(nn.Linear(2, 1), nn.functional.mse_loss), Caps(gradients=1))
        >>> request = Request(torch.zeros(1, 3), step=0, seed=0, batch_size=2)
        >>> peer.answer(request).gradients
        tensor([[-1., -1., -2.]])
        >>> peer.answer(request).refused
        'it has given all the gradients it gives, 1'
    """

    def __init__(
        self,
        user: User,
        passes: Passes,
        caps: Caps | None = None,
        log: Path | Ledger | None = None,
        support: ModelSupport | None = None,
        *,
        privacy: Privacy | None = None,
    ) -> None:
        self.user, self.passes = user.to(passes.parameters.device), passes
        self.caps, self.ledger = caps or Caps(), log if isinstance(log, Ledger) else Ledger(log)
        if privacy is not None and log is None:
            raise KnobError(
                "`privacy` needs a `log`: what was spent must be known to the next process too"
            )
        self._private = None if privacy is None else self._promised(privacy)
        self.privacy, self.margin = privacy, None if privacy is None else privacy.margin
        self._secret: bytes | None = None
        self._roundings: dict[str, Rounding] = {}
        if caps is not None or privacy is not None:
            path = self.ledger.path
            beside = None if path is None else path.with_name(path.name + ".secret")
            self._secret = secrets.token_bytes() if beside is None else kept_secret(beside)
        # layers and losses of known classes draw no random numbers and move no buffers
        unknown = ModelSupport(moved=frozenset(passes.buffers()), random=True)
        self.support = support or (ModelSupport() if takes(passes) else unknown)
        self._linear = LinearRows(self.user, passes)
        self._streamed, self._n = self.user.is_stream, len(self.user)
        # whether a batch may have nothing to learn from
        known, held = known_per_example(passes.loss), self.user.examples
        if known is not None and isinstance(held, InMemory) and isinstance(held.targets, Tensor):
            known = simplest(known, [held.targets])
        self._ignores = known is not None and known.weights is not None
        self._table: tuple[tuple[int, int], IndexTable] | None = None

    def _promised(self, privacy: Privacy) -> PrivateGradients:
        """Return what gives private gradients, where the log and the caps go with it."""
        PROMISE("privacy", privacy)
        if self.caps.norm is not None:
            raise KnobError(
                "`norm` must be left out (in [caps] `inf`) where there is `privacy`, got"
                f" {self.caps.norm:g}: each example is clipped to `clip`, and a gradient with noise"
                " has no norm to keep to"
            )
        if privacy.batch_size is not None and privacy.batch_size < self.caps.examples:
            raise KnobError(
                f"`batch_size` must be at least `examples` of the caps, {self.caps.examples}, got"
                f" {privacy.batch_size}: batches of no other size are answered for, and none of"
                " fewer examples"
            )
        private = PrivateGradients(self.user, self.passes, privacy, self.caps.gradients)
        self._spending = Spending(privacy, self.ledger, self.caps.gradients)
        return private

    @property
    def epsilon(self) -> float | None:
        """The ε that was spent, over every run that the log knows of.

        None where nothing is promised.

        It is infinite where the log tells of gradients without noise.
        """
        return None if self._private is None else self._spending.epsilon

    @functools.cached_property
    def frozen(self) -> str:
        """The digest of the parameters that are not trained."""
        return frozen_digest(self.passes.model)

    @property
    def left(self) -> int | None:
        """How many gradients are left to give; None where there is no limit."""
        return (
            None if self.caps.gradients is None else max(0, self.caps.gradients - self.ledger.given)
        )

    @functools.cached_property
    def size(self) -> int | None:
        """How many examples there are, as far as it is told.

        Whole blocks of `caps.examples`; None for a stream.
        """
        least = self.caps.examples
        return None if self._streamed else self._n // least * least

    def terms(self, batch_size: Any = None, gradients: Any = None) -> dict[str, Any]:
        """Return what user 0 may know before it asks.

        Whether and how much there is to give, and what is promised.

        Of a private peer `left` is what ε allows too where user 0 says that it wants so many
        gradients of batches of this size: all that it wants, or as many as there are.
        """
        left, private = self.left, self._private
        if private is not None and _is_count(batch_size) and _is_count(gradients):
            refused = private.why_not_of(batch_size) is not None
            left = 0
            if not refused:
                left = self._spending.left(private.event(batch_size), min(gradients, MOST_PLANNED))
        terms: dict[str, Any] = {
            "willing": left is None or left > 0,
            "left": left,
            "size": self.size,
        }
        # behind a gradient, at least
        terms |= {"examples": self.caps.examples, "no_e_steps": self.why_no_e_steps}
        if private is None:
            return terms
        told = {"promises": private.privacy.in_words(), "promise": self._spending.told()}
        return terms | told | {"batch_size": private.privacy.batch_size}

    @property
    def why_no_e_steps(self) -> str:
        """Why it answers no E-steps; empty where it does."""
        if self._private is not None:
            return "it promises privacy, and gives gradients with noise only"
        return "it has a stream, not examples" if self._streamed else ""

    def of_planned(self, batch_size: int, gradients: int) -> int:
        """Return how many of so many gradients of such batches would be given, as far as is known before."""
        if min(batch_size, self._n) < self.caps.examples:
            return 0
        left = self.terms(batch_size, gradients)["left"]
        return gradients if left is None else min(left, gradients)

    def promise(self, batch_size: int) -> dict[str, float] | None:
        """Return what is promised, how much of it was spent, and the noise on each number.

        None where nothing.
        """
        if self._private is None:
            return None
        noise = self._private.deviation(
            self._private.event(batch_size), min(batch_size, self.size or 1)
        )
        return self._spending.told() | {"noise": noise}

    @functools.cached_property
    def identity(self) -> Identity:
        """By what other peers know it in masked sums.

        The same in all runs where caps and log keep its secret.
        """
        kept = self._secret
        return Identity(
            self.user.name, None if kept is None else secret_bytes(kept, "identity in masked sums")
        )

    def noise_terms(self, batch_size: Any) -> dict[str, Any]:
        """Return what noise a masked sum must have for such batches.

        Nothing where none is split.
        """
        if (
            self._private is None
            or not _is_count(batch_size)
            or self._private.why_not_of(batch_size) is not None
        ):
            return {}
        return self._private.noise_terms(batch_size, self.size or 1)

    def answer(
        self,
        request: Request,
        caller: str = "user 0",
        share: NoiseShare | None = None,
        *,
        masked: bool = False,
    ) -> Reply:
        """Return the gradients at the points on the batch of (seed, user, step), or why there are none.

        Every gradient counts against the caps, those of steps of its own too, each of which is
        clipped; an E-step counts as `EStep.gradients`, and of it the gradient is clipped. With caps
        on the norm or a log, one that is not finite is not given: its row is not numbers, and where
        that holds for all the request is refused. An error is logged and raised. The log also names
        the caller. The `share` is of the noise of a masked sum, where the answer is a part of one
        and its sites split the noise.

        Where it is `masked`, nothing but the sum may tell of the examples. So what is refused
        follows from the request and the counts, a gradient is not clipped, one that fails is not a
        number, which spoils the sum, and no time is told. The log has it.
        """
        try:
            self._check(request, masked=masked)
            if self._private is not None:
                return self._answer_privately(request, self._private, caller, share)
            return self._answer_plainly(request, caller, masked=masked)
        except RefusedError as refusal:
            return self.refuse(str(refusal), caller, request.step)

    def _answer_plainly(self, request: Request, caller: str, *, masked: bool) -> Reply:
        began, asked = time.perf_counter(), request.e_step
        try:
            if asked is None:
                gradients, examples = self._gradients(request)
            else:  # a gradient that is cut would tell of this peer under masks
                norm = math.inf if masked else self.caps.norm
                limits = self.size, norm, self.caps.examples
                gradients = self._linear.answer(asked, request.points[0], *limits)[None]
                examples = self._n
        except Exception as error:
            self._note(caller, request.step, failed=f"{type(error).__name__}: {error}")
            if not masked:
                raise
            shape = request.points.shape if asked is None else (1, math.prod(asked.shape))
            gradients, examples = request.points.new_full(shape, math.nan), 0
        counted, norm = request.gradients, None
        if masked:
            norm = max(clipped(gradient, None)[1] for gradient in gradients)
            if not math.isfinite(norm):
                norm = None
                self._note(caller, request.step, failed="not finite: no sum, under masks")
        elif self._secret is not None or self.ledger.path is not None:
            # steps of its own are clipped one by one, and an E-step's gradient before it has units
            cap = self.caps.norm if request.work is None and asked is None else None
            pairs = [clipped(gradient, cap) for gradient in gradients]
            norms = [norm for _, norm in pairs if math.isfinite(norm)]
            if not norms:
                raise RefusedError("not finite")
            counted = counted // len(pairs) * len(norms)
            norm, missing = max(norms), torch.full_like(gradients[0], math.nan)
            gradients = torch.stack(
                [each if math.isfinite(norm) else missing for each, norm in pairs]
            )
        line: dict[str, Any] = {
            "caller": caller,
            "step": repr(request.step),
            "examples": examples,
            "norm": norm,  # the largest
        }
        line |= {} if asked is None else {"e_step": asked.told}
        # another process was faster
        if not self.ledger.give(counted, at_most=self.caps.gradients, **line):
            raise RefusedError(self._too_many(request.gradients) or "")
        return Reply(
            gradients, seconds=0.0 if masked else time.perf_counter() - began, examples=self.size
        )

    def _answer_privately(
        self, request: Request, private: PrivateGradients, caller: str, share: NoiseShare | None
    ) -> Reply:
        """Write down what the answer costs, then make it; whatever happens in between, it is spent.

        Neither a time nor an error's kind leaves: both would tell of the sample.
        """
        if reason := private.why_not_of(request.batch_size):
            raise RefusedError(reason)
        event = private.event(request.batch_size)
        if reason := private.too_little_noise(event, share, works=request.work is not None):
            raise RefusedError(reason)
        why_not = functools.partial(self._spending.over_budget, event, request.gradients)
        line: dict[str, Any] = {"caller": caller, "step": repr(request.step)}
        line |= {} if share is None else {"sites": share.sites, "margin": share.margin}
        if reason := self.ledger.spend(event, request.gradients, why_not, **line):
            raise RefusedError(reason)
        added = None if share is None else share.added
        try:
            gradients, _ = self._gradients(request, added)
        except Exception as error:
            self._note(caller, request.step, failed=f"{type(error).__name__}: {error}")
            return Reply(refused="it failed")
        steps = 1 if request.work is None else request.work.count
        # which is not how many there are
        told = private.deviation(event, min(request.batch_size, self.size or 1))
        noise = (told if added is None else added) * math.sqrt(steps)  # of a sum over steps
        return Reply(gradients, examples=self.size, noise=noise)

    def rounded(self, gradients: Tensor, dtype: torch.dtype, caller: str = "user 0") -> Tensor:
        """Return an answer in the precision of the request, where that is half.

        With what its last one lost.
        """
        if dtype not in HALVES.values() or dtype == self.passes.parameters.dtype:
            return gradients
        if caller not in self._roundings or self._roundings[caller].dtype != dtype:
            self._roundings[caller] = Rounding(dtype)
        return self._roundings[caller](gradients)

    def refuse(self, reason: str, caller: str = "user 0", step: object = None) -> Reply:
        """Log a refusal and return it; for a request that cannot even be read, too."""
        self._note(caller, step, refused=reason)
        return Reply(refused=reason)

    def _check(self, request: Request, *, masked: bool) -> None:
        """Raise a `RefusedError` of what does not fit this peer's model or its caps."""
        asked, model, d = request.e_step, self.passes.model, self.passes.parameters.size
        request.check(model, d, streamed=self._streamed)
        if request.frozen is not None and request.frozen != self.frozen:
            raise RefusedError("its model has other frozen parameters")
        if asked is not None and (why := self.why_no_e_steps or self._linear.misfit(asked)):
            raise RefusedError(why)
        behind = self._n if asked is not None else min(request.batch_size, self._n)
        if behind < self.caps.examples:
            raise RefusedError(f"it gives no gradient of fewer than {self.caps.examples} examples")
        if self.caps.gradients is not None and (why := self._too_many(request.gradients)):
            raise RefusedError(why)
        # Sums in which some sites' shares are cut and others' are not can be solved for each site's.
        if masked and asked is not None and self.size is not None and asked.examples < self.size:
            raise RefusedError(f"under masks an E-step must count all of its {self.size} examples")

    def _too_many(self, gradients: int) -> str | None:
        """Return why it does not give so many gradients more, if it does not."""
        left = self.left
        if left == 0:
            return f"it has given all the gradients it gives, {self.caps.gradients}"
        if left is not None and left < gradients:
            return f"it has {left} gradients left to give, and was asked for {gradients}"
        return None

    # What it computes.

    def _gradients(self, request: Request, added: float | None = None) -> tuple[Tensor, int]:
        """Return what is asked for at each point, a row each, and over how many examples each is.

        `added`: the noise of private gradients, as in `PrivateGradients.gradient`.
        """
        work, rows, carried = request.work, [], self.support.moved or request.buffers
        first, examples = self._drawn(request, request.step, added)
        for place, point in enumerate(request.points):
            buffers = self._buffers(request, place) if carried else {}

            def gradient(x: Tensor, k: int, buffers: dict[str, Tensor] = buffers) -> Tensor:
                at = first if k == 0 else self._drawn(request, request.step + k)[0]
                found = at(x, buffers)
                return found if self.caps.norm is None else clipped(found, self.caps.norm)[0]

            rows.append(
                first(point, buffers) if work is None else work.followed(point, gradient, place)
            )
        return torch.stack(rows), examples

    def _buffers(self, request: Request, place: int) -> dict[str, Tensor]:
        """Return the model's buffers at the point in this place; passes move them."""
        buffers = self.passes.buffers()
        for name, rows in request.buffers.items():
            buffers[name].copy_(rows[place if len(rows) > 1 else 0])
        return buffers

    def _drawn(
        self, request: Request, step: int, added: float | None = None
    ) -> tuple[GradientAt, int]:
        """Return what gives gradients on a step's batch, and over how many examples.

        Private ones draw anew.
        """
        name, seed = self.user.name, request.seed
        if self._secret is not None:  # transforms, dropout and streams are not for user 0 to choose
            seed = secret_number(self._secret, f"seed {seed}")
        if self._private is not None:
            event = self._private.event(request.batch_size)
            settings: dict[str, Any] = {"event": event, "added": added, "seed": seed, "step": step}
            gradient_of = functools.partial(self._private.gradient, **settings)
            return gradient_of, round(event.rate * self._n)
        size, examples = min(request.batch_size, self._n), self.user.examples
        if self._draws is not None:
            indices = self._draws.indices(size, seed, step)
            batch = self.user.take(indices, seed=seed, step=step)
        elif isinstance(examples, InMemory):  # indices are drawn for several steps at a time
            if self._table is None or self._table[0] != (seed, size):
                stream = BatchStream(random_key(seed, name), self._n, size)
                self._table = (seed, size), IndexTable([stream])
            batch = examples.take(self._table[1].row(step, request.points.device))
        else:
            batch = self.user.batch(size, seed=seed, step=step)
        if self._ignores:
            self.passes.tell_of_nothing(name, batch[1])

        def gradient(x: Tensor, buffers: dict[str, Tensor]) -> Tensor:
            with seeded(seed, name, step, x.device) if self.support.random else nullcontext():
                return self.passes.single(x, *batch, buffers)[0]

        return gradient, len(batch[1])

    @functools.cached_property
    def _draws(self) -> OwnDraws | None:
        if self._secret is None or self._streamed:
            return None
        return OwnDraws(self._secret, self._n, self.caps.examples)

    def _note(self, caller: str, step: object, **what: Any) -> None:
        self.ledger.note(caller=caller, step=repr(step), **what)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31
