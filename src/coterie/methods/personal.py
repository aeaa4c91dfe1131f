"""A personal model near a common one: by a penalty on the distance, or one step away from it."""

import math
from dataclasses import dataclass, field

from torch import Tensor

from coterie.arguments import COUNT, POSITIVE, checked, real
from coterie.methods.clients import Clients, LocalSteps
from coterie.methods.fedavg import FedAvg
from coterie.methods.rounds import METHOD, Method
from coterie.rules import State
from coterie.users.sampling import uniform


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


@dataclass(frozen=True)
@checked(penalty=POSITIVE, probability=real("lie between 0 and 1", lambda p: 0 < p < 1))
class L2GD(LocalSteps):
    """Toss a coin: with probability p move towards the mean of all models, else by the own gradient.

        heads:  x_k ← x_k − (ηλ/p) (x_k − mean_j x_j)           tails:  x_k ← x_k − (η/(1 − p))
            g_k(x_k)

    which in expectation is gradient descent on Σ f_k(x_k) + (λ/2) ‖x_k − mean_j x_j‖²: alone at λ →
    0, one model at λ → ∞. On quadratics the mean over time is its minimiser at any stable step
    size. At the end of a round, right after an own step, the mean differs from it by −(η/(1 − p))
    ∇f_k; each path fluctuates around it by O(√η).

    A round ends after K own steps. Consecutive heads leave the mean as it is, so they take one
    exchange. Their number before an own step is geometric and is drawn from (seed, step). The
    paper's α is nη here. A step beyond the mean, ηλ/p > 1, which the paper excludes, is cut at the
    mean.

    Args:
        local_steps: K.
        penalty: λ.
        probability: p, in (0, 1); there are Kp exchanges a round on average.

    Reference: Hanzely, Richtárik, Federated learning of a mixture of global and local models,
    arXiv:2002.05516, 2020, Algorithm 1.

    Example:
        >>> L2GD(local_steps=5, penalty=0.1).gradients_a_round
        5
    """

    local_steps: int = 1
    penalty: float = 0.1
    probability: float = 0.5

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: all models are x."""
        return {"step": 0, "x": x.repeat(len(users.names), 1)}

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        x, p = state["x"], self.probability
        kept = 1 - min(1.0, lr * self.penalty / p)
        for step in range(state["step"], state["step"] + self.local_steps):
            if heads := heads_in_a_row(p, users.seed, step):
                centre = users.mean(x)
                x = users.moved(centre + kept**heads * (x - centre), x)
                users.exchange(down=x.shape[1], up=x.shape[1])
            x = users.local_steps(x, step, 1, lr=lr / (1 - p))
        return {"step": state["step"] + self.local_steps, "x": x}


def heads_in_a_row(probability: float, seed: int, step: int) -> int:
    """Return how many times a coin shows heads before tails: m with probability pᵐ(1 − p)."""
    return int(math.log1p(-uniform(seed, "coin", step)) / math.log(probability))


@dataclass(frozen=True)
@checked(inner_steps=COUNT, penalty=POSITIVE, inner_lr=POSITIVE, server_lr=POSITIVE)
class PFedMe(LocalSteps):
    """Fit a personal model near the local one, move the local one to it, and average the local ones.

        w_k ← w, then K times:
            θ_k ← w_k, then S times, all on one batch,  θ_k ← θ_k − a (g_k(θ_k) + λ (θ_k − w_k))
            w_k ← w_k − ηλ (w_k − θ_k)
        w ← (1 − β) w + β mean_k w_k

    θ_k, the personal model, is about argmin f_k(θ) + (λ/2)‖θ − w_k‖², and λ(w_k − θ_k) the gradient
    of its least value, so w goes down the mean of these. On quadratics, with M_k = A_k + λ, P_k = 1
    − (1 − aM_k)^S and E_k = λP_kM_k⁻¹A_k, w converges to the solution of  Σ (1 − (1 − ηE_k)^K)(w −
    o_k) = 0. Here θ_k starts at w_k in every local step. The step ηλ must be below 2.

    Args:
        local_steps: K.
        penalty: λ; the larger it is, the nearer θ_k is to w.
        inner_steps: S.
        inner_lr: a, the step size of θ_k; η is that of training.
        server_lr: β.

    Reference: T. Dinh, Tran, Nguyen, Personalized federated learning with Moreau envelopes, NeurIPS
    2020, Algorithm 1.

    Example:
        >>> PFedMe(local_steps=2, inner_steps=5).gradients_a_round
        10
    """

    local_steps: int = 1
    penalty: float = 1.0
    inner_steps: int = 5
    inner_lr: float = 0.05
    server_lr: float = 1.0

    models_in = "theta"

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round."""
        return self.local_steps * self.inner_steps

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: all models are x."""
        return {"step": 0, "w": x, "theta": x.repeat(len(users.names), 1)}

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        w, theta, step = state["w"], state["theta"], state["step"]
        local = w.expand_as(theta)
        for batch in range(step, step + self.local_steps):
            near = local
            for _ in range(self.inner_steps):
                near = near - self.inner_lr * (
                    users.gradients(near, batch) + self.penalty * (near - local)
                )
            theta = users.moved(near, theta)
            local = local - lr * self.penalty * (local - near)
        users.exchange(down=w.numel(), up=w.numel())
        w = w + self.server_lr * (users.mean(local) - w)
        return {"step": step + self.local_steps, "w": w, "theta": theta}


@dataclass(frozen=True)
class PerFedAvg(LocalSteps):
    """Average the models that all users have trained to be good *after* one own step.

        x_k ← x, then K times  y_k = x_k − a g_k(x_k),  x_k ← x_k − η (g_k(y_k) − a h_k);      x ←
        mean_k x_k h_k = 0
        (first order) h_k = (g_k(x_k + δ g_k(y_k)) − g_k(x_k − δ g_k(y_k))) / 2δ  ≈  ∇²f_k(x_k)
        g_k(y_k)   (Hessian-free)

    each g_k of a line on a new batch, the two of h_k on the same one. User k's personal model is x
    − a g_k(x).

    The Hessian-free variant with K = 1 is gradient descent on the meta-objective, mean_k f_k(x −
    a∇f_k(x)), whose minimiser on quadratics solves Σ (1 − aA_k)A_k(1 − aA_k)(x − o_k) = 0. The
    first-order variant omits a factor: it converges to the solution of Σ A_k(1 − aA_k)(x − o_k) =
    0. With K steps the matrix B_k before (x − o_k) becomes 1 − (1 − ηB_k)^K. All users take part in
    every round, or a sample: `Sampled`.

    Args:
        local_steps: K.
        inner_lr: a, the step size of the adaptation; η is that of training.
        difference: δ of the Hessian-free variant; first order when None.

    Reference: Fallah, Mokhtari, Ozdaglar, Personalized federated learning with theoretical
    guarantees: a model-agnostic meta-learning approach, NeurIPS 2020, Algorithm 1 and its two
    approximations.

    Example:
        >>> PerFedAvg(local_steps=5).gradients_a_round, PerFedAvg(5, difference=1e-3).gradients_a_round
        (11, 21)
    """

    local_steps: int = 1
    inner_lr: float = 0.01
    difference: float | None = None

    models_in = "models"

    def __post_init__(self) -> None:
        super().__post_init__()
        POSITIVE("inner_lr", self.inner_lr)
        if self.difference is not None:
            POSITIVE("difference", self.difference)

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round, including the one that adapts its own model."""
        return (2 if self.difference is None else 4) * self.local_steps + 1

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: x, not yet adapted."""
        return {"step": 0, "x": x, "models": x.unsqueeze(0)}

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        x, step, a, delta = state["x"], state["step"], self.inner_lr, self.difference
        points = x.expand(len(users.names), -1)
        for _ in range(self.local_steps):
            adapted = users.local_steps(points, step, 1, lr=a)
            outer = users.gradients(adapted, step + 1)
            step += 2
            if delta is not None:
                ahead, behind = (users.gradients(points + d * outer, step) for d in (delta, -delta))
                outer = outer - a * (ahead - behind) / (2 * delta)
                step += 1
            points = points - lr * outer
        users.exchange(down=x.numel(), up=x.numel())
        x = users.mean(points)
        models = users.local_steps(x.expand(users.personal, -1), step, 1, lr=a)
        return {"step": step + 1, "x": x, "models": models}
