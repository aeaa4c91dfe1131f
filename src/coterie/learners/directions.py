"""The rules of many runs at once: from the gradients of all to the direction of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from coterie.rules.knobs import Knob, value_at
from coterie.rules.rules import Alone, BiasCorrection, WeightedAveraging


class Directions:
    """Weighted averaging and bias correction of many runs, a row each.

        d_t     = (1 − α) g_0 + α (g_avg − w c_t)
        c_{t+1} = (1 − β) c_t + β (g_avg − g_0)

    as in `coterie.rules`, with everybody's answer there.

    Args:
        rules: the rule of each run that listens, in the order of the rows.
        x: the parameters, of shape (K, d), for their dtype and device.

    Example:
        >>> directions = Directions({4: WeightedAveraging(0.25), 7: WeightedAveraging(0.5)}, torch.zeros(8, 1))
        >>> directions(own=torch.full((2, 1), 4.0), peers=torch.zeros(2, 1), step=0)
        tensor([[3.],
                [2.]])
    """

    def __init__(self, rules: Mapping[int, Alone | WeightedAveraging | BiasCorrection], x: Tensor) -> None:
        listening = {run: rule for run, rule in rules.items() if not isinstance(rule, Alone)}
        corrected = [rule for rule in listening.values() if isinstance(rule, BiasCorrection)]
        self._rows = {run: row for row, run in enumerate(listening)}
        self._alpha = _Column("alpha", [rule.alpha for rule in listening.values()], x)
        self._beta = _Column("beta", [rule.beta for rule in corrected], x)
        places = [row for row, rule in enumerate(listening.values()) if isinstance(rule, BiasCorrection)]
        self._corrected = torch.tensor(places, dtype=torch.int64, device=x.device)
        self._place = {row: place for place, row in enumerate(places)}

        def column(values: list[float]) -> Tensor:
            return x.new_tensor(values).unsqueeze(1)

        self._correction = column([float(rule.correction) for rule in corrected])
        self._first = column([float(rule.start == "first") for rule in corrected])
        self._warm = column([float(rule.warm_up) for rule in corrected])
        self._c = x.new_zeros(len(corrected), x.shape[1])

    def __call__(self, own: Tensor, peers: Tensor, step: int) -> Tensor:
        """Return the direction of each run, and remember its bias.

        Args:
            own: g_0, a row a run.
            peers: g_avg, a row a run; it is changed.
            step: how many steps were taken.
        """
        alpha = self._alpha.at(step)
        if self._place:
            bias = (peers - own).index_select(0, self._corrected)
            c = self._c = self._first * bias if not step else self._c
            beta = torch.maximum(self._beta.at(step), self._warm / (step + 1))
            peers.index_add_(0, self._corrected, c * self._correction, alpha=-1)
            self._c = torch.lerp(c, bias, beta)
        return torch.lerp(own, peers, alpha)

    def weight(self, run: int) -> float:
        """Return the weight that a run's peers had in the last step."""
        return self._alpha.last[self._rows[run]] if run in self._rows else 0.0

    def bias(self, run: int, steps: int) -> dict[str, Any]:
        """Return what a run's rule remembers of its peers' bias after so many steps, where it does."""
        place = self._place.get(self._rows.get(run, -1))
        return {} if place is None else {"seen": steps, "c": self._c[place].clone()}


class _Column:
    """A knob of many runs, a row each."""

    def __init__(self, name: str, knobs: Sequence[Any], x: Tensor) -> None:
        self.name, self.like = name, x
        self.moving: dict[int, Knob] = {row: knob for row, knob in enumerate(knobs) if callable(knob)}
        self.last = [0.0 if row in self.moving else value_at(name, knob, 0) for row, knob in enumerate(knobs)]
        self.values = x.new_tensor(self.last).unsqueeze(1)

    def at(self, step: int) -> Tensor:
        """Return the values at a step, of shape (rows, 1)."""
        if self.moving:
            for row, knob in self.moving.items():
                self.last[row] = value_at(self.name, knob, step)
            self.values = self.like.new_tensor(self.last).unsqueeze(1)
        return self.values
