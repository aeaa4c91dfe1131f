"""SAGA and SAG: user 0 alone, with a table of the last gradient of every block of its examples."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.methods.clients import Clients
from coterie.methods.local import check_local_steps
from coterie.rules import State
from coterie.users.sampling import draw, random_key


@dataclass(frozen=True)
class SAGA:
    """Update one block's gradient in the table, and step by the whole table.

        f_0 = Σ_j p_j f_j over B blocks of the own examples, p_j a block's share; j drawn evenly, then
        x ← x − η (B p_j (∇f_j(x) − t_j) + Σ_i p_i t_i)           (SAGA: unbiased)
        x ← x − η Σ_i p_i t_i⁺ / Σ_{i seen} p_i                   (SAG: biased, less noisy)
        t_j ← t_j⁺ = ∇f_j(x)

    With a constant step size both converge linearly on a strongly convex finite sum, and need no pass over all
    examples. In the papers f_j is the loss of one example; here it is that of a fixed block of about `batch_size`
    examples, so the table has n/batch_size rows of the model's size. A step draws its block from (seed, user,
    step). The table starts at 0, not at ∇f_j(x_0), which would cost a pass.

    Args:
        local_steps: the number of steps in a round.
        biased: use SAG, not SAGA.

    Reference:
        Defazio, Bach and Lacoste-Julien, SAGA: a fast incremental gradient method, NeurIPS 2014. Schmidt, Le Roux
        and Bach, Minimizing finite sums with the stochastic average gradient, Math. Programming 2017.

    Example:
        >>> SAGA(local_steps=10).gradients_a_round
        10
    """

    local_steps: int = 10
    biased: bool = False

    def __post_init__(self) -> None:
        check_local_steps(self.local_steps)

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round."""
        return self.local_steps

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: x and an empty table."""
        blocks = len(_blocks(users))
        return {
            "step": 0,
            "x": x,
            "table": x.new_zeros(blocks, x.numel()),
            "seen": x.new_zeros(blocks),
            "weight": 0.0,
        }

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        x, step, blocks = state["x"], state["step"], _blocks(users)
        table, seen = state["table"].clone(), state["seen"].clone()
        shares = x.new_tensor([len(block) for block in blocks])
        shares = shares / shares.sum()
        key, steps = random_key(users.seed, users.me.name), range(step, step + self.local_steps)
        for t, j in zip(steps, draw([key], [len(blocks)], 1, steps).flatten().tolist(), strict=True):
            fresh = users.gradient_on(users.me.name, x, blocks[j], t)
            direction = len(blocks) * shares[j] * (fresh - table[j]) + shares @ table
            table[j], seen[j] = fresh, 1.0
            if self.biased:
                direction = (shares @ table) / (shares @ seen)
            x = x - lr * direction
        return {"step": step + self.local_steps, "x": x, "table": table, "seen": seen, "weight": 0.0}

    def models(self, state: State) -> Tensor:
        """Return x, the model of user 0."""
        x: Tensor = state["x"]
        return x.unsqueeze(0)


def _blocks(users: Clients) -> list[Tensor]:
    """Return blocks of about as many of user 0's examples as a batch has."""
    size = users.costs.batches[users.me.name]
    return users.blocks(users.me.name, -(-len(users.me) // size))
