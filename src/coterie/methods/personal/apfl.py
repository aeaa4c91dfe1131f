"""APFL: mix an own model with one for all, and learn the proportion."""

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.arguments import SHARE, checked
from coterie.methods.clients import Clients, LocalSteps
from coterie.rules import State


@dataclass(frozen=True)
@checked(mixing=SHARE)
class APFL(LocalSteps):
    """Train an own model so that its mixture with the common model is good for the user.

        w_k ← w, then K times, from the same batch and the old values, u_k = a_k v_k + (1 − a_k)
        w_k:
            w_k ← w_k − η g_k(w_k),    v_k ← v_k − η a_k g_k(u_k)
            a_k ← a_k − η ⟨v_k − w_k, g_k(u_k)⟩,  kept in [0, 1]                (learned; the first
            of the K times)
        w ← mean_k w_k

    The personal model is a_k v_k + (1 − a_k) w. v_k is unconstrained, so for any a_k > 0 the
    mixture can be any
    model: with K = 1 it converges to the user's own optimum, as training alone does. With K > 1 it
        converges near
    it, since w_k moves within a round.

    a_k is updated at the start of a round, where w_k is the common model. It often runs to 0 or 1
    early: v_k takes steps a_k times as long as those of w_k, so it lags behind, and w_k seems
    better; at a_k = 0 v_k stops moving. All users take part in every round, or a sample: `Sampled`.

    Args:
        local_steps: K.
        mixing: a_k at the start, in [0, 1].
        learned: whether a_k is updated.

    Reference: Deng, Kamani, Mahdavi, Adaptive personalized federated learning, arXiv:2003.13461,
        2020, Algorithm 1
    and the section on adaptive mixing.

    Example:
        >>> APFL(local_steps=5).gradients_a_round
        10
    """

    local_steps: int = 1
    mixing: float = 0.5
    learned: bool = True

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round: two from every batch."""
        return 2 * self.local_steps

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: all models are x."""
        n = len(users.names)
        return {"step": 0, "w": x, "v": x.repeat(n, 1), "mixing": x.new_full((n, 1), self.mixing)}

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        v, mixing, step = state["v"], state["mixing"], state["step"]
        w = state["w"].expand_as(v)
        for k in range(self.local_steps):
            mixed = users.gradients(mixture(w, v, mixing), step + k)
            slope = ((v - w) * mixed).sum(1, keepdim=True)
            v = v - lr * mixing * mixed
            w = w - lr * users.gradients(w, step + k)
            if self.learned and k == 0:
                mixing = (mixing - lr * slope).clamp(0, 1)
        users.exchange(down=w.shape[1], up=w.shape[1])
        return {"step": step + self.local_steps, "w": users.mean(w), "v": v, "mixing": mixing}

    def models(self, state: State) -> Tensor:
        """Return the mixtures."""
        return mixture(state["w"], state["v"], state["mixing"])


def mixture(w: Tensor, v: Tensor, a: Tensor | float) -> Tensor:
    """Return a_k v_k + (1 − a_k) w_k, w one vector for all or a row for each user."""
    return torch.lerp(w.expand_as(v), v, a)
