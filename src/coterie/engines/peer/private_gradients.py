"""Private gradients of one user: a secret sample, each example clipped, noise on the sum."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from coterie.engines.in_process.model_support import full_precision, warnings_as_errors
from coterie.engines.in_process.passes import Buffers, Passes
from coterie.engines.peer.ghost_norms import MARGIN, clipped_sum_by_layer, takes
from coterie.errors import CoterieError, DataError, ModelError, attributing_errors_to
from coterie.evaluation.losses import PerExample
from coterie.privacy.accountant import MAX_KINDS, Event
from coterie.privacy.masks import NoiseShare
from coterie.privacy.noise import clipped_sum, noisy, poisson_sample
from coterie.privacy.privacy import Privacy
from coterie.users.examples import InMemory
from coterie.users.sampling import seeded
from coterie.users.trees import Tree
from coterie.users.user import Loss, User

logger = logging.getLogger(__name__)

COMPARED = 32
"""On so many examples the gradient of a batch is compared with the mean of each example's."""

TOLERANCE = 1e-3
"""By how much of its norm it may differ."""

MOST_AT_ONCE = 512
"""So many examples are passed together at most."""


class PrivateGradients:
    """What a user gives of its examples under a `Privacy`, and what it costs.

    Every gradient has a Poisson sample of its own, at the rate that is the batch size over the
    number of examples. Each example's gradient is that of a batch of this example alone, so that no
    example can act through another.

    Args:
        user: whose examples they are; they must be countable.
        passes: through the model; one whose examples mix is a `ModelError`.
        privacy: what is promised.
        gradients: how many are given in all, from which the noise follows where it is not said.
    """

    def __init__(self, user: User, passes: Passes, privacy: Privacy, gradients: int | None) -> None:
        if user.is_stream:
            raise DataError(
                f"{user.name!r} is a stream, of which it is not known how often an example comes;"
                " privacy needs a number of examples"
            )
        privacy.check(len(user), gradients)
        self.user, self.passes, self.privacy, self._gradients = user, passes, privacy, gradients
        self._events: dict[float, Event] = {}  # by rate
        check_apart(passes)
        # A package that is missing is told now: later errors do not leave.
        noisy(passes.parameters.vector()[:1], 1.0, 1.0)
        self._mapped = self._by_layer = False
        device, before = passes.parameters.device, _of_loss(passes.loss)
        # Else a GPU's sums by layer, which are so precise, differ from others by hundredths.
        with full_precision(), seeded(0, user.name, 0, device):
            passing = self._passing(min(COMPARED, len(user)))
            _check_unchanged(before, _of_loss(passes.loss))
            self._look(passing)

    def event(self, batch_size: int) -> Event:
        """Return what one gradient of batches of this size costs."""
        rate = min(1.0, batch_size / len(self.user))
        if rate not in self._events:
            self._events[rate] = Event(rate, self.privacy.noise_at(rate, self._gradients))
        return self._events[rate]

    def why_not_of(self, batch_size: int) -> str | None:
        """Return why the cost of such batches is not looked for, if it is not.

        That takes seconds, and user 0 chooses the sizes; and the site may have said which alone it
        gives.
        """
        only = self.privacy.batch_size
        if only is not None and batch_size != only:
            return f"it gives gradients of batches of {only} only"
        known = min(1.0, batch_size / len(self.user)) in self._events
        if known or len(self._events) < MAX_KINDS:
            return None
        return (
            f"it has been asked for {MAX_KINDS} sizes of batches, and answers for no other in"
            " this run"
        )

    def deviation(self, event: Event, over: float | None = None) -> float:
        """Return the standard deviation of the noise on each number of a gradient.

        `over` so many examples.
        """
        return (
            event.noise
            * self.privacy.clip
            / (event.rate * len(self.user) if over is None else over)
        )

    def noise_terms(self, batch_size: int, told: int) -> dict[str, Any]:
        """Return what noise a masked sum must have, in units of this gradient.

        Nothing where none is split.

        `told`: how many examples others know of; the noise does not tell how many there are.
        """
        if self.privacy.margin is None:
            return {}
        noise = self.deviation(self.event(batch_size), min(batch_size, told))
        return {"noise": noise, "margin": self.privacy.margin}

    def too_little_noise(
        self, event: Event, share: NoiseShare | None, *, works: bool
    ) -> str | None:
        """Return why an answer would have too little noise, if it had.

        Where sites split it, and not all add.
        """
        if self.privacy.margin is None:
            return None if share is None else "it does not split its noise"
        if share is None or works:
            return (
                "its noise is split over the sites of masked sums, and it gives parts of these only"
            )
        if share.of_sum < self.deviation(event):
            return (
                f"the sum has noise of {share.of_sum:.3g} to its gradient, and it needs"
                f" {self.deviation(event):.3g}"
            )
        return None

    def gradient(
        self,
        x: Tensor,
        buffers: Buffers = None,
        *,
        event: Event,
        added: float | None = None,
        seed: int = 0,
        step: int = 0,
    ) -> Tensor:
        """Return a gradient at x, like the mean over a batch.

        The seed is that of dropout and random transforms.

        With `added` its noise has this standard deviation, in place of the event's: the rest is
        others' to add. It is then in single precision, whatever that of the model: in half, such
        noise could be rounded away.
        """
        chosen = poisson_sample(len(self.user), event.rate)
        first, *others = torch.split(chosen, MOST_AT_ONCE)
        total = self._clipped(x, first, buffers, seed, step)
        for indices in others:
            total = total.double() + self._clipped(x, indices, buffers, seed, step)
        noise = event.noise if added is None else event.noise * added / self.deviation(event)
        noised = noisy(total, self.privacy.clip, noise, over=event.rate * len(self.user))
        return noised.to(x.dtype) if added is None else noised

    def _clipped(self, x: Tensor, chosen: Tensor, buffers: Buffers, seed: int, step: int) -> Tensor:
        """Return the sum of these examples' clipped gradients, of each as if there were no other."""
        if self._by_layer and len(chosen):
            try:
                batch = self.user.take(chosen, seed=seed, step=step)
                total, holds = clipped_sum_by_layer(self.passes, x, *batch, self.privacy.clip)
            except Exception:  # an example that does not pass, whatever is raised; the others may
                if len(chosen) == 1:
                    return self._by_rows(x, chosen, buffers, seed, step)
                halves = (self._clipped(x, half, buffers, seed, step) for half in chosen.chunk(2))
                return torch.stack([half.double() for half in halves]).sum(0)
            if bool(holds.all()):
                return total
            holds = holds.cpu()
            # one that needs a pass by itself does not change how others are passed
            if bool(holds.any()):
                rest = self._by_rows(x, chosen[~holds], buffers, seed, step)
                return rest + self._clipped(x, chosen[holds], buffers, seed, step)
        return self._by_rows(x, chosen, buffers, seed, step)

    def _by_rows(self, x: Tensor, chosen: Tensor, buffers: Buffers, seed: int, step: int) -> Tensor:
        """Return the same from each example's gradient, clipped as by layer.

        Which way it is may hang on one.
        """
        total, clip = torch.zeros_like(x, dtype=torch.float64), self.privacy.clip / (1 + MARGIN)
        for indices in self._pieces(x, chosen):
            total += clipped_sum(self._rows_of(x, indices, buffers, seed, step), clip)
        return total

    def _pieces(self, x: Tensor, chosen: Tensor) -> Sequence[Tensor]:
        """Return these examples in pieces, of as many as memory allows to map at a time."""
        at_once = (
            max(1, self.passes.memory // (4 * len(x) * x.dtype.itemsize)) if self._mapped else 1
        )
        return torch.split(chosen, at_once) if len(chosen) else ()

    def _rows_of(
        self, x: Tensor, indices: Tensor, buffers: Buffers, seed: int, step: int
    ) -> Tensor:
        """Return the gradients of these examples, one a row.

        That of one which does not pass is zero.

        An error would tell user 0 that this example is there.
        """
        try:
            return self._rows(x, indices, buffers, seed, step)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            if len(indices) > 1:
                return torch.cat(
                    [self._rows_of(x, one, buffers, seed, step) for one in torch.split(indices, 1)]
                )
            logger.warning(
                "example %d of %r counts as zero: %r", int(indices), self.user.name, error
            )
            return torch.zeros_like(x).unsqueeze(0)

    def _rows(self, x: Tensor, indices: Tensor, buffers: Buffers, seed: int, step: int) -> Tensor:
        """Return the gradients of these examples, one a row.

        Of each at x, with equal constants and draws.

        What one draws, or changes in the parameters, is nothing to the next.
        """
        inputs, targets = self.user.take(indices, seed=seed, step=step)
        own = self._constants(buffers)
        with seeded(seed, self.user.name, step, x.device):
            if self._mapped:
                return self.passes.each_example(x, inputs, targets, own)
            return self.passes.single(x.clone(), inputs, targets, own)[0].unsqueeze(0)

    def _constants(self, buffers: Buffers = None) -> dict[str, Tensor]:
        """Return copies of the buffers and of the frozen parameters.

        What a pass changes in them is forgotten.
        """
        own = {name: buffer.clone() for name, buffer in (buffers or self.passes.buffers()).items()}
        named = list(self.passes.model.named_parameters(remove_duplicate=False))
        plain = (p for _, p in named if not p.requires_grad and type(p) is nn.Parameter)
        frozen = {id(p): p.detach().clone() for p in plain}
        return own | {name: frozen[id(p)] for name, p in named if id(p) in frozen}

    def _passing(self, n: int) -> Tensor:
        """Return which of the first examples have a gradient.

        Where none has, model or loss is to blame.
        """
        x, passing = self.passes.parameters.vector(), list[int]()
        for k in range(n):
            with suppress(Exception):
                passing += (
                    [k]
                    if bool(self._rows(x, torch.tensor([k]), None, 0, 0).isfinite().all())
                    else []
                )
        if not passing:
            with attributing_errors_to("the model or the loss, given one example,"):
                self._rows(x, torch.tensor([0]), None, 0, 0)
            raise ModelError(
                "no example has a finite gradient at the model's first parameters; prepare the"
                " inputs, or let the model begin with other parameters"
            )
        return torch.tensor(passing)

    def _look(self, indices: Tensor) -> None:
        """Find out whether examples can be mapped, and refuse a model or loss under which they mix."""
        x, (inputs, targets) = (
            self.passes.parameters.vector(),
            self.user.take(indices, seed=0, step=0),
        )
        # a data set's collation may look at several examples
        if isinstance(self.user.examples, InMemory):
            try:
                with warnings_as_errors():
                    self.passes.each_example(x, inputs, targets, self.passes.buffers())
                self._mapped = True
            except Exception:  # a model may fail under `vmap` in any way; a loop then serves
                self._mapped = False
        together, again = (self._together(x, indices, seed) for seed in range(2))
        tolerance = max(TOLERANCE, 10 * torch.finfo(x.dtype).eps)  # of a model in half precision
        # model or data set draw random numbers
        if bool((together - again).norm() > tolerance * together.norm()):
            return
        rows = torch.cat([self._rows(x, piece, None, 0, 0) for piece in self._pieces(x, indices)])
        if not bool((together - rows.mean(0)).norm() <= tolerance * together.norm() + 1e-6):
            raise ModelError(
                "the gradient of a batch is not the mean of its examples' gradients, so that they"
                " cannot be clipped one by one; use a loss that is a plain mean, and layers that"
                " treat each example on its own"
            )
        self._by_layer = self._fits_by_layer(x, inputs, targets, rows)

    def _together(self, x: Tensor, indices: Tensor, seed: int) -> Tensor:
        """Return the gradient of these examples as a batch, with what the seed draws."""
        batch = self.user.take(indices, seed=seed, step=0)
        with seeded(seed, self.user.name, 0, x.device):
            return self.passes.single(x, *batch, self._constants())[0]

    def _fits_by_layer(self, x: Tensor, inputs: Tree, targets: Tree, rows: Tensor) -> bool:
        """Say whether the model's layers give the clipped sum, as their classes say and these examples confirm."""
        plain = isinstance(self.user.examples, InMemory) and isinstance(inputs, Tensor)
        if not plain or not takes(self.passes):
            return False
        clip = float(rows.norm(dim=1).median())  # about half are clipped
        try:
            if not clip > 0:
                return False
            total, holds = clipped_sum_by_layer(self.passes, x, inputs, targets, clip)
        except (
            CoterieError,
            RuntimeError,
        ):  # layers may be called with shapes that are not foreseen
            return False
        expected = clipped_sum(rows, clip)
        return bool(holds.all()) and bool((total - expected).norm() <= 1e-2 * expected.norm())


def check_apart(passes: Passes) -> None:
    """Refuse a model that normalises over the batch.

    Each example's gradient would depend on the others.
    """
    for name, module in passes.model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise ModelError(
                f"the layer {name!r} ({type(module).__name__}) normalises over the batch, so that"
                " examples mix and cannot be clipped one by one; use GroupNorm or LayerNorm"
            )


def _of_loss(loss: Loss) -> dict[str, Tensor]:
    """Return copies of a loss's own tensors."""
    module = loss.each if isinstance(loss, PerExample) else loss
    if not isinstance(module, nn.Module):
        return {}
    return {
        name: own.detach().clone()
        for name, own in (*module.named_parameters(), *module.named_buffers())
    }


def _check_unchanged(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    """Refuse a loss whose tensors a pass has changed.

    Unlike a model's, nobody makes them the same for all.
    """
    if changed := [name for name, own in after.items() if not torch.equal(own, before[name])]:
        raise ModelError(
            f"the loss changes its own {changed[0]!r} as it computes, so that an example would act"
            " on those after it; let it stay as it is, or let it be a buffer of the model, which"
            " is the same for every example"
        )
