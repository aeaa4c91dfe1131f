"""Ditto: personal models with a penalty on their distance to one that all users train together."""

from dataclasses import dataclass, field

from torch import Tensor

from coterie.arguments import COUNT, POSITIVE, checked
from coterie.methods.averaging.fedavg import FedAvg
from coterie.methods.clients import Clients
from coterie.methods.rounds import METHOD, Method
from coterie.rules import State


@dataclass(frozen=True)
@checked(together=METHOD, penalty=POSITIVE, personal_steps=COUNT)
class Ditto:
    """Train personal models on the own examples, pulled towards a model that all users train.

        w ← a round of `together`;      S times  v_k ← v_k − η (g_k(v_k) + λ (v_k − w))

    with the w from before the round, the newest that users know when they compute. v_k converges to
    argmin f_k(v) + (λ/2)‖v − w*‖², w* being the limit of `together`: between alone (λ → 0) and w*
    (λ → ∞). Only w is exchanged. All users take part in every round, or a sample: `Sampled`.

    Args:
        penalty: λ.
        together: the method that trains w; with a robust aggregator Ditto is the paper's robust
            variant.
        personal_steps: S.

    Reference: Li et al., Ditto: fair and robust federated learning through personalization, ICML
    2021, Algorithm 1.

    Example:
        >>> Ditto(penalty=0.1, together=FedAvg(5), personal_steps=5).gradients_a_round
        10
    """

    penalty: float = 0.1
    together: Method = field(default_factory=FedAvg)
    personal_steps: int = 1

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round."""
        return self.together.gradients_a_round + self.personal_steps

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: all personal models are x."""
        return {
            "step": 0,
            "together": self.together.init(users, x),
            "v": x.repeat(users.personal, 1),
        }

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        v, w = state["v"], self.together.models(state["together"])
        together = self.together.round(users, state["together"] | {"step": state["step"]}, lr)
        step = together["step"]
        for k in range(self.personal_steps):
            v = users.moved(v - lr * (users.gradients(v, step + k) + self.penalty * (v - w)), v)
        return {"step": step + self.personal_steps, "together": together, "v": v}

    def models(self, state: State) -> Tensor:
        """Return the v_k."""
        v: Tensor = state["v"]
        return v
