"""The parameters of many runs as the rows of one matrix, stepped by few optimizers."""

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from coterie.errors import attributing_errors_to
from coterie.gradients.gradients import cut
from coterie.gradients.parameters import Parameters
from coterie.learners.spec import RunSpec

ELEMENTWISE = frozenset(
    {"Adadelta", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
"""The optimizers of `torch.optim` that treat every number of a parameter by itself.

Adagrad does too, but makes its
state before the first step, when the parameters are not stacked yet."""

FUSED = (torch.optim.Adam, torch.optim.AdamW)
"""The optimizers whose steps of many rows on a CPU are taken in one loop."""


def why_not_stacked(optimizer: Optimizer) -> str | None:
    """Say why one optimizer cannot step many rows, or None where it can."""
    kind = type(optimizer)
    if kind.__name__ not in ELEMENTWISE or kind is not getattr(torch.optim, kind.__name__):
        return f"{kind.__name__} is not known to work element by element"
    return "the optimizer has taken steps before" if optimizer.state else None


class Stack:
    """Rows of parameters, and an optimizer for all rows that have the same settings.

    An optimizer that works element by element treats stacked parameters as it treats each by
    itself. Where it does not (`why_not_stacked`), a setting of one row has an optimizer over
    parameters in the model's shapes.

    `x`, of shape (K, d), is where each run starts; it is changed in place. `settings`, in the order
    of the rows: a prepared run whose model, optimizer and scheduler they have, and how many rows
    those are.
    """

    def __init__(self, x: Tensor, settings: Sequence[tuple[RunSpec, int]]) -> None:
        self.x, self.direction = x, torch.zeros_like(x)
        self._settings = settings
        norms = [spec.clip_norm or math.inf for spec, count in settings for _ in range(count)]
        self.norms = None if set(norms) <= {math.inf} else x.new_tensor(norms).unsqueeze(1)
        self._steps: list[tuple[Optimizer, LRScheduler | None]] = []
        first = 0
        for spec, count in settings:
            rows: slice | int = slice(first, first + count)
            if why_not_stacked(spec.made_optimizer):
                if count > 1:
                    raise ValueError(
                        "an optimizer that does not work element by element steps one row"
                    )
                rows = first
            optimizer = _optimizer_over(spec, x[rows], self.direction[rows])
            made = spec.made_scheduler(optimizer)
            # one that follows the validation loss, which is not known here, steps elsewhere
            self._steps.append((optimizer, None if isinstance(made, ReduceLROnPlateau) else made))
            first += count

    @classmethod
    def of_model(cls, spec: RunSpec, x: Tensor, scheduler: LRScheduler | None) -> Self:
        """Return the one row of a model's own parameters, whose optimizer follows their `.grad`."""
        stack = cls(x.unsqueeze(0), ())
        follows_loss = isinstance(scheduler, ReduceLROnPlateau)
        stack._steps = [(spec.made_optimizer, None if follows_loss else scheduler)]
        return stack

    @classmethod
    def of(cls, spec: RunSpec, x: Tensor) -> Self:
        """Return rows of one run, stepped together where its optimizer allows it, else each by one of its own."""
        apart = why_not_stacked(spec.made_optimizer)
        return cls(x.clone(), [(spec, 1)] * len(x) if apart else [(spec, len(x))])

    def optimize(self, rates: Sequence[float] | Tensor) -> None:
        """Let every optimizer follow its rows of `direction`, by the step sizes of `rates()`."""
        if self.norms is not None:
            self.direction.copy_(cut(self.direction, self.norms))
        first = 0
        for optimizer, scheduler in self._steps:
            last = first + (0 if scheduler is None else len(optimizer.param_groups))
            with at_rates(optimizer, rates[first:last]) if len(rates) else contextlib.nullcontext():
                optimizer.step()
            first = last

    def schedule(self) -> None:
        """Let the schedules of step sizes go on."""
        with attributing_errors_to("the scheduler"):
            for optimizer, scheduler in self._steps:
                if scheduler is not None:
                    # another steps in its place, or schedules run ahead of a block of steps
                    optimizer._opt_called = True  # type: ignore[attr-defined]
                    scheduler.step()

    def rates(self) -> list[float]:
        """Return the step sizes that schedules change, as they are."""
        scheduled = [optimizer for optimizer, scheduler in self._steps if scheduler is not None]
        return [float(group["lr"]) for optimizer in scheduled for group in optimizer.param_groups]

    def make_capturable(self) -> None:
        """Let the optimizers count their steps on the device."""
        for optimizer, _ in self._steps:
            make_capturable(optimizer, self.x.device)

    def tensors(self) -> list[Tensor]:
        """Return the rows, and what the optimizers remember."""
        return [
            self.x,
            *(tensor for optimizer, _ in self._steps for tensor in state_tensors(optimizer)),
        ]

    def settings(self) -> list[Any]:
        """Return the numbers that a captured step has in it."""
        return [
            settings_of(optimizer, scheduled=bool(scheduler))
            for optimizer, scheduler in self._steps
        ]

    def schedules(self) -> list[dict[str, Any]]:
        """Return where the schedules are: their states, and the step sizes."""
        return [
            {
                "lr": [group["lr"] for group in optimizer.param_groups],
                "scheduler": scheduler and scheduler.state_dict(),
            }
            for optimizer, scheduler in self._steps
        ]

    def load_schedules(self, schedules: Sequence[dict[str, Any]]) -> None:
        """Go back to where the schedules were."""
        for (optimizer, scheduler), saved in zip(self._steps, schedules, strict=True):
            for group, rate in zip(optimizer.param_groups, saved["lr"], strict=True):
                group["lr"] = rate
            if scheduler is not None:
                scheduler.load_state_dict(saved["scheduler"])

    def forked(self, origins: Sequence[Sequence[int]]) -> "Stack":
        """Return a stack made by `of` whose rows are means of rows of this, optimizer's state included."""
        other = Stack.of(
            self._settings[0][0], torch.stack([_mean(self.x[list(rows)]) for rows in origins])
        )
        together = len(self._settings) == 1
        sources = [[0]] if together else origins
        for (optimizer, scheduler), places in zip(other._steps, sources, strict=True):
            olds = [self._steps[place] for place in places]
            _take_state(optimizer, [old for old, _ in olds], origins if together else None)
            if scheduler is not None:
                scheduler.load_state_dict(copy.deepcopy(olds[0][1].state_dict()))  # type: ignore[union-attr]
        return other

    def set_rates(self, optimizer: Optimizer) -> None:
        """Take over the step sizes of another optimizer of the same groups."""
        for each, _ in self._steps:
            for group, other in zip(each.param_groups, optimizer.param_groups, strict=True):
                group["lr"] = other["lr"]

    def forget(self) -> None:
        """Hold no more than the rows, after the last step."""
        self.direction = self.direction[:0].clone()
        for optimizer, _ in self._steps:
            optimizer.state.clear()
            for p in _parameters(optimizer):
                p.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later steps depend on."""
        return {
            "x": self.x,
            "optimizers": [optimizer.state_dict() for optimizer, _ in self._steps],
            "schedulers": [scheduler and scheduler.state_dict() for _, scheduler in self._steps],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state."""
        self.x.copy_(state["x"])
        saved = zip(self._steps, state["optimizers"], state["schedulers"], strict=True)
        for (optimizer, scheduler), optimizer_state, scheduler_state in saved:
            optimizer.load_state_dict(optimizer_state)
            if scheduler is not None:
                scheduler.load_state_dict(scheduler_state)


class Steps:
    """Steps of stacks: the rows of all whose optimizers have the same settings move by one call.

    Each keeps its optimizer, which later steps, checkpoints and forks go on from.
    """

    def __init__(self) -> None:
        self._of: list[int] = []
        # those of several only: what steps by itself is not held, as it may be large
        self._joint: list[tuple[Optimizer, list[Optimizer]]] = []

    def take(self, stacks: Sequence[Stack]) -> None:
        """Let stacks follow their directions, and the schedules of step sizes go on."""
        optimizers = [optimizer for stack in stacks for optimizer, _ in stack._steps]
        states = [id(optimizer.state) for optimizer in optimizers]
        if states != self._of:  # others, or one that has loaded its state
            joined = _joined(optimizers)
            self._of, self._joint = states, [one for one in joined if len(one[1]) > 1]
        together = {id(each) for _, members in self._joint for each in members}
        for stack in stacks:
            if stack.norms is not None:  # directions are cut to what is allowed
                stack.direction.copy_(cut(stack.direction, stack.norms))
        for joint, members in self._joint:
            _step(joint, members)
        for optimizer in optimizers:
            if id(optimizer) not in together:
                optimizer.step()
        for stack in stacks:
            if any(scheduler for _, scheduler in stack._steps):
                stack.schedule()


def _joined(optimizers: Sequence[Optimizer]) -> list[tuple[Optimizer, list[Optimizer]]]:
    """Return an optimizer for all of the same settings, over the parameters of all of them."""
    alike: dict[Any, list[Optimizer]] = {}
    for optimizer in optimizers:
        kind, hooks = type(optimizer), optimizer._optimizer_step_pre_hooks
        plain = kind.__name__ in ELEMENTWISE and kind is getattr(torch.optim, kind.__name__)
        by_itself = not plain or hooks or optimizer._optimizer_step_post_hooks
        settings = id(optimizer) if by_itself else str(settings_of(optimizer, scheduled=False))
        alike.setdefault((kind, settings), []).append(optimizer)
    made = []
    for members in alike.values():
        joint = members[0]
        if len(members) > 1:
            joint = copy.copy(joint)
            joint._warned_capturable_if_run_uncaptured = True
            joint.state = type(joint.state)(dict)
            joint.param_groups = [
                {**group, "params": [p for each in members for p in each.param_groups[k]["params"]]}
                for k, group in enumerate(joint.param_groups)
            ]
            for each in members:
                joint.state.update(each.state)
        made.append((joint, members))
    return made


def _step(joint: Optimizer, members: Sequence[Optimizer]) -> None:
    """Take the step of all members at once, or one by one where schedules have set them apart."""
    settings = [settings_of(each, scheduled=False) for each in members]
    if any(each != settings[0] for each in settings):
        for each in members:
            each.step()
        return
    for group, now in zip(joint.param_groups, settings[0], strict=True):
        group.update(now)  # a schedule may change more than step sizes
    known = len(joint.state)
    joint.step()
    if len(joint.state) > known:  # what is remembered was made in this step
        for each in members:
            each.state.update({p: joint.state[p] for p in _parameters(each) if p in joint.state})


def _mean(rows: Tensor) -> Tensor:
    return rows[0] if len(rows) == 1 else rows.mean(0)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _take_state(
    new: Optimizer, olds: Sequence[Optimizer], origins: Sequence[Sequence[int]] | None
) -> None:
    """Let an optimizer go on from others: from rows of one, or from the mean of some."""
    for group, old_group in zip(new.param_groups, olds[0].param_groups, strict=True):
        group.update(
            {key: copy.deepcopy(value) for key, value in old_group.items() if key != "params"}
        )
    befores = list(zip(*map(_parameters, olds), strict=True))
    for p, before in zip(_parameters(new), befores, strict=True):
        states: list[dict[str, Any]] = [old.state[q] for old, q in zip(olds, before, strict=True)]
        fresh: dict[str, Any] = {}
        for key, value in states[0].items():
            if not isinstance(value, Tensor) or not value.is_floating_point() or not value.ndim:
                fresh[key] = copy.deepcopy(value)
            elif origins is None:
                fresh[key] = _mean(torch.stack([state[key] for state in states])).clone()
            else:
                by_row = value.shape == before[0].shape
                fresh[key] = (
                    torch.stack([_mean(value[list(o)]) for o in origins])
                    if by_row
                    else value.clone()
                )
        new.state[p] = fresh


def _optimizer_over(spec: RunSpec, x: Tensor, direction: Tensor) -> Optimizer:
    """Return a copy of the optimizer that holds rows of parameters, or one row, in the place of the model's."""
    optimizer = copy.deepcopy(spec.made_optimizer, {id(p): p for p in spec.model.parameters()})
    # single steps beside captured ones are meant
    optimizer._warned_capturable_if_run_uncaptured = True
    parameters = Parameters(spec.model)
    names = {id(p): name for name, p in parameters.named.items()}
    values, slopes = parameters.unflatten(x), parameters.unflatten(direction)
    state = dict(optimizer.state)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        held = [(names[id(p)], p) for p in group["params"] if id(p) in names]
        pairs = [(values[name], slopes[name]) for name, _ in held]
        if x.ndim == 2 and len(held) == len(values):
            pairs = [(x, direction)]  # one tensor in the place of many
            group.update(_fused(optimizer, group, x))
        for value, slope in pairs:
            value.grad = slope
        if x.ndim == 1:
            optimizer.state.update({values[name]: state[p] for name, p in held if p in state})
        group["params"] = [value for value, _ in pairs]
    return optimizer


def _fused(optimizer: Optimizer, group: Mapping[str, Any], x: Tensor) -> dict[str, bool]:
    """Let one loop take the steps of an optimizer on a CPU, three times as fast, where nothing else was asked for.

    It reads memory in order: x must be whole, not columns of a larger matrix.
    """
    asked = any(group.get(key) for key in ("foreach", "fused", "capturable", "differentiable"))
    can = (
        type(optimizer) in FUSED
        and x.device.type == "cpu"
        and x.is_floating_point()
        and x.is_contiguous()
    )
    return {"fused": True} if can and not asked else {}


def why_not_capturable(optimizer: Optimizer) -> str | None:
    """Say why an optimizer's step cannot be captured, or None where it can."""
    official = type(optimizer) is getattr(torch.optim, type(optimizer).__name__, None)
    if not official or not (isinstance(optimizer, SGD) or "capturable" in optimizer.defaults):
        return f"{type(optimizer).__name__} is not known to be capturable"
    return None


def make_capturable(optimizer: Optimizer, device: torch.device) -> None:
    """Let an optimizer count its steps on the device."""
    if device.type == "cuda" and not isinstance(optimizer, SGD):
        optimizer._warned_capturable_if_run_uncaptured = True  # single steps are meant too
        for group in optimizer.param_groups:
            group["capturable"] = True
        for parameter, state in optimizer.state.items():
            state.update(
                {k: v.to(parameter.device) for k, v in state.items() if isinstance(v, Tensor)}
            )


@contextlib.contextmanager
def at_rates(optimizer: Optimizer, rates: Sequence[float] | Tensor) -> Iterator[None]:
    """Let an optimizer use these step sizes inside, one for each group; none: its own."""
    before = [dict(group) for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        group["lr"] = rate
        if isinstance(rate, Tensor) and isinstance(optimizer, SGD):
            # which alone reads a step size on the device
            group["fused"], group["foreach"] = True, False
    yield
    for group, was in zip(optimizer.param_groups, before, strict=True):
        group.update(was)


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Return what an optimizer remembers."""
    return [
        v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)
    ]


def settings_of(optimizer: Optimizer, *, scheduled: bool) -> list[dict[str, Any]]:
    """Return the numbers that a captured step has in it.

    Not the step size where a schedule changes it.
    """
    return [
        {
            key: value
            for key, value in group.items()
            if key != "params" and not (key == "lr" and scheduled)
        }
        for group in optimizer.param_groups
    ]
