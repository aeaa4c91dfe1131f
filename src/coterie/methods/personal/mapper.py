"""MAPPER: the common model is trained on the gradients of its mixtures with own models."""

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.arguments import SHARE, listed
from coterie.errors import KnobError
from coterie.methods.clients import Clients, LocalSteps
from coterie.methods.personal.apfl import mixture
from coterie.rules import State


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
        federated
    learning, arXiv:2002.10619, 2020, section 5, algorithm MAPPER.

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
