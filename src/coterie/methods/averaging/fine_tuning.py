"""Fine-tuning: all users train one model together, then each continues alone."""

from dataclasses import dataclass, field

from torch import Tensor

from coterie.arguments import COUNT, checked
from coterie.methods.averaging.fedavg import FedAvg
from coterie.methods.clients import Clients
from coterie.methods.rounds import METHOD, Method
from coterie.rules import State


@dataclass(frozen=True)
@checked(together=METHOD, rounds=COUNT)
class FineTuning:
    """Train one model together for some rounds, then let every user continue from it alone.

        round < R:    x ← a round of `together`
        round ≥ R:    x_k ← x_k − η g_k(x_k), as many times as a round of `together` has gradients

    Nothing is sent after round R. The personal models converge to the users' own optima. How much
    of the common model remains depends on R and on the number of rounds after it: on quadratics x_k
    − o_k shrinks by 1 − ηA_k with every step. `coterie.train` serves the best round by validation,
    so tuning for too long does no harm where user 0 has a validation set.

    In the paper tuning starts when training has ended, and users may freeze layers. Here the
    scheduler continues.

    Args:
        rounds: R, the number of rounds to train together.
        together: the method that trains one model for all.

    Reference: Wang et al., Federated evaluation of on-device personalization, arXiv:1910.10252,
    2019.

    Example:
        >>> FineTuning(rounds=40, together=FedAvg(5)).gradients_a_round
        5
    """

    rounds: int
    together: Method = field(default_factory=FedAvg)

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round."""
        return self.together.gradients_a_round

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round."""
        together = self.together.init(users, x)
        return {
            "step": 0,
            "round": 0,
            "together": together,
            "models": self.together.models(together),
        }

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        following = state | {"round": state["round"] + 1}
        if state["round"] < self.rounds:
            together = self.together.round(users, state["together"], lr)
            models = self.together.models(together)
            return following | {"step": together["step"], "together": together, "models": models}
        points, count = state["models"].expand(users.personal, -1), self.gradients_a_round
        points = users.local_steps(points, state["step"], count, lr=lr)
        return following | {"step": state["step"] + count, "models": points}

    def models(self, state: State) -> Tensor:
        """Return the model for all, and once tuning has begun each user's own."""
        models: Tensor = state["models"]
        return models
