"""Weights for a user with fresh samples at every step: the bias Gram matrix, as the run goes.

With fresh samples a gradient is unbiased wherever x is, and the noises of two steps are
independent. So products of gradients across steps show the peers' bias without their noise.

The running means stay on the device. Every few steps they are copied to the host. The host solves
for weights at the next such step, from the last copy: neither waits for the other, and the weights
do not depend on how fast the copy travels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from coterie.arguments import COUNT, checked
from coterie.gradients.gradients import Gradients, by_name
from coterie.gradients.simplex import simplex_minimum
from coterie.rules.rule import Rule, State, rows_of

STEPS_BETWEEN_SOLUTIONS = 5
"""Steps from one solution for the weights to the next.

Each uses the running means of the solution before.
"""
MIN_STEPS_SEEN = 10
"""Steps that a peer must have been seen in before it can have weight."""
MEANS = ("bias", "squares", "counts", "noise")
"""The running means, by their names in the state."""


@dataclass(frozen=True)
@checked(horizon=COUNT)
class StreamAveraging(Rule):
    """Average by the weights that trade the peers' bias against everybody's noise best, solved for as the run goes.

        B_ij = running mean of sym⟨y_i(t), y_j(t − 1)⟩,  y_i = g_i − g_0
        κ    = argmin over the simplex of  κᵀBκ + Σ_{k≥0} κ_k² σ_k² / T

    κ_0 is the weight of the own gradient, whose bias is zero; σ_k², the noise of user k's batch, is
    half the running mean of ‖g_k(t) − g_k(t − 1)‖². The entries of B carry noise, with a standard
    error s, and a minimiser would pick out the peers that it flatters. So peers whose B_ii cannot
    be told apart are given their mean; off the diagonal B_ij is shrunk by 1 − (2s/B_ij)², to zero
    where it is less than 2s, and kept between 0 and √(B_ii B_jj): biases that seem to cancel are
    not relied on. Users alike then share the weight, and those with a bias well above the noise get
    none.

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
        >>> [round(weight, 1) for weight in state["tau"].tolist()]
        [0.3, 0.3, 0.0]
    """

    horizon: int

    needs_rows: ClassVar[bool] = True

    def __call__(self, g: Gradients, state: State) -> tuple[Tensor, State]:
        """Return the average by the weights found so far, and the next state."""
        rows = rows_of(g)
        if "tau" not in state:  # the peers' part of κ, in the order of `names`
            state = state | self._start(g)
        seen = self._observed(g, rows, state)
        if state["step"] % STEPS_BETWEEN_SOLUTIONS == 0:
            seen |= self._solved(state) | {f"sent {name}": _send(seen[name]) for name in MEANS}
        following = state | seen
        used = by_name(following["tau"], following["names"], g.names)
        weight = used.sum()
        average = used @ rows / weight.clamp(min=torch.finfo(weight.dtype).tiny)
        following |= {"step": state["step"] + 1, "weight": weight}
        return torch.lerp(g.own, average, weight), following

    @property
    def _remembered(self) -> int:
        """How many steps the running means go back over; before that they are means of all."""
        return max(100, self.horizon // 5)

    def _start(self, g: Gradients) -> State:
        """Return what has been seen before the first step: nothing."""
        names = [*g.names, *g.left_out]
        n, d = len(names), len(g.own)
        matrix = g.own.new_zeros(n, n, dtype=torch.float64)
        noise = g.own.new_zeros(1 + n, dtype=torch.float64)
        means = {"bias": matrix, "squares": matrix, "counts": matrix, "noise": noise}
        tau, rows = g.own.new_zeros(n), g.own.new_zeros(1 + n, d)
        return {"names": names, "tau": tau, "rows": rows, "present": noise[1:], **means}

    def _observed(self, g: Gradients, rows: Tensor, state: State) -> State:
        """Return the running means after one more step.

        Bias products, their squares, noise, and counts.
        """
        names = state["names"]
        rows = torch.cat([g.own.unsqueeze(0), by_name(rows, g.names, names)])
        present = by_name(state["noise"].new_ones(len(g.names)), g.names, names)
        both = present * state["present"]  # nobody was at the step before the first
        mask = both[:, None] * both
        counts = state["counts"] + mask
        rate = mask / counts.clamp(min=1, max=self._remembered)
        now, before = rows[1:] - rows[0], state["rows"][1:] - state["rows"][0]
        lagged = (now @ before.mT).double()
        lagged = (lagged + lagged.mT) / 2
        change = ((rows - state["rows"]).square().sum(1) / 2).double()
        own_rate = torch.cat([rate.amax().reshape(1) if names else rate.new_zeros(1), rate.diag()])
        return {
            "rows": rows,
            "present": present,
            "bias": state["bias"] + rate * (lagged - state["bias"]),
            "squares": state["squares"] + rate * (lagged.square() - state["squares"]),
            "noise": state["noise"] + own_rate * (change - state["noise"]),
            "counts": counts,
        }

    def _solved(self, state: State) -> State:
        """Return the weights for the running means that were sent at the last such step, if they show somebody."""
        sent = {name: _arrived(state[f"sent {name}"]) for name in MEANS if f"sent {name}" in state}
        if not sent or not bool((sent["counts"].diag() >= MIN_STEPS_SEEN).any()):
            return {}
        tau: Tensor = state["tau"]
        return {"tau": torch.from_numpy(self._kappa(sent)[1:]).to(tau, non_blocking=True)}

    def _kappa(self, seen: Mapping[str, Tensor]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Solve for the weights; a peer that was seen too seldom has none."""
        bias, counts = seen["bias"], seen["counts"]
        error = (seen["squares"] - bias.square()).clamp(min=0) / counts.clamp(
            min=1, max=2 * self._remembered
        )
        shrunk = (1 - 4 * error / bias.square().clamp(min=1e-300)).clamp(min=0) * bias
        size = _pooled(bias.diag(), error.diag()).clamp(min=0).sqrt()
        kept = (
            torch.minimum(shrunk.clamp(min=0), size * size[:, None]).fill_diagonal_(0)
            + size.square().diag()
        )
        known = torch.cat([torch.tensor([True]), counts.diag() >= MIN_STEPS_SEEN]).numpy()
        matrix = torch.nn.functional.pad(kept, (1, 0, 1, 0)) + (seen["noise"] / self.horizon).diag()
        kappa = np.zeros(len(known))
        kappa[known] = simplex_minimum(matrix.numpy()[np.ix_(known, known)])
        return kappa


_ON_THE_WAY = WeakTensorKeyDictionary()
"""When copies to the host will have arrived.

A state that was saved and read again has none on the way.
"""


def _send(values: Tensor) -> Tensor:
    """Begin to copy a tensor to the host, and return the copy; `_arrived` waits for it."""
    if not values.is_cuda:
        return values.clone()
    copy = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
    _ON_THE_WAY[copy] = torch.cuda.current_stream(values.device).record_event()
    return copy


def _arrived(copy: Tensor) -> Tensor:
    """Return a copy on the host that `_send` began, once it is whole."""
    if copy in _ON_THE_WAY:
        _ON_THE_WAY[copy].synchronize()
    return copy.cpu()  # a state that was read again may be on the device


def _pooled(values: Tensor, variances: Tensor) -> Tensor:
    """Return for each value the mean of those that it cannot be told apart from, by how likely that is."""
    known = variances.clamp(min=1e-300)
    apart = (values[:, None] - values).square() / (2 * (known[:, None] + known))
    weights = torch.exp(-apart) / known
    return (weights @ values) / weights.sum(1)
