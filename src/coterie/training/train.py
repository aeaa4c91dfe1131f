"""Train one run (Algorithm 1, with any optimizer of `torch.optim`): set up, choose, take the steps, finish."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from coterie.arguments import COUNT
from coterie.choosing import Chooser, MakesLearner
from coterie.choosing.sampled_gradients import OnParts
from coterie.engines.cpu_threads import cpu_threads, threads_for
from coterie.engines.engine import Engine, MakeEngine
from coterie.engines.in_process.engine import InProcess
from coterie.engines.in_process.forward_options import DEFAULT_FORWARD, ForwardOptions
from coterie.errors import KnobError
from coterie.evaluation.metrics import Metric
from coterie.gradients.norm_bound import FACTOR
from coterie.learners.learner import Learner
from coterie.learners.spec import STEPS, OptimizerLike, RunSpec, Scheduler
from coterie.methods.rounds import Method
from coterie.recording.claim import Claim, claimed
from coterie.recording.configuration import Configuration
from coterie.recording.interruption import interruptible
from coterie.rules import Rule
from coterie.training import setup
from coterie.training.checking import check, with_rule, with_usable_peers
from coterie.training.choose import choose, with_estimates
from coterie.training.hooks import HookLike, ProgressHook
from coterie.training.loop import TrainingLoop
from coterie.training.resuming import with_earlier_choice
from coterie.training.run import Run, RunOptions
from coterie.training.trackers import trackers_of
from coterie.users.user import Loss, User


def train(
    model: nn.Module,
    loss: Loss,
    me: User,
    peers: Sequence[User],
    rule: Rule | Chooser | Method | MakesLearner | None = None,
    *,
    optimizer: OptimizerLike | None = None,
    lr: float | None = None,
    scheduler: Scheduler | None = None,
    clip_norm: float | None = None,
    steps: int = STEPS,
    epochs: int | None = None,
    batch_size: int = 32,
    seed: int = 0,
    device: torch.device | str | None = None,
    metrics: Mapping[str, Metric] | None = None,
    evaluate_every: int | None = None,
    hooks: Sequence[HookLike] = (),
    norm_bound: float | None = FACTOR,
    exchange_every: int = 1,
    local_steps: int = 1,
    out: Path | str | None = None,
    trackers: Sequence[str] | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
    progress: bool | None = None,
    guard: Literal["auto", "held-out", "off"] = "auto",
    measure: bool | None = None,
    capture: bool | None = None,
    forward_options: ForwardOptions = DEFAULT_FORWARD,
    engine: Engine | MakeEngine = InProcess,
    threads: int | None = None,
) -> Run:
    """Train a personal model for user 0 with its peers' gradients.

    At every step all users compute a gradient at the same point, the rule makes a direction of them, and the
    optimizer follows it (Algorithm 1). The model that is passed in is not changed; that which is
    returned shares its frozen parameters. Ctrl-C ends the run after the step it is in, with everything saved;
    pressed twice it stops at once. Before the first step the theory's constants are measured, in sixteen passes
    that change nothing; see docs/estimates.md.

    Args:
        model: any module; training starts from its parameters, in the mode (train or eval) it is in.
        loss: the mean loss of a batch from (output, target).
        me: user 0; its validation set chooses the best model, its test set is looked at once, at the end.
        peers: the others.
        rule: how gradients become a direction: `Alone`, `WeightedAveraging`, `BiasCorrection`, …;
            `AdaptiveAveraging`, which has nothing to set, when None; knobs that are "auto" are chosen before the
            first step. Or a method of `coterie.methods`, whose rounds are then the steps.
        optimizer: a class of `torch.optim` (or a function of the parameters), or an optimizer of this very
            model, e.g. with parameter groups; Adam when None. A method takes plain steps of its own.
        lr: the step size; the optimizer's own default when None, and 0.1 for a method.
        scheduler: a function of the optimizer that returns a learning-rate scheduler, stepped at every step
            (`ReduceLROnPlateau`: at every evaluation, with the validation loss).
        clip_norm: the norm that the rule's direction is cut to before the optimizer follows it; not cut when None.
        steps: how many steps to take.
        epochs: in the place of `steps`, as many as user 0 has batches in so many passes over its examples.
        batch_size: examples each user draws for a gradient; all of them where it has fewer.
        seed: what batches and dropout are drawn from, with the user's name and the step.
        device: where to train; where the model is when None.
        metrics: by name, functions of (outputs, targets) over a whole set; accuracy or RMSE when None.
        evaluate_every: steps between evaluations; a fiftieth of the run when None.
        hooks: called as the run goes on: functions of a `Step`, called after every step, or instances of
            `coterie.Hook`. One that returns True from a step ends the run.
        norm_bound: leave out of a step what is more than so many times as long as the median of all peers'
            gradients, or, where only their sum is at hand, as the longest sum before; and where each is at hand,
            what keeps pointing against user 0 and most of the others. The record counts it as left out; None leaves
            out nothing. See docs/reliability.md.
        exchange_every: steps that user 0 takes for each exchange with the peers; in those between it uses what they
            last said, and the rule learns nothing of them. See docs/exchanges.md.
        local_steps: plain steps of the optimizer's size that every user takes from x, on a batch each, for one step
            of the run. The sum of what they follow takes the place of the user's gradient.
        out: a folder for the record, checkpoints and what trackers write.
        trackers: names of trackers that follow a run with `out`; TensorBoard, where it is installed, when None.
            Your own can be registered; see docs/extending.md.
        checkpoint_every: steps between checkpoints in `out`; a tenth of the run when None.
        resume: go on from the last checkpoint in `out`; from the start where there is none.
        progress: show a progress bar; None: when standard error is a terminal.
        guard: "held-out" keeps a model trained alone beside, compares the two on the validation set at every
            evaluation, restarts from it where the peers do harm, and gives the better of the two, for one more own
            gradient a step; "off" does not; "auto" does where there are validation examples. The default rule
            trains alone beside in any case, and without validation examples compares on own examples held out. A
            method is not restarted, and the model beside it takes as many own steps as it computes own gradients.
        measure: measure noise, bias and curvature before the first step, by sixteen passes over the users, and
            report them with the plan that they imply. None: where all examples are in this process.
        capture: take steps as one program that the host looks into only where something is recorded: on a GPU a
            captured CUDA graph. None: on a GPU. What cannot be captured is told, with the reason, and taken step
            by step. Hooks are called after every step all the same. See docs/performance.md.
        forward_options: autocast, channels last and `torch.compile` for training; see `ForwardOptions`.
        engine: where the users are: `InProcess`, another function that makes an engine over this run's model
            and users, which is closed at the end, or an engine.
        threads: CPU threads of torch while the run goes on. None: one where passes are small, so that threads would
            only wait for each other, else as many as torch has.

    Example:
        >>> import coterie
        >>> inputs = torch.eye(4).repeat(5, 1)
        >>> users = [User(name, inputs, inputs.sum(1, keepdim=True)) for name in ("me", "a", "b")]
        >>> rule = coterie.WeightedAveraging(alpha=0.5)
        >>> run = train(nn.Linear(4, 1), nn.functional.mse_loss, *(users[0], users[1:]), rule, lr=0.1)
        >>> run.record.points[-1].own_loss < 1e-3
        True
    """
    how: dict[str, Any] = {"optimizer": optimizer, "lr": lr, "scheduler": scheduler, "clip_norm": clip_norm}
    how |= {"norm_bound": norm_bound, "exchange_every": exchange_every, "local_steps": local_steps}
    how |= {"steps": steps, "batch_size": batch_size, "seed": seed, "device": device, "metrics": metrics}
    spec = RunSpec(model, loss, me, peers, rule, evaluate_every=evaluate_every, hooks=hooks, **how)
    if epochs is not None:
        spec = replace(spec, steps=_steps_in(epochs, spec))
    options = RunOptions(
        out, trackers, checkpoint_every, resume, progress, guard, measure, capture, forward_options, engine, threads
    )
    return train_spec(spec, options)


def _steps_in(epochs: int, spec: RunSpec) -> int:
    """Return how many batches user 0 has in some passes over its examples."""
    if spec.steps != STEPS:
        raise KnobError(f"`steps` ({spec.steps}) and `epochs` ({epochs}) were both given; leave one out")
    if spec.me.is_stream:
        raise KnobError("`epochs` has no meaning for a stream, which has no end; give `steps`")
    batches = math.ceil(len(spec.me) / spec.batch_size)
    return int(COUNT("epochs", epochs)) * batches


def train_spec(spec: RunSpec, options: RunOptions) -> Run:
    """Train a run that is specified; see `train`."""
    began = time.monotonic()
    with ExitStack() as held, ExitStack() as stack:
        run = set_up(spec, options, held, stack)
        interrupted = stack.enter_context(interruptible())
        run.open()
        stopped = run.loop.run(interrupted)
        stack.close()  # whom the engine has asked need not wait for the end
        return run.loop.finish(stopped, time.monotonic() - began)


@dataclass(frozen=True, eq=False)
class SetUpRun:
    """A run that is set up; once it is open its steps can be taken."""

    spec: RunSpec  # prepared
    loop: TrainingLoop
    configuration: Configuration
    claim: Claim | None
    resume: bool

    def open(self) -> None:
        """Begin the record, or resume the run that was left in the folder."""
        self.loop.open(self.configuration, self.claim, self.resume)


def set_up(
    spec: RunSpec,
    options: RunOptions,
    held: ExitStack,
    stack: ExitStack,
    *,
    learner_of: Callable[..., Learner] = setup.learner_of,
    known: dict[str, OnParts] | None = None,
) -> SetUpRun:
    """Set a run up: check, open the engine, claim the folder, choose, measure, make the learner and its guard.

    `held` keeps the folder and the number of threads, `stack` the engine and the progress bar. Runs that start at
    one point share `known`; see `before_training`.
    """
    forward, folder = options.forward_options, None if options.out is None else Path(options.out)
    save_every = max(1, spec.steps // 10) if options.checkpoint_every is None else options.checkpoint_every
    check(spec)
    spec = with_usable_peers(spec)
    trackers = [] if folder is None else trackers_of(folder, options.trackers)
    spec = with_rule(spec).prepared()
    guarded, guard = setup.guard_mode(options.guard, spec)
    engine = setup.opened(spec, options, stack)
    held.enter_context(cpu_threads(threads_for(options.threads, engine)))
    data = "" if folder is None else " ".join(user.fingerprint() for user in (spec.me, *spec.peers))
    frozen = "" if folder is None else setup.frozen_part(spec)
    configuration = setup.configuration_of(spec, engine, guard=guard, data=data, frozen=frozen)
    claim = None if folder is None else held.enter_context(claimed(folder))
    configuration = with_earlier_choice(configuration, folder, options.resume)

    rule, configuration = choose(spec, engine, configuration, progress=options.progress)
    if options.measure is not False:
        everywhere = options.measure is True
        configuration = with_estimates(configuration, spec, engine, rule, anywhere=everywhere, known=known)

    costs = setup.costs_of(spec, engine.names, configuration.peers)
    by_itself = guarded and not isinstance(rule, MakesLearner)  # whose learner guards itself
    watch = setup.guard_of(spec, costs, forward) if by_itself else None
    learner = learner_of(spec, rule, engine, costs, guarded=guarded, forward_options=forward)
    captured, how = setup.captured(options.capture, learner, watch)
    hooks = [*trackers, ProgressHook(options.progress, stack), *spec.hooks]
    loop = TrainingLoop(spec, learner, hooks, save_every=save_every, guard=watch, captured=captured)
    return SetUpRun(spec, loop, replace(configuration, capture=how), claim, options.resume)
