"""User 0 weighs the others' models: by their distance, by its validation loss, or by who is internal."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from coterie.arguments import COUNT, POSITIVE, SHARE, checked, instance, listed, one_of, optional
from coterie.errors import KnobError
from coterie.methods.clients import Clients, LocalSteps, Pull, weighed
from coterie.rules import State
from coterie.rules.similarity import TINY


@dataclass(frozen=True)
@checked(penalty=POSITIVE, scale=POSITIVE, step=POSITIVE)
class FedAMP(LocalSteps):
    """Send every user a mean of all models, the nearer ones with more weight, and pull its own steps to it.

        ξ_kj = (α/s) exp(−‖x_k − x_j‖²/s) for j ≠ k,   ξ_kk = 1 − Σ_j ξ_kj,   u_k = Σ_j ξ_kj x_j
        then K times  x_k ← x_k − η (g_k(x_k) + (λ/α) (x_k − u_k))

    Attentive message passing: a step of size α on λ Σ A(‖x_k − x_j‖²), A(z) = 1 − exp(−z/s), and
    then own steps with a penalty. Where Σ_j ξ_kj would exceed 1, all ξ_kj are divided by it, so
    that u_k stays a mean. Users far apart in parameters are strangers to each other: with s small
    it is training alone, with s large and α/s = 1/n it is pulled to the plain mean. In a large
    model all distances are large: s must be of their order.

    Args:
        local_steps: K.
        penalty: λ.
        scale: s, the squared distance over which users count as near.
        step: α.

    Reference: Huang et al., Personalized cross-silo federated learning on non-IID data, AAAI 2021,
    Algorithm 1, with K plain steps for the exact minimum; A is the paper's 1 − exp(−z/s).

    Example:
        >>> FedAMP(local_steps=5).gradients_a_round
        5
    """

    local_steps: int = 5
    penalty: float = 0.1
    scale: float = 1.0
    step: float = 0.5

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: all models are x."""
        n = len(users.names)
        return {"step": 0, "x": x.repeat(n, 1)} | weighed(
            torch.eye(n, dtype=x.dtype, device=x.device)[0]
        )

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        x, step = state["x"], state["step"]
        weights = self.near(x)
        pull = Pull(self.penalty / self.step, weights @ x)
        users.exchange(down=x.shape[1], up=x.shape[1])
        moved = users.local_steps(x, step, self.local_steps, lr=lr, pull=pull)
        return {"step": step + self.local_steps, "x": users.moved(moved, x)} | weighed(weights[0])

    def near(self, x: Tensor) -> Tensor:
        """Return ξ, a row for each user."""
        apart = (x[:, None] - x[None]).square().sum(-1)
        weights = (self.step / self.scale * torch.exp(-apart / self.scale)).fill_diagonal_(0.0)
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1.0)
        return weights + torch.diag(1 - weights.sum(1))


@dataclass(frozen=True)
@checked(start=one_of("own", "mine"))
class FedFomo(LocalSteps):
    """Move towards the models that are better on user 0's validation examples.

        x_k ← K local steps of user k, from x_k (start "own") or from x (start "mine")
        w_k ∝ max(0, (L_0(x) − L_0(x_k)) / ‖x_k − x‖),  k = 0..N, to sum 1
        x ← x + Σ w_k (x_k − x),      x_0 ← x

    where L_0 is the validation loss of user 0 and x its model before the round. Where no model is
    better, x does not move. The validation examples choose the weights and the best round too: few
    of them are a noisy judge, and their loss is optimistic. In the paper every user weighs a sample
    of the others; here user 0 weighs all peers, and peers, who need no validation examples, train
    alone. `similarity.FirstOrder` is the first-order approximation.

    Args:
        local_steps: K.
        start: the model at which peers begin a round: their `"own"`, as in the paper, or user 0's,
            `"mine"`.

    Reference: Zhang, Sapra, Fidler, Yeung and Alvarez, Personalized federated learning with first
    order model optimization, ICLR 2021, equations 3 and 4.

    Example:
        >>> FedFomo(local_steps=5).gradients_a_round
        5
    """

    local_steps: int = 5
    start: Literal["own", "mine"] = "own"

    models_in = "points"

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: all users at x."""
        n = len(users.names)
        return {"step": 0, "points": x.repeat(n, 1)} | weighed(x.new_zeros(n))

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        step, points = state["step"], state["points"]
        x = points[0]
        points = users.local_steps(points, step, self.local_steps, lr=lr)
        users.exchange(down=x.numel() if self.start == "mine" else 0, up=x.numel())
        before, *after = users.held_out_losses(torch.cat([x.unsqueeze(0), points]))
        gains = (before - torch.stack(after)) / (points - x).norm(dim=1).clamp(min=TINY)
        gains = torch.nan_to_num(gains, nan=0.0, posinf=0.0).clamp(min=0)
        gains = users.moved(gains, torch.zeros_like(gains))
        weights = gains / gains.sum().clamp(min=TINY)
        x = x + weights @ (points - x)
        points = (
            x.repeat(len(points), 1)
            if self.start == "mine"
            else torch.cat([x.unsqueeze(0), points[1:]])
        )
        return {"step": step + self.local_steps, "points": points} | weighed(weights)


_NAMES = listed(instance(str, ""), "a list of names of peers", {str: 'write `internal=["ward 3"]`'})


@dataclass(frozen=True)
class Selfish(LocalSteps):
    """Minimise the mean loss of the internal users, with local steps of all users corrected towards it.

        x_k ← x, then K times  x_k ← x_k − η (g_k(x_k) − c_k + c_I),   c_I = mean over internal
        users of c_k c_k⁺ = c_k − c_I + (x − x_k) / (Kη) x ← (1 − α) mean_I x_k + α mean_E x_k

    where I are user 0 and the internal users named, and E the external ones. Its fixed point is the
    minimiser of mean_I f_k for every K and α, as long as η is small for the external users'
    curvature: they reduce the noise and add no bias, as in bias correction. With few own examples
    that minimiser overfits. α = 0 is SCAFFOLD among the internal users. In the paper external users
    have weights; here all are equal.

    Args:
        local_steps: K.
        internal: the names of the internal users other than user 0.
        alpha: α, the external users' weight, in [0, 1]; when None, all users have equal weight.

    Reference: The setting of Luo, Hu and Yu, Rethinking client reweighting for selfish federated
    learning, 2021; the corrections of Karimireddy et al., SCAFFOLD, ICML 2020.

    Example:
        >>> Selfish(local_steps=5, internal=("ward 3",)).gradients_a_round
        5
    """

    local_steps: int = 5
    internal: tuple[str, ...] = ()
    alpha: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "internal", _NAMES("internal", self.internal))
        optional(SHARE)("alpha", self.alpha)  # None gives all users equal weight

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: x, and no correction yet."""
        if unknown := [name for name in self.internal if name not in users.names[1:]]:
            raise KnobError(
                f"`internal` names {unknown[0]!r}, who is no peer; the peers are {users.names[1:]}"
            )
        return {"step": 0, "x": x, "c": x.new_zeros(len(users.names), x.numel())} | weighed(
            self._weights(users, x)
        )

    def _inside(self, users: Clients, like: Tensor) -> Tensor:
        """Return the weight of each user in the mean of the internal ones."""
        inside = like.new_tensor(
            [k == 0 or name in self.internal for k, name in enumerate(users.names)]
        )
        return inside / inside.sum()

    def _weights(self, users: Clients, like: Tensor) -> Tensor:
        inside = self._inside(users, like)
        outside = (inside == 0).to(inside)
        if users.present is not None:
            inside, outside = inside * users.present, outside * users.present
            inside = inside / inside.sum()
        if self.alpha is None or not outside.any():
            here = (inside + outside > 0).to(inside)
            return here / here.sum()
        return torch.lerp(inside, outside / outside.sum(), self.alpha)

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        x, c, step = state["x"], state["c"], state["step"]
        points, following = self.corrected_steps(
            users, x, c, self._inside(users, x) @ c, step=step, lr=lr
        )
        weights = self._weights(users, x)
        moved = {"x": weights @ points, "c": users.moved(following, c)}
        return {"step": step + self.local_steps} | moved | weighed(weights)


AVERAGED_ROUNDS = 3
"""The weights are averaged over this many rounds, as in the paper."""


@dataclass(frozen=True)
@checked(rounds=COUNT)
class Waffle(LocalSteps):
    """Weigh SCAFFOLD's updates by their distance from user 0's, more strictly as the rounds go by.

        x_k ← x, then K times  x_k ← x_k − η (g_k(x_k) − c_k + c)
        c_k⁺ = c_k − c + (x − x_k) / (Kη)
        D_k = ‖x_k − x_0‖²,  m and M the least and the largest of the peers'
        D_0 = m (1 − (1 − Ω)(M − m)/M),   Ω = 1 / (1 + exp(s (2r/R − 1))) in round r of R
        a_k ∝ max(0, Ω − (D_k − D_0)/(M − D_0)), to sum 1 and averaged over the last 3 rounds
        x ← x + Σ a_k (x_k − x),      c ← c + Σ a_k (c_k⁺ − c_k)

    Ω decreases from nearly 1 to nearly 0: from nearly all users to user 0 alone. c still depends on
    the earlier weights: in the end ∇f_0(x) = c_0 − c, which is not 0 where users differ. After the
    first rounds the corrections remove the differences between gradients: D_k then measures
    curvature and noise. All users take part in every round.

    Args:
        rounds: R; `steps` of `coterie.train`.
        local_steps: K.
        slope: s, how fast Ω decreases.

    Reference: Beaussart, Grimberg, Hartley and Jaggi, WAFFLE: weighted averaging for personalized
    federated learning, 2021, which combines SCAFFOLD with the weight erosion of Grimberg et al.
    2020 (`similarity.WeightErosion`).

    Example:
        >>> [round(Waffle(rounds=100).share(r), 3) for r in (0, 50, 100)]
        [0.961, 0.5, 0.039]
    """

    rounds: int
    local_steps: int = 5
    slope: float = 3.2

    def share(self, played: int) -> float:
        """Return Ω after so many rounds."""
        return 1 / (1 + math.exp(self.slope * (2 * played / self.rounds - 1)))

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: x, no corrections, no weights."""
        n = len(users.names)
        zeros = x.new_zeros(n, x.numel())
        return {
            "step": 0,
            "x": x,
            "c_k": zeros,
            "c": zeros[0],
            "last": x.new_zeros(0, n),
            "weight": 0.0,
        }

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        x, c, c_k, step = state["x"], state["c"], state["c_k"], state["step"]
        points, following = self.corrected_steps(users, x, c_k, c, step=step, lr=lr)
        fresh = points.new_zeros(len(points))
        here = slice(None) if users.present is None else users.present
        fresh[here] = self._weights(points[here], self.share(step // self.local_steps))
        following = users.moved(following, c_k)
        last = torch.cat([state["last"], fresh.unsqueeze(0)])[-AVERAGED_ROUNDS:]
        weights = last.mean(0)
        x, c = x + weights @ (points - x), c + weights @ (following - c_k)
        return {
            "step": step + self.local_steps,
            "x": x,
            "c_k": following,
            "c": c,
            "last": last,
        } | weighed(weights)

    def _weights(self, points: Tensor, share: float) -> Tensor:
        distances = (points - points[0]).square().sum(1)
        if len(points) > 1:
            least, largest = distances[1:].min(), distances[1:].max()
            distances[0] = least * (1 - (1 - share) * (largest - least) / largest.clamp(min=TINY))
        spread = (distances.max() - distances[0]).clamp(min=TINY)
        weights = (share - (distances - distances[0]) / spread).clamp(min=0)
        return weights / weights.sum()
