"""What a peer computes for user 0's linear model, or for the last layer of its network.

Its own posterior under each prior, or the gradient of its loss there. User 0 needs only sums.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from coterie.mixture.families import FAMILIES, Array, Family
from coterie.mixture.posterior import (
    MODELS,
    Priors,
    Rows,
    outputs_of,
    posterior,
    targets_of,
)
from coterie.mixture.scaling import Scaling

ITERATIONS = 8
"""Of L-BFGS, at most: EM goes on from what it finds."""
TOLERANCE = 1e-2
"""How near a peer finds its mode, in standard deviations of the prior.

Its posterior is far wider.
"""
FARTHEST = 5.0
"""How many standard deviations of the prior a peer's mode may be from the prior's mean, in each number."""
MOST = 100.0
"""What a mean loss, and a number of its gradient or of its curvature, count as at most."""
MAX_PRIORS = 32
"""Under how many priors a peer answers at once."""
STACKED = 2**20
"""How many numbers a stack of users' rows holds at most, if it is not one user's."""
MANY_USERS = 32
"""From so many users in a stack on, those who count under one prior answer by themselves."""
MANY = 2
"""From so many times as many rows on as there are numbers in one, sums stand for them."""
FEW_ROWS = 16
"""Users of so few rows share a stack, however many each has."""
TOLD = {"gradient": 1, "curvature": 1, "posterior": 2}
"""What a peer can be asked for, and as how many gradients it counts: a posterior is a mode and a width."""


class Sums(NamedTuple):
    """What a peer tells under P priors, or weighted sums of that over peers; 0 what is not asked for.

    A peer's share is its number of examples, in units that the question sets. It multiplies loss,
    gradient, curvature and residual, so that one sum gives means over all examples.
    """

    share: Array  # (P,)
    loss: Array  # (P,): the mean loss at the prior's mean
    gradient: Array  # (D, P, K): its gradient there
    curvature: Array  # (D, P, K): the diagonal of its second derivative there
    residual: Array  # (P,): the mean of expected squared errors; 0 but for the squared loss
    first: Array  # (D, P, K): x − mean, x the mode
    second: Array  # (D, P, K): (x − mean)²
    variance: Array  # (D, P, K): of the posterior


_PARTS = {
    "gradient": ("loss", "gradient"),
    "curvature": ("curvature",),
    "posterior": ("residual", "first", "second", "variance"),
}
_NUMBERS = ("share", "loss", "residual")
"""One for a prior; all others are one for each parameter."""
_OF_USERS = ("first", "second", "variance")
"""In these every user counts alike, however many examples it has."""


@dataclass(frozen=True, eq=False)
class EStep:
    """What user 0 asks of peers about a linear layer: a kind of work, as `LocalWork` is.

    A peer answers by a row for each prior. Every number of it lies in [−1, 1], in units that follow
    from the question alone: so much one peer moves user 0 at most, and masks need no more room.

    Args:
        family: the name of the loss's family.
        scaling: user 0's, by which peers scale their rows; values beyond 100 of its standard
            deviations count as these.
        priors: whose means are the points of gradient and curvature.
        told: what peers tell, of `TOLD`, separated by blanks.
        examples: how many examples are a share of 1.
        layer: the name of the linear layer in the model; the rows are what goes into it. The only
            one when empty.

    Example:
        >>> from coterie.mixture.families import SQUARED
        >>> x, y = np.ones((3, 1)), np.full((3, 1), 4.0)
        >>> ask = EStep("squared", Scaling.of(x, y, SQUARED, intercept=False),
        ...     Priors(np.zeros((1, 1, 1)), np.ones((1, 1, 1)), np.ones(1)), "gradient posterior")
        >>> told = ask.read(ask.answer(Rows(x, y)))
        >>> told.first.item(), told.variance.item(), told.residual.item(), told.gradient.item()
        (3.0, 0.25, 1.25, -4.0)
    """

    family: str
    scaling: Scaling
    priors: Priors
    told: str = "posterior"
    examples: float = 1.0
    layer: str = ""

    @property
    def gradients(self) -> int:
        """As how many gradients an answer counts."""
        return len(self.priors.noise) * sum(TOLD.get(each, 0) for each in self.told.split())

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of an answer: a row for each prior."""
        d, p, k = self.priors.mean.shape
        return p, sum(1 if name in _NUMBERS else d * k for name in self._names)

    def wrong(self) -> str | None:
        """Return what is wrong with the question, whoever made it, if anything is."""
        mean, variance, noise = self.priors
        d, p, k = mean.shape if mean.ndim == 3 else (0, 0, 0)
        fits = p and d and k and variance.shape == mean.shape and noise.shape == (p,)
        if not fits or p > MAX_PRIORS:
            return f"it answers under 1 to {MAX_PRIORS} priors, of a mean and a variance for each number"
        positive = [variance, noise, self.scaling.scale, self.scaling.target_scale]
        numbers = [mean, *positive, self.scaling.shift, self.scaling.target_shift]
        if not all(np.isfinite(each).all() for each in numbers):
            return "priors and scaling must be finite numbers"
        if not all((each > 0).all() for each in positive) or not 1 <= self.examples < 2**53:
            return "variances, scales and the number of examples must be positive"
        columns = {len(self.scaling.shift), len(self.scaling.scale), d - self.scaling.intercept}
        outputs = {len(self.scaling.target_shift), len(self.scaling.target_scale), k}
        if len(columns) > 1 or len(outputs) > 1:
            return "priors and scaling must be of the same layer"
        told = self.told.split()
        known = bool(told) and set(told) <= set(TOLD) and len(set(told)) == len(told)
        if self.family not in FAMILIES or not known:
            return "it knows no such family, or nothing of the kind to tell"
        return None

    def about(self) -> Hashable:
        """Return what must be the same for rows to be in the same units."""
        return self.family, *(each.tobytes() for each in self.scaling[:4])

    def rows(self, rows: Rows) -> Rows:
        """Return a peer's rows in user 0's units, without values beyond all that user 0 knows.

        A row that holds a number that is not finite does not count.
        """
        return self.scaling.clipped(self.scaling.rows(*rows).finite())

    def scaled(self, users: "StackedUsers") -> "StackedUsers | None":
        """Return several peers' rows in user 0's units, see `rows`; None where one has no such number.

        Of the squared loss few rows stand for many: those with the same sums of squares and products.
        """
        (inputs, targets), there = users.rows[:2], users.there
        n, numbers = there.shape[1], inputs.shape[2] + self.scaling.intercept + targets.shape[2]
        few = FAMILIES[self.family].is_squared and n >= MANY * numbers
        step = max(numbers, STACKED // (len(there) * numbers)) if few else max(1, n)
        stack = Rows(inputs[:, :0], targets[:, :0])
        for begin in range(0, max(1, n), step):
            some = slice(begin, begin + step)
            count = np.sqrt(there[:, some]) if few else (there > 0).astype(np.float64)
            flat = (each[:, some].reshape(-1, each.shape[2]) for each in users.rows[:2])
            with np.errstate(over="ignore"):
                rows = self.scaling.rows(*flat)
            if not all(np.isfinite(each).all() for each in rows[:2]):
                return None
            clipped = (each.reshape(*count.shape, -1) for each in self.scaling.clipped(rows)[:2])
            rows = Rows(
                *(each if (count == 1).all() else each * count[..., None] for each in clipped)
            )
            if begin:
                rows = Rows(*(np.concatenate(b, 1) for b in zip(stack[:2], rows[:2], strict=True)))
            stack = _summed(rows) if few else rows
        return StackedUsers(stack, np.ones(stack.inputs.shape[:2]) if few else there, users.counts)

    def answer(self, rows: Rows, size: float | None = None, norm: float | None = None) -> Array:
        """Return what a peer with these rows tells.

        Args:
            rows: the peer's, see `rows`.
            size: how many examples it says that it has; as many as rows when None.
            norm: what its gradient is clipped to. Where it is infinite, nothing but a posterior has
                a bound: under masks a gradient that is cut would tell of this peer alone.
        """
        users = StackedUsers.of([rows])
        said = None if size is None else size * users.counts / max(1, len(rows.inputs))
        answers: Array = self.answers(users, said, norm)[0]
        return answers

    def answers(
        self, users: "StackedUsers", sizes: Array | None = None, norm: float | None = None
    ) -> Array:
        """Return what each of several peers tells, (S, P, size); see `answer`."""
        family, priors = FAMILIES[self.family], self.priors
        most = max(1, MODELS // priors.mean.size)
        if not family.is_squared and most < len(users.counts):
            parts = [slice(k, k + most) for k in range(0, len(users.counts), most)]
            few = [None if sizes is None else sizes[part] for part in parts]
            each = [
                self.answers(users.some(part), n, norm) for part, n in zip(parts, few, strict=True)
            ]
            return np.concatenate(each)
        told = _told(users, family, priors, set(self.told.split()))
        if norm is not None and norm < np.inf and "gradient" in told:
            length = np.sqrt(np.square(told["gradient"]).sum((2, 3), keepdims=True))
            told["gradient"] = told["gradient"] * (norm / np.maximum(length, norm))
        share = np.minimum(1.0, (users.counts if sizes is None else sizes) / self.examples)
        numbers = self._flat(told, len(users.counts)) / self._bounds
        kept = np.where(self._of_share, np.inf if norm == np.inf else 1.0, 1.0)
        numbers = np.clip(numbers, -kept, kept)
        if (share < 1).any():
            numbers *= np.where(self._of_share, share[:, None, None], 1.0)
        return numbers

    def answers_that_count(self, users: "StackedUsers", counting: Array | None) -> Array:
        """Return what users tell, (S, P, size), but zeros of who counts under the first prior alone.

        That prior listens to everybody, the others to few. `counting`, (S, P), says who counts
        where; everybody everywhere when None.
        """
        if counting is None or "gradient" in self.told or len(counting) < MANY_USERS:
            return self.answers(users)
        few = np.asarray(counting[:, 1:].any(1))
        if few.all():
            return self.answers(users)
        first = Priors(*(each[:1] if each.ndim == 1 else each[:, :1] for each in self.priors))
        numbers = np.zeros((len(few), *self.shape))
        numbers[~few, :1] = replace(self, priors=first).answers(users.some(~few))
        if few.any():
            numbers[few] = self.answers(users.some(few))
        return numbers

    def read(self, numbers: Array) -> Sums:
        """Return what an answer says, or a weighted sum of answers: (P, size)."""
        of_all, of_each = self.priors.noise, self.priors.mean
        found = {
            name: np.zeros_like(of_all if name in _NUMBERS else of_each) for name in Sums._fields
        }
        for name, part in self.parts(numbers).items():
            found[name] = np.moveaxis(part, 0, 1) if part.ndim > 1 else part
        return Sums(**found)

    def parts(self, numbers: Array) -> dict[str, Array]:
        """Return the parts of answers (…, P, size) by name, each (…, P) or (…, P, D, K)."""
        d, _, k = self.priors.mean.shape
        ends = np.cumsum([1 if name in _NUMBERS else d * k for name in self._names])
        cut = np.split(numbers * self._bounds, ends[:-1], -1)
        return {
            name: part[..., 0] if name in _NUMBERS else part.reshape(*part.shape[:-1], d, k)
            for name, part in zip(self._names, cut, strict=True)
        }

    @cached_property
    def _names(self) -> list[str]:
        """What a row is made of, in order."""
        parts = [part for each in self.told.split() for part in _PARTS[each]]
        known = FAMILIES[self.family].is_squared
        return ["share", *(part for part in parts if known or part != "residual")]

    def _flat(self, parts: Mapping[str, Array], users: int = 1) -> Array:
        """Return a row for each user and prior, (S, P, size), of parts as `parts` has them."""
        d, p, k = self.priors.mean.shape
        wide = [
            np.broadcast_to(
                parts[name], (users, p) if name in _NUMBERS else (users, p, d, k)
            ).reshape(users, p, -1)
            for name in self._names
        ]
        return np.concatenate(wide, -1)

    @cached_property
    def _of_share(self) -> Array:
        """Which numbers of a row the share multiplies, (size,)."""
        said = {name: np.array(name not in _OF_USERS) for name in Sums._fields}
        of_share: Array = self._flat(said)[0, 0]
        return of_share

    @cached_property
    def _bounds(self) -> Array:
        """What each number is at most, in the units of user 0, (P, size)."""
        variance, noise = np.moveaxis(self.priors.variance, 1, 0), self.priors.noise
        bounds = dict.fromkeys(Sums._fields, np.array(MOST)) | {"share": np.array(1.0)}
        bounds |= {"residual": FARTHEST**2 * noise, "variance": variance}
        bounds |= {"first": FARTHEST * np.sqrt(variance), "second": FARTHEST**2 * variance}
        found: Array = self._flat(bounds)[0]
        return found


class StackedUsers(NamedTuple):
    """The rows of several users in one stack, short ones filled with rows of zeros.

    Example:
        >>> one, two = (Rows(np.ones((n, 1)), np.ones((n, 1))) for n in (1, 2))
        >>> users = StackedUsers.of([one, two])
        >>> users.rows.inputs.shape, users.there.tolist()
        ((2, 2, 1), [[1.0, 0.0], [1.0, 1.0]])
    """

    rows: Rows  # (S, n, D) and (S, n, K)
    there: Array  # (S, n): what a row counts, 1 where nothing says so; 0 where it is filling
    counts: Array  # (S,): the sums of these

    @classmethod
    def of(cls, users: Sequence[Rows]) -> "StackedUsers":
        """Return the stack of some users' rows."""
        counts = np.array([len(rows.inputs) for rows in users])
        there = np.arange(max(1, counts.max())) < counts[:, None]
        weights = there.astype(np.float64)
        if any(rows.weights is not None for rows in users):
            weights[there] = np.concatenate([rows.counts for rows in users])
            counts = weights.sum(1)
        if len(users) == 1 and there.all():
            return cls(Rows(*(each[None] for each in users[0][:2])), weights, counts)
        stacks = [np.zeros((*there.shape, each.shape[1])) for each in users[0][:2]]
        for i, stack in enumerate(stacks):
            stack[there] = np.concatenate([rows[i] for rows in users])
        return cls(Rows(*stacks), weights, counts)

    def some(self, which: slice | Array) -> "StackedUsers":
        """Return some of the users."""
        rows = Rows(self.rows.inputs[which], self.rows.targets[which])
        return StackedUsers(rows, self.there[which], self.counts[which])

    @classmethod
    def by_size(cls, users: Sequence[Rows]) -> list[tuple[Array, "StackedUsers"]]:
        """Return stacks of users who have about as many rows, each with the places of its users."""
        stacks, counts = list[tuple[Array, StackedUsers]](), [len(rows.inputs) for rows in users]
        order, begin = np.argsort(counts, kind="stable"), 0
        width = sum(each.shape[1] for each in users[0][:2]) if users else 1
        for end in range(1, len(order) + 1):
            most = counts[order[end]] if end < len(order) else math.inf
            near = most <= max(FEW_ROWS, 1.25 * counts[order[begin]])
            if near and (end + 1 - begin) * most * width <= STACKED:
                continue
            places = order[begin:end]
            stacks.append((places, cls.of([users[place] for place in places])))
            begin = end
        return stacks


def _summed(rows: Rows) -> Rows:
    """Return users' rows with the same sums of squares and products, as many as there are numbers in one."""
    width = rows.inputs.shape[2]
    both = np.asarray(np.linalg.qr(np.concatenate(rows[:2], 2), mode="r"))
    return Rows(both[..., :width], both[..., width:])


def _told(
    users: StackedUsers, family: Family, priors: Priors, wanted: set[str]
) -> dict[str, Array]:
    """Return what is wanted of users' rows, (S, P) or (S, P, D, K), before it has a share or a bound."""
    rows, s, p = users.rows, len(users.counts), len(priors.noise)
    n, found = np.where(users.counts > 0, users.counts, 1)[:, None], {"share": np.array(1.0)}
    counted = rows.inputs * users.there[..., None]
    if wanted & {"gradient", "curvature"}:  # at the same points for all, (S, n, P, K)
        over, targets = n[..., None, None], rows.targets[:, :, None]
        outputs = outputs_of(rows.inputs.reshape(-1, rows.inputs.shape[2]), priors.mean)
        outputs = outputs.reshape(*users.there.shape, *outputs.shape[1:])
        predicted = family.predict(outputs)
        found["gradient"] = _back(counted, predicted - targets) / over
        losses = family.losses(outputs, targets)
        found["loss"] = (users.there[:, None] @ losses)[:, 0] / n
        if "curvature" in wanted:
            squares = counted * rows.inputs
            found["curvature"] = _back(squares, family.curvature(predicted)) / over
    if "posterior" not in wanted:
        return found

    def of_each(part: Array) -> Array:
        each: Array = np.moveaxis(part, 0, 1) if part.ndim > 1 else part
        return each.reshape(s, p, *each.shape[1:])

    mean, variance = (np.tile(each, (1, s, 1)) for each in priors[:2])
    priors, there = Priors(mean, variance, np.tile(priors.noise, s)), np.repeat(users.there.T, p, 1)
    settings: dict[str, Any] = {"tolerance": TOLERANCE, "iterations": ITERATIONS}
    at, width = posterior(rows, family, priors, there, **settings)
    found["residual"] = np.array(0.0)
    if family.is_squared:
        targets = targets_of(rows, s * p)
        errors = np.square(targets - outputs_of(rows.inputs, at)) * there[..., None]
        squares = np.repeat((counted * rows.inputs).sum(1), p, 0).T[..., None]  # (D, S P, 1)
        whole = of_each(errors.sum((0, 2)) + (squares * width).sum((0, 2)))
        found["residual"] = whole / (n * targets.shape[2])
    first = of_each(at - mean)
    return found | {"first": first, "second": np.square(first), "variance": of_each(width)}


def _back(inputs: Array, outputs: Array) -> Array:
    """Return each user's transposed product, (S, P, D, K), of outputs (S, n, P, K)."""
    s, n, p, k = outputs.shape
    slopes = inputs.swapaxes(1, 2) @ outputs.reshape(s, n, p * k)
    return slopes.reshape(s, -1, p, k).swapaxes(1, 2)
