"""An own and a common model, mixed: one proportion for a user (APFL, MAPPER), or one for every number (FedALA)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.arguments import COUNT, POSITIVE, SHARE, checked, listed
from coterie.errors import KnobError
from coterie.methods.clients import Clients, LocalSteps
from coterie.rules import State


@dataclass(frozen=True)
@checked(mixing=SHARE)
class APFL(LocalSteps):
    """Train an own model so that its mixture with the common model is good for the user.

        w_k ← w, then K times, from one batch and the old values, u_k = a_k v_k + (1 − a_k) w_k:
            w_k ← w_k − η g_k(w_k),    v_k ← v_k − η a_k g_k(u_k)
            a_k ← a_k − η ⟨v_k − w_k, g_k(u_k)⟩,  kept in [0, 1]      (learned; the first of K)
        w ← mean_k w_k

    The personal model is a_k v_k + (1 − a_k) w. v_k is unconstrained, so for any a_k > 0 the
    mixture can be any model: with K = 1 it converges to the user's own optimum, as training alone
    does. With K > 1 it converges near it, since w_k moves within a round.

    a_k is updated at the start of a round, where w_k is the common model. It often runs to 0 or 1
    early: v_k takes steps a_k times as long as those of w_k, so it lags behind, and w_k seems
    better; at a_k = 0 v_k stops moving. All users take part in every round, or a sample: `Sampled`.

    Args:
        local_steps: K.
        mixing: a_k at the start, in [0, 1].
        learned: whether a_k is updated.

    Reference: Deng, Kamani, Mahdavi, Adaptive personalized federated learning, arXiv:2003.13461,
    2020, Algorithm 1 and the section on adaptive mixing.

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


@dataclass(frozen=True)
class Mapper(LocalSteps):
    """Fit own models and mixing weights to the common model, then step it by the gradients of the mixtures.

        for every a of a short list, u_k = a v_k + (1 − a) w,  K times from the last round's v_k:
            v_k ← v_k − η a g_k(u_k)
        user k keeps the a_k, and its v_k, that has the least loss on a fresh batch
        w ← w − η Σ p_k (1 − a_k) g_k(a_k v_k + (1 − a_k) w),  p_k the shares of the examples

    The personal model is a_k v_k + (1 − a_k) w. As in APFL, v_k is unconstrained: for any a_k > 0
    the mixture converges to the user's own optimum, and a_k is chosen by losses on training
    examples. With a = 1 w does not move; a = 0 is gradient descent on the pooled objective.

    In the paper predictions are mixed, which is the same for models that are linear in their
    parameters; own models are fitted exactly, not by K steps; and one user takes part at a time,
    not all.

    Args:
        local_steps: K.
        mixings: the values of a to choose from, in [0, 1].

    Reference: Mansour, Mohri, Ro, Suresh, Three approaches for personalization with applications to
    federated learning, arXiv:2002.10619, 2020, section 5, algorithm MAPPER.

    Example:
        >>> Mapper(local_steps=5).gradients_a_round
        16
    """

    local_steps: int = 1
    mixings: tuple[float, ...] = (0.25, 0.5, 0.75)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not listed(SHARE, "numbers of [0, 1]")("mixings", self.mixings):
            raise KnobError("`mixings` must hold at least one number of [0, 1]")

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round."""
        return len(self.mixings) * self.local_steps + 1

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: all models are x."""
        n = len(users.names)
        return {
            "step": 0,
            "w": x,
            "v": x.repeat(n, 1),
            "mixing": x.new_full((n, 1), self.mixings[0]),
        }

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        w, v, step = state["w"], state["v"], state["step"]
        tried = []
        for mixing in self.mixings:
            own = v
            for k in range(self.local_steps):
                own = own - lr * mixing * users.gradients(mixture(w, own, mixing), step + k)
            tried.append(own)
        step += self.local_steps
        pairs = zip(tried, self.mixings, strict=True)
        losses = torch.stack([users.losses(mixture(w, own, a), step) for own, a in pairs])
        best = losses.nan_to_num(torch.inf).argmin(0)
        v = users.moved(torch.stack(tried)[best, torch.arange(len(best), device=best.device)], v)
        chosen = users.moved(w.new_tensor(self.mixings)[best].unsqueeze(1), state["mixing"])
        g = users.gradients(mixture(w, v, chosen), step + 1)
        users.exchange(down=w.numel(), up=w.numel())
        w = w - lr * (users.shares @ ((1 - chosen) * g))
        return {"step": step + 2, "w": w, "v": v, "mixing": chosen}

    def models(self, state: State) -> Tensor:
        """Return the mixtures."""
        return mixture(state["w"], state["v"], state["mixing"])


@dataclass(frozen=True)
@checked(weight_lr=POSITIVE, weight_steps=COUNT)
class FedALA(LocalSteps):
    """Learn for every number of the model how much of the common model to take before the own steps.

        S times, all on one batch:  W_k ← W_k − γ g_k(y_k) ⊙ (w − x_k),  kept in [0, 1],  y_k = x_k
        + (w − x_k) ⊙ W_k x_k ← y_k, then K times  x_k ← x_k − η g_k(x_k);      w ← Σ p_k x_k,  p_k
        the shares of the examples

    from W_k = 1: FedAvg, which it stays with γ = 0. The first round has no common model yet, and
    skips the learning. W_k follows the training loss, so few examples drive it to the own model
    wherever that fits them better.

    Here all numbers of the model have a weight, and S steps on one batch of a round; the authors
    weigh the last layers only by choice, take one pass over a sample of the examples, and in the
    first round passes until the loss settles.

    Args:
        local_steps: K.
        weight_lr: γ, the step size of W_k.
        weight_steps: S.

    Reference: Zhang, Hua, Wang, Song, Xue, Ma, Guan, FedALA: adaptive local aggregation for
    personalized federated learning, AAAI 2023; the update of W_k is that of the authors' code.

    Example:
        >>> FedALA(local_steps=5).gradients_a_round
        6
    """

    local_steps: int = 5
    weight_lr: float = 1.0
    weight_steps: int = 1

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round."""
        return self.local_steps + self.weight_steps

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: all models are x."""
        rows = x.repeat(len(users.names), 1)
        return {"step": 0, "x": rows, "common": x, "share": rows.new_ones(rows.shape)}

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        x, share, step = state["x"], state["share"], state["step"]
        lacking = state["common"] - x
        # before the first round lacking is 0, and nothing is learned
        for _ in range(self.weight_steps):
            gradient = users.gradients(x + lacking * share, step)
            share = users.moved((share - self.weight_lr * gradient * lacking).clamp(0, 1), share)
        points = users.local_steps(x + lacking * share, step + 1, self.local_steps, lr=lr)
        users.exchange(down=x.shape[1], up=x.shape[1])
        moved = users.moved(points, x)
        return {
            "step": step + 1 + self.local_steps,
            "x": moved,
            "common": users.shares @ points,
            "share": share,
        }
