"""What a peer computes for a request.

Gradients of its own examples, on batches that it draws itself.
"""

import functools
import hashlib
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from coterie.arguments import COUNT, POSITIVE, check_fields, optional, whole
from coterie.engines.engine import AllRows, LocalWork
from coterie.engines.in_process.model_support import ModelSupport
from coterie.engines.in_process.passes import Passes
from coterie.engines.peer.linear_rows import LinearRows
from coterie.engines.peer.private_gradients import PrivateGradients
from coterie.engines.requests import Request
from coterie.users.examples import InMemory
from coterie.users.sampling import BatchStream, IndexTable, random_key, seeded
from coterie.users.trees import Tree
from coterie.users.user import User


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


def secret_number(secret: bytes, purpose: str) -> int:
    """Return a number of 63 bits that only who has the secret can know."""
    return int.from_bytes(secret_bytes(secret, purpose, 8), "little") >> 1


def secret_bytes(secret: bytes, purpose: str, n: int = 32) -> bytes:
    """Return bytes that only who has the secret can know."""
    return hashlib.blake2b(
        purpose.encode(), key=hashlib.sha256(secret).digest(), digest_size=n
    ).digest()


class OwnGradients:
    """Gradients at the points of a request, or sums of what steps from them follow.

    Args:
        user, passes, support: as for `Peer`.
        caps: to whose norm the gradient of each step is clipped, and of how many examples a block
            is.
        secret: what batches are drawn by, see `OwnDraws`; by (seed, user, step) when None, as user
            0 would.
        private: what gives private gradients, where those are promised.
    """

    def __init__(
        self,
        user: User,
        passes: Passes,
        support: ModelSupport,
        caps: Caps,
        *,
        secret: bytes | None,
        private: PrivateGradients | None,
    ) -> None:
        self.user, self.passes, self.support, self.caps = user, passes, support, caps
        self._secret, self._private = secret, private
        self.linear = LinearRows(user, passes)
        self._table: tuple[BatchStream, IndexTable] | None = None

    def __call__(self, request: Request, added: float | None = None) -> tuple[Tensor, int]:
        """Return what is asked for at each point, a row each, and over how many examples every gradient is.

        `added`: the noise of private gradients, as in `PrivateGradients.gradient`.
        """
        if request.work is not None:
            return self._worked(request, request.work)
        gradient, examples = self._drawn(request, request.step, added)
        points = enumerate(request.points)
        return (
            torch.stack([gradient(point, self._buffers(request, p)) for p, point in points]),
            examples,
        )

    def e_step(self, asked: AllRows, point: Tensor, *, masked: bool) -> tuple[Tensor, int]:
        """Answer an E-step on all examples, of which it says as many as the caps tell, or histograms.

        Their gradient is clipped, but not where it is `masked`.
        """
        told = len(self.user) // self.caps.examples * self.caps.examples
        norm = math.inf if masked else self.caps.norm
        how = asked, point, told, norm, self.caps.examples
        return self.linear.answer(*how)[None], len(self.user)

    def _worked(self, request: Request, work: LocalWork) -> tuple[Tensor, int]:
        """Take steps from each point, and return the sums of what they followed, and examples as above."""
        rows, examples = [], 0
        for place, point in enumerate(request.points):
            buffers = self._buffers(request, place)

            def gradient(x: Tensor, k: int, buffers: dict[str, Tensor] = buffers) -> Tensor:
                nonlocal examples
                gradient_at, examples = self._drawn(request, request.step + k)
                given = gradient_at(x, buffers)
                return given if self.caps.norm is None else clipped(given, self.caps.norm)[0]

            rows.append(work.followed(point, gradient, place))
        return torch.stack(rows), examples

    def _buffers(self, request: Request, place: int) -> dict[str, Tensor]:
        """Return the model's buffers at the point in this place; passes move them."""
        buffers = self.passes.buffers() if self.support.moves_buffers or request.buffers else {}
        for name, rows in request.buffers.items():
            buffers[name].copy_(rows[place if len(rows) > 1 else 0])
        return buffers

    def _drawn(
        self, request: Request, step: int, added: float | None = None
    ) -> tuple[GradientAt, int]:
        """Return what gives gradients on a step's batch, and over how many examples.

        Private ones draw anew.
        """
        seed, name = self._seed(request), self.user.name
        if self._private is not None:
            event = self._private.event(request.batch_size)
            size = round(event.rate * len(self.user))
            how: dict[str, Any] = {"event": event, "added": added, "seed": seed, "step": step}
            return functools.partial(self._private.gradient, **how), size
        batch = self._batch(request, step)

        def gradient(x: Tensor, buffers: dict[str, Tensor]) -> Tensor:
            self.passes.tell_of_nothing(name, batch[1])
            with seeded(seed, name, step, x.device) if self.support.random else nullcontext():
                return self.passes.single(x, *batch, buffers)[0]

        return gradient, len(batch[1])

    def _seed(self, request: Request) -> int:
        """Return what transforms, dropout and streams draw from.

        With caps it is not for user 0 to choose.
        """
        if self._secret is None:
            return request.seed
        return secret_number(self._secret, f"seed {request.seed}")

    @functools.cached_property
    def _draws(self) -> OwnDraws | None:
        if self._secret is None or self.user.is_stream:
            return None
        return OwnDraws(self._secret, len(self.user), self.caps.examples)

    def _batch(self, request: Request, step: int) -> tuple[Tree, Tree]:
        """Return this peer's own draw, or where it has no caps what `User.batch` gives."""
        seed, size = self._seed(request), min(request.batch_size, len(self.user))
        if self._draws is not None:
            return self.user.take(self._draws.indices(size, seed, step), seed=seed, step=step)
        if not isinstance(self.user.examples, InMemory):
            return self.user.batch(size, seed=seed, step=step)
        stream = BatchStream(random_key(seed, self.user.name), len(self.user), size)
        # indices are drawn for several steps at a time
        if self._table is None or self._table[0] != stream:
            self._table = stream, IndexTable([stream])
        return self.user.take(self._table[1].row(step, request.points.device), seed=seed, step=step)
