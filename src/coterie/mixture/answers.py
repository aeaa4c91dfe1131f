"""What a peer computes for user 0's linear model, or for the last layer of its network.

Its own posterior under each prior, or the gradient of its loss there. User 0 needs only sums.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from coterie.mixture.families import FAMILIES, Array, Family
from coterie.mixture.posterior import (
    Priors,
    Rows,
    back_to_parameters,
    most_probable,
    outputs_of,
    posterior_variance,
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
        p = len(self.priors.noise)
        return p, sum(int(np.prod(self._shape(name))) for name in self._names()) // p

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

    def rows(self, inputs: Array, targets: Array) -> Rows:
        """Return a peer's rows in user 0's units, without values beyond all that user 0 knows.

        A row that holds a number that is not finite does not count.
        """
        return self.scaling.clipped(self.scaling.rows(inputs, targets).finite())

    def answer(self, rows: Rows, size: float | None = None, norm: float | None = None) -> Array:
        """Return what a peer with these rows tells.

        Args:
            rows: the peer's, see `rows`.
            size: how many examples it says that it has; as many as rows when None.
            norm: what its gradient is clipped to. Where it is infinite, nothing but a posterior has
                a bound: under masks a gradient that is cut would tell of this peer alone.
        """
        family, priors = FAMILIES[self.family], self.priors
        told = _told(rows, family, priors, set(self.told.split()))
        if norm is not None and norm < np.inf and "gradient" in told:
            length = np.sqrt(np.square(told["gradient"]).sum((0, 2)))[:, None]
            told["gradient"] = told["gradient"] * (norm / np.maximum(length, norm))
        share = min(1.0, (len(rows.inputs) if size is None else size) / self.examples)
        numbers, of_share = self._flat(told) / self._bounds(), self._of_share()
        kept = np.where(of_share, np.inf if norm == np.inf else 1.0, 1.0)
        numbers = np.clip(numbers, -kept, kept)
        numbers[:, of_share] *= share
        return numbers

    def read(self, numbers: Array) -> Sums:
        """Return what an answer says, or a weighted sum of answers: (P, size)."""
        d, p, k = self.priors.mean.shape
        found = {name: np.zeros(self._shape(name)) for name in Sums._fields}
        widths = [found[name].size // p for name in self._names()]
        parts = np.split(numbers * self._bounds(), np.cumsum(widths)[:-1], 1)
        for name, part in zip(self._names(), parts, strict=True):
            wide = found[name].ndim > 1
            found[name] = np.moveaxis(part.reshape(p, d, k), 0, 1) if wide else part[:, 0]
        return Sums(**found)

    def _names(self) -> list[str]:
        """Return what a row is made of, in order."""
        parts = [part for each in self.told.split() for part in _PARTS[each]]
        known = FAMILIES[self.family].is_squared
        return ["share", *(part for part in parts if known or part != "residual")]

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a part: one number for each prior, or for each parameter too."""
        of_all, of_each = self.priors.noise, self.priors.mean
        return tuple((of_all if name in _NUMBERS else of_each).shape)

    def _flat(self, parts: Mapping[str, Array]) -> Array:
        """Return a row for each prior, (P, size)."""
        p = len(self.priors.noise)
        wide = [np.broadcast_to(parts[name], self._shape(name)) for name in self._names()]
        return np.column_stack(
            [(np.moveaxis(each, 1, 0) if each.ndim > 1 else each).reshape(p, -1) for each in wide]
        )

    def _of_share(self) -> Array:
        """Say which numbers of a row the share multiplies."""
        said = {name: np.array(name not in _OF_USERS) for name in Sums._fields}
        of_share: Array = self._flat(said)[0]
        return of_share

    def _bounds(self) -> Array:
        """Return what each number is at most, in the units of user 0, (P, size)."""
        variance, noise = self.priors.variance, self.priors.noise
        bounds = dict.fromkeys(Sums._fields, np.array(MOST)) | {"share": np.array(1.0)}
        bounds |= {"residual": FARTHEST**2 * noise, "variance": variance}
        bounds |= {"first": FARTHEST * np.sqrt(variance), "second": FARTHEST**2 * variance}
        return self._flat(bounds)


def _told(rows: Rows, family: Family, priors: Priors, wanted: set[str]) -> dict[str, Array]:
    """Return what is wanted of a peer's rows, before it has a share or a bound."""
    n, found = max(1, len(rows.inputs)), {"share": np.array(1.0)}
    if wanted & {"gradient", "curvature"}:
        outputs, targets = outputs_of(rows.inputs, priors.mean), rows.targets[:, None]
        predicted = family.predict(outputs)
        found["gradient"] = back_to_parameters(rows.inputs, predicted - targets) / n
        found["loss"] = family.losses(outputs, targets).sum(0) / n
        found["curvature"] = (
            back_to_parameters(np.square(rows.inputs), family.curvature(predicted)) / n
        )
    if "posterior" in wanted:
        at = most_probable(rows, family, priors, tolerance=TOLERANCE, iterations=ITERATIONS)
        variance = posterior_variance(rows, family, priors, at)
        found["residual"] = np.array(0.0)
        if family.is_squared:
            errors = np.square(rows.targets[:, None] - outputs_of(rows.inputs, at)).sum((0, 2))
            widths = (np.square(rows.inputs).sum(0)[:, None, None] * variance).sum((0, 2))
            found["residual"] = (errors + widths) / max(1, rows.targets.size)
        first = at - priors.mean
        found |= {"first": first, "second": np.square(first), "variance": variance}
    return found
