"""Private gradients of one user: a secret sample, each example clipped, noise on the sum."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from coterie.engines.ghost_norms import clipped_sum_by_layer, takes
from coterie.engines.in_process.model_support import warnings_as_errors
from coterie.engines.in_process.passes import Buffers, Passes
from coterie.errors import CoterieError, DataError, ModelError
from coterie.privacy.accountant import Event
from coterie.privacy.clipping import clipped_sum, noisy
from coterie.privacy.masks import NoiseShare
from coterie.privacy.privacy import Privacy
from coterie.privacy.randomness import poisson_sample
from coterie.users.examples import InMemory
from coterie.users.trees import Tree, n_rows
from coterie.users.user import User

COMPARED = 32
"""On so many examples the gradient of a batch is compared with the mean of each example's."""

TOLERANCE = 1e-3
"""By how much of its norm it may differ."""

MOST_AT_ONCE = 512
"""So many examples are passed together at most."""


class PrivateGradients:
    """What a user gives of its examples under a `Privacy`, and what it costs.

    Every gradient has a Poisson sample of its own, at the rate that is the batch size over the number of examples.
    Each example's gradient is that of a batch of this example alone, so that no example can act through another.

    Args:
        user: whose examples they are; they must be countable.
        passes: through the model; one whose examples mix is a `ModelError`.
        privacy: what is promised.
        gradients: how many are given in all, from which the noise follows where it is not said.
    """

    def __init__(self, user: User, passes: Passes, privacy: Privacy, gradients: int | None) -> None:
        if user.is_stream:
            raise DataError(
                f"{user.name!r} is a stream, of which it is not known how often an example comes; privacy needs a "
                "number of examples"
            )
        privacy.check(len(user), gradients)
        self.user, self.passes, self.privacy, self._gradients = user, passes, privacy, gradients
        check_apart(passes)
        noisy(
            passes.parameters.vector()[:1], 1.0, 1.0
        )  # a package that is missing is told now: later errors do not leave
        self._mapped = self._by_layer = False
        self._look(user.take(torch.arange(min(COMPARED, len(user))), seed=0, step=0))

    def event(self, batch_size: int) -> Event:
        """Return what one gradient of batches of this size costs."""
        rate = min(1.0, batch_size / len(self.user))
        return Event(rate, self.privacy.noise_at(rate, self._gradients))

    def deviation(self, event: Event, over: float | None = None) -> float:
        """Return the standard deviation of the noise on each number of a gradient; `over` so many examples."""
        return event.noise * self.privacy.clip / (event.rate * len(self.user) if over is None else over)

    def noise_terms(self, batch_size: int, told: int) -> dict[str, Any]:
        """Return what noise a masked sum must have, in units of this gradient; nothing where none is split.

        `told`: how many examples others know of; the noise does not tell how many there are.
        """
        if self.privacy.margin is None:
            return {}
        noise = self.deviation(self.event(batch_size), min(batch_size, told))
        return {"noise": noise, "margin": self.privacy.margin}

    def too_little_noise(self, event: Event, share: NoiseShare | None, *, works: bool) -> str | None:
        """Return why an answer would have too little noise, if it had: where sites split it, and not all add."""
        if self.privacy.margin is None:
            return None if share is None else "it does not split its noise"
        if share is None or works:
            return "its noise is split over the sites of masked sums, and it gives parts of these only"
        if share.of_sum < self.deviation(event):
            return (
                f"the sum has noise of {share.of_sum:.3g} to its gradient, and it needs {self.deviation(event):.3g}"
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
        """Return a gradient at x, like the mean over a batch; the seed is that of random transforms.

        With `added` its noise has this standard deviation, in place of the event's: the rest is others' to add.
        """
        chosen = poisson_sample(len(self.user), event.rate)
        first, *others = torch.split(chosen, MOST_AT_ONCE)
        total = self._clipped(x, first, buffers, seed, step)
        for some in others:
            total = total.double() + self._clipped(x, some, buffers, seed, step)
        noise = event.noise if added is None else event.noise * added / self.deviation(event)
        return noisy(total, self.privacy.clip, noise, over=event.rate * len(self.user)).to(x.dtype)

    def _clipped(self, x: Tensor, chosen: Tensor, buffers: Buffers, seed: int, step: int) -> Tensor:
        """Return the sum of these examples' clipped gradients."""
        if self._by_layer and len(chosen):
            total = clipped_sum_by_layer(
                self.passes, x, *self.user.take(chosen, seed=seed, step=step), self.privacy.clip
            )
            if total is not None:
                return total
        total = torch.zeros_like(x, dtype=torch.float64)
        for rows in self._rows(x, chosen, buffers, seed, step):
            total += clipped_sum(rows, self.privacy.clip)
        return total

    def _rows(self, x: Tensor, chosen: Tensor, buffers: Buffers, seed: int, step: int) -> Iterator[Tensor]:
        """Return the gradients of these examples, one a row, as many at a time as memory allows."""
        at_once = max(1, self.passes.memory // (4 * len(x) * x.dtype.itemsize)) if self._mapped else 1
        for some in torch.split(chosen, at_once) if len(chosen) else ():
            inputs, targets = self.user.take(some, seed=seed, step=step)
            own = {name: buffer.clone() for name, buffer in (buffers or self.passes.buffers()).items()}
            if self._mapped:
                yield self.passes.each_example(x, inputs, targets, own)
            else:
                yield self.passes.single(x, inputs, targets, own)[0].unsqueeze(0)

    def _look(self, batch: tuple[Tree, Tree]) -> None:
        """Find out whether examples can be mapped, and refuse a model or loss under which they mix."""
        x, (inputs, targets) = self.passes.parameters.vector(), batch
        if isinstance(self.user.examples, InMemory):  # a data set's collation may look at several examples
            try:
                with warnings_as_errors():
                    self.passes.each_example(x, inputs, targets, self.passes.buffers())
                self._mapped = True
            except Exception:  # a model may fail under `vmap` in any way; a loop then serves
                self._mapped = False
        together, again = (self.passes.single(x, inputs, targets, self.passes.buffers())[0] for _ in range(2))
        if not torch.equal(together, again):  # it draws random numbers
            return
        rows = torch.cat(list(self._rows(x, torch.arange(n_rows(inputs)), None, 0, 0)))
        if not bool((together - rows.mean(0)).norm() <= TOLERANCE * together.norm() + 1e-6):
            raise ModelError(
                "the gradient of a batch is not the mean of its examples' gradients, so that they cannot be "
                "clipped one by one; use a loss that is a plain mean, and layers that treat each example on its own"
            )
        self._by_layer = self._fits_by_layer(x, inputs, targets, rows)

    def _fits_by_layer(self, x: Tensor, inputs: Tree, targets: Tree, rows: Tensor) -> bool:
        """Say whether the model's layers give the clipped sum, as their classes say and these examples confirm."""
        if not isinstance(self.user.examples, InMemory) or not takes(self.passes):
            return False
        clip = float(rows.norm(dim=1).median())  # about half are clipped
        try:
            total = clipped_sum_by_layer(self.passes, x, inputs, targets, clip) if clip > 0 else None
        except (CoterieError, RuntimeError):  # layers may be called with shapes that are not foreseen
            return False
        expected = clipped_sum(rows, clip)
        return total is not None and bool((total - expected).norm() <= 1e-2 * expected.norm())


def check_apart(passes: Passes) -> None:
    """Refuse a model that normalises over the batch: each example's gradient would depend on the others."""
    for name, module in passes.model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise ModelError(
                f"the layer {name!r} ({type(module).__name__}) normalises over the batch, so that examples mix and "
                "cannot be clipped one by one; use GroupNorm or LayerNorm"
            )
