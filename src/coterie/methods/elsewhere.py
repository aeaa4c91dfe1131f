"""The users of a federated method whose examples are elsewhere.

Peers are asked to take steps of their own. How many gradients a method asks them for is found by
rehearsing it with a formula in their place.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from coterie.engines.engine import Answers, Capabilities, Engine, LocalWork, Question, require
from coterie.engines.in_process.engine import InProcess
from coterie.engines.messages import MAX_POINTS
from coterie.errors import KnobError
from coterie.gradients.gradients import Gradients, gave_nothing
from coterie.gradients.parameters import is_finite
from coterie.methods.clients import Clients, Pull
from coterie.methods.rounds import Method
from coterie.recording.costs import Costs, Traffic
from coterie.users.user import User

ALL = 2**31
"""A batch of as many examples has all of them."""


class ClientsElsewhere(Clients):
    """Ask user 0 here and its peers elsewhere; the local steps of a round are one exchange.

    Methods that need no more than `gradients`, `full_gradients` and `local_steps` run on every
    engine whose peers take steps of their own; what needs their losses is refused. A peer that does
    not answer takes no step. The personal models of a method are user 0's alone (`personal`):
    others do not show theirs.

    Args:
        engine: computes the gradients.
        me: user 0.
        costs: counts gradients, examples and numbers sent.
        own: user 0 alone, in this process.

    Example:
        >>> from coterie import InProcess
        >>> users = [User(name, torch.randn(9, 2), torch.randn(9, 1)) for name in ("me", "a", "b")]
        >>> engine = InProcess(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, users[0], users[1:])
        >>> costs = Costs(dict.fromkeys(["me", "a", "b"], 9))
        >>> clients = ClientsElsewhere(engine, users[0], costs, own=engine)
        >>> clients.local_steps(torch.zeros(3, 3), step=0, count=5, lr=0.1).shape
        torch.Size([3, 3])
    """

    here: ClassVar[bool] = False

    def __init__(self, engine: Engine, me: User, costs: Costs, own: InProcess) -> None:
        self.asked, self.me, self.costs, self.own = engine, me, costs, own
        self.peers = require(engine, "local_work", "a method")
        self.names = (me.name, *engine.names)
        self.left_out, self.own_losses = {}, []
        self._users = {me.name: me}

    @cached_property
    def engine(self) -> NoReturn:
        """Refuse what only users in this process can answer."""
        raise KnobError(
            "this method needs all users in one process, as peers elsewhere give gradients and"
            " local steps alone; train where all examples are, or take another, such as `FedAvg`"
        )

    @property
    def sizes(self) -> Tensor:  # type: ignore[override]  # peers tell theirs when they answer
        """How many examples each user has.

        As many as the mean of the others where it is not known.
        """
        known = self.asked.capabilities.examples
        counts = torch.tensor(
            [float(known.get(name) or math.nan) for name in self.names], dtype=torch.float64
        )
        counts = counts.nan_to_num(nan=float(counts.nanmean()))
        return counts.to(self.own.parameters.device, self.own.parameters.dtype)

    def blocks(self, name: str, count: int) -> list[Tensor]:
        """Return blocks of user 0's examples; those of a peer are refused."""
        return super().blocks(name, count) if name == self.me.name else self.engine

    def gradients(self, points: Tensor, step: int) -> Tensor:
        """Return each user's gradient at its point, in one exchange; one row asks user 0 alone."""
        own = self._own(points[0], step)
        return torch.cat([own[None], self._answers(points, step)])

    def full_gradients(self, points: Tensor) -> Tensor:
        """Return each user's gradient at its point over all its examples.

        One row asks user 0 alone.
        """
        own = super().full_gradients(points[:1])
        return torch.cat([own, self._answers(points, 0, batch_size=ALL)])

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
        """Let every user take plain steps from its point, the peers' in one exchange.

        See `Clients.local_steps`.
        """
        if pull is not None:
            drawn = (-pull.strength * pull.centre).expand_as(points)
            add = drawn if add is None else add + drawn
        work = LocalWork(count, lr, add, 0.0 if pull is None else pull.strength)
        peers, x = self._answers(points, step, work), points[0]
        for k in range(count):
            x = x - lr * work.direction(self._own(x, step + k), x)
        return torch.cat([x[None], points[1:] - lr * peers])

    def _own(self, x: Tensor, step: int) -> Tensor:
        """Return user 0's gradient, and note its loss."""
        g = self.asked.gradients(x, step, {})
        self.costs.compute(self.names[:1])
        self.own_losses.append(float(g.own_loss))
        return g.own

    def _answers(
        self,
        points: Tensor,
        step: int,
        work: LocalWork | None = None,
        batch_size: int | None = None,
    ) -> Tensor:
        """Return what the peers that take part give at their rows of `points`, a row for each peer.

        Zeros where one gives nothing; no rows where user 0 alone has a point.
        """
        answered = torch.zeros_like(points[1:])
        left_out: dict[str, str] = {}
        asked = self._places()[1:] if len(points) > 1 else []
        # what is the same for all is one point, at which all are asked at once
        alike = bool((points[1:] == points[1:2]).all()) and (work is None or work.add is None)
        most = len(self.names) if alike else MAX_POINTS
        for group in (asked[k : k + most] for k in range(0, len(asked), most)):
            places = group[:1] if alike else group
            point_of = {user: 0 if alike else place for place, user in enumerate(group)}
            weights = torch.full((len(places), len(self.names) - 1), math.nan, dtype=torch.float64)
            for user, place in point_of.items():
                weights[place, user - 1] = 1.0 / len(group)
            part = None if work is None else work.at(places)
            answers = self.peers.ask(
                Question(points[places], step, weights, rows=True, work=part, batch_size=batch_size)
            )()
            left_out |= answers.left_out
            for user, place in point_of.items():
                if answers.rows is not None and is_finite(row := answers.rows[place, user - 1]):
                    answered[user - 1] = row
        self.left_out |= left_out
        silent = gave_nothing(left_out)
        gave = [self.names[user] for user in asked if self.names[user] not in silent]
        self.costs.compute(gave, times=1 if work is None else work.count)
        return answered


def gradients_asked(
    method: Method, me: str, peers: Sequence[str], *, rounds: int = 1, seed: int = 0
) -> dict[str, int]:
    """Return how many gradients a method asks of each peer elsewhere, by playing its rounds without them.

    A method that needs more of its peers than gradients and local steps is a `KnobError`.

    Example:
        >>> from coterie.methods import FedAvg, FineTuning
        >>> gradients_asked(FedAvg(5), "me", ["a", "b"], rounds=10)
        {'a': 50, 'b': 50}
        >>> gradients_asked(FineTuning(4, FedAvg(5)), "me", ["a", "b"], rounds=10)
        {'a': 20, 'b': 20}
    """
    held_out = torch.zeros(1, 1), torch.zeros(1, 1)
    user = User(me, *held_out, validation=held_out)
    # it draws no weights from a global generator
    model = nn.Linear(1, 1, device="meta").to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    own = InProcess(model, nn.functional.mse_loss, user, batch_size=1, seed=seed)
    costs = Costs(dict.fromkeys([me, *peers], 1))
    users = ClientsElsewhere(_Formula(me, peers), user, costs, own)
    state = method.init(users, torch.ones(own.parameters.size))
    for _ in range(rounds):
        state = method.round(users, state, lr=0.1)
    return {name: costs.by_user()[name].gradients for name in peers}


class _Formula:
    """The engine of a rehearsal, whose users' losses are ½‖x − k‖² for user k.

    Of local work it gives what the first step follows: who is asked what does not depend on it.
    """

    def __init__(self, me: str, peers: Sequence[str]) -> None:
        self.names = tuple(peers)
        self.capabilities = Capabilities(local_work=True, examples=dict.fromkeys([me, *peers], 1))

    def gradients(
        self, x: Tensor, step: int, weights: Mapping[str, float], rows: bool = False
    ) -> Gradients:
        """Return user 0's gradient; nobody else's is asked for in this way."""
        return Gradients(own=x, own_loss=float(x.square().sum()) / 2)

    def ask(self, question: Question) -> Callable[[], Answers]:
        """Return what the peers give, each at every point."""
        users = torch.arange(1, len(self.names) + 1)[:, None]
        rows = (question.points[:, None] - users).nan_to_num_(0.0, 0.0, 0.0)
        return lambda: Answers(None, torch.ones(len(rows)), {}, rows)

    def describe(self) -> dict[str, Any]:
        """Return nothing: there is no record."""
        return {}

    def traffic(self) -> Mapping[str, Traffic]:
        """Return nothing: nothing travels."""
        return {}

    def close(self) -> None:
        """Do nothing."""
