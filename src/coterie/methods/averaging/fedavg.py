"""Federated averaging, and FedProx, whose local steps are pulled back to where they began.

All users take local steps from a common point, then their models are averaged.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from coterie.aggregators import Aggregator
from coterie.arguments import NOT_NEGATIVE, checked, function, one_of, optional
from coterie.errors import KnobError, attributing_errors_to
from coterie.methods.clients import Clients, LocalSteps, Pull
from coterie.rules import State

_AGGREGATOR = optional(
    function(
        "an aggregator, or another function from the users' moves, one a row, to one move",
        {type: "give it its knobs: `CoordinateMedian()`", str: "names are for the command line"},
    )
)


@dataclass(frozen=True)
@checked(shares=one_of("examples", "equal"), aggregator=_AGGREGATOR)
class FedAvg(LocalSteps):
    """Average the models that all users have trained for a few steps from the last average.

        x_k ← x, then K times  x_k ← x_k − η g_k(x_k);      x ← Σ p_k x_k,  or  x ← x +
        aggregator(x_k − x)

    With one local step it is gradient descent on Σ p_k f_k: the pooled objective where p_k are the
    shares of the examples. With more, users drift towards their own optima: on quadratics f_k = ½(x
    − o_k)ᵀA_k(x − o_k) it converges to the solution of  Σ p_k (1 − (1 − ηA_k)^K)(x − o_k) = 0, not
    to the minimiser of the average.

    All users get one model. All take part in every round, or a sample: `Sampled`.

    Args:
        local_steps: K.
        shares: p_k: by the number of `"examples"`, as in the paper, or `"equal"`. An aggregator
            ignores them.
        aggregator: a function from the users' moves, one a row, to one move, in place of the mean:
            a robust one limits the influence of a few bad users.

    Reference: McMahan et al., Communication-efficient learning of deep networks from decentralized
    data, AISTATS 2017.

    Example:
        >>> FedAvg(local_steps=5).gradients_a_round
        5
    """

    local_steps: int = 1
    shares: Literal["examples", "equal"] = "examples"
    aggregator: Aggregator | Callable[[Tensor], Tensor] | None = None

    def walk(self, users: Clients, start: Tensor, step: int, lr: float) -> Tensor:
        """Return where the local steps lead."""
        return users.local_steps(start, step, self.local_steps, lr=lr)

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        x, step = state["x"], state["step"]
        points = self.walk(users, x.expand(len(users.names), -1), step, lr)
        users.exchange(down=x.numel(), up=x.numel())
        if self.aggregator is not None:
            x = x + self._aggregated(users.taking_part(points - x))
        else:
            x = users.shares @ points if self.shares == "examples" else users.mean(points)
        return {"step": step + self.local_steps, "x": x}

    def _aggregated(self, moves: Tensor) -> Tensor:
        """Return the one move that the aggregator makes of these, one a row."""
        with attributing_errors_to("the aggregator"):
            move: Tensor = self.aggregator(moves)  # type: ignore[misc]  # there is one
        if move.shape != moves.shape[1:]:
            shapes = f"{tuple(move.shape)}, not {tuple(moves.shape[1:])} as one row"
            raise KnobError(
                "`aggregator` must make one move of the users' moves; it gave one of shape"
                f" {shapes}"
            )
        return move


@dataclass(frozen=True)
@checked(penalty=NOT_NEGATIVE)
class FedProx(FedAvg):
    """Average the models of all users, each trained with a penalty on its distance from the last average.

        x_k ← x, then K times  x_k ← x_k − η (g_k(x_k) + μ (x_k − x));      x ← Σ p_k x_k

    The penalty holds local steps back where users differ. μ = 0 is FedAvg, to the bit. On
    quadratics, with M_k = A_k + μ, it converges to the solution of  Σ p_k (1 − (1 − ηM_k)^K)
    M_k⁻¹A_k (x − o_k) = 0, not to the minimiser of the average. The paper lets users stop at a
    given inexactness; here all take K steps.

    Args:
        local_steps: K.
        shares: p_k, as in `FedAvg`.
        aggregator: as in `FedAvg`.
        penalty: μ.

    Reference: Li et al., Federated optimization in heterogeneous networks, MLSys 2020, Algorithm 2.

    Example:
        >>> FedProx(local_steps=5, penalty=0.1).gradients_a_round
        5
    """

    penalty: float = 0.1

    def walk(self, users: Clients, start: Tensor, step: int, lr: float) -> Tensor:
        """Return where the local steps lead."""
        return users.local_steps(
            start, step, self.local_steps, lr=lr, pull=Pull(self.penalty, start)
        )
