"""A method rehearsed with peers who answer by a formula.

What it will ask of each, before anybody is asked.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from coterie.engines.engine import Capabilities, LocalWork, Question
from coterie.engines.in_process.engine import InProcess
from coterie.gradients.gradients import Gradients
from coterie.methods.elsewhere import ClientsElsewhere
from coterie.methods.rounds import Method
from coterie.recording.costs import Costs, Traffic
from coterie.users.user import User


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
    users = _Rehearsed(_Formula(me, peers), user, costs, own)
    state = method.init(users, torch.ones(own.parameters.size))
    for _ in range(rounds):
        state = method.round(users, state, lr=0.1)
    return {name: costs.by_user()[name].gradients for name in peers}


class _Rehearsed(ClientsElsewhere):
    """Users whose peers answer at once, all in one formula, and are counted as those who are asked.

    Peer k's loss is ½‖x − k‖². What local steps follow is what the first would: who is asked what
    does not depend on it.
    """

    def _given(
        self,
        points: Tensor,
        step: int,
        work: LocalWork | None,
        batch_size: int | None,
        asked: list[int],
    ) -> Tensor:
        """Return what the peers at these places give, and zeros for the others."""
        given, places = torch.zeros_like(points), torch.tensor(asked)
        given[places] = points[places] - places[:, None]
        return given[1:].nan_to_num_(0.0, 0.0, 0.0)

    def held_out_losses(self, points: Tensor) -> Tensor:
        """Return user 0's losses by its formula."""
        return points.square().sum(1) / 2


class _Formula:
    """The engine of a rehearsal.

    It gives user 0's gradient, of the loss ½‖x‖², and nobody else's.
    """

    def __init__(self, me: str, peers: Sequence[str]) -> None:
        self.names = tuple(peers)
        self.capabilities = Capabilities(local_work=True, examples=dict.fromkeys([me, *peers], 1))

    def gradients(
        self, x: Tensor, step: int, weights: Mapping[str, float], rows: bool = False
    ) -> Gradients:
        """Return user 0's gradient; nobody else's is asked for in this way."""
        return Gradients(own=x, own_loss=float(x.square().sum()) / 2)

    def ask(self, question: Question) -> NoReturn:
        """Refuse: in a rehearsal the peers' answers are not asked for one by one."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Return nothing: there is no record."""
        return {}

    def traffic(self) -> Mapping[str, Traffic]:
        """Return nothing: nothing travels."""
        return {}

    def close(self) -> None:
        """Do nothing."""
