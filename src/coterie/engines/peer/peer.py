"""A peer, wherever it is.

It answers a request with the gradient of its own examples, within its caps.

The worker of torch.distributed, the site of NVFLARE and `InProcess(one_by_one=True)` all answer by
this class. They differ only in what carries requests and replies.
"""

import functools
import math
import secrets
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.engines.compression import HALVES, Rounding
from coterie.engines.in_process.model_support import ModelSupport
from coterie.engines.in_process.passes import Passes
from coterie.engines.peer.ledger import Ledger, Spending, kept_secret
from coterie.engines.peer.own_gradients import Caps, OwnGradients, clipped, secret_bytes
from coterie.engines.peer.private_gradients import PrivateGradients
from coterie.engines.requests import Reply, Request
from coterie.errors import KnobError
from coterie.gradients.parameters import frozen_digest
from coterie.privacy.keys import Identity
from coterie.privacy.masks import NoiseShare
from coterie.privacy.privacy import PROMISE, Privacy
from coterie.users.user import User

MOST_PLANNED = 10**6
"""Of more gradients a private peer does not say whether it gives them.

The accountant would take minutes.
"""


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
        support: what is known of the model; a model that is not known may draw random numbers and
            move buffers.
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
        self._secret: bytes | None = None
        self._roundings: dict[str, Rounding] = {}
        if caps is not None or privacy is not None:
            path = self.ledger.path
            beside = None if path is None else path.with_name(path.name + ".secret")
            self._secret = secrets.token_bytes() if beside is None else kept_secret(beside)
        own = (
            self.user,
            passes,
            support or ModelSupport(moved=frozenset(passes.buffers()), random=True),
        )
        self._gradients = OwnGradients(*own, self.caps, secret=self._secret, private=self._private)

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

    def is_willing(self) -> bool:
        """Say whether there is a gradient left to give."""
        return self.left is None or self.left > 0

    @property
    def left(self) -> int | None:
        """How many gradients are left to give; None where there is no limit."""
        return (
            None if self.caps.gradients is None else max(0, self.caps.gradients - self.ledger.given)
        )

    @property
    def size(self) -> int | None:
        """How many examples there are, as far as it is told.

        Whole blocks of `caps.examples`; None for a stream.
        """
        least = self.caps.examples
        return None if self.user.is_stream else len(self.user) // least * least

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
        return "it has a stream, not examples" if self.user.is_stream else ""

    def of_planned(self, batch_size: int, gradients: int) -> int:
        """Return how many of so many gradients of such batches would be given, as far as is known before."""
        if min(batch_size, len(self.user)) < self.caps.examples:
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

    @property
    def margin(self) -> int | None:
        """How many others may tell their noise where it is split over the sites of a sum.

        None where it is not.
        """
        return None if self._private is None else self._private.privacy.margin

    @property
    def is_private(self) -> bool:
        """Whether something is promised about each example."""
        return self._private is not None

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
        began = time.perf_counter()
        reason = self._misfit(request) or self._exceeded_cap(request)
        if reason := reason or (self._cut_under_masks(request) if masked else None):
            return self.refuse(reason, caller, request.step)
        if self._private is not None:
            return self._answer_privately(request, self._private, caller, share)
        counts = self._secret is not None or self.ledger.path is not None
        try:
            if request.e_step is None:
                gradients, examples = self._gradients(request)
            else:
                how = request.e_step, request.points[0]
                gradients, examples = self._gradients.e_step(*how, masked=masked)
        except Exception as error:
            self._note(caller, request.step, failed=f"{type(error).__name__}: {error}")
            if not masked:
                raise
            gradients, examples = torch.full_like(request.form, math.nan), 0
        given, norm = request.gradients, None
        plain = request.work is None and request.e_step is None
        if masked:
            norm = max(clipped(gradient, None)[1] for gradient in gradients)
            if not math.isfinite(norm):
                norm = None
                self._note(caller, request.step, failed="not finite: no sum, under masks")
        elif counts:
            # steps of its own are clipped one by one, and an E-step's gradient before it has units
            cap = self.caps.norm if plain else None
            pairs = [clipped(gradient, cap) for gradient in gradients]
            norms = [norm for _, norm in pairs if math.isfinite(norm)]
            if not norms:
                return self.refuse("not finite", caller, request.step)
            given = given // len(pairs) * len(norms)
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
        line |= {} if request.e_step is None else {"e_step": request.e_step.told}
        # another process was faster
        if not self.ledger.give(given, at_most=self.caps.gradients, **line):
            return self.refuse(self._exceeded_cap(request) or "", caller, request.step)
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
            return self.refuse(reason, caller, request.step)
        event = private.event(request.batch_size)
        if reason := private.too_little_noise(event, share, works=request.work is not None):
            return self.refuse(reason, caller, request.step)
        why_not = functools.partial(self._spending.over_budget, event, request.gradients)
        line: dict[str, Any] = {"caller": caller, "step": repr(request.step)}
        line |= {} if share is None else {"sites": share.sites, "margin": share.margin}
        if reason := self.ledger.spend(event, request.gradients, why_not, **line):
            return self.refuse(reason, caller, request.step)
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

    def _misfit(self, request: Request) -> str | None:
        """Return what does not fit this peer's model, if anything does not."""
        size, model = self.passes.parameters.size, self.passes.model
        if wrong := request.misfit(model, size, streamed=self.user.is_stream):
            return wrong
        if request.frozen is not None and request.frozen != self.frozen:
            return "its model has other frozen parameters"
        if request.e_step is not None:
            return self.why_no_e_steps or self._gradients.linear.misfit(request.e_step)
        return None

    def _exceeded_cap(self, request: Request) -> str | None:
        """Return which cap a request exceeds, if any."""
        examples = len(self.user)
        if request.e_step is None:  # which is of all examples
            examples = min(request.batch_size, examples)
        if examples < self.caps.examples:
            return f"it gives no gradient of fewer than {self.caps.examples} examples"
        if not self.is_willing():
            return f"it has given all the gradients it gives, {self.caps.gradients}"
        left, asked = self.left, request.gradients
        if left is not None and left < asked:
            return f"it has {left} gradients left to give, and was asked for {asked}"
        return None

    def _cut_under_masks(self, request: Request) -> str | None:
        """Return why all its examples would not weigh alike in an E-step's sum, if they would not.

        Sums in which some sites' shares are cut and others' are not can be solved for each site's.
        """
        asked, size = request.e_step, self.size
        if asked is None or size is None or asked.examples >= size:
            return None
        return f"under masks an E-step must count all of its {size} examples"

    def _note(self, caller: str, step: object, **what: Any) -> None:
        self.ledger.note(caller=caller, step=repr(step), **what)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31
