"""Set up a run: its specification is checked, the engine opened, the learner and its guard made."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, cast

import torch

from coterie.choosing import AdaptiveAveraging, Chooser, MakesLearner
from coterie.engines.capabilities import require
from coterie.engines.engine import Engine, MakeEngine
from coterie.engines.in_process.engine import InProcess
from coterie.engines.in_process.forward_options import DEFAULT_FORWARD, ForwardOptions
from coterie.errors import DataError, KnobError
from coterie.evaluation.losses import ignored_class, is_over_classes
from coterie.evaluation.metrics import binary_accuracy, metrics_for
from coterie.learners.learner import Learner
from coterie.learners.spec import RunSpec
from coterie.methods.clients import Clients
from coterie.methods.rounds import Method, Rounds
from coterie.recording.configuration import Configuration, UserSummary
from coterie.recording.costs import Costs
from coterie.recording.describe import describe
from coterie.rules import Alone, Rule
from coterie.training.captured import Captured, block_of, warn_not_captured
from coterie.training.choose import Followed
from coterie.training.guard import MIN_HELD_OUT, Guard
from coterie.training.hooks import as_hook
from coterie.users.examples import Examples, plain_targets
from coterie.users.user import User


@dataclass(frozen=True, eq=False)
class RunOptions:
    """How a run is taken: what may differ between two runs of one specification. See `coterie.train`."""

    out: Path | str | None = None
    trackers: Sequence[str] = ("tensorboard",)
    checkpoint_every: int | None = None
    resume: bool = False
    progress: bool | None = None
    guard: Literal["auto", "held-out", "off"] = "auto"
    measure: bool = True
    capture: bool | None = None
    forward_options: ForwardOptions = DEFAULT_FORWARD
    engine: Engine | MakeEngine = InProcess


def with_rule(spec: RunSpec, guard: str) -> RunSpec:
    """Return the run with the rule that None stands for; a method's run with plain SGD for its step size."""
    if not isinstance(spec.rule, Method):
        return replace(spec, rule=AdaptiveAveraging()) if spec.rule is None else spec
    if spec.optimizer not in (None, torch.optim.SGD):
        raise KnobError("a method takes plain gradient steps of its own: leave `optimizer` out, and give `lr`")
    if guard == "held-out":
        raise KnobError('a guard watches over a rule, not over a method: leave `guard` out, or set it to "off"')
    return replace(spec, optimizer=torch.optim.SGD, lr=0.1 if spec.lr is None else spec.lr)


def check(spec: RunSpec, save_every: int = 1) -> None:
    """Refuse numbers below 1, hooks that are none, and users whose examples are all of one class."""
    numbers = {"steps": spec.steps, "evaluate_every": spec.every, "checkpoint_every": save_every}
    for name, number in numbers.items():
        if number < 1:
            raise KnobError(f"`{name}` must be at least 1, got {number}")
    for hook in spec.hooks:
        as_hook(hook)
    for user in (spec.me, *spec.peers):
        _check_classes(user, spec)


def _check_classes(user: User, spec: RunSpec) -> None:
    """Refuse a user whose examples are all of one class, or have no target that the loss does not ignore."""
    for examples in (user.examples, user.validation, user.test):
        targets = plain_targets(examples)
        if targets is not None and is_over_classes(spec.loss) and bool((targets == ignored_class(spec.loss)).all()):
            raise DataError(
                f"user {user.name!r} has a set whose targets are all {ignored_class(spec.loss)}, which the loss "
                "ignores: nothing to learn from; leave it out, or give it targets"
            )
    targets = plain_targets(user.examples)
    if targets is not None and is_over_classes(spec.loss):
        targets = targets[targets != ignored_class(spec.loss)] if targets.ndim == 1 else targets
    if targets is None or targets.numel() > len(targets) or len(torch.unique(targets)) > 1:
        return
    if targets.is_floating_point() and metrics_for(spec.loss).get("accuracy") is not binary_accuracy:
        return  # numbers, not classes
    raise DataError(
        f"user {user.name!r} has examples of one class only ({targets.flatten()[0].item()}), which says "
        "nothing about telling classes apart; give it examples of another, or leave it out"
    )


def opened(spec: RunSpec, options: RunOptions, stack: ExitStack) -> Engine:
    """Return the engine once it can give what the rule needs; one that is made here is closed with the stack."""
    engine = options.engine
    if engine is InProcess:
        engine = partial(InProcess, forward_options=options.forward_options)
    elif options.forward_options != DEFAULT_FORWARD:
        raise KnobError(
            "`forward_options` is for users in this process; leave `engine` out, or give them to the engine"
        )
    if callable(engine):
        users = spec.me, spec.peers
        engine = engine(spec.model, spec.loss, *users, batch_size=spec.batch_size, seed=spec.seed)
        stack.callback(engine.close)
    check_rule(spec.rule, engine)
    return engine


def check_rule(rule: Rule | Chooser | Method | MakesLearner, engine: Engine) -> None:
    """Refuse a rule that needs what this engine cannot give; a chooser says so when it chooses."""
    whose = f"`{type(rule).__name__}`"
    if isinstance(rule, Method):
        require(engine, "own_points", whose)
    elif isinstance(rule, MakesLearner):
        rule.check(engine)
    elif not isinstance(rule, Chooser):
        rule.weights(engine.names)  # an unknown name in `tau`
        if rule.needs_rows:
            require(engine, "rows", whose)


def configuration_of(spec: RunSpec, engine: Engine, *, guard: str = "off", data: str = "") -> Configuration:
    """Return what the record and a resumed run should know of what was asked for."""
    me, groups = spec.me, spec.made_optimizer.param_groups
    rates = "/".join(dict.fromkeys(f"{group['lr']:g}" for group in groups))
    held_out = {part: len(getattr(me, part) or ()) for part in ("validation", "test")}
    return Configuration(
        rule=describe(spec.rule),
        alone=isinstance(spec.rule, Alone),
        optimizer=f"{type(spec.made_optimizer).__name__}(lr={rates})",
        parameter_groups=[{k: str(v) for k, v in group.items() if k != "params"} for group in groups],
        scheduler=describe(spec.scheduler),
        loss=describe(spec.loss),
        model=describe(spec.model),
        me=UserSummary(name=me.name, examples=_count(me), **held_out),
        peers={peer.name: _count(peer) for peer in spec.peers},
        batch_size=spec.batch_size,
        seed=spec.seed,
        steps=spec.steps,
        evaluate_every=spec.every,
        guard=guard,
        data=data,
    ).with_engine(engine.describe())


def costs_of(spec: RunSpec, names: Sequence[str], peers: Mapping[str, int | str]) -> Costs:
    """Return where what is asked of the users is counted; `peers` has how many examples those have that tell."""
    size = spec.batch_size
    examples = {spec.me.name: _count(spec.me), **dict.fromkeys(names, size), **peers}
    return Costs({name: size if isinstance(n, str) else min(size, n) for name, n in examples.items()})


def learner_of(
    spec: RunSpec, rule: Followed, engine: Engine, costs: Costs, *, guarded: bool, forward_options: ForwardOptions
) -> Learner:
    """Return the learner of a run: of a rule, of a method, which takes rounds, or one of its own kind."""
    if isinstance(rule, Method):
        return Rounds(spec, rule, Clients(engine, spec.me, spec.peers, costs))
    if isinstance(rule, MakesLearner):
        return rule.learner(spec, engine, costs, guarded=guarded, forward_options=forward_options)
    return Learner(spec, rule, engine, costs)


def guard_mode(guard: str, spec: RunSpec) -> tuple[bool, str]:
    """Say whether there is to be a guard, and why or why not."""
    n = 0 if spec.me.validation is None else len(spec.me.validation)
    if guard not in ("auto", "held-out", "off"):
        raise KnobError(f'`guard` must be "auto", "held-out" or "off", got {guard!r}')
    if guard == "off" or isinstance(spec.rule, Alone | Method):
        return False, "off"
    if guard == "auto" and n < MIN_HELD_OUT:
        return False, f"off: {n} validation examples, fewer than {MIN_HELD_OUT}"
    if n < 2:
        raise KnobError(f"a guard compares on a validation set, but {spec.me.name!r} has {n} validation examples")
    return True, f"held-out: {n} validation examples"


def guard_of(spec: RunSpec, costs: Costs, forward_options: ForwardOptions) -> Guard:
    """Return a guard whose shadow starts where the model does, with an optimizer and batches like its own."""
    model, optimizer = copy.deepcopy((spec.model, spec.made_optimizer))
    alone = replace(spec, model=model, optimizer=optimizer, peers=())
    engine = alone.in_process(forward_options=forward_options)
    shadow = Learner(alone, Alone(), engine, costs)
    return Guard(shadow, spec.loss, cast("Examples", spec.me.validation), spec.every)


def captured(capture: bool | None, learner: Learner, guard: Guard | None) -> tuple[Captured | None, str]:
    """Return the steps as one program where that is wanted and possible, and what a record should say of it."""
    if capture is False or (capture is None and not learner.x.is_cuda):
        return None, "off"
    blocks = []
    for each in [learner] if guard is None else [learner, guard.shadow]:
        block = block_of(each)
        if isinstance(block, str):
            if capture or not isinstance(learner, Rounds):  # nobody asked to capture what never is: methods
                warn_not_captured(block)
            return None, f"off: {block}"
        blocks.append(block)
    return Captured(*blocks), "a CUDA graph" if learner.x.is_cuda else "one program"


def _count(user: User) -> int | str:
    return "a stream" if user.is_stream else len(user)
