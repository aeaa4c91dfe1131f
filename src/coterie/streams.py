"""Weights for a user with fresh samples at every step: the bias Gram matrix, as the run goes.

With fresh samples a gradient is unbiased wherever x is, and the noises of two steps are independent. So products of
gradients across steps show the peers' bias without their noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from coterie.errors import KnobError
from coterie.gradients import Gradients
from coterie.rules import State, WeightedAveraging
from coterie.weights import simplex_minimum

EVERY = 5
"""Steps from one solution for the weights to the next."""
PATIENCE = 10
"""Steps that a peer must have been seen in before it can have weight."""


@dataclass(frozen=True)
class StreamAveraging:
    """Average by the weights that trade the peers' bias against everybody's noise best, found on the way.

        B_ij = running mean of sym⟨y_i(t), y_j(t − 1)⟩,  y_i = g_i − g_0
        κ    = argmin over the simplex of  κᵀBκ + Σ_{k≥0} κ_k² σ_k² / T

    κ_0 is the weight of the own gradient, whose bias is zero; σ_k², the noise of user k's batch, is half the
    running mean of ‖g_k(t) − g_k(t − 1)‖². The entries of B carry noise, with a standard error s, and a minimiser
    would pick out the peers that it flatters. So peers whose B_ii cannot be told apart are given their mean; off
    the diagonal B_ij is shrunk by 1 − (2s/B_ij)², to zero where it is less than 2s, and kept between 0 and
    √(B_ii B_jj): biases that seem to cancel are not relied on. Users alike then share the weight, and those with a
    bias well above the noise get none.

    It generalises the paper's choice of weights, in which B is diagonal with the entries ζ_k².

    Args:
        horizon: T, the steps of the run, over which noise averages out and bias does not.

    Example:
        >>> rule = StreamAveraging(horizon=100)
        >>> state = rule.init(torch.zeros(3))
        >>> noise = torch.Generator().manual_seed(0)
        >>> for step in range(100):
        ...     own, *rows = torch.randn(4, 3, generator=noise)
        ...     rows[2] += 9
        ...     direction, state = rule(Gradients(own, rows=torch.stack(rows), names=("a", "b", "c")), state)
        >>> {name: round(weight, 1) for name, weight in state["tau"].items()}
        {'a': 0.3, 'b': 0.3, 'c': 0.0}
    """

    horizon: int

    needs_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.horizon >= 1:
            raise KnobError(f"`horizon` must be at least 1 step, got {self.horizon!r}")

    def weights(self, names: Sequence[str]) -> dict[str, float]:
        """Ask every peer."""
        return WeightedAveraging(1.0).weights(names)

    def init(self, x: Tensor) -> State:
        """Return the state before the first step; `tau` is the peers' part of κ."""
        return {"step": 0, "weight": 0.0, "tau": {}}

    def __call__(self, g: Gradients, state: State) -> tuple[Tensor, State]:
        """Return the average by the weights found so far, and the next state."""
        if g.rows is None or len(g.names) != len(g.rows):
            raise KnobError("`StreamAveraging` needs every peer's gradient: `Gradients(rows=…, names=…)`")
        names = state.get("names") or [*g.names, *g.left_out]
        seen = self._observed(g, state, names)
        tau = state["tau"]
        if state["step"] % EVERY == 0 and bool((seen["counts"].diag() >= PATIENCE).any()):
            tau = dict(zip(names, self._kappa(seen).tolist()[1:], strict=True))
        used = g.rows.new_tensor([tau.get(name, 0.0) for name in g.names])
        weight = float(used.sum())
        direction = torch.lerp(g.own, used @ g.rows / weight, weight) if weight else g.own
        return direction, {"step": state["step"] + 1, "weight": weight, "tau": tau, "names": names, **seen}

    @property
    def _remembered(self) -> int:
        """How many steps the running means go back over; before that they are means of all."""
        return max(100, self.horizon // 5)

    def _observed(self, g: Gradients, state: State, names: Sequence[str]) -> State:
        """Return the running means after one more step: bias products, their squares, noise, and counts."""
        n = len(names)
        here = torch.tensor([names.index(name) for name in g.names], dtype=torch.long)
        rows = g.own.new_zeros(1 + n, len(g.own))
        rows[0], rows[1 + here] = g.own, g.rows if g.rows is not None else g.own
        present = torch.zeros(n, dtype=torch.bool)
        present[here] = True
        if "rows" not in state:
            zeros = torch.zeros(n, n, dtype=torch.float64)
            noise = torch.zeros(1 + n, dtype=torch.float64)
            return {
                "rows": rows,
                "present": present,
                "bias": zeros,
                "squares": zeros,
                "noise": noise,
                "counts": zeros,
            }
        both = present & state["present"]
        mask = (both[:, None] & both).double()
        counts = state["counts"] + mask
        rate = mask / counts.clamp(min=1, max=self._remembered)
        now, before = rows[1:] - rows[0], state["rows"][1:] - state["rows"][0]
        lagged = (now @ before.mT).double().cpu()
        lagged = (lagged + lagged.mT) / 2
        change = ((rows - state["rows"]).square().sum(1) / 2).double().cpu()
        own_rate = torch.cat([rate.max().reshape(1), rate.diag()])
        return {
            "rows": rows,
            "present": present,
            "bias": state["bias"] + rate * (lagged - state["bias"]),
            "squares": state["squares"] + rate * (lagged.square() - state["squares"]),
            "noise": state["noise"] + own_rate * (change - state["noise"]),
            "counts": counts,
        }

    def _kappa(self, seen: State) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Solve for the weights; a peer that was seen too seldom has none."""
        bias, counts = seen["bias"], seen["counts"]
        error = (seen["squares"] - bias.square()).clamp(min=0) / counts.clamp(min=1, max=2 * self._remembered)
        shrunk = (1 - 4 * error / bias.square().clamp(min=1e-300)).clamp(min=0) * bias
        size = _pooled(bias.diag(), error.diag()).clamp(min=0).sqrt()
        kept = torch.minimum(shrunk.clamp(min=0), size * size[:, None]).fill_diagonal_(0) + size.square().diag()
        known = torch.cat([torch.tensor([True]), counts.diag() >= PATIENCE]).numpy()
        matrix = torch.nn.functional.pad(kept, (1, 0, 1, 0)) + (seen["noise"] / self.horizon).diag()
        kappa = np.zeros(len(known))
        kappa[known] = simplex_minimum(matrix.numpy()[np.ix_(known, known)])
        return kappa


def _pooled(values: Tensor, variances: Tensor) -> Tensor:
    """Return for each value the mean of those that it cannot be told apart from, by how likely that is.

    Example:
        >>> _pooled(torch.tensor([1.0, 3.0, 90.0]), torch.tensor([4.0, 4.0, 4.0])).tolist()
        [1.87..., 2.12..., 90.0]
    """
    known = variances.clamp(min=1e-300)
    apart = (values[:, None] - values).square() / (2 * (known[:, None] + known))
    weights = torch.exp(-apart) / known
    return (weights @ values) / weights.sum(1)
