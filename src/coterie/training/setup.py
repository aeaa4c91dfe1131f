"""Before the first step of a run: what was asked for is checked, copied and opened."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeAlias

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from coterie.choosing import Chooser
from coterie.engines.capabilities import require
from coterie.engines.engine import Engine, MakeEngine
from coterie.engines.in_process.engine import InProcess
from coterie.engines.in_process.forward_options import DEFAULT_FORWARD, ForwardOptions
from coterie.errors import DataError, KnobError, ModelError
from coterie.evaluation.metrics import binary_accuracy, metrics_for
from coterie.gradients.parameters import Parameters
from coterie.learners.learner import Track
from coterie.learners.spec import Problem
from coterie.methods.rounds import Method
from coterie.rules import Alone, Rule
from coterie.training.captured import Captured, tell, why_not
from coterie.training.guard import ENOUGH, Guard
from coterie.users.examples import InMemory
from coterie.users.user import Loss, User

OptimizerLike: TypeAlias = Optimizer | Callable[..., Optimizer]


def check(loss: Loss, me: User, peers: Sequence[User], numbers: Mapping[str, int]) -> None:
    """Check that the numbers are above 0, and that every user has several classes where there are classes."""
    for name, number in numbers.items():
        if number < 1:
            raise KnobError(f"`{name}` must be at least 1, got {number}")
    for user in (me, *peers):
        targets = user.examples.targets if isinstance(user.examples, InMemory) else None
        if targets is None or targets.numel() > len(targets) or len(torch.unique(targets)) > 1:
            continue
        if targets.is_floating_point() and metrics_for(loss).get("accuracy") is not binary_accuracy:
            continue  # numbers, not classes
        raise DataError(
            f"user {user.name!r} has examples of one class only ({targets.flatten()[0].item()}), which says "
            "nothing about telling classes apart; give it examples of another, or leave it out"
        )


def plain(optimizer: OptimizerLike | None, lr: float | None, guard: str) -> tuple[OptimizerLike, float]:
    """Return the optimizer that holds a method's step size; what a method cannot use is a `KnobError`."""
    if optimizer not in (None, torch.optim.SGD):
        raise KnobError("a method takes plain gradient steps of its own: leave `optimizer` out, and give `lr`")
    if guard == "held-out":
        raise KnobError('a guard watches over a rule, not over a method: leave `guard` out, or set it to "off"')
    return torch.optim.SGD, 0.1 if lr is None else lr


def copies(
    model: nn.Module, optimizer: OptimizerLike, lr: float | None, device: torch.device | str | None
) -> tuple[nn.Module, Optimizer]:
    """Return copies of the model and its optimizer, on the device asked for, that are ours to change."""
    if isinstance(optimizer, Optimizer):
        if lr is not None:
            raise KnobError(
                f"`lr` ({lr}) and an optimizer that has its own were both given; set it in the optimizer"
            )
        model, made = copy.deepcopy((model, optimizer))
        model = _moved(model, device)
    else:
        model = _moved(copy.deepcopy(model), device)
        trainable = list(Parameters(model).named.values())
        made = optimizer(trainable) if lr is None else optimizer(trainable, lr=lr)
    ours = {id(p) for p in model.parameters()}
    if any(id(p) not in ours for group in made.param_groups for p in group["params"]):
        raise ModelError("the optimizer holds parameters of another model; make it from `model.parameters()`")
    if isinstance(made, LBFGS):
        raise KnobError("LBFGS evaluates the loss several times a step; use an optimizer that takes one gradient")
    return model, made


def _moved(model: nn.Module, device: torch.device | str | None) -> nn.Module:
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:  # torch was built without it, or there is none
        raise KnobError(
            f"`device` {str(device)!r} cannot be used here: {error}; leave it out for the CPU"
        ) from error


def guarded(guard: str, rule: Rule | Chooser | Method, me: User) -> tuple[bool, str]:
    """Say whether there is to be a guard, and why or why not."""
    n = 0 if me.validation is None else len(me.validation)
    if guard not in ("auto", "held-out", "off"):
        raise KnobError(f'`guard` must be "auto", "held-out" or "off", got {guard!r}')
    if guard == "off" or isinstance(rule, Alone | Method):
        return False, "off"
    if guard == "auto" and n < ENOUGH:
        return False, f"off: {n} validation examples, fewer than {ENOUGH}"
    if n < 2:
        raise KnobError(f"a guard compares on a validation set, but {me.name!r} has {n} validation examples")
    return True, f"held-out: {n} validation examples"


def captured(capture: bool | None, track: Track, guard: Guard | None) -> tuple[Captured | None, str]:
    """Return the steps as one program where that is wanted and possible, and what a record should say of it."""
    if capture is False or (capture is None and not track.x.is_cuda):
        return None, "off"
    tracks = [track] if guard is None else [track, guard.shadow]
    why = next(filter(None, map(why_not, tracks)), None)
    if why is not None:
        tell(why)
        return None, f"off: {why}"
    return Captured(*tracks), "a CUDA graph" if track.x.is_cuda else "one program"


def opened(
    engine: Engine | MakeEngine,
    problem: Problem,
    rule: Rule | Chooser | Method,
    forward_options: ForwardOptions,
    stack: ExitStack,
) -> Engine:
    """Return the engine once it can give what the rule needs; one that is made here is closed with the stack."""
    p = problem
    if engine is InProcess:
        engine = partial(InProcess, forward_options=forward_options)
    elif forward_options != DEFAULT_FORWARD:
        raise KnobError(
            "`forward_options` is for users in this process; leave `engine` out, or give them to the engine"
        )
    if callable(engine):
        engine = engine(p.model, p.loss, p.me, p.peers, batch_size=p.batch_size, seed=p.seed)
        stack.callback(engine.close)
    check_rule(rule, engine)
    return engine


def check_rule(rule: Rule | Chooser | Method, engine: Engine) -> None:
    """Refuse a rule that needs what this engine cannot give; a chooser says so when it chooses."""
    whose = f"`{type(rule).__name__}`"
    if isinstance(rule, Method):
        require(engine, "own_points", whose)
        return
    if isinstance(rule, Chooser):
        return
    rule.weights(engine.names)  # an unknown name in `tau`
    if rule.needs_rows:
        require(engine, "rows", whose)
