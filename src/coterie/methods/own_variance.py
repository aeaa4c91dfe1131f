"""SVRG, SAGA, SAG and MVR: user 0 alone, with less noise than SGD."""

from dataclasses import dataclass

from torch import Tensor

from coterie.arguments import checked, real
from coterie.methods.clients import Clients, LocalSteps
from coterie.rules import State
from coterie.users.sampling import draw, random_key


class OwnVariance(LocalSteps):
    """What the methods share that ask no peer: their model is trained alone."""


@dataclass(frozen=True)
class SVRG(OwnVariance):
    """Take steps whose noise vanishes as the model converges, without peers.

        y = x, G = ∇f_0(y) over all examples, then K times  x ← x − η (g_0(x) − g_0(y) + G)

    both g_0 on the same batch. On a strongly convex finite sum it converges linearly with a
    constant step size, where SGD keeps a noise floor. The next round starts at the last x (option I
    of the paper). It converges to the optimum of the own examples, which overfits where they are
    few.

    Args:
        local_steps: K, the number of steps between two passes over all examples.

    Reference: Johnson and Zhang, Accelerating stochastic gradient descent using predictive variance
    reduction, NeurIPS 2013.

    Example:
        >>> SVRG(local_steps=10).gradients_a_round
        21
    """

    local_steps: int = 10

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round, one of them over all its examples."""
        return 2 * self.local_steps + 1

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: x."""
        return {"step": 0, "x": x, "weight": 0.0}

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        step, start = state["step"], state["x"].unsqueeze(0)
        whole, x = users.full_gradients(start), start
        for k in range(self.local_steps):
            x = x - lr * (users.gradients(x, step + k) - users.gradients(start, step + k) + whole)
        return {"step": step + self.local_steps, "x": x[0], "weight": 0.0}


@dataclass(frozen=True)
class SAGA(OwnVariance):
    """Update one block's gradient in the table, and step by the whole table.

        f_0 = Σ_j p_j f_j over B blocks of the own examples, p_j a block's share; j drawn evenly,
        then x ← x − η (B p_j (∇f_j(x) − t_j) + Σ_i p_i t_i)           (SAGA: unbiased) x ← x − η
        Σ_i p_i t_i⁺ / Σ_{i seen} p_i                   (SAG: biased, less noisy) t_j ← t_j⁺ =
        ∇f_j(x)

    With a constant step size both converge linearly on a strongly convex finite sum, and need no
    pass over all examples. In the papers f_j is the loss of one example; here it is that of a fixed
    block of about `batch_size` examples, so the table has n/batch_size rows of the model's size. A
    step draws its block from (seed, user, step). The table starts at 0, not at ∇f_j(x_0), which
    would cost a pass.

    Args:
        local_steps: the number of steps in a round.
        biased: use SAG, not SAGA.

    Reference: Defazio, Bach and Lacoste-Julien, SAGA: a fast incremental gradient method, NeurIPS
    2014. Schmidt, Le Roux and Bach, Minimizing finite sums with the stochastic average gradient,
    Math. Programming 2017.

    Example:
        >>> SAGA(local_steps=10).gradients_a_round
        10
    """

    local_steps: int = 10
    biased: bool = False

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: x and an empty table."""
        table = x.new_zeros(len(_blocks(users)), x.numel())
        return {"step": 0, "x": x, "table": table, "seen": x.new_zeros(len(table)), "weight": 0.0}

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        x, step, blocks = state["x"], state["step"], _blocks(users)
        table, seen = state["table"].clone(), state["seen"].clone()
        shares = x.new_tensor([len(block) for block in blocks])
        shares = shares / shares.sum()
        key, steps = random_key(users.seed, users.me.name), range(step, step + self.local_steps)
        for t, j in zip(
            steps, draw([key], [len(blocks)], 1, steps).flatten().tolist(), strict=True
        ):
            fresh = users.gradient_on(users.me.name, x, blocks[j], t)
            direction = len(blocks) * shares[j] * (fresh - table[j]) + shares @ table
            table[j], seen[j] = fresh, 1.0
            if self.biased:
                direction = (shares @ table) / (shares @ seen)
            x = x - lr * direction
        return {
            "step": step + self.local_steps,
            "x": x,
            "table": table,
            "seen": seen,
            "weight": 0.0,
        }


@dataclass(frozen=True)
@checked(rate=real("lie in (0, 1]", lambda rate: 0 < rate <= 1))
class MVR(OwnVariance):
    """Average past gradients as momentum does, each corrected for the movement of the model since.

        d_t = g_0(x_t) + (1 − a) (d_{t−1} − g_0(x_{t−1})),      x_{t+1} = x_t − η d_t

    both g_0 on the batch of step t. a = 1 is SGD. Unlike SVRG and SAGA it needs no pass over the
    examples and no table, so it works on streams. The error of d_t decreases with a and η, but not
    to 0 while they are constant. The model ends closer to the optimum than with SGD only where a is
    well below η times the curvature. d_0 is the first gradient. a is constant here, and so is η
    without a `scheduler`; in the papers both decrease.

    Args:
        local_steps: the number of steps in a round.
        rate: a, the weight of the new gradient, in (0, 1].

    Reference: Cutkosky and Orabona, Momentum-based variance reduction in non-convex SGD (STORM),
    NeurIPS 2019. Tran-Dinh et al., A hybrid stochastic optimization framework for composite
    nonconvex optimization, 2019.

    Example:
        >>> MVR(local_steps=10).gradients_a_round
        20
    """

    local_steps: int = 10
    rate: float = 0.1

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round."""
        return 2 * self.local_steps

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: x, with no gradient yet."""
        return {"step": 0, "x": x, "before": x, "weight": 0.0}

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        step, x, before = state["step"], state["x"], state["before"]
        d: Tensor | None = state.get("d")
        for t in range(step, step + self.local_steps):
            fresh, old = (users.gradients(point.unsqueeze(0), t)[0] for point in (x, before))
            d = fresh if d is None else fresh + (1 - self.rate) * (d - old)
            x, before = x - lr * d, x
        return {"step": step + self.local_steps, "x": x, "before": before, "d": d, "weight": 0.0}


def _blocks(users: Clients) -> list[Tensor]:
    """Return blocks of about as many of user 0's examples as a batch has."""
    size = users.costs.batches[users.me.name]
    return users.blocks(users.me.name, -(-len(users.me) // size))
