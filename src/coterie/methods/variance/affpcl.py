"""AffPCL: the own gradient, less the noise that it shares with a model which all users move."""

from dataclasses import dataclass

from torch import Tensor

from coterie.arguments import SHARE, checked
from coterie.methods.clients import Clients, LocalSteps
from coterie.rules import State


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
