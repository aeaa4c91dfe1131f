"""Federated averaging, and what trains by it: FedProx, fine-tuning afterwards, a sample of users a round.

All users take local steps from a common point, then their models are averaged.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from coterie.aggregators import Aggregator
from coterie.arguments import COUNT, NOT_NEGATIVE, checked, function, one_of, optional
from coterie.errors import KnobError, attributing_errors_to
from coterie.methods.clients import Clients, LocalSteps, Pull
from coterie.methods.rounds import METHOD, Method
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


@dataclass(frozen=True)
@checked(together=METHOD, rounds=COUNT)
class FineTuning:
    """Train one model together for some rounds, then let every user continue from it alone.

        round < R:    x ← a round of `together`
        round ≥ R:    x_k ← x_k − η g_k(x_k), as many times as a round of `together` has gradients

    Nothing is sent after round R. The personal models converge to the users' own optima. How much
    of the common model remains depends on R and on the number of rounds after it: on quadratics x_k
    − o_k shrinks by 1 − ηA_k with every step. `coterie.train` serves the best round by validation,
    so tuning for too long does no harm where user 0 has a validation set.

    In the paper tuning starts when training has ended, and users may freeze layers. Here the
    scheduler continues.

    Args:
        rounds: R, the number of rounds to train together.
        together: the method that trains one model for all.

    Reference: Wang et al., Federated evaluation of on-device personalization, arXiv:1910.10252,
    2019.

    Example:
        >>> FineTuning(rounds=40, together=FedAvg(5)).gradients_a_round
        5
    """

    rounds: int
    together: Method = field(default_factory=FedAvg)

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round."""
        return self.together.gradients_a_round

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round."""
        together = self.together.init(users, x)
        return {
            "step": 0,
            "round": 0,
            "together": together,
            "models": self.together.models(together),
        }

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        following = state | {"round": state["round"] + 1}
        if state["round"] < self.rounds:
            together = self.together.round(users, state["together"], lr)
            models = self.together.models(together)
            return following | {"step": together["step"], "together": together, "models": models}
        points, count = state["models"].expand(users.personal, -1), self.gradients_a_round
        points = users.local_steps(points, state["step"], count, lr=lr)
        return following | {"step": state["step"] + count, "models": points}

    def models(self, state: State) -> Tensor:
        """Return the model for all, and once tuning has begun each user's own."""
        models: Tensor = state["models"]
        return models


@dataclass(frozen=True)
@checked(method=METHOD, peers=COUNT)
class Sampled:
    """Play the rounds of a method with user 0 and a sample of its peers.

    The peers of a round are drawn without replacement from (seed, step), each as likely. The others
    are not asked: they compute and send nothing, take no step, and count in no mean of the round;
    what they had before (a personal model, a correction, a cluster) stays. User 0, for whom the run
    is, takes part in every round, so means weigh it more than its share; in the papers it is drawn
    like the others. With all peers in the sample the bits are those of the method. Methods of user
    0 alone, such as `SVRG`, ask no peer, so that nothing is sampled.

    Args:
        method: the method, for instance `FedAvg(5)`.
        peers: how many take part in a round.

    Reference: McMahan et al., Communication-efficient learning of deep networks from decentralized
    data, AISTATS 2017, the fraction C of clients.

    Example:
        >>> from coterie.methods import FedAvg
        >>> Sampled(FedAvg(5), peers=3).gradients_a_round
        5
    """

    method: Method
    peers: int

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round."""
        return self.method.gradients_a_round

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the method's state before the first round, for which all users are asked where it asks any."""
        return self.method.init(users, x)

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round of the method with a sample."""
        with users.sample(self.peers, state["step"]):
            return self.method.round(users, state, lr)

    def models(self, state: State) -> Tensor:
        """Return the method's models."""
        return self.method.models(state)
