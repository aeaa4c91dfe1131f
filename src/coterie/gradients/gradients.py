"""What user 0 receives in one step: its own gradient and its peers', checked and combined."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from coterie.errors import KnobError
from coterie.gradients.parameters import is_finite


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients at one point, as flat vectors.

    Args:
        own: g_0, user 0's own gradient, of shape (d,).
        peers: Σ τ_k g_k, the peers' weighted sum, of shape (d,), with g_0 for peers that did not
            answer.
        rows: the gradients of the peers that answered, of shape (n, d), for rules that need each.
        names: the peers of `rows`, in order.
        answered: the share of the peers' weight that answered; 1 when everyone did.
        left_out: the peers left out of this step, each with the reason.
        x: the point the gradients belong to, where a rule needs it.
        own_loss: user 0's loss on its batch.

    Example:
        >>> g = Gradients(own=torch.zeros(2), rows=torch.tensor([[1.0, 0.0], [0.0, 1.0]]), names=("a", "b"))
        >>> g.average({"a": 0.25, "b": 0.75})
        (tensor([0.2500, 0.7500]), 1.0)
    """

    own: Tensor
    peers: Tensor | None = None
    rows: Tensor | None = None
    names: tuple[str, ...] = ()
    answered: float = 1.0
    left_out: Mapping[str, str] = field(default_factory=dict)
    x: Tensor | None = None
    own_loss: Tensor | float = math.nan

    def average(
        self,
        tau: Mapping[str, float] | None = None,
        aggregator: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, float]:
        """Return the peers' weighted sum, or aggregate, and the share of the weight that answered.

        The weight of a peer that did not answer goes back to g_0.

        Args:
            tau: the weight of each peer, used with `rows`; equal weights when None.
            aggregator: combines the rows in place of the weighted sum; see `coterie.aggregators`.
        """
        if aggregator is not None:
            return self._aggregate(aggregator)
        if self.peers is not None:
            return self.peers, self.answered
        if self.rows is None:
            raise KnobError(
                "a rule that listens to peers needs `Gradients(peers=…)` or `Gradients(rows=…)`"
            )
        if tau is None:
            weights = [self.answered / max(1, len(self.rows))] * len(self.rows)
        else:
            weights = [float(tau.get(name, 0.0)) for name in self._row_names()]
        return weighted_sum(self.own, self.rows, weights)

    def with_peers(
        self,
        matrix: Tensor,
        names: tuple[str, ...],
        weights: Mapping[str, float],
        left_out: Mapping[str, str],
        *,
        rows: bool,
    ) -> Self:
        """Return the same own gradient with these peers' gradients.

        As rows, or as their weighted sum.
        """
        shares = [weights[name] for name in names]
        if rows:
            return replace(
                self,
                rows=matrix,
                names=names,
                peers=None,
                answered=present(shares),
                left_out=left_out,
            )
        peers, answered = weighted_sum(self.own, matrix, shares)
        return replace(self, rows=None, names=(), peers=peers, answered=answered, left_out=left_out)

    def _aggregate(self, aggregator: Callable[[Tensor], Tensor]) -> tuple[Tensor, float]:
        if self.rows is None:
            raise KnobError("an aggregator needs every peer's gradient: `Gradients(rows=…)`")
        if not len(self.rows):
            return complete(self.own, self.own, 0.0)
        return complete(self.own, self.answered * aggregator(self.rows), self.answered)

    def _row_names(self) -> tuple[str, ...]:
        if self.rows is not None and len(self.names) != len(self.rows):
            raise KnobError(
                f"`names` must name every row when weights are given by name: {len(self.names)}"
                f" names, {len(self.rows)} rows"
            )
        return self.names


def weighted_sum(own: Tensor, rows: Tensor, weights: Sequence[float]) -> tuple[Tensor, float]:
    """Return Σ τ_k g_k plus g_0 times the weight that is missing to 1, and the weight present."""
    return complete(own, own.new_tensor(weights) @ rows, sum(weights))


def add_up(
    own: Tensor, arriving: Iterable[tuple[str, Tensor]], weights: Mapping[str, float]
) -> tuple[Tensor, float, dict[str, str]]:
    """Return Σ τ_k g_k added up in the order of arrival, the weight present, and the peers left out with reasons.

    One gradient is held at a time. The same order gives the same bits on every engine.
    """
    total, answered, left_out = torch.zeros_like(own), 0.0, {}
    for name, gradient in arriving:
        if is_finite(gradient):
            total.add_(gradient, alpha=weights[name])
            answered += weights[name]
        else:
            left_out[name] = "not finite"
    return *complete(own, total, answered), left_out


def gave_nothing(left_out: Mapping[str, str]) -> list[str]:
    """Return the peers that were not asked, did not answer or refused.

    Others were left out for what they gave.

    Example:
        >>> gave_nothing({"a": "no answer", "b": "refused", "c": "refused: too often", "d": "not finite"})
        ['a', 'b', 'c']
    """
    return [
        name
        for name, why in left_out.items()
        if why in ("no answer", "not waited for", "refused") or why.startswith("refused:")
    ]


def complete(own: Tensor, peers: Tensor, answered: float) -> tuple[Tensor, float]:
    """Give the weight that did not answer back to g_0; exactly g_0 when nobody did."""
    answered = present([answered])
    if not answered:
        return own.clone(), 0.0
    return (peers, 1.0) if answered == 1 else (peers.add(own, alpha=1 - answered), answered)


def present(weights: Iterable[float]) -> float:
    """Return the share of the peers' weight that answered.

    1 where the weights sum to it but for rounding.
    """
    answered = sum(weights)
    return 1.0 if 1 - answered < 1e-12 else answered


def by_name(
    values: Tensor, names: Sequence[str], wanted: Sequence[str], otherwise: Tensor | float = 0.0
) -> Tensor:
    """Return the values of the names wanted, one a row, without synchronising host and device.

    A user who has no value gets `otherwise`: a number, or a value for each name wanted.
    """
    if list(names) == list(wanted):
        return values
    if not isinstance(otherwise, Tensor):
        otherwise = values.new_full((len(wanted), *values.shape[1:]), otherwise)
    place = {name: i for i, name in enumerate(names)}
    picked = [
        values[place[name]] if name in place else otherwise[i] for i, name in enumerate(wanted)
    ]
    return torch.stack(picked) if picked else otherwise


def cut(rows: Tensor, norm: float | Tensor) -> Tensor:
    """Return a vector, or each row of a matrix, cut to a norm.

    The norm may be a column with one for each row.

    Example:
        >>> cut(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])
    """
    # else squares may overflow
    peak = rows.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    share: Tensor = norm / (rows / peak).norm(dim=-1, keepdim=True) / peak
    return rows * share.clamp(max=1.0)


def keep_finite(
    rows: Tensor, names: Sequence[str]
) -> tuple[Tensor, tuple[str, ...], dict[str, str]]:
    """Return the finite rows, their names, and the peers left out with reasons."""
    if is_finite(rows):
        return rows, tuple(names), {}
    finite = rows.isfinite().all(1).tolist()
    kept = tuple(name for name, good in zip(names, finite, strict=True) if good)
    left_out = {name: "not finite" for name, good in zip(names, finite, strict=True) if not good}
    return rows[torch.tensor(finite, device=rows.device)], kept, left_out
