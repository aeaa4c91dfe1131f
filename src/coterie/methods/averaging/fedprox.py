"""FedProx: federated averaging whose local steps are pulled back to where they began."""

from dataclasses import dataclass

from torch import Tensor

from coterie.arguments import NOT_NEGATIVE, checked
from coterie.methods.averaging.fedavg import FedAvg
from coterie.methods.clients import Clients, Pull


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
