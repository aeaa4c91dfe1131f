"""The contract of an engine: what is asked and answered, what else it can do, and who refuses.

It gives all users' gradients at one point, wherever the users are.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, Self, TypeAlias, overload, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from coterie.engines.in_process.copies import Copies
from coterie.errors import KnobError
from coterie.gradients.gradients import Gradients
from coterie.gradients.parameters import Parameters, finite_rows, is_finite
from coterie.mixture.answers import EStep
from coterie.recording.costs import Traffic
from coterie.trees.histograms import Histograms
from coterie.users.examples import Examples
from coterie.users.user import Loss, User

NOT_IN_MEMORY = "not all examples are in memory"

AllRows: TypeAlias = EStep | Histograms
"""What peers answer on all their examples, in the place of a gradient."""


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do beyond the weighted sum of the peers' gradients.

    The defaults describe an engine whose users are elsewhere. Ask by `require`, which also refuses.

    Args:
        rows: every peer's own gradient can be had.
        rows_at_hand: they cost no more than the weighted sum, which is made of them here.
        own_points: every user answers at a point of its own; the engine is then
            `AnswersAtOwnPoints`.
        local: all users' examples are in this process: other batch sizes can be asked for, and
            gradients cost nothing but time; the engine is then `Local`.
        same_bits: gradients have the bits of `InProcess(one_by_one=True)`; otherwise they agree to
            rounding.
        not_captured: why steps cannot be one program; None where they can, and the engine is
            `Captures`.
        rows_not_captured: the same for a rule that needs rows.
        not_stacked: why the model cannot be passed in many copies at once; None where it can.
        examples: how many examples each user has, user 0 included; None for a stream. Empty where
            not known.
        noise: the standard deviation of what private peers add to each number of a gradient, as far
            as it is known.
        batch_size: how many examples a user draws for a gradient at most; None where not known.
        batch_dependent: another batch size may mean another objective, as with BatchNorm.
        many_points: peers can be asked at several points in one exchange; the engine is then
            `Asks`.
        sketch: how many numbers a peer shows of its gradient where weights are chosen; None where
            it shows all.
        local_work: peers take steps of their own from a point; the engine is then `Asks`.
        no_e_steps: why peers answer no E-steps; empty where they do, and the engine is then
            `Asks`.

    Example:
        >>> Capabilities(rows=False).own_points
        False
    """

    rows: bool = True
    rows_at_hand: bool = False
    own_points: bool = False
    local: bool = False
    same_bits: bool = False
    not_captured: str | None = NOT_IN_MEMORY
    rows_not_captured: str | None = NOT_IN_MEMORY
    not_stacked: str | None = NOT_IN_MEMORY
    examples: Mapping[str, int | None] = field(default_factory=dict)
    noise: Mapping[str, float] = field(default_factory=dict)
    batch_size: int | None = None
    batch_dependent: bool = False
    many_points: bool = False
    sketch: int | None = None
    local_work: bool = False
    no_e_steps: str = "peers of this engine answer no E-steps"


@dataclass(frozen=True, eq=False)
class LocalWork:
    """Plain steps that a user takes from a point, each on its batch of the next step.

    X ← x − η (g(x) + a + λ x).

    What it gives is its displacement over η: the sum of what its steps followed, in the place of a
    gradient.

    Example:
        >>> LocalWork(count=2, lr=0.5).followed(torch.ones(1), lambda x, k: x)  # f(x) = x²/2
        tensor([1.5000])
    """

    count: int  # K, at least 1
    lr: float  # η
    add: Tensor | None = None  # a, of shape (P, d), a row for each point; zero when None
    decay: float = 0.0  # λ

    def at(self, places: int | Sequence[int]) -> Self:
        """Return the same work from some of the points alone."""
        if self.add is None:
            return self
        return replace(self, add=self.add[[places] if isinstance(places, int) else places])

    def direction(self, gradient: Tensor, x: Tensor, place: int | slice = 0) -> Tensor:
        """Return what a step follows at x on its way from the point in this place, or from all in these places."""
        if self.add is not None:
            gradient = gradient + self.add[place]
        return gradient.add(x, alpha=self.decay) if self.decay else gradient

    def followed(
        self, x: Tensor, gradient: Callable[[Tensor, int], Tensor], place: int | slice = 0
    ) -> Tensor:
        """Take the steps from x, by what gives a gradient at a point in step k, and return what they followed."""
        total = torch.zeros_like(x)
        for k in range(self.count):
            direction = self.direction(gradient(x, k), x, place)
            x, total = x - self.lr * direction, total + direction
        return total


@dataclass(frozen=True, eq=False)
class Question:
    """What a learner asks at several points of one step.

    Its peers at the first of them, user 0 at the others.

    User 0's examples are asked in parts, which are users like the others: all of them (part 0), or
    all but a fold.
    """

    # of shape (P, d), those that are sent finite; followed by buffers where passes move them
    points: Tensor
    step: int
    # of shape (Q, N), a column for each of the engine's names; NaN where a peer is not asked
    weights: Tensor
    rows: bool = False  # every peer's gradient instead of their weighted sums
    sketched: int = 0  # beside sums, every peer's sketches at the first so many points
    # of each point, where passes move the model's
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    # what the peers do from each point; they give a gradient there when None
    work: LocalWork | None = None
    # another than the engine's, where there is work or each peer has one point
    batch_size: int | None = None
    own: Sequence[int] = ()  # which part of user 0's examples answers at each of the last points
    # at the first points each peer by itself, and user 0 on all examples of these parts
    each: Sequence[int] = ()
    # in the place of a gradient, at one point: where a network is up to the layer
    e_step: AllRows | None = None
    into: Tensor | None = None  # where the sums may be written, in the order of the points
    # (N, P): under which priors of an E-step each peer's answer counts; all where None
    counting: NDArray[np.bool_] | None = None

    @property
    def form(self) -> Tensor:
        """Something like what a peer answers at all points, in shape and type."""
        if self.e_step is None:
            return self.points
        return torch.zeros(1, math.prod(self.e_step.shape), dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class Answers:
    """What the users answer."""

    # of shape (P, d), over those whose gradients can be used; None where rows were asked for
    sums: Tensor | None
    answered: Tensor  # of shape (Q,): the weight that is in each sum of the peers
    left_out: Mapping[str, str]  # the peers left out at any point, each with the reason
    # of shape (P, N, d); not numbers where there is none that can be used
    rows: Tensor | None = None
    sketches: Tensor | None = None  # of shape (sketched, N, k), in the same way
    # of shape (P, N): who refused where; None if a peer refuses all points or none
    refused: Tensor | None = None
    losses: Tensor | None = None  # user 0's at its points
    # what its passes left in the model's buffers there, one point a row
    buffers: Tensor | None = None
    judged: "PeerEvidence | None" = None  # what `each` asked for

    @classmethod
    def of(
        cls, question: Question, received: Mapping[tuple[int, int], Tensor], names: Sequence[str]
    ) -> Self:
        """Return the answers in which (point, peer) has what is given, where it is finite.

        Example:
            >>> asked = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
            >>> question = Question(torch.zeros(1, 1), step=0, weights=asked)
            >>> received = {(0, 0): torch.ones(1), (0, 1): torch.tensor([torch.nan])}
            >>> answers = Answers.of(question, received, ["a", "b"])
            >>> answers.sums, answers.answered.tolist(), answers.left_out
            (tensor([[0.5000]]), [0.5], {'b': 'not finite'})
        """
        kept = {place: row for place, row in received.items() if is_finite(row)}
        left_out = {
            names[peer]: "not finite" for point, peer in received if (point, peer) not in kept
        }
        return cls.over(question, len(names), kept, left_out)

    @classmethod
    def over(
        cls,
        question: Question,
        peers: int,
        kept: Mapping[tuple[int, int], Tensor],
        left_out: Mapping[str, str],
    ) -> Self:
        """Return the answers in which (point, peer) has what is kept, all of which is finite.

        Nothing is as large as all gradients together unless these are asked for.
        """
        points, weights = question.form, question.weights.tolist()
        answered = points.new_zeros(len(points))
        for point, peer in kept:
            answered[point] += weights[point][peer]
        if not question.rows:
            sums = torch.zeros_like(points)
            for (point, peer), row in kept.items():
                sums[point].add_(row, alpha=weights[point][peer])
            return cls(sums, answered, left_out)
        rows = points.new_full((len(points), peers, points.shape[1]), math.nan)
        for place, row in kept.items():
            rows[place] = row
        return cls(None, answered, left_out, rows)


@dataclass(frozen=True, eq=False)
class PeerEvidence:
    """Each peer's gradient by itself, or its sketch, at some points, and user 0's in the same form."""

    theirs: Tensor  # of shape (R, N, m); not numbers where there is none
    ours: Tensor  # of shape (R, m)

    def lengths(self) -> tuple[Tensor, Tensor]:
        """Return the length of each peer's gradient, (R, N), and at each point what is usual, (R,).

        That is the median of the peers' lengths, or user 0's where that is longer.
        """
        lengths = self.theirs.norm(dim=2)
        return lengths, torch.fmax(lengths.nanmedian(dim=1).values, self.ours.norm(dim=1))

    def without(self, peers: Tensor) -> "PeerEvidence":
        """Return the same where some peers (R, N) did not answer."""
        if peers.any():
            return replace(self, theirs=self.theirs.masked_fill(peers.unsqueeze(2), torch.nan))
        return self


def combined(rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return weighted sums (P, d) of the rows (P, N, d) that are finite, and the weight that is in each.

    Example:
        >>> combined(torch.tensor([[[3.0, 4.0], [torch.nan, 0.0]]]), torch.tensor([[0.5, 0.5]]))
        (tensor([[1.5000, 2.0000]]), tensor([0.5000]))
    """
    there = finite_rows(rows)
    if not there.all():
        rows = rows.masked_fill(~there.unsqueeze(2), 0.0)
    present = weights * there
    return torch.bmm(present.unsqueeze(1), rows).squeeze(1), present.sum(1)


class Engine(Protocol):
    """What computes gradients, wherever the users are."""

    @property
    def names(self) -> tuple[str, ...]:
        """The peers that can be asked."""

    @property
    def capabilities(self) -> Capabilities:
        """What else can be had from this engine."""

    def gradients(
        self, x: Tensor, step: int, weights: Mapping[str, float], rows: bool = False
    ) -> Gradients:
        """Return all users' gradients at x.

        `PeerLost` where a peer is gone that the run cannot do without.

        Args:
            x: the point, a flat vector.
            step: the step, from which every user draws its batch.
            weights: τ, the weight of each peer to ask; nobody is asked when empty.
            rows: return every peer's gradient instead of their weighted sum.
        """

    def describe(self) -> dict[str, Any]:
        """Return how gradients are computed, for the record.

        A resumed run must have the same description. An engine whose peers are elsewhere also says
        who they are (`peers`: their names and numbers of examples).
        """

    def traffic(self) -> Mapping[str, Traffic]:
        """Return the bytes that have travelled and the seconds they took, by user.

        Empty where nothing travels.
        """

    def close(self) -> None:
        """Release the peers: no more gradients will be asked for."""


class MakeEngine(Protocol):
    """A function that makes an engine over the users of a run, such as `InProcess`."""

    def __call__(
        self,
        model: nn.Module,
        loss: Loss,
        me: User,
        peers: Sequence[User],
        *,
        batch_size: int,
        seed: int,
    ) -> Engine:
        """Return an engine; `model` is the one that is trained, and user 0's batches move its buffers."""


@runtime_checkable
class AnswersAtOwnPoints(Engine, Protocol):
    """An engine whose users each answer at a point of their own (`own_points`)."""

    @property
    def seed(self) -> int:
        """What batches are drawn from, with the user's name and the step."""

    @property
    def parameters(self) -> Parameters:
        """The trainable parameters of the model: their number, dtype and device."""

    def each(
        self, points: Tensor, step: int, names: Sequence[str] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return every user's gradient at its row of `points`, user 0 first, and user 0's loss.

        `names` are the peers whose rows follow user 0's; all of them when None, or none where there
        is one row.
        """

    def on(self, name: str, x: Tensor, indices: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return one user's gradient and loss at x on its examples at these indices."""

    def on_each(self, name: str, x: Tensor, indices: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return one user's gradient at x on the examples of each row of `indices`, and the mean loss of all."""

    def losses(self, points: Tensor, step: int) -> Tensor:
        """Return every user's loss at its row of `points`, on its batch of this step."""

    def losses_over(self, examples: Examples, points: Tensor) -> Tensor:
        """Return the mean loss over some examples at each of these points."""


@runtime_checkable
class Asks(Engine, Protocol):
    """An engine that asks its peers a `Question`.

    It says which: gradients at several points (`many_points`), steps of their own (`local_work`),
    E-steps (`no_e_steps` is empty).
    """

    def ask(self, question: Question) -> Callable[[], Answers]:
        """Ask, and return at once what waits for the answers; `PeerLost` as for `gradients`.

        Steps of its own each peer takes from one point at most. Answers to an E-step are rows where
        the engine has rows, else their weighted sum.
        """


@runtime_checkable
class LimitsExchanges(Engine, Protocol):
    """An engine whose exchanges may take so long that a run of many is refused before it begins."""

    def check_exchanges(self, exchanges: int) -> None:
        """Refuse a run of so many exchanges, with advice, where they would take too long."""


@runtime_checkable
class TellsPromises(Engine, Protocol):
    """An engine whose peers may be private, and tell what they promise."""

    def promises(self) -> Mapping[str, Mapping[str, float]]:
        """Return by peer `epsilon`, `delta` and `clip`, how much of ε is `spent`, and the `noise` on each number.

        It is called once the last gradient was given, and may ask the peers.
        """


@runtime_checkable
class Captures(Engine, Protocol):
    """An engine whose gradients can be part of a captured program (`not_captured` is None)."""

    def indices(self, names: tuple[str, ...], step: int) -> Tensor:
        """Return the examples that user 0 and these peers draw in the next steps, a row for each step."""

    def gradients_of(
        self, x: Tensor, indices: Tensor, weights: Mapping[str, float], *, rows: bool
    ) -> Gradients:
        """Return all users' gradients on the examples of one row of `indices`, finite or not."""


@runtime_checkable
class Local(Engine, Protocol):
    """An engine whose users' examples are all in this process (`local`)."""

    @property
    def users(self) -> Mapping[str, User]:
        """All users by name, user 0 first, on the model's device."""

    def with_batch_size(self, size: int) -> Self:
        """Return an engine over the same users with batches of another size."""


@runtime_checkable
class Stackable(Local, Protocol):
    """An engine whose model can be passed in many copies at once (`not_stacked` is None)."""

    def copies(self) -> Copies:
        """Return the model in many copies."""


Capability = Literal["rows", "own_points", "local", "capture", "local_work"]

_METHODS: dict[str, Any] = {"own_points": AnswersAtOwnPoints, "local": Local, "capture": Captures}
_METHODS |= {"local_work": Asks}
_REFUSALS = {
    "rows": (
        "every peer's gradient{purpose}, but this engine gives their weighted sum alone; use "
        "`WeightedAveraging` or `BiasCorrection` with numbers, or let the peers give rows"
    ),
    "own_points": (
        "every user's gradient at a point of its own{purpose}, but this engine asks all users at"
        " one point; pass no `engine`: users in this process answer at any point"
    ),
    "local": (
        "all users' examples in this process{purpose}, but those of this engine are elsewhere; pass"
        " no `engine`, or a rule with its weights set, such as `WeightedAveraging`"
    ),
    "capture": (
        "steps that can be captured{purpose}, but {why}; take them one by one: `capture=False`"
    ),
    "local_work": (
        "peers that take steps of their own{purpose}, but those of this engine give one gradient;"
        " leave `local_steps` out"
    ),
}


@overload
def require(
    engine: Engine, capability: Literal["rows"], for_whom: str, purpose: str = ...
) -> Engine: ...
@overload
def require(
    engine: Engine, capability: Literal["own_points"], for_whom: str, purpose: str = ...
) -> AnswersAtOwnPoints: ...
@overload
def require(
    engine: Engine, capability: Literal["local"], for_whom: str, purpose: str = ...
) -> Local: ...
@overload
def require(
    engine: Engine, capability: Literal["capture"], for_whom: str, purpose: str = ...
) -> Captures: ...
@overload
def require(
    engine: Engine, capability: Literal["local_work"], for_whom: str, purpose: str = ...
) -> Asks: ...
def require(engine: Engine, capability: Capability, for_whom: str, purpose: str = "") -> Engine:
    """Return the engine, with the methods of a capability.

    A `KnobError` with the remedy where it has it not.

    Args:
        engine: any engine.
        capability: "rows", "own_points", "local", "capture" or "local_work"; see `Capabilities`.
        for_whom: who needs it, for the message.
        purpose: what for, for the message: "to choose its knobs".

    Example:
        >>> from coterie.theory.quadratic import NoisyQuadratic, Quadratic
        >>> engine = NoisyQuadratic(Quadratic(1, 0, noise=0), [Quadratic(2, 5, noise=0)]).engine()
        >>> require(engine, "rows", "`StreamAveraging`") is engine
        True
        >>> require(engine, "own_points", "`FedAvg`")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        coterie.errors.KnobError: `FedAvg` needs every user's gradient at a point of its own, but
        this ...
    """
    can = engine.capabilities
    has = {
        "rows": can.rows,
        "own_points": can.own_points,
        "local": can.local,
        "capture": can.not_captured is None,
    }
    has["local_work"] = can.local_work
    if not has[capability]:
        needed = _REFUSALS[capability].format(purpose=f" {purpose}".rstrip(), why=can.not_captured)
        raise KnobError(f"{for_whom} needs {needed}")
    if capability in _METHODS and not isinstance(engine, _METHODS[capability]):
        raise TypeError(
            f"{type(engine).__name__} says that it has `{capability}`, but lacks its methods"
        )
    return engine
