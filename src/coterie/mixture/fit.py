"""A linear model for user 0, in closed form: honest candidates, and one mixture of them."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from coterie.mixture.answers import EStep, StackedUsers
from coterie.mixture.candidates import Candidates, OwnRows, constant, flat_prior, judged, paths
from coterie.mixture.families import Array, Family
from coterie.mixture.mixing import MixtureEntry, mix, weights_of
from coterie.mixture.posterior import Priors, Rows
from coterie.mixture.prior import Found, Heard, PriorAnswer, PriorQuestion, find_priors
from coterie.mixture.scaling import ManyRows, Scaling

SURE = 0.95
"""A constant is served if, of it and the mixture, own rows give it more than this probability."""


@dataclass(frozen=True, eq=False)
class Fitted:
    """What is served, and what speaks for it."""

    served: MixtureEntry
    alone: MixtureEntry
    entries: Mapping[str, MixtureEntry]  # of each kind of candidates
    tau: Array  # (N,): whom the prior of all own rows listens to
    folds: int
    # own rows speak for a constant against the mixture: that is served
    is_constant: bool = False

    @classmethod
    def of(
        cls,
        mixture: MixtureEntry,
        alone: MixtureEntry,
        entries: Mapping[str, MixtureEntry],
        tau: Array,
        *,
        folds: int,
        family: Family,
    ) -> "Fitted":
        """Return what is served: the mixture, or the constant where own rows speak for that."""
        guess, is_constant = entries.get("constant", mixture), False
        if guess is not mixture:
            losses, even = np.stack([mixture.losses, guess.losses]).sum(1), np.full(2, 0.5)
            count = len(mixture.losses)
            is_constant = weights_of(losses, count, 1, even, family, temperature=1)[1] > SURE
        served = guess if is_constant else mixture
        return cls(served, alone, entries, tau, folds, is_constant=bool(is_constant))


T = TypeVar("T")
Fitting = Generator[PriorQuestion, PriorAnswer, Fitted]
Others = Callable[[Array], Sequence[Candidates]]
"""From the folds of the own rows to further blocks of candidates."""


def fit(
    rows: Rows | ManyRows,
    family: Family,
    scaling: Scaling,
    peers: int,
    *,
    seed: int = 0,
    held_out: Rows | None = None,
    others: Others | None = None,
    single: bool = False,
    linear: bool = True,
    signs: Sequence[int] = (),
) -> Fitting:
    """Fit user 0's model.

    Yield what the peers are asked, be sent what they answer, return what was found.

    Args:
        rows: user 0's, scaled; a row that holds a number that is not finite does not count. Of more
            than 10,000 a sample of as many judges candidates; all are fitted to.
        family: of the loss.
        scaling: between the caller's units and these.
        peers: how many there are; nobody is asked where there is none.
        seed: of the folds.
        held_out: further rows of user 0 that nothing is fitted to, scaled: evidence for every
            candidate.
        others: makes further candidates from the fold of each row; a row that does not count has
            none, and is not among the rows that candidates have outputs for.
        single: serve the best candidate in the place of the mixture.
        linear: whether there are linear candidates; beside the constant, which there always is.
        signs: of each column; candidates that do not have them are left out, see
            `Candidates.monotone`.
    """
    held_out = None if held_out is None else held_out.finite()
    rows = rows.finite() if isinstance(rows, Rows) else rows
    own = OwnRows.of(rows, family, seed, whole=others is not None)
    found, candidates = None, [constant(own, scaling)]
    if linear:
        found, more = yield from linear_candidates(own, family, scaling, peers)
        candidates += more
    validated = of_each = None
    if held_out is not None:
        inputs, validated, of_each = scaling.unscaled(held_out)
        candidates = [one.on(inputs) for one in candidates]
    candidates += others(own.folds) if others else ()
    candidates = [one for each in candidates if (one := each.monotone(signs)).many]
    targets = scaling.outputs(own.judging.targets)
    settings: dict[str, Any] = {"held_out": validated, "held_out_counts": of_each}
    settings |= {"counts": own.judging.weights, "single": single}
    served, by_alone, entries = mix(family, targets, own.folds, candidates, **settings)
    tau = np.zeros(0) if found is None else found.tau[0]
    return Fitted.of(served, by_alone, entries, tau, folds=own.seen.shape[1] - 1, family=family)


Linear = Generator[PriorQuestion, PriorAnswer, tuple[Found | None, list[Candidates]]]


def linear_candidates(own: OwnRows, family: Family, scaling: Scaling, peers: int) -> Linear:
    """Yield what the peers are asked, as `fit` does, and return the linear candidates.

    And what was found from the peers; nobody is asked where there is none.

    Args:
        own: user 0's rows, scaled.
        family: of the loss.
        scaling: between the caller's units and these.
        peers: how many there are.
    """
    d, k, views = own.rows.inputs.shape[1], own.rows.targets.shape[1], own.seen.shape[1]
    flat, found = flat_prior(d, k, intercept=scaling.intercept), None
    priors = {"alone": Priors(np.zeros((d, 1, k)), flat, np.ones(1))}
    candidates = list[Candidates]()
    if peers:
        found = yield from find_priors(own, family, peers, intercept=scaling.intercept)
        of_all = Priors(*(each[:1] if each.ndim == 1 else each[:, :1] for each in found.priors))
        chosen = Priors(*(each[1:] if each.ndim == 1 else each[:, 1:] for each in found.priors))
        priors |= {"near pooled": Priors(found.pooled, flat, of_all.noise), "hierarchical": of_all}
        if scaling.intercept:
            its_own = np.where(flat > 1, flat, of_all.variance)
            priors["hierarchical, own intercept"] = of_all._replace(variance=its_own)
        if len(chosen.noise):
            priors["hierarchical, chosen peers"] = chosen
        pooled = np.broadcast_to(found.pooled[:, None], (d, views, 1, k))
        together = {"pooled": pooled, "pooled, user as a column": found.joint}
        candidates += [judged(kind, own, of, scaling) for kind, of in together.items()]
    return found, candidates + paths(own, family, priors, scaling)


Ask = Callable[[PriorQuestion], PriorAnswer]


def driven(asking: Generator[PriorQuestion, PriorAnswer, T], ask: Ask) -> T:
    """Return what is found, by a function that asks the peers."""
    try:
        question = next(asking)
        while True:
            question = asking.send(ask(question))
    except StopIteration as end:
        found: T = end.value
        return found


def asks_here(peers: Sequence[Rows], family: Family) -> Ask:
    """Return what asks peers whose scaled rows are at hand."""
    heard, examples = Heard(), float(max((rows.counts.sum() for rows in peers), default=1))
    stacks = StackedUsers.by_size([rows.finite() for rows in peers])

    def ask(question: PriorQuestion) -> PriorAnswer:
        scaling = Scaling.none(question.priors.mean.shape[0], question.priors.mean.shape[2])
        asked = EStep(family.name, scaling, question.priors, question.told, max(1.0, examples))
        numbers = np.empty((len(peers), *asked.shape))
        for places, users in stacks:
            numbers[places] = asked.answers(users)
        return heard.answer(question, asked, numbers)

    return ask


def fit_here(
    inputs: Array,
    targets: Array,
    peers: Sequence[tuple[Array, Array] | Rows],
    family: Family,
    outputs: int = 1,
    *,
    weights: Array | None = None,
    intercept: bool = True,
    seed: int = 0,
    others: Others | None = None,
    single: bool = False,
) -> Fitted:
    """Fit a linear model for user 0 beside peers whose rows are at hand.

    Args:
        inputs: user 0's, (n, D).
        targets: user 0's: classes, or numbers of shape (n, K).
        peers: the same of each peer, and what its rows count, if not 1.
        family: of the loss.
        outputs: K, as many as there are classes.
        weights: what user 0's rows count.
        intercept: whether the model has one.
        seed: of the folds.
        others: makes further candidates, see `fit`.
        single: serve the best candidate in the place of the mixture.

    Example:
        >>> from coterie.mixture.families import SQUARED
        >>> random = np.random.default_rng(0)
        >>> users = [(x := random.normal(size=(n, 3)), x.sum(1) + random.normal(size=n)) for n in (8, 50, 50, 50)]
        >>> fitted = fit_here(*users[0], users[1:], SQUARED)
        >>> float(np.abs(fitted.served.parameters[:3] - 1).max()) < 0.2
        True
    """
    scaling = Scaling.of(inputs, family.targets(targets, outputs), family, intercept=intercept)

    def scaled(x: Array, y: Array, counts: Array | None = None) -> Rows:
        return scaling.rows(x, family.targets(y, outputs), counts)

    rows = scaled(inputs, targets, weights)
    fitting = fit(rows, family, scaling, len(peers), seed=seed, others=others, single=single)
    return driven(fitting, asks_here([scaling.clipped(scaled(*peer)) for peer in peers], family))
