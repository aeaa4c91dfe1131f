"""Training: the loop of Algorithm 1, with any optimizer of `torch.optim`."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

import torch
from torch import nn

from coterie.choosing import AdaptiveAveraging, Choice, Chooser, chooser_for
from coterie.choosing.measuring import before_training
from coterie.engines.engine import Engine, MakeEngine
from coterie.engines.in_process.engine import InProcess
from coterie.engines.in_process.forward_options import DEFAULT_FORWARD, ForwardOptions
from coterie.errors import DataError
from coterie.evaluation.metrics import Metric
from coterie.gradients.parameters import Parameters
from coterie.learners.learner import Track
from coterie.learners.spec import Problem, Scheduler
from coterie.methods.clients import Clients
from coterie.methods.rounds import Method, Rounds
from coterie.recording.configuration import Configuration, UserSummary
from coterie.recording.costs import Costs
from coterie.recording.describe import describe
from coterie.recording.interruption import interruptible
from coterie.recording.progress import progress_bar
from coterie.recording.tensorboard import tensorboard
from coterie.rules import Alone, Rule
from coterie.training import setup as preparing
from coterie.training.guard import Guard
from coterie.training.loop import TrainingState, found_before
from coterie.training.run import Callback, Run, Step
from coterie.users.examples import Examples
from coterie.users.user import Loss, User

MOST = 2**30
"""How many bytes of peers' gradients may be held to measure constants that no knob waits for."""


def train(
    model: nn.Module,
    loss: Loss,
    me: User,
    peers: Sequence[User],
    rule: Rule | Chooser | Method | None = None,
    *,
    optimizer: preparing.OptimizerLike | None = None,
    lr: float | None = None,
    scheduler: Scheduler | None = None,
    steps: int = 1000,
    batch_size: int = 32,
    seed: int = 0,
    device: torch.device | str | None = None,
    metrics: Mapping[str, Metric] | None = None,
    evaluate_every: int | None = None,
    callbacks: Sequence[Callback] = (),
    out: Path | str | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
    progress: bool | None = None,
    guard: Literal["auto", "held-out", "off"] = "auto",
    measure: bool = True,
    capture: bool | None = None,
    forward_options: ForwardOptions = DEFAULT_FORWARD,
    engine: Engine | MakeEngine = InProcess,
) -> Run:
    """Train a personal model for user 0 with its peers' gradients.

    At every step all users compute a gradient at the same point, the rule makes a direction of them, and the
    optimizer follows it (Algorithm 1). The model that is passed in is not changed. Ctrl-C ends the run after
    the step it is in, with everything saved; pressed twice it stops at once. Before the first step the theory's
    constants are measured, in eight passes that change nothing; see docs/estimates.md.

    Args:
        model: any module; training starts from its parameters, in the mode (train or eval) it is in.
        loss: the mean loss of a batch from (output, target).
        me: user 0; its validation set chooses the best model, its test set is looked at once, at the end.
        peers: the others.
        rule: how gradients become a direction: `Alone`, `WeightedAveraging`, `BiasCorrection`, …;
            or what chooses one before the first step: `AdaptiveAveraging`, which has nothing to set, when None. Or
            a method of `coterie.methods`, whose rounds are then the steps.
        optimizer: a class of `torch.optim` (or a function of the parameters), or an optimizer of this very
            model, e.g. with parameter groups; Adam when None. A method takes plain steps of its own.
        lr: the step size; the optimizer's own default when None, and 0.1 for a method.
        scheduler: a function of the optimizer that returns a learning-rate scheduler, stepped at every step
            (`ReduceLROnPlateau`: at every evaluation, with the validation loss).
        steps: how many steps to take.
        batch_size: examples each user draws for a gradient; all of them where it has fewer.
        seed: what batches and dropout are drawn from, with the user's name and the step.
        device: where to train; where the model is when None.
        metrics: by name, functions of (outputs, targets) over a whole set; accuracy or RMSE when None.
        evaluate_every: steps between evaluations; a fiftieth of the run when None.
        callbacks: called with a `Step` after every step; one that returns True ends the run.
        out: a folder for the record, checkpoints and TensorBoard's events (where it is installed).
        checkpoint_every: steps between checkpoints in `out`; a tenth of the run when None.
        resume: go on from the last checkpoint in `out`; from the start where there is none.
        progress: show a progress bar; None: when standard error is a terminal.
        guard: "held-out" keeps a model trained alone beside, compares the two on the validation set at every
            evaluation, restarts from it where the peers do harm, and gives the better of the two; "off" does
            not; "auto" does where there are 100 validation examples.
        measure: measure noise, bias and curvature before the first step, by nine passes over the users, and report
            them with the plan that they imply.
        capture: take steps as one program that the host looks into only where something is recorded: on a GPU a
            captured CUDA graph. None: on a GPU. What cannot be captured is told, with the reason, and taken step
            by step; callbacks are called after every step all the same. See docs/performance.md.
        forward_options: autocast, channels last and `torch.compile` for training; see `ForwardOptions`.
        engine: where the users are: `InProcess`, another function that makes an engine over this run's model
            and users, which is closed at the end, or an engine.

    Example:
        >>> import coterie
        >>> inputs = torch.eye(4).repeat(5, 1)
        >>> users = [User(name, inputs, inputs.sum(1, keepdim=True)) for name in ("me", "a", "b")]
        >>> rule = coterie.WeightedAveraging(alpha=0.5)
        >>> run = train(nn.Linear(4, 1), nn.functional.mse_loss, *(users[0], users[1:]), rule, lr=0.1)
        >>> run.record.points[-1].own_loss < 1e-3
        True
    """
    began = time.monotonic()
    steps, batch_size, seed = int(steps), int(batch_size), int(seed)
    every = max(1, steps // 50) if evaluate_every is None else int(evaluate_every)
    keep = max(1, steps // 10) if checkpoint_every is None else int(checkpoint_every)
    folder = None if out is None else Path(out)
    rule = AdaptiveAveraging() if rule is None else rule
    preparing.check(loss, me, peers, {"steps": steps, "evaluate_every": every, "checkpoint_every": keep})
    if isinstance(rule, Method):
        optimizer, lr = preparing.plain(optimizer, lr, guard)
    model, optimizer = preparing.copies(model, optimizer or torch.optim.Adam, lr, device)
    problem = Problem(model, loss, me, tuple(peers), optimizer, scheduler, steps, batch_size, seed)
    guarded, why = preparing.guarded(guard, rule, me)
    with contextlib.ExitStack() as stack:
        engine = preparing.opened(engine, problem, rule, forward_options, stack)
        data = "" if folder is None else " ".join(user.fingerprint() for user in (me, *peers))
        configuration = replace(configuration_of(problem, rule), data=data, guard=why, evaluate_every=every)
        configuration = found_before(configuration.with_engine(engine.describe()), folder, resume)
        configuration, followed = _chosen(configuration, problem, rule, engine, progress)
        if measure and not (configuration.estimates or configuration.not_measured):
            configuration = _measured(configuration, problem, engine, followed)
        costs = costs_of(me, engine.names, configuration.peers, batch_size)
        watch = _shadowed(problem, every, costs, forward_options) if guarded else None
        track = track_of(problem, followed, engine, costs)
        captured, how = preparing.captured(capture, track, watch)
        configuration = replace(configuration, capture=how)
        training = TrainingState(track, loss, me, metrics, watch, captured=captured)
        stopped: str | None = None
        interrupted = stack.enter_context(interruptible())
        training.open(configuration, folder, resume)
        show = stack.enter_context(progress_bar(progress, type(followed).__name__, steps))
        write = stack.enter_context(tensorboard(folder and folder / "tensorboard"))
        while track.step < steps and not stopped:
            near = min(every - track.step % every, keep - track.step % keep, steps - track.step)
            own_loss, left_out = training.advance(1 if callbacks else near)
            point = training.evaluate() if track.step % every == 0 or track.step == steps else None
            if point:
                write(point)
            if track.step % keep == 0:
                training.save()
            show(track.step, own_loss, track.weight, track.best.get("loss"))
            told = Step(track.step, own_loss, track.weight, left_out, point, model)
            if [callback for callback in callbacks if callback(told) is True]:
                stopped = "a callback"
            if interrupted():
                stopped = "Ctrl-C"
    return training.finish(stopped, time.monotonic() - began)


def configuration_of(problem: Problem, rule: Rule | Chooser | Method) -> Configuration:
    """Return what the record and a resumed run should know of what was asked for."""
    me, groups = problem.me, problem.optimizer.param_groups
    rates = "/".join(dict.fromkeys(f"{group['lr']:g}" for group in groups))
    held_out = {part: len(getattr(me, part) or ()) for part in ("validation", "test")}
    return Configuration(
        rule=describe(rule),
        alone=isinstance(rule, Alone),
        optimizer=f"{type(problem.optimizer).__name__}(lr={rates})",
        parameter_groups=[{k: str(v) for k, v in group.items() if k != "params"} for group in groups],
        scheduler=describe(problem.scheduler),
        loss=describe(problem.loss),
        model=describe(problem.model),
        me=UserSummary(name=me.name, examples=_count(me), **held_out),
        peers={peer.name: _count(peer) for peer in problem.peers},
        batch_size=problem.batch_size,
        seed=problem.seed,
        steps=problem.steps,
    )


def _chosen(
    configuration: Configuration,
    problem: Problem,
    rule: Rule | Chooser | Method,
    engine: Engine,
    progress: bool | None,
) -> tuple[Configuration, Rule | Method]:
    """Return the rule to follow, chosen now or before, and the configuration with the account of the choice."""
    chooser = chooser_for(rule)
    if chooser is None:
        return configuration, cast("Rule | Method", rule)
    if not configuration.choice:
        configuration = with_choice(configuration, chooser.choose(problem, engine, progress))
    return configuration, chooser.rule_from(configuration.choice)


def with_choice(configuration: Configuration, choice: Choice) -> Configuration:
    """Return a configuration with the account of a choice, and with the constants measured for it, if any."""
    estimates = configuration.estimates if choice.estimates is None else choice.estimates.to_plain()
    return replace(configuration, choice=dict(choice.account), estimates=estimates)


def _measured(configuration: Configuration, problem: Problem, engine: Engine, rule: Rule | Method) -> Configuration:
    """Return a configuration with the constants at the start, or with why they are not measured."""
    if isinstance(rule, Alone | Method) or not engine.capabilities.local:
        return configuration  # elsewhere gradients may have a price
    parameters = Parameters(problem.model)
    held = len(engine.names) * parameters.size * parameters.dtype.itemsize
    if held > MOST and not rule.needs_rows:
        why = f"every peer's gradient at once would take {held / 2**30:.1f} GiB"
        return replace(configuration, not_measured=why)
    try:
        return replace(configuration, estimates=before_training(engine, problem).to_plain())
    except DataError as error:
        return replace(configuration, not_measured=str(error))


def track_of(problem: Problem, rule: Rule | Method, engine: Engine, costs: Costs) -> Track:
    """Return the model at the start of its way."""
    schedule = problem.scheduler and problem.scheduler(problem.optimizer)
    if isinstance(rule, Method):
        users = Clients(engine, problem.me, problem.peers, costs)
        return Rounds(problem.model, rule, users, problem.optimizer, schedule)
    return Track(problem.model, rule, engine, problem.optimizer, scheduler=schedule, costs=costs)


def _shadowed(problem: Problem, every: int, costs: Costs, forward_options: ForwardOptions) -> Guard:
    """Return a guard whose shadow starts where the model does, with an optimizer and batches like its own."""
    model, optimizer = copy.deepcopy((problem.model, problem.optimizer))
    size, seed = problem.batch_size, problem.seed
    engine = InProcess(model, problem.loss, problem.me, batch_size=size, seed=seed, forward_options=forward_options)
    shadow = track_of(replace(problem, model=model, optimizer=optimizer), Alone(), engine, costs)
    return Guard(shadow, problem.loss, cast("Examples", problem.me.validation), every)


def costs_of(me: User, names: Sequence[str], peers: Mapping[str, int | str], batch_size: int) -> Costs:
    """Return where what is asked of the users is counted; `peers` has how many examples those have that tell."""
    examples = {me.name: _count(me), **dict.fromkeys(names, batch_size), **peers}
    return Costs({name: batch_size if isinstance(n, str) else min(batch_size, n) for name, n in examples.items()})


def _count(user: User) -> int | str:
    return "a stream" if user.is_stream else len(user)
