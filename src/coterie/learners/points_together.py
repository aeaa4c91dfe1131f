"""Gradients and losses at several points in one pass: one model in many copies, over users in this process."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from coterie.engines.capabilities import Stackable
from coterie.engines.in_process.sampler import Batches
from coterie.gradients.gradients import is_finite
from coterie.learners.points import Own, Points, Sums, combined
from coterie.learners.spec import RunSpec
from coterie.users.examples import Examples, InMemory
from coterie.users.sampling import BatchStream, IndexTable, random_key

MAX_ROW_BYTES = {"cpu": 2**25, "cuda": 2**30}
"""About how many bytes of peers' gradients are held at once where each is wanted by itself."""


class PointsTogether(Points):
    """The same as `Points`, to rounding, in one pass each for user 0 and for the peers."""

    def __init__(self, spec: RunSpec, engine: Stackable, parts: Tensor) -> None:
        super().__init__(spec, engine, parts)
        self._stackable, self._copies = engine, engine.copies()
        self._me = engine.users[spec.me.name]
        self._held: dict[int, InMemory] = {}
        like = self.start()
        self._shares = (parts / parts.sum(1, keepdim=True)).to(like)
        self._draws = _Draws(parts, spec.batch_size, random_key(spec.seed, spec.me.name), like)

    def own(self, points: Tensor, step: int, parts: Sequence[int]) -> Own:
        """Return user 0's gradient at each point; see `Points.own`."""
        indices, shares = self._draws.at(step)
        gradients, sums = self._gradients(points, shares[list(parts)], *self._me.examples.take(indices))
        return Own(gradients, sums[0], points[:, self.d :])

    def on_all(self, points: Tensor, step: int, parts: Sequence[int]) -> Tensor:
        """Return user 0's gradient at each point, on all examples of its part."""
        everything = self._me.examples.take(torch.arange(self.parts.shape[1]))
        return self._gradients(points, self._shares[list(parts)], *everything)[0]

    def sums(self, points: Tensor, step: int, weights: Tensor) -> Sums:
        """Return the peers' weighted sums; see `Points.sums`."""
        batches = self._drawn(step)
        shares = [
            (weights[:, list(batch.positions)] / batch.size).repeat_interleave(batch.size, dim=1)
            for batch in batches
        ]
        inputs, targets = torch.cat([b.inputs for b in batches]), torch.cat([b.targets for b in batches])
        sums = self._gradients(points, torch.cat(shares, dim=1), inputs, targets)[0]
        if is_finite(sums):
            return Sums(sums, weights.sum(1))
        rows, left_out = self.rows(points, step, weights > 0)
        return combined(rows, weights, left_out)

    def rows(self, points: Tensor, step: int, asked: Tensor) -> tuple[Tensor, dict[str, str]]:
        """Return each peer's gradient at each point; see `Points.rows`."""
        rows = points.new_full((len(points), len(self.names), self.d), torch.nan)
        usable = points.isfinite().all(1)
        for part in self._cut(self._drawn(step), len(points)):
            rows[:, list(part.positions)] = self._by_peer(points, part)
        lost = (asked & ~rows.isfinite().all(2))[usable].any(0).tolist()
        rows[~usable] = torch.nan
        return rows, {name: "not finite" for name, one in zip(self.names, lost, strict=True) if one}

    def losses(self, points: Tensor, examples: Examples) -> Tensor:
        """Return the loss of each example at each point; see `Points.losses`."""
        if not isinstance(examples, InMemory):
            return super().losses(points, examples)
        held = self._held.setdefault(id(examples), examples.to(points.device))
        inputs, targets = held.inputs, held.targets
        chunks = torch.split(points, self._copies.max_copies(inputs, len(inputs)))
        each = [self._copies.losses(x[None], inputs[None], targets[None])[0] for x in chunks]
        return torch.cat(each).double().cpu()

    def _drawn(self, step: int) -> list[Batches]:
        return self._stackable.draw(self.names, step)[1]

    def _cut(self, batches: Sequence[Batches], copies: int) -> Iterator[Batches]:
        """Return batches in parts of as many peers as can be held."""
        for batch in batches:
            held = MAX_ROW_BYTES.get(batch.inputs.device.type, 2**28)
            yield from batch.cut(max(1, held // (copies * self.d * self._shares.element_size())))

    def _by_peer(self, points: Tensor, batch: Batches) -> Tensor:
        """Return the gradients of some peers at all points, of shape (R, peers, d)."""
        inputs, targets = batch.by_user(batch.inputs), batch.by_user(batch.targets)
        x = points[:, : self.d]
        mean = x.new_tensor(1 / batch.size).expand(len(inputs), len(x), batch.size)
        return self._copies.gradients(x.expand(len(inputs), *x.shape), mean, inputs, targets)[0].transpose(0, 1)

    def _gradients(self, points: Tensor, shares: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient of each copy's weighted sum of the examples' losses, and that sum."""
        most = self._copies.max_copies(inputs, len(inputs))
        batch = inputs[None], targets[None]
        chunks = zip(torch.split(points[:, : self.d], most), torch.split(shares, most), strict=True)
        pairs = [self._copies.gradients(x[None], some[None], *batch) for x, some in chunks]
        return torch.cat([g[0] for g, _ in pairs]), torch.cat([s[0] for _, s in pairs])


class _Draws:
    """User 0's batches from several parts of its examples: which examples are drawn for any, and what each weighs.

    A part's batch is that of a user with those examples alone.
    """

    def __init__(self, parts: Tensor, batch_size: int, key: int, like: Tensor) -> None:
        self.parts = [part.nonzero().flatten() for part in parts.cpu()]
        self.n, self.like = parts.shape[1], like[:1]
        self.streams = [BatchStream(key, len(part), min(batch_size, len(part))) for part in self.parts]
        self.table = IndexTable(self.streams)
        self.whole = all(stream.size == stream.n for stream in self.streams)
        self.kept: tuple[int, tuple[Tensor, Tensor]] | None = None

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the indices drawn for any part, and the weight of each in every part."""
        if self.kept is None or (self.kept[0] != step and not self.whole):
            shares = torch.zeros(len(self.parts), self.n, dtype=torch.float64)
            drawn = torch.split(self.table.row(step), [stream.size for stream in self.streams])
            for row, part, places in zip(shares, self.parts, drawn, strict=True):
                row.index_put_((part[places],), row.new_tensor(1 / len(places)), accumulate=True)
            used = shares.any(0).nonzero().flatten()
            self.kept = step, (used.to(self.like.device), shares[:, used].to(self.like))
        return self.kept[1]
