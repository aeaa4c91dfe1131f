"""Other ways to weigh peers from their gradients, each a few lines, to compare `AdaptiveAveraging` with.

All need every peer's gradient, and none needs to know more. They differ in what they take for
likeness: the angle between gradients, their distance, or what a peer's last gradient would have
done for user 0's loss.

`state["tau"]` holds the weights of the last step, of the users in `state["names"]`, the own under
the empty name. It stays on the device, where the next step needs it, and a step asks the host for
nothing: it can be captured.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from coterie.arguments import POSITIVE, SHARE, checked, real
from coterie.gradients.gradients import Gradients, by_name
from coterie.rules.rule import Capturable, State, rows_of

TINY = 1e-30
"""Keeps a gradient of length zero from dividing by it."""
OWN = ""
"""The name of user 0's own weight, which is no user's."""


@dataclass(frozen=True)
class _Weighing(Capturable):
    """What the rules here share.

    They need every peer's gradient, and can be captured once the peers are known.
    """

    needs_rows: ClassVar[bool] = True

    def repeats(self, state: State) -> bool:
        """Say whether the peers are known.

        The first step, which learns who they are, is on its own.
        """
        return "tau" in state


@dataclass(frozen=True)
@checked(alpha=SHARE)
class _ByAngle(_Weighing):
    alpha: float


@dataclass(frozen=True)
class CosineSimilarity(_ByAngle):
    """Weigh each peer by the cosine of the angle between its gradient and the own.

        τ_k ∝ max(0, cos(g_0, g_k)),   d_t = (1 − α) g_0 + α Σ τ_k g_k

    With no peer at an acute angle, d_t = g_0.

    Args:
        alpha: α, the peers' weight, in [0, 1].

    Example:
        >>> rule = CosineSimilarity(alpha=0.5)
        >>> g = Gradients(torch.tensor([1.0, 0.0]), rows=torch.tensor([[3.0, 0.0], [-1.0, 0.0]]), names=("a", "b"))
        >>> direction, state = rule(g, rule.init(torch.zeros(2)))
        >>> direction, state["names"], state["tau"]
        (tensor([2., 0.]), ['a', 'b'], tensor([1., 0.]))

    Reference: the similarity that Sattler, Müller and Samek, *Clustered Federated Learning* (2021),
    group by.
    """

    def __call__(self, g: Gradients, state: State) -> tuple[Tensor, State]:
        """Return the average by similarity and the next state."""
        rows = rows_of(g)
        likeness = _cosines(g.own, rows).clamp(min=0)
        total = likeness.sum()
        tau = likeness / total.clamp(min=TINY)
        alpha = self.alpha * (total > 0).to(rows)
        return torch.lerp(g.own, tau @ rows, alpha), _next(state, g, tau, alpha)


@dataclass(frozen=True)
class SimilarityGate(_ByAngle):
    """Let a peer's gradient through where it makes an acute angle with the own, and not otherwise.

        d_t = g_0 + (α/N) Σ_k [cos(g_0, g_k) ≥ 0] (g_k − g_0)

    so that the weight of a peer that is shut out goes back to g_0.

    Args:
        alpha: α, the weight of the peers where all come through, in [0, 1].

    Example:
        >>> rule = SimilarityGate(alpha=0.5)
        >>> g = Gradients(torch.tensor([1.0, 0.0]), rows=torch.tensor([[3.0, 0.0], [-1.0, 0.0]]), names=("a", "b"))
        >>> rule(g, rule.init(torch.zeros(2)))[0]
        tensor([1.5000, 0.0000])

    Reference: Du, Czarnecki, Jayakumar, Farajtabar, Pascanu and Lakshminarayanan, *Adapting
    Auxiliary Losses Using Gradient Similarity* (2018), the unweighted version, with peers for
    auxiliary losses.
    """

    def __call__(self, g: Gradients, state: State) -> tuple[Tensor, State]:
        """Return the average of what came through and the next state."""
        rows = rows_of(g)
        tau = (_cosines(g.own, rows) >= 0).to(rows) * (g.answered / max(1, len(rows)))
        direction = g.own + self.alpha * (tau @ rows - tau.sum() * g.own)
        return direction, _next(state, g, tau, self.alpha * tau.sum())


@dataclass(frozen=True)
@checked(penalty=real("not be negative", lambda penalty: penalty >= 0))
class WeightErosion(_Weighing):
    """Begin with everybody alike, and wear a peer's weight away by how far its gradients are from the own.

        ω_k ← max(0, ω_k − p ‖g_k − g_0‖ / ‖g_0‖),   d_t = (g_0 + Σ ω_k g_k) / (1 + Σ ω_k)

    from ω_k = 1. A weight never comes back.

    Args:
        penalty: p, how fast.

    Example:
        >>> rule = WeightErosion(penalty=0.25)
        >>> g = Gradients(torch.tensor([1.0, 0.0]), rows=torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), names=("a", "b"))
        >>> rule(g, rule.init(torch.zeros(2)))[1]["tau"]
        tensor([1.0000, 0.5000])

    Reference: Grimberg, Hartley, Jaggi and Karimireddy, *Weight Erosion: an Update Aggregation
    Scheme for Personalized Collaborative Machine Learning* (2020), without its penalty for small
    data sets.
    """

    penalty: float = 0.01

    def __call__(self, g: Gradients, state: State) -> tuple[Tensor, State]:
        """Return the average by what is left of the weights, and the next state."""
        rows, names = rows_of(g), _everybody(g, state)
        before = state["tau"] if "tau" in state else rows.new_ones(len(names))
        far = (rows - g.own).norm(dim=1) / g.own.norm().clamp(min=TINY)
        omega = (by_name(before, names, g.names) - self.penalty * far).clamp(min=0)
        total = 1 + omega.sum()
        return (g.own + omega @ rows) / total, _next(
            state, g, omega, 1 - 1 / total, otherwise=before
        )


@dataclass(frozen=True)
class _ByGain(_Weighing):
    """Weigh everybody, user 0 too, by what their last gradient does for user 0's loss.

    Equally at first.
    """

    @abstractmethod
    def moved(self, weights: Tensor, lengths: Tensor, gains: Tensor, own: Tensor) -> Tensor:
        """Return the next weights from ‖g_k‖ and ⟨g_0 now, g_k⟩ of the last step.

        Before the first, g_k is zero.
        """

    def __call__(self, g: Gradients, state: State) -> tuple[Tensor, State]:
        """Return Σ w_k g_k, with the own gradient in the place of who did not answer, and the next state."""
        here, everyone = [OWN, *g.names], torch.cat([g.own.unsqueeze(0), rows_of(g)])
        if "tau" not in state:
            n = len(here) + len(g.left_out)
            equal = torch.full((n,), 1 / n, dtype=torch.float64, device=g.own.device)
            zeros = everyone.new_zeros(n, everyone.shape[1])
            state = {**state, "names": [*here, *g.left_out], "tau": equal, "last": zeros}
        names, last = state["names"], state["last"]
        weights = self.moved(
            state["tau"], last.norm(dim=1).double(), (last @ g.own).double(), g.own
        )
        others = by_name(weights, names, here)[1:]
        used = torch.cat([1 - others.sum().reshape(1), others]).to(everyone)
        following = {
            "step": state["step"] + 1,
            "weight": used[1:].sum(),
            "tau": weights,
            "names": names,
        }
        return used @ everyone, {**following, "last": by_name(everyone, here, names)}


@dataclass(frozen=True)
@checked(rate=POSITIVE)
class MirrorDescent(_ByGain):
    """Learn the weights with the model, by mirror descent on user 0's loss after the step that they cause.

        d_t = Σ_{k≥0} w_k g_k(x_t),   w_k ← w_k exp(γ ⟨g_0(x_{t+1}), g_k(x_t)⟩ / s) / Z

    The derivative of f_0(x_t − η Σ w_k g_k) by w_k is −η ⟨∇f_0(x_{t+1}), g_k(x_t)⟩, and the next
    own gradient, from a fresh batch, stands for ∇f_0. s, the product of the lengths of g_0(x_{t+1})
    and of the longest g_k(x_t), makes γ free of units; Z makes the weights sum to 1. Where a batch
    is all own examples, the weights follow the training loss, not the true one. The paper takes
    several such steps, each with one gradient more, before x moves; here there is one, after it has
    moved, with a gradient computed anyway: weights are a step late.

    Args:
        rate: γ, the step size of the weights.

    Example:
        >>> rule = MirrorDescent(rate=1.0)
        >>> g = Gradients(torch.tensor([1.0]), rows=torch.tensor([[1.0], [-1.0]]), names=("a", "b"))
        >>> state = rule(g, rule.init(torch.zeros(1)))[1]
        >>> state = rule(g, state)[1]
        >>> state["names"], state["tau"]
        (['', 'a', 'b'], tensor([0.4683, 0.4683, 0.0634], dtype=torch.float64))

    Reference: Tupitsa, Horváth, Takáč and Gorbunov, *Federated Learning Can Find Friends That Are
    Advantageous* (MeritFed, 2024).
    """

    rate: float = 0.1

    def moved(self, weights: Tensor, lengths: Tensor, gains: Tensor, own: Tensor) -> Tensor:
        """Return w_k exp(γ gain_k / s) / Z."""
        scale = lengths.max() * own.norm().double() + TINY
        weights = weights * torch.exp(self.rate * gains / scale)
        return weights / weights.sum()


@dataclass(frozen=True)
@checked(memory=real("lie in [0, 1)", lambda memory: 0 <= memory < 1))
class FirstOrder(_ByGain):
    """Weigh everybody by how much user 0's loss falls along their last gradient, per unit of length.

        w_k ∝ running mean of max(0, ⟨g_0(x_{t+1}), g_k(x_t)⟩ / ‖g_k(x_t)‖),   d_t = Σ_{k≥0} w_k
        g_k(x_t)

    To first order this is FedFomo's (f_0(x) − f_0(x_k)) / ‖x_k − x‖ for models x_k = x − η g_k one
    step away, with the next own gradient, from a fresh batch, in the place of a validation loss.

    Args:
        memory: the share of the running mean that a step leaves as it was, in [0, 1).

    Example:
        >>> rule = FirstOrder(memory=0.0)
        >>> g = Gradients(torch.tensor([1.0]), rows=torch.tensor([[2.0], [-1.0]]), names=("a", "b"))
        >>> state = rule(g, rule.init(torch.zeros(1)))[1]
        >>> rule(g, state)[1]["tau"].tolist()
        [0.5, 0.5, 0.0]

    Reference: Zhang, Sapra, Fidler, Yeung and Alvarez, *Personalized Federated Learning with First
    Order Model Optimization* (FedFomo, 2021).
    """

    memory: float = 0.9

    def moved(self, weights: Tensor, lengths: Tensor, gains: Tensor, own: Tensor) -> Tensor:
        """Return the running mean after one more step.

        As it was where nobody's gradient was of use.
        """
        worth = (gains / (lengths + TINY)).clamp(min=0)
        total = worth.sum()
        return torch.where(
            total > 0, torch.lerp(worth / total.clamp(min=TINY), weights, self.memory), weights
        )


def _everybody(g: Gradients, state: State) -> list[str]:
    """Return the peers asked, in the order of the first step."""
    names: list[str] = state.get("names", [*g.names, *g.left_out])
    return names


def _next(
    state: State, g: Gradients, tau: Tensor, weight: Tensor, otherwise: Tensor | float = 0.0
) -> State:
    """Return the next state, in which who did not answer has the weight `otherwise`."""
    names = _everybody(g, state)
    tau = by_name(tau, g.names, names, otherwise)
    return {"step": state["step"] + 1, "weight": weight, "tau": tau, "names": names}


def _cosines(own: Tensor, rows: Tensor) -> Tensor:
    lengths: Tensor = rows.norm(dim=1) * own.norm()
    return (rows @ own) / lengths.clamp(min=TINY)
