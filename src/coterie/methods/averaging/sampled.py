"""Client sampling: in every round of a method user 0 works with a few peers, drawn anew."""

from dataclasses import dataclass

from torch import Tensor

from coterie.arguments import COUNT, checked
from coterie.methods.clients import Clients
from coterie.methods.rounds import METHOD, Method
from coterie.rules import State


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
