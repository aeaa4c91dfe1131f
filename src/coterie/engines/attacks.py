"""Attacks, for tests and benchmarks: what bad peers send, knowing what the good ones do.

An attack is a function of (the good peers' rows, how many attackers, the step) that returns the
attackers' rows. `Attacked` lets some peers of an engine send them, so that any run can be attacked.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from coterie.engines.engine import Capabilities, Engine
from coterie.engines.in_process.engine import InProcess
from coterie.errors import DataError, KnobError, did_you_mean
from coterie.gradients.gradients import Gradients, keep_finite
from coterie.recording.configuration import describe
from coterie.recording.costs import Traffic
from coterie.users.examples import InMemory, plain_targets
from coterie.users.user import User


class Attack(Protocol):
    """What attackers send in one step."""

    def __call__(self, honest: Tensor, n: int, step: int) -> Tensor:
        """Return n rows, from those of the good peers, at a step."""


@dataclass(frozen=True)
class Scaled:
    """Send a multiple of the good peers' mean: s·m.

    Args:
        factor: s. Large, it is the crudest attack; negative, it turns the direction round.

    Example:
        >>> Scaled(factor=-2.0)(torch.tensor([[1.0], [3.0]]), n=2, step=0)
        tensor([[-4.],
                [-4.]])
    """

    factor: float = 100.0

    def __call__(self, honest: Tensor, n: int, step: int) -> Tensor:
        """Return n times the scaled mean."""
        return _repeated(self.factor * honest.mean(0), n)


def sign_flip() -> Scaled:
    """Return the attack that sends −m, m the good peers' mean.

    Example:
        >>> sign_flip()
        Scaled(factor=-1.0)
    """
    return Scaled(-1.0)


def inner_product(epsilon: float = 0.5) -> Scaled:
    """Return inner-product manipulation, −ε·m.

    Small enough to pass, and against the good peers' mean.

    Example:
        >>> inner_product(epsilon=0.1)
        Scaled(factor=-0.1)

    Reference: Xie, Koyejo and Gupta, *Fall of Empires* (2020).
    """
    return Scaled(-epsilon)


@dataclass(frozen=True)
class LittleIsEnough:
    """Stay within the good peers' spread, all on one side.

    M − z·s, s their standard deviation by coordinate.

    Args:
        z: how many standard deviations away. When None, the largest z at which enough good peers,
            were they normal, would be further away to make a majority with the attackers.

    Example:
        >>> LittleIsEnough(z=1.0)(torch.tensor([[1.0], [3.0]]), n=1, step=0)
        tensor([[0.5858]])

    Reference: Baruch, Baruch and Goldberg, *A Little Is Enough* (2019), Algorithm 3.
    """

    z: float | None = None

    def __call__(self, honest: Tensor, n: int, step: int) -> Tensor:
        """Return n times the shifted mean."""
        z = self.z if self.z is not None else _unnoticed(len(honest), n)
        return _repeated(honest.mean(0) - z * _spread(honest), n)


@dataclass(frozen=True)
class Mimic:
    """Repeat one good peer, so that it counts for several; an aggregator cannot tell.

    Args:
        row: which of the good peers.

    Example:
        >>> Mimic(row=1)(torch.tensor([[1.0], [3.0]]), n=1, step=0)
        tensor([[3.]])

    Reference: Karimireddy, He and Jaggi, *Byzantine-Robust Learning on Heterogeneous Datasets via
    Bucketing* (2022).
    """

    row: int = 0

    def __call__(self, honest: Tensor, n: int, step: int) -> Tensor:
        """Return n times the row."""
        return _repeated(honest[self.row % len(honest)], n)


@dataclass(frozen=True)
class AlternatingDrift:
    """Push within the good peers' spread, to one side for a while and then to the other.

        m ± z·s,   the sign changing every `period` steps

    Every row is plausible, and over time so is their mean; but a model that follows is led from one
    side to the other and settles nowhere. It beats every aggregator here, which sees one step at a
    time (see the guard).

    Args:
        z: how many standard deviations away.
        period: how many steps to push to one side.

    Example:
        >>> drift = AlternatingDrift(z=1.0, period=10)
        >>> rows = torch.tensor([[1.0], [3.0]])
        >>> drift(rows, n=1, step=9), drift(rows, n=1, step=10)
        (tensor([[3.4142]]), tensor([[0.5858]]))
    """

    z: float = 1.0
    period: int = 50

    def __post_init__(self) -> None:
        if self.period < 1:
            raise KnobError(f"`period` must be at least 1, got {self.period!r}")

    def __call__(self, honest: Tensor, n: int, step: int) -> Tensor:
        """Return n times the mean, pushed."""
        sign = 1 - 2 * (step // self.period % 2)
        return _repeated(honest.mean(0) + sign * self.z * _spread(honest), n)


def flip_labels(user: User, n_classes: int) -> User:
    """Return the same user with each training label y turned into n_classes − 1 − y.

    Example:
        >>> user = flip_labels(User("a", torch.zeros(3, 1), torch.tensor([0, 1, 9])), n_classes=10)
        >>> user.examples.targets
        tensor([9, 8, 0])
    """
    examples = user.examples
    targets = plain_targets(examples)
    if not isinstance(examples, InMemory) or targets is None or targets.is_floating_point():
        raise DataError(
            f"user {user.name!r} has no labels in memory to flip; give it a tensor of classes"
        )
    if not 0 <= int(targets.min()) <= int(targets.max()) < n_classes:
        raise KnobError(
            f"`n_classes` must exceed every label of user {user.name!r}, got {n_classes}"
        )
    flipped = copy.copy(user)
    flipped.examples = InMemory(examples.inputs, n_classes - 1 - targets)
    return flipped


@dataclass(frozen=True)
class Attacked:
    """An engine some of whose peers send what an attack tells them to.

    The attackers see what the good peers send in the same step; user 0's own gradient where there
    is no good peer.

    Args:
        engine: where the good gradients come from.
        attackers: the names of the peers that attack.
        attack: what they send.

    Example:
        >>> from coterie.theory.quadratic import NoisyQuadratic, Quadratic
        >>> problem = NoisyQuadratic(Quadratic(1, 0, noise=0), [Quadratic(1, 0, noise=0)] * 2)
        >>> engine = Attacked(problem.engine(), ["2"], sign_flip())
        >>> engine.gradients(torch.ones(1), step=0, weights={"1": 0.5, "2": 0.5}, rows=True).rows
        tensor([[ 1.],
                [-1.]])
    """

    engine: Engine
    attackers: Sequence[str]
    attack: Attack

    def __post_init__(self) -> None:
        if unknown := [name for name in self.attackers if name not in self.names]:
            raise KnobError(
                f"`attackers` names an unknown peer {unknown[0]!r}; the peers are {self.names}"
                f"{did_you_mean(unknown[0], self.names)}"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The peers that can be asked."""
        return self.engine.names

    @property
    def capabilities(self) -> Capabilities:
        """What can be had under attack.

        Rows where the engine has them, and nothing that would avoid the attack.
        """
        can = self.engine.capabilities
        return Capabilities(
            rows=can.rows,
            rows_at_hand=can.rows and bool(self.attackers),
            examples=can.examples,
            batch_size=can.batch_size,
        )

    def gradients(
        self, x: Tensor, step: int, weights: Mapping[str, float], rows: bool = False
    ) -> Gradients:
        """Return everybody's gradients at x, the attackers' replaced; see `Engine.gradients`."""
        bad = [name for name in weights if name in self.attackers]
        if not bad:
            return self.engine.gradients(x, step, weights, rows)
        g = self.engine.gradients(x, step, weights, rows=True)
        answers = zip(g.names, () if g.rows is None else g.rows, strict=True)
        good = {name: row for name, row in answers if name not in bad}
        honest = torch.stack(list(good.values())) if good else g.own[None]
        sent = good | dict(zip(bad, self.attack(honest, len(bad), step).to(g.own), strict=True))
        names = [name for name in weights if name in sent]
        matrix, kept, not_finite = keep_finite(torch.stack([sent[name] for name in names]), names)
        left_out = {name: why for name, why in g.left_out.items() if name not in bad} | not_finite
        return g.with_peers(matrix, kept, weights, left_out, rows=rows)

    def describe(self) -> dict[str, Any]:
        """Return what the record should say of how gradients are computed, and of who attacks."""
        return self.engine.describe() | {
            "attack": describe(self.attack),
            "attackers": list(self.attackers),
        }

    def traffic(self) -> Mapping[str, Traffic]:
        """Return what has travelled so far."""
        return self.engine.traffic()

    def close(self) -> None:
        """Close the engine under attack."""
        self.engine.close()


ATTACKS: Mapping[str, Callable[[], Attack]] = {
    "sign-flip": sign_flip,
    "inner-product": inner_product,
    "scaled": Scaled,
    "little-is-enough": LittleIsEnough,
    "mimic": Mimic,
    "alternating-drift": AlternatingDrift,
}
"""Attacks by name, as the command line takes them."""


def under_attack(attack: str, attackers: int | Sequence[str]) -> Callable[..., Attacked]:
    """Return what makes the engine of a run in this process some of whose peers attack.

    They are given by name, or as many as are given are the first.

    Example:
        >>> import coterie
        >>> me, a, b = (User(name, [[1.0]], [[1.0]]) for name in ("me", "a", "b"))
        >>> engine = under_attack("sign-flip", 1)
        >>> run = coterie.train(torch.nn.Linear(1, 1), torch.nn.functional.mse_loss, me, [a, b], "wga",
        ...     engine=engine, steps=2, measure=False)
        >>> run.record.configuration.engine["attackers"]
        ['a']
    """
    if attack not in ATTACKS:
        hint = did_you_mean(attack, ATTACKS)
        raise KnobError(f"unknown attack {attack!r}; the attacks are {', '.join(ATTACKS)}{hint}")

    def make(*about: Any, **settings: Any) -> Attacked:
        engine = InProcess(*about, **settings)
        if not isinstance(attackers, int):
            return Attacked(engine, attackers, ATTACKS[attack]())
        if not 1 <= attackers <= len(engine.names):
            raise KnobError(
                f"`attackers` must be from 1 to {len(engine.names)}, the number of peers, got"
                f" {attackers}"
            )
        return Attacked(engine, engine.names[:attackers], ATTACKS[attack]())

    return make


def _repeated(row: Tensor, n: int) -> Tensor:
    return row.expand(n, -1).clone()


def _spread(honest: Tensor) -> Tensor:
    """Return the standard deviation of every coordinate; 0 for one row."""
    return honest.std(0) if len(honest) > 1 else torch.zeros_like(honest[0])


def _unnoticed(honest: int, attackers: int) -> float:
    """Return z_max of Baruch et al.: Φ(z) is the share of good ones that need not be won over."""
    needed = (honest + attackers) // 2 + 1 - attackers
    share = min(max((honest - needed) / honest, 0.5), 1 - 1e-9)
    return float(torch.special.ndtri(torch.tensor(share, dtype=torch.float64)))
