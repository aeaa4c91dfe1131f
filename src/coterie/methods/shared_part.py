"""FedPer, FedRep and FedBN: a part of the model is everybody's, the rest stays with its user."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from coterie.arguments import COUNT, instance, listed, optional
from coterie.errors import KnobError
from coterie.gradients.parameters import Parameters
from coterie.methods.clients import Clients, LocalSteps
from coterie.rules import State

_NAMES = optional(
    listed(
        instance(str, ""),
        "a list of names of layers or parameters",
        {str: 'write `head=["classifier"]`; `model.named_parameters()` shows the names'},
    )
)


class _SharedPart(LocalSteps):
    """What they share: models in rows, of which a part is averaged when a round ends."""

    models_in = "points"

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: all models are x."""
        return {
            "step": 0,
            "points": x.repeat(len(users.names), 1),
            "own": self.own(users.engine.parameters),
        }

    def own(self, parameters: Parameters) -> Tensor:
        """Return which numbers of the model stay with their user, a truth value each."""
        raise NotImplementedError

    def averaged(self, users: Clients, points: Tensor, own: Tensor) -> Tensor:
        """Return the models after an exchange of the part that all share, by the shares of the examples."""
        shared = int((~own).sum())
        users.exchange(down=shared, up=shared)
        return torch.where(own, points, users.shares @ points)


@dataclass(frozen=True)
class FedPer(_SharedPart):
    """Train all of the model at every user, and average all of it but the head.

        x_k = (b, h_k), then K times  x_k ← x_k − η g_k(x_k);      b ← Σ p_k b_k,  h_k stays

    With K = 1 it is gradient descent on Σ p_k f_k(b, h_k) where users' head steps are 1/p_k times
    as long: at its minimiser in the end. An empty head is FedAvg, to the bit; a head of everything
    is training alone.

    Args:
        local_steps: K.
        head: what stays with its user: names of layers (`"classifier"`, `"2"`) or of parameters
            (`"2.bias"`). When None it is the last layer, or of a model with one layer its last
            parameter, the bias.

    Reference: Arivazhagan, Aggarwal, Singh, Choudhary, Federated learning with personalization
    layers, arXiv:1912.00818, 2019.

    Example:
        >>> FedPer(local_steps=5, head=["classifier"]).gradients_a_round
        5
    """

    local_steps: int = 1
    head: Sequence[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "head", _NAMES("head", self.head))

    def own(self, parameters: Parameters) -> Tensor:
        """Return which numbers are the head's."""
        return _numbers_of(parameters, _head(parameters, self.head))

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        step, points, own = state["step"], state["points"], state["own"]
        points = users.local_steps(points, step, self.local_steps, lr=lr)
        return {
            "step": step + self.local_steps,
            "points": self.averaged(users, points, own),
            "own": own,
        }


@dataclass(frozen=True)
class FedRep(_SharedPart):
    """Fit every user's head to the shared representation, then let all improve the representation.

        S times  h_k ← h_k − η g_k(b, h_k)|h,  then K times  b_k ← b_k − η g_k(b_k, h_k)|b;      b ←
        Σ p_k b_k

    g|h being the head's numbers of a gradient, g|b the others. With K = 1 it stands still where
    `FedPer` does. The heads are nearly fitted when the representation moves. In the paper a sample
    of users takes part: `Sampled`.

    Args:
        local_steps: K.
        head_steps: S.
        head: as in `FedPer`.

    Reference: Collins, Hassani, Mokhtari, Shakkottai, Exploiting shared representations for
    personalized federated learning, ICML 2021, Algorithm 1.

    Example:
        >>> FedRep(local_steps=1, head_steps=5).gradients_a_round
        6
    """

    local_steps: int = 1
    head_steps: int = 5
    head: Sequence[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        COUNT("head_steps", self.head_steps)
        object.__setattr__(self, "head", _NAMES("head", self.head))

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round."""
        return self.head_steps + self.local_steps

    def own(self, parameters: Parameters) -> Tensor:
        """Return which numbers are the head's."""
        return _numbers_of(parameters, _head(parameters, self.head))

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        step, points, own = state["step"], state["points"], state["own"]
        for part in [own] * self.head_steps + [~own] * self.local_steps:
            points = points - lr * (part * users.gradients(points, step))
            step += 1
        return {"step": step, "points": self.averaged(users, points, own), "own": own}


@dataclass(frozen=True)
class FedBN(_SharedPart):
    """Average all of the model but its batch normalisation, which stays with its user.

        `FedPer` whose head are the scales and shifts of all BatchNorm layers

    It suits users whose inputs differ in scale. Running statistics are user 0's own: those of
    `run.model`, and of all of `run.models`, as peers keep none.

    Args:
        local_steps: K.

    Reference: Li, Jiang, Zhang, Kamp, Dou, FedBN: federated learning on non-IID features via local
    batch normalization, ICLR 2021.

    Example:
        >>> FedBN(local_steps=5).gradients_a_round
        5
    """

    local_steps: int = 1

    def own(self, parameters: Parameters) -> Tensor:
        """Return which numbers are of batch normalisation."""
        names = [name for name, layer in parameters.owners.items() if isinstance(layer, _BatchNorm)]
        if not names:
            raise KnobError(
                "`FedBN` keeps BatchNorm's parameters personal, but the model has none to train;"
                " use `FedAvg`, or name what is to stay with its user: `FedPer(head=[…])`"
            )
        return _numbers_of(parameters, names)

    round = FedPer.round


def _head(parameters: Parameters, head: Sequence[str] | None) -> list[str]:
    """Return the names of the parameters in the head."""
    names = list(parameters.named)
    if head is None:
        if len(names) == 1:
            raise KnobError(
                "the model has one parameter, so nothing would be shared; set `head`, or train"
                " alone"
            )
        last = parameters.owners[names[-1]]
        of_last = [name for name in names if parameters.owners[name] is last]
        return names[-1:] if of_last == names else of_last
    for each in head:
        if not any(_belongs(name, each) for name in names):
            raise KnobError(
                f"`head` names {each!r}, which the model has not to train; it has"
                f" {', '.join(names)}"
            )
    return [name for name in names if any(_belongs(name, each) for each in head)]


def _belongs(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def _numbers_of(parameters: Parameters, names: Sequence[str]) -> Tensor:
    """Return which numbers of the flat vector belong to these parameters."""
    each = zip(parameters.named, parameters.lengths, strict=True)
    return torch.cat(
        [torch.full((n,), name in names, device=parameters.device) for name, n in each]
    )
