"""The users of a federated method.

Each computes at a point of its own, and what it computes is counted.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie.arguments import COUNT
from coterie.engines.engine import AnswersAtOwnPoints, Engine, require
from coterie.errors import DataError
from coterie.gradients.parameters import is_finite
from coterie.recording.costs import Costs
from coterie.rules import State
from coterie.users.sampling import random_key
from coterie.users.user import User


class Pull(NamedTuple):
    """What draws local steps to a point: λ (x_k − w)."""

    strength: float  # λ
    centre: Tensor  # w, one for all or a row for each user


class Clients:
    """Ask all users of a method, user 0 first, and count what they compute and send.

    Points are rows, one for each user in the order of `names`. Where a peer's gradient is not
    finite, its row becomes zero, so that the peer takes no step, and `left_out` names it. A peer
    that does not take part in a round (`sample`) is not asked, and its row is zero too.

    Args:
        engine: computes the gradients.
        me: user 0.
        peers: the others.
        costs: counts gradients, examples and numbers sent.

    Example:
        >>> from coterie import InProcess
        >>> users = [User(name, torch.randn(9, 2), torch.randn(9, 1)) for name in ("me", "a", "b")]
        >>> engine = InProcess(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, users[0], users[1:])
        >>> clients = Clients(engine, users[0], users[1:], Costs({user.name: 9 for user in users}))
        >>> clients.gradients(torch.zeros(3, 3), step=0).shape
        torch.Size([3, 3])
        >>> clients.costs.by_user()["a"].gradients
        1
    """

    present: Tensor | None = None
    """Who takes part in this round, a truth value for each user; None where all do."""
    here: ClassVar[bool] = True
    """Whether the users' examples are in this process; see `ClientsElsewhere`."""

    def __init__(self, engine: Engine, me: User, peers: Sequence[User], costs: Costs) -> None:
        self.asked, self.me = engine, me
        self._users = {user.name: user for user in (me, *peers)}
        self.names = tuple(self._users)
        self.costs = costs
        self.left_out: dict[str, str] = {}
        self.own_losses: list[float] = []
        counts = torch.tensor(
            [float(len(user)) for user in self._users.values()], dtype=torch.float64
        )
        self.sizes = counts.to(self.engine.parameters.device, self.engine.parameters.dtype)

    @cached_property
    def engine(self) -> AnswersAtOwnPoints:
        """The engine, where users are in this process.

        What only they can answer is refused elsewhere.
        """
        return require(self.asked, "own_points", "this method")

    @cached_property
    def own(self) -> AnswersAtOwnPoints:
        """What computes for user 0, who is always in this process."""
        return self.engine

    @property
    def seed(self) -> int:
        """The seed of the run, from which batches, coins and starting points are drawn."""
        return self.own.seed

    @property
    def shares(self) -> Tensor:
        """Each user's share of the examples of all who take part, p_k."""
        sizes = self.sizes if self.present is None else self.sizes * self.present
        return sizes / sizes.sum()

    @property
    def personal(self) -> int:
        """How many users' personal models a method keeps.

        All users', or where they are elsewhere user 0's.
        """
        return len(self.names) if self.here else 1

    @contextmanager
    def sample(self, peers: int, step: int) -> Iterator[None]:
        """Let user 0 and so many peers take part, drawn by (seed, step) without replacement, each as likely."""
        count = len(self.names) - 1
        if peers < count:
            random = np.random.default_rng([random_key(self.seed, "peers of a round"), step])
            drawn = 1 + torch.from_numpy(random.choice(count, peers, replace=False))
            self.present = torch.zeros(len(self.names), dtype=torch.bool, device=self.sizes.device)
            self.present[torch.cat([torch.tensor([0]), drawn]).to(self.present.device)] = True
        try:
            yield
        finally:
            self.present = None

    def taking_part(self, rows: Tensor) -> Tensor:
        """Return the rows of those who take part."""
        return rows if self.present is None else rows[self.present]

    def mean(self, rows: Tensor) -> Tensor:
        """Return the mean row of those who take part."""
        return self.taking_part(rows).mean(0)

    def moved(self, rows: Tensor, before: Tensor) -> Tensor:
        """Return the new rows of those who take part, and the old ones of the others."""
        if self.present is None or len(rows) == 1:  # user 0's alone, who always takes part
            return rows
        return torch.where(self.present.reshape(-1, *[1] * (rows.ndim - 1)), rows, before)

    def _places(self) -> list[int]:
        """Return the places of those who take part among all names, user 0 first."""
        if self.present is None:
            return list(range(len(self.names)))
        places: list[int] = self.present.nonzero().flatten().tolist()
        return places

    def _asked(self) -> list[str]:
        """Return the names of those who take part, user 0 first."""
        return [self.names[place] for place in self._places()]

    def gradients(self, points: Tensor, step: int) -> Tensor:
        """Return each user's gradient at its point, on its batch of this step.

        One row asks user 0 alone.
        """
        if self.present is None or len(points) == 1:
            rows, loss = self.engine.each(points, step)
            self.costs.compute(self.names[: len(points)])
        else:
            asked = self._asked()
            answers, loss = self.engine.each(points[self.present], step, asked[1:])
            rows = torch.zeros_like(points)
            rows[self.present] = answers
            self.costs.compute(asked)
        self.own_losses.append(float(loss))
        return self._finite(rows)

    def local_steps(
        self,
        points: Tensor,
        step: int,
        count: int,
        *,
        lr: float,
        add: Tensor | None = None,
        pull: Pull | None = None,
    ) -> Tensor:
        """Let every user take plain steps from its point, x_k ← x_k − η (g_k(x_k) + a_k + λ (x_k − w)).

        `points` and a_k, in `add`, are a row for each user, as may be w; one row of points moves
        user 0 alone.
        """
        for k in range(count):
            gradients = self.gradients(points, step + k)
            if add is not None:
                gradients.add_(add)
            if pull is not None:
                gradients.add_(points - pull.centre, alpha=pull.strength)
            points = torch.sub(points, gradients, alpha=lr)
        return points

    def full_gradients(self, points: Tensor) -> Tensor:
        """Return each user's gradient at its point over all its examples.

        One row asks user 0 alone.
        """
        rows, asked = torch.zeros_like(points), set(self._asked())
        for row, name, x in zip(rows, self.names, points, strict=False):
            if name in asked:
                row.copy_(self.gradient_on(name, x, self.blocks(name, 1)[0]))
        return self._finite(rows)

    def blocks(self, name: str, count: int) -> list[Tensor]:
        """Return the indices of a user's examples in `count` blocks, dealt in turn, none of them empty."""
        user = self._users[name]
        if user.is_stream:
            raise DataError(f"{name!r} is a stream, but this method needs a fixed set of examples")
        count = min(count, len(user))
        return [torch.arange(first, len(user), count) for first in range(count)]

    def gradient_on(self, name: str, x: Tensor, indices: Tensor, step: int = 0) -> Tensor:
        """Return one user's gradient at x on its examples at these indices, finite or not.

        The step seeds dropout and other random parts of the model.
        """
        self.costs.compute([name], len(indices))
        is_own = name == self.me.name
        gradient, loss = (self.own if is_own else self.engine).on(name, x, indices, step)
        if is_own:
            self.own_losses.append(float(loss))
        return gradient

    def losses(self, points: Tensor, step: int) -> Tensor:
        """Return each user's loss at its point, on its batch of this step.

        Running statistics stay as they are.
        """
        return self.engine.losses(points, step)

    def losses_over_all(self, models: Tensor, step: int) -> Tensor:
        """Return each user's mean loss under each model over all its examples, of shape (models, users).

        They are those of evaluation. A stream's are those of its batch of this step.
        """
        columns = []
        for place, user in enumerate(self._users.values()):
            if user.is_stream:
                points = models[:, None].expand(-1, len(self.names), -1)
                columns.append(torch.stack([self.losses(point, step)[place] for point in points]))
            else:
                columns.append(self.engine.losses_over(user.examples, models))
        return torch.stack(columns, dim=1)

    def held_out_losses(self, points: Tensor) -> Tensor:
        """Return user 0's mean validation loss at each of these points."""
        if self.me.validation is None:
            raise DataError(
                f"this method compares models on validation examples, but {self.me.name!r} has none"
            )
        return self.own.losses_over(self.me.validation, points)

    def exchange(self, down: int, up: int) -> None:
        """Count the numbers that user 0 sends to every peer that takes part, and that each sends back (`up`)."""
        self.costs.exchange(self._asked()[1:], down, up)

    def _finite(self, rows: Tensor) -> Tensor:
        """Set the peers' rows that are not finite to zero, and name them in `left_out`."""
        if not is_finite(rows[1:]):
            bad = ~rows[1:].isfinite().all(1)
            self.left_out |= {self.names[1 + int(k)]: "not finite" for k in bad.nonzero().flatten()}
            rows[1:][bad] = 0.0
        return rows


class LocalSteps:
    """What the methods share whose users take `local_steps` steps in a round."""

    local_steps: int
    models_in: ClassVar[str] = "x"
    """The entry of the state that holds the models: a row for each user, or one vector for all."""

    def __post_init__(self) -> None:
        COUNT("local_steps", self.local_steps)

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round."""
        return self.local_steps

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: x."""
        return {"step": 0, "x": x}

    def models(self, state: State) -> Tensor:
        """Return the personal models, or the one for all as a row."""
        models: Tensor = state[self.models_in]
        return models.reshape(-1, models.shape[-1])

    def corrected_steps(
        self, users: Clients, x: Tensor, c_k: Tensor, c: Tensor, *, step: int, lr: float
    ) -> tuple[Tensor, Tensor]:
        """Take SCAFFOLD's local steps from x, and return where they lead and the next corrections.

        x_k ← x, then K times  x_k ← x_k − η (g_k(x_k) − c_k + c);   c_k⁺ = c_k − c + (x − x_k) /
        (Kη)
        """
        points = users.local_steps(x.expand_as(c_k), step, self.local_steps, lr=lr, add=c - c_k)
        users.exchange(down=2 * x.numel(), up=2 * x.numel())
        return points, c_k - c + (x - points) / (self.local_steps * lr)


def weighed(weights: Tensor) -> dict[str, Any]:
    """Return the entries of the state by which a method reports user 0's weight and then its peers'."""
    return {"weights": weights, "weight": float(weights[1:].sum())}
