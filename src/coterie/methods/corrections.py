"""One model, by local steps that are corrected towards what all users, or user 0, would take."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from coterie.arguments import POSITIVE, SHARE, checked, real, whole
from coterie.methods.clients import Clients, LocalSteps
from coterie.rules import State


@dataclass(frozen=True)
@checked(option=whole(1, 2), server_lr=POSITIVE)
class Scaffold(LocalSteps):
    """Correct every local step by an estimate of how the user's gradient differs from the mean.

        x_k ← x, then K times  x_k ← x_k − η (g_k(x_k) − c_k + c)
        c_k⁺ = g_k(x), over all examples of user k                         (option I)
        c_k⁺ = c_k − c + (x − x_k) / (Kη)                                  (option II)
        x ← x + η_g mean_k (x_k − x),      c ← mean_k c_k⁺

    Its fixed point is the minimiser of the mean of the f_k for every K; that of FedAvg is not. All
    users get one model. All take part in every round, or a sample (`Sampled`): c then moves by the
    sample's share of the users.

    Args:
        local_steps: K.
        option: how c_k is updated: 1 costs a pass over all examples, 2 costs nothing.
        server_lr: η_g.

    Reference: Karimireddy et al., SCAFFOLD: stochastic controlled averaging for federated learning,
    ICML 2020, Algorithm 1, equations 3–5.

    Example:
        >>> Scaffold(local_steps=5).gradients_a_round
        5
    """

    local_steps: int = 5
    option: Literal[1, 2] = 2
    server_lr: float = 1.0

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round; option I adds a pass over all examples."""
        return self.local_steps + (self.option == 1)

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: x, and no correction yet."""
        return {"step": 0, "x": x, "c": x.new_zeros(len(users.names), x.numel())}

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        x, c, step = state["x"], state["c"], state["step"]
        points, following = self.corrected_steps(users, x, c, c.mean(0), step=step, lr=lr)
        if self.option == 1:
            following = users.full_gradients(x.expand_as(c))
        moved = torch.lerp(x, users.mean(points), self.server_lr)
        return {"step": step + self.local_steps, "x": moved, "c": users.moved(following, c)}


@dataclass(frozen=True)
@checked(momentum=real("lie in [0, 1)", lambda momentum: 0 <= momentum < 1))
class Mime(LocalSteps):
    """Use the server's momentum in every local step, and update it only when the round ends.

        G = mean_k ∇f_k(x), over all examples
        x_k ← x, then K times  x_k ← x_k − η ((1 − β) d_k + β m)
        d_k = g_k(x_k)                      (MimeLite)
        d_k = g_k(x_k) − g_k(x) + G         (Mime; both g_k on the same batch)
        x ← mean_k x_k,      m ← (1 − β) G + β m

    Mime's fixed point is the minimiser of the mean of the f_k for every K. MimeLite's is not; at β
    = 0 MimeLite is FedAvg with equal shares. All users get one model. All take part in every round,
    or a sample: `Sampled`. The paper allows the statistics of any server optimizer; here they are
    those of SGD with momentum.

    Args:
        local_steps: K.
        momentum: β, in [0, 1).
        lite: omit the correction, which halves the number of gradients.

    Reference: Karimireddy et al., Breaking the centralized barrier for cross-device federated
    learning, NeurIPS 2021 (Mime: mimicking centralized stochastic algorithms in federated learning,
    2020), Algorithm 1.

    Example:
        >>> Mime(local_steps=5).gradients_a_round, Mime(local_steps=5, lite=True).gradients_a_round
        (11, 6)
    """

    local_steps: int = 5
    momentum: float = 0.9
    lite: bool = False

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round, one of them over all its examples."""
        return self.local_steps * (1 if self.lite else 2) + 1

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: x, at rest."""
        return {"step": 0, "x": x, "m": x.new_zeros(x.shape)}

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        x, m, step = state["x"], state["m"], state["step"]
        start = x.expand(len(users.names), -1)
        mean = users.mean(users.full_gradients(start))
        points = start
        for k in range(self.local_steps):
            d = users.gradients(points, step + k)
            if not self.lite:
                d = d - users.gradients(start, step + k) + mean
            points = points - lr * ((1 - self.momentum) * d + self.momentum * m)
        users.exchange(down=x.numel() * (2 if self.lite else 3), up=2 * x.numel())
        m = (1 - self.momentum) * mean + self.momentum * m
        return {"step": step + self.local_steps, "x": users.mean(points), "m": m}


@dataclass(frozen=True)
@checked(alpha=SHARE, beta=SHARE)
class AffPCL(LocalSteps):
    """Correct every own gradient by the same batch's gradient at the centre, a model that all users move.

        ḡ = Σ_j g_j(z)/n,   K times   x_k ← x_k − η [g_k(x_k) − α (g_k(z) − (ḡ − c_k))],   z ← z − η
        ḡ c_k ← (1 − β_t) c_k + β_t (ḡ − g_k(z)),   β_t = max(β, 1/(t + 1))

    both g_k on one batch. ḡ − c_k is an estimate of ∇f_k(z) from n users' batches, so what a user's
    gradient at x_k has of noise in common with that at z goes, and the noise of the mean of n
    comes. c_k is the bias of the mean at the centre. It settles as the centre does, where that of
    `BiasCorrection` follows x. The first step is the user's own.

    The paper treats linear stochastic approximation and corrects for other inputs by known ratios
    of densities: `coterie.theory.Affine` is that, with its exact moments. For gradients of any
    model no such ratio is known, and c_k stands for all of the difference between f_k and the mean,
    of inputs and of objectives. On a fixed set it converges to the own optimum, as training alone
    does.

    Args:
        local_steps: K.
        alpha: α, how much of the correction is taken, in [0, 1]; 0 is training alone, 1 the
            paper's.
        beta: β, the rate at which c_k follows, in [0, 1].

    Reference: Zhang and Azizan, Personalized collaborative learning with affinity-based variance
    reduction, ICLR 2026, arXiv:2510.16232. Their text was not at hand: this form follows the
    abstract and a summary of the method.

    Example:
        >>> AffPCL(local_steps=5).gradients_a_round
        10
    """

    local_steps: int = 1
    alpha: float = 1.0
    beta: float = 0.01

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round: two from every batch."""
        return 2 * self.local_steps

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: all models are x, and no bias is known."""
        own = x.repeat(users.personal, 1)
        return {"step": 0, "x": own, "centre": x, "c": own.new_zeros(own.shape)}

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        x, z, c = state["x"], state["centre"], state["c"]
        for step in range(state["step"], state["step"] + self.local_steps):
            own = users.gradients(x, step)
            central = users.gradients(z.expand(len(users.names), -1), step)
            mean = users.mean(central)
            users.exchange(down=z.numel(), up=z.numel())
            bias = mean - central[: len(x)]
            known = bias if step == 0 else c
            x = users.moved(x - lr * (own + self.alpha * (bias - known)), x)
            c = users.moved(c + max(self.beta, 1 / (step + 1)) * (bias - c), c)
            z = z - lr * mean
        return {"step": state["step"] + self.local_steps, "x": x, "centre": z, "c": c}


@dataclass(frozen=True)
@checked(rate=SHARE)
class AuxMom(LocalSteps):
    """Take K steps by the peers' mean gradient, plus what it lacks to the own one, estimated once a round.

        h = mean_{j≥1} g_j,   m ← (1 − a) m + a (g_0(x) − h(x))
        y ← x, then K times  y ← y − η (h(y) + m);      x ← y

    from m = the first g_0(x) − h(x). Bias correction (`BiasCorrection`) with α = 1 whose bias is
    held for K steps, and updated before them. Only one own gradient a round enters: for users whose
    own batches are rare. The engine computes one with each step of the peers all the same, and it
    is counted. It converges to the own optimum.

    Args:
        local_steps: K.
        rate: a, in (0, 1]; 1 forgets all former rounds.

    Reference: Chayti and Karimireddy, Optimization with access to auxiliary information,
    arXiv:2206.00395, AuxMOM. Its text was not at hand: this form follows the abstract and a
    summary.

    Example:
        >>> AuxMom(local_steps=5).gradients_a_round
        6
    """

    local_steps: int = 5
    rate: float = 0.1

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round, of which those of the K steps are not used."""
        return self.local_steps + 1

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: x, and nothing known of the bias."""
        return {"step": 0, "x": x, "m": x.new_zeros(x.shape), "before": x}

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        x, step = state["x"], state["step"]
        m = self.carried(users, state)
        y = x
        for k in range(step + 1, step + 1 + self.local_steps):
            y = y - lr * (_of_peers(users, _asked_at(users, y, k)) + m)
        return {"step": step + 1 + self.local_steps, "x": y, "m": m, "before": x}

    def carried(self, users: Clients, state: State) -> Tensor:
        """Return the next m."""
        seen, m = _lacking(users, state["x"], state["step"]), state["m"]
        return seen if state["step"] == 0 else m + self.rate * (seen - m)


@dataclass(frozen=True)
class AuxMVR(AuxMom):
    """The same with a recursive estimate, whose noise at the last point is taken out.

        m ← b(x) + (1 − a) (m − b(x⁻)),   b = g_0 − h on one batch,   x⁻ where the last round
        started

    Where the noise of b hardly depends on x, m is the running mean of the noise about the bias at x
    itself: what the bias has moved since is known. It costs two gradients of everybody a round more
    than K.

    Args:
        local_steps: K.
        rate: a, in (0, 1].

    Reference: as `AuxMom`, AuxMVR; its estimate is MVR's (STORM), for g_0 − h.

    Example:
        >>> AuxMVR(local_steps=5).gradients_a_round
        7
    """

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round, of which those of the K steps are not used."""
        return self.local_steps + 2

    def carried(self, users: Clients, state: State) -> Tensor:
        """Return the next m."""
        seen = _lacking(users, state["x"], state["step"])
        before = _lacking(users, state["before"], state["step"])
        return seen if state["step"] == 0 else seen + (1 - self.rate) * (state["m"] - before)


def _asked_at(users: Clients, x: Tensor, step: int) -> Tensor:
    """Return everybody's gradient at one point."""
    rows = users.gradients(x.expand(len(users.names), -1), step)
    users.exchange(down=x.numel(), up=x.numel())
    return rows


def _of_peers(users: Clients, rows: Tensor) -> Tensor:
    """Return the mean of the peers that take part."""
    peers = users.taking_part(rows)[1:]
    return peers.sum(0) / max(1, len(peers))


def _lacking(users: Clients, x: Tensor, step: int) -> Tensor:
    """Return g_0 − h at a point."""
    rows = _asked_at(users, x, step)
    return rows[0] - _of_peers(users, rows)
