"""Data interpolation: train on a mixture of the own examples and those of all users."""

from collections.abc import Mapping, Sequence

from coterie.arguments import SHARE
from coterie.rules import WeightedAveraging
from coterie.users.user import User


def data_interpolation(me: User, peers: Sequence[User], mixing: float) -> WeightedAveraging:
    """Return the rule that minimises a f_0 + (1 − a) f_pooled, f_pooled being the mean loss over all examples.

    The rule is weighted gradient averaging. n_0 of the N pooled examples are user 0's own, so

        α = (1 − a)(1 − n_0/N),    τ_k ∝ n_k

    minimises the same objective: alone at a = 1, `WeightedAveraging.pooled` at a = 0.

    Args:
        me: user 0.
        peers: the others.
        mixing: a, in [0, 1], the weight of f_0 in addition to its share of f_pooled. The paper
            chooses it by cross-validation; `AdaptiveAveraging` does so for α.

    Reference: Mansour, Mohri, Ro, Suresh, Three approaches for personalization with applications to
    federated learning, arXiv:2002.10619, 2020, section 4.

    Example:
        >>> small, large = User("me", [[0.0]] * 10, range(10)), User("a", [[0.0]] * 30, range(30))
        >>> data_interpolation(small, [large], mixing=0.5)
        WeightedAveraging(alpha=0.375, tau={'a': 1.0}, aggregator=None)
    """
    return interpolation_of_sizes(len(me), {peer.name: len(peer) for peer in peers}, mixing)


def interpolation_of_sizes(
    own_examples: int, peers: Mapping[str, int], mixing: float
) -> WeightedAveraging:
    """Return the rule of `data_interpolation` from the numbers of examples, the peers' by name."""
    SHARE("mixing", mixing)
    total = sum(peers.values())
    tau = {name: n / total for name, n in peers.items()}
    return WeightedAveraging(alpha=(1 - mixing) * total / (total + own_examples), tau=tau)
