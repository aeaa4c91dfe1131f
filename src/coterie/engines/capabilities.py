"""What an engine can do.

A Protocol for each capability, and the one place that refuses what cannot be had.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, Self, overload, runtime_checkable

from torch import Tensor

from coterie.engines.engine import Answers, Capabilities, Engine, Question
from coterie.engines.in_process.copies import Copies
from coterie.errors import KnobError
from coterie.gradients.gradients import Gradients
from coterie.gradients.parameters import Parameters
from coterie.users.examples import Examples
from coterie.users.user import User

__all__ = [
    "AnswersAtOwnPoints",
    "Asks",
    "Capabilities",
    "Captures",
    "LimitsExchanges",
    "Local",
    "Stackable",
    "TellsPromises",
    "require",
]


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
