"""What a peer promises about any one of its examples."""

from dataclasses import dataclass

from coterie.arguments import COUNT, POSITIVE, check_fields, instance, optional, real, whole
from coterie.errors import KnobError
from coterie.privacy.accountant import NOISE, least_noise

LEAST_DELTA = 1e-12
"""A smaller δ is lost in the tails that the accountant leaves away, some 10⁻¹⁵ of each kind of events."""

DELTA = real(f"lie in [{LEAST_DELTA:g}, 1)", lambda value: LEAST_DELTA <= value < 1)


@dataclass(frozen=True)
class Privacy:
    """(ε, δ) for every example, over all that is ever given.

    An example that is there or not changes little.

    Args:
        epsilon: ε, spent over all runs; a request beyond it is refused.
        delta: δ, less than one over the number of examples, and at least 1e-12: the accountant is
            no finer.
        clip: the norm that each example's gradient is clipped to.
        noise: the noise on the sum of a batch, its standard deviation in multiples of `clip`. When
            None the least with which `epsilon` lasts for all the gradients that the peer gives.
        margin: give parts of masked sums only, and let their sites split the noise: the sum has all
            of it, also without that of `margin` other sites. The promise is then against those who
            see sums, together with so many sites. All of it is the peer's own when None.
        batch_size: answer for batches of this size only. Of any when None: user 0 may then choose
            sizes by what it has seen, while ε is added up as if they had been fixed before, and
            what holds is a somewhat larger δ.

    Example:
        >>> Privacy(epsilon=2.0, delta=1e-5, clip=1.0).in_words()
        'ε = 2 at δ = 1e-05 for every example, clipped to norm 1'
    """

    epsilon: float
    delta: float
    clip: float
    noise: float | None = None
    margin: int | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        sizes = {"epsilon": POSITIVE, "delta": DELTA, "clip": POSITIVE}
        others = {
            "noise": optional(NOISE),
            "margin": optional(whole(0)),
            "batch_size": optional(COUNT),
        }
        check_fields(self, {**sizes, **others})

    def check(self, examples: int, gradients: int | None) -> None:
        """Refuse what does not fit a peer of so many examples that gives so many gradients in all."""
        if not self.delta < 1 / examples:
            raise KnobError(
                f"`delta` must be less than one over the number of examples, 1/{examples}, got"
                f" {self.delta:g}; else a mechanism that gives a whole example away would pass"
            )
        if self.noise is None and not gradients:
            raise KnobError(
                "`noise` must be given, or a cap on `gradients`, from which it follows: the least"
                " with which `epsilon` lasts for so many"
            )

    def noise_at(self, rate: float, gradients: int | None) -> float:
        """Return the noise on a gradient of a sample at this rate, where so many are given in all."""
        if self.noise is not None:
            return self.noise
        return least_noise(rate, gradients or 1, self.epsilon, self.delta)

    def in_words(self) -> str:
        """Return the promise in words."""
        noise = "" if self.noise is None else f", with noise of {self.noise:g} times that"
        noise += "" if self.batch_size is None else f", in batches of {self.batch_size}"
        said = (
            f"ε = {self.epsilon:g} at δ = {self.delta:g} for every example, clipped to norm"
            f" {self.clip:g}{noise}"
        )
        if self.margin is None:
            return said
        return (
            f"{said}, split over the sites of masked sums: against who sees these, with"
            f" {self.margin} of the sites"
        )


PROMISE = instance(Privacy, "a `coterie.privacy.Privacy`")
"""What a promise must be."""
