"""The rules of many runs at once: each kind of rule is called once, on the gradients of all its runs."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from coterie.gradients.gradients import Gradients
from coterie.rules.rule import FormulaRule, State, knob_names


class StackedRules:
    """The rules of many runs by number, in the order of the rows of x (R, d). All peers answer in every step."""

    def __init__(self, rules: Mapping[int, FormulaRule], x: Tensor) -> None:
        kinds: dict[Hashable, list[int]] = {}
        for row, rule in enumerate(rules.values()):
            kinds.setdefault(_kind(rule), []).append(row)
        runs, each = list(rules), list(rules.values())
        self._groups = [_Group([each[row] for row in rows], rows, x) for rows in kinds.values()]
        places = ((group, *pair) for group in self._groups for pair in enumerate(group.rows.tolist()))
        self._places = {runs[row]: (group, place) for group, place, row in places}

    def __call__(self, own: Tensor, peers: Tensor) -> Tensor:
        """Return the direction of each run, and remember the state of its rule."""
        if len(self._groups) == 1:
            return self._groups[0](own, peers)
        directions = torch.empty_like(own)
        for group in self._groups:
            some = group(own.index_select(0, group.rows), peers.index_select(0, group.rows))
            directions.index_copy_(0, group.rows, some)
        return directions

    def weight(self, run: int) -> float:
        """Return the weight that a run's peers had in the last step."""
        group, place = self._places[run]
        return float(group.plain(place)["weight"])

    def state(self, run: int) -> State:
        """Return the state of a run's rule."""
        group, place = self._places[run]
        tensors = {name: group.state[name][place].clone() for name in group.rule.memory}
        return {**group.plain(place), **tensors}


class _Group:
    """Runs whose rules differ in knobs and in the peers' weights only."""

    def __init__(self, rules: Sequence[FormulaRule], rows: Sequence[int], x: Tensor) -> None:
        self.rows, self.rule, self.x = torch.tensor(rows, device=x.device), rules[0], x
        self.names = knob_names(self.rule)
        settings = [tuple(getattr(rule, name) for name in self.names) for rule in rules]
        distinct = list(dict.fromkeys(settings))
        self.which = [distinct.index(setting) for setting in settings]
        self.distinct = [rules[settings.index(setting)] for setting in distinct]
        self.state = self.rule.init(x[self.rows])
        plain = {name: value for name, value in self.state.items() if name not in self.rule.memory}
        self.plains = [plain] * len(distinct)
        self.values: list[dict[str, float]] = []
        self.stacked: Any = self.rule

    def __call__(self, own: Tensor, peers: Tensor) -> Tensor:
        """Return the directions of these runs."""
        following = [rule.next_knobs(plain) for rule, plain in zip(self.distinct, self.plains, strict=True)]
        values = [numbers for numbers, _ in following]
        if values != self.values:
            columns = {name: [values[place][name] for place in self.which] for name in self.names}
            knobs = {name: self.x.new_tensor(column).unsqueeze(1) for name, column in columns.items()}
            self.values, self.stacked = values, self.rule.with_knobs(knobs)
        direction, state = self.stacked(Gradients(own, peers), self.state)
        self.plains = [plain for _, plain in following]
        self.state = {**state, **self.plains[0]}  # the numbers that a step depends on are the same in all runs
        return direction  # type: ignore[no-any-return]

    def plain(self, place: int) -> State:
        """Return the plain part of a run's state."""
        return self.plains[self.which[place]]


def _kind(rule: FormulaRule) -> Hashable:
    """Return what rules must have in common to be called together: the type, and all but knobs and weights."""
    apart = {*knob_names(rule), "tau"}
    values = [getattr(rule, field.name) for field in fields(rule) if field.name not in apart]  # type: ignore[arg-type]
    return type(rule), tuple(value if isinstance(value, Hashable) else id(value) for value in values)
