"""Many runs of one model and loss as one program: seeds, users as user 0, rules and step sizes side by side."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.func import functional_call
from torch.optim.lr_scheduler import ReduceLROnPlateau

from coterie.choosing import AdaptiveAveraging, Chooser, chooser_for
from coterie.engines.in_process.engine import InProcess
from coterie.errors import GradientError
from coterie.evaluation.metrics import Metric
from coterie.learners.side_by_side import engine_of, why_one_by_one
from coterie.learners.spec import Problem, Scheduler
from coterie.methods.rounds import Method
from coterie.recording.interruption import interruptible
from coterie.recording.progress import progress_bar
from coterie.rules import Alone, FormulaRule, Rule
from coterie.training import setup as preparing
from coterie.training.many_loop import Begun, Together
from coterie.training.run import Callback, Run
from coterie.training.train import configuration_of, train, with_choice
from coterie.users.examples import InMemory
from coterie.users.sampling import seeded
from coterie.users.user import Loss, User


@dataclass(frozen=True, eq=False)
class Wanted:
    """A run that is wanted from `train_many`; what is None is as for all.

    Args:
        me: user 0.
        peers: the others.
        rule: how gradients become a direction; `AdaptiveAveraging` when None.
        seed: what batches are drawn from, with the user's name and the step.
        lr: the step size.
        model: where to start: the model of all runs with other parameters.
        optimizer: as for `train`.
        scheduler: as for `train`; runs that are given the same one share it.
        callbacks: called with a `Step` after every step of this run; one that returns True ends it. Where the run
            is taken up again by itself, they are told its steps from the first again.
    """

    me: User
    peers: Sequence[User]
    rule: Rule | Chooser | Method | None = None
    seed: int = 0
    lr: float | None = None
    model: nn.Module | None = None
    optimizer: preparing.OptimizerLike | None = None
    scheduler: Scheduler | None = None
    callbacks: Sequence[Callback] = ()


def train_many(
    model: nn.Module,
    loss: Loss,
    wanted: Sequence[Wanted],
    *,
    optimizer: preparing.OptimizerLike | None = None,
    lr: float | None = None,
    scheduler: Scheduler | None = None,
    steps: int = 1000,
    batch_size: int = 32,
    device: torch.device | str | None = None,
    metrics: Mapping[str, Metric] | None = None,
    evaluate_every: int | None = None,
    progress: bool | None = None,
) -> list[Run]:
    """Train many personal models at once, and return what `train` without a guard returns for each.

    The parameters of all runs are the rows of one matrix. In every step the own batches of all go through the
    model together, then the peers', drawn once for all runs that share them; rules and optimizers work on all
    rows. Batches are those of `train`, so that a run differs from the same run by itself in rounding only. `Alone`,
    `WeightedAveraging` and `BiasCorrection` can take part, and whatever chooses one of them before the first step.

    A run that cannot take part is trained by `train` after the others, and `record.configuration.runs` says
    why. So is one whose gradients turn out not to be finite; where they are user 0's own, its `stopped` says so.
    Ctrl-C ends all runs after the step they are in.

    Args:
        model: any module; every run starts from its parameters, unless it has a model of its own.
        loss: the mean loss of a batch from (output, target).
        wanted: the runs.
        optimizer: as for `train`.
        lr: as for `train`.
        scheduler: as for `train`.
        steps: how many steps each run takes.
        batch_size: examples each user draws for a gradient; all of them where it has fewer.
        device: where to train; where the model is when None.
        metrics: as for `train`.
        evaluate_every: steps between evaluations; a fiftieth of the run when None.
        progress: show a progress bar; None: when standard error is a terminal.

    Example:
        >>> import coterie
        >>> inputs = torch.eye(4).repeat(5, 1)
        >>> me, *peers = (User(name, inputs, inputs.sum(1, keepdim=True)) for name in ("me", "a", "b"))
        >>> rules = [coterie.WeightedAveraging(alpha) for alpha in (0.1, 0.9)]
        >>> wanted = [Wanted(me, peers, rule, seed) for rule in rules for seed in (0, 1)]
        >>> runs = train_many(nn.Linear(4, 1), nn.functional.mse_loss, wanted, lr=0.1, steps=500)
        >>> [run.record.points[-1].own_loss < 1e-3 for run in runs]
        [True, True, True, True]
        >>> runs[0].record.configuration.runs
        'one program of 4'
    """
    every = max(1, int(steps) // 50) if evaluate_every is None else int(evaluate_every)
    common = _Common(
        *(model, loss, optimizer, lr, scheduler, int(steps), int(batch_size), device),
        *(metrics, every, progress),
    )
    begun = _begin(wanted, common)
    joined = [each for each in begun if each.why is None]
    runs: dict[int, Run] = {}
    stopped = False
    if joined:
        together = Together(joined, metrics, every)
        with interruptible() as interrupted, progress_bar(progress, f"{len(joined)} runs", common.steps) as show:
            runs, stopped = together.train(interrupted, show)
    for place, (each, asked) in enumerate(zip(begun, wanted, strict=True)):
        if place not in runs:
            runs[place] = each.not_begun(metrics) if stopped else _by_itself(asked, common, each.why)
            stopped = stopped or runs[place].stopped == "Ctrl-C"
    return [runs[place] for place in range(len(wanted))]


@dataclass(frozen=True, eq=False)
class _Common:
    """What all runs have in common, where they do not ask for something else."""

    model: nn.Module
    loss: Loss
    optimizer: preparing.OptimizerLike | None
    lr: float | None
    scheduler: Scheduler | None
    steps: int
    batch_size: int
    device: torch.device | str | None
    metrics: Mapping[str, Metric] | None
    every: int
    progress: bool | None

    def problem(self, wanted: Wanted, rule: Rule | Chooser | Method) -> Problem:
        """Return what a run is to learn, with copies of model and optimizer that are ours to change."""
        optimizer, lr = wanted.optimizer or self.optimizer, self.lr if wanted.lr is None else wanted.lr
        if isinstance(rule, Method):
            optimizer, lr = preparing.plain(optimizer, lr, "off")
        model, made = preparing.copies(wanted.model or self.model, optimizer or torch.optim.Adam, lr, self.device)
        scheduler = wanted.scheduler or self.scheduler
        users = wanted.me, tuple(wanted.peers)
        return Problem(model, self.loss, *users, made, scheduler, self.steps, self.batch_size, int(wanted.seed))


def _begin(wanted: Sequence[Wanted], common: _Common) -> list[Begun]:
    """Return every run before its first step; those that cannot take part with the reason."""
    engines: dict[tuple[int, ...], InProcess] = {}
    begun: list[Begun] = []
    for place, asked in enumerate(wanted):
        rule = AdaptiveAveraging() if asked.rule is None else asked.rule
        problem = common.problem(asked, rule)
        alike = asked.model in (None, common.model) or _alike(common.model, problem)
        users = (asked.me, *asked.peers)
        key = tuple(id(user) for user in users) + (() if alike else (place,))
        if key not in engines:
            numbers = {"steps": common.steps, "evaluate_every": common.every}
            preparing.check(common.loss, asked.me, asked.peers, numbers)
            engines[key] = engine_of(problem)
        preparing.check_rule(rule, engines[key])
        why = _why(rule, problem, engines[key])
        if not alike:
            why = why or "its model is not the one of all runs with other parameters"
        first = next((each.problem.me for each in begun if each.why is None), asked.me)
        if _form(asked.me) != _form(first):
            why = why or "its examples have another shape or dtype than those of the first run"
        configuration = configuration_of(problem, rule).with_engine(engines[key].describe())
        configuration = replace(configuration, evaluate_every=common.every)
        begun.append(Begun(place, problem, rule, engines[key], configuration, asked.callbacks, why))
    return [_chosen(each, common.progress) for each in begun]


def _chosen(begun: Begun, progress: bool | None) -> Begun:
    """Let the chooser of a run choose its rule, where it has one and can take part."""
    chooser = chooser_for(begun.rule)
    if begun.why is not None or chooser is None:
        return begun
    choice = chooser.choose(begun.problem, engine_of(begun.problem), progress)
    return replace(begun, rule=choice.rule, configuration=with_choice(begun.configuration, choice))


def _why(rule: Rule | Chooser | Method, problem: Problem, engine: InProcess) -> str | None:
    """Say why a run cannot take part, or None where it can."""
    if not isinstance(rule, Alone | FormulaRule | AdaptiveAveraging):
        return f"`{type(rule).__name__}` is not a rule that runs can follow together"
    if getattr(rule, "aggregator", None) is not None:
        return "an aggregator needs every peer's gradient"
    reason = why_one_by_one(problem, engine)
    if reason is None and problem.scheduler is not None:
        schedule = problem.scheduler(copy.deepcopy(problem.optimizer))
        if isinstance(schedule, ReduceLROnPlateau):
            return "`ReduceLROnPlateau` follows the validation loss of one run"
    return reason


def _alike(model: nn.Module, problem: Problem) -> bool:
    """Say whether a run's model is the model of all runs with other parameters, as far as a batch tells."""
    ours, other = (dict(each.state_dict(keep_vars=True)) for each in (model, problem.model))
    if [(name, p.shape, p.dtype, p.requires_grad) for name, p in ours.items()] != [
        (name, p.shape, p.dtype, p.requires_grad) for name, p in other.items()
    ]:
        return False
    device = next(iter(other.values())).device
    inputs = problem.me.batch(problem.batch_size, seed=problem.seed, step=0)[0].to(device)
    trained = {name: p for name, p in other.items() if p.requires_grad}
    try:
        with torch.no_grad(), seeded(problem.seed, problem.me.name, 0, device):
            expected = copy.deepcopy(problem.model)(inputs)
            found = functional_call(copy.deepcopy(model).to(device), trained, (inputs,))
            return bool(torch.allclose(found, expected))
    except Exception:  # a model that does not fit says so better where it is tried by itself
        return False


def _form(user: User) -> tuple[object, ...]:
    """Return what the examples of runs in one program have in common."""
    held = user.examples
    if not isinstance(held, InMemory):
        return ()
    return held.inputs.shape[1:], held.inputs.dtype, held.targets.shape[1:], held.targets.dtype


def _by_itself(asked: Wanted, common: _Common, why: str | None) -> Run:
    """Train a run by itself, and say why."""
    try:
        run = train(
            asked.model or common.model,
            common.loss,
            asked.me,
            asked.peers,
            asked.rule,
            optimizer=asked.optimizer or common.optimizer,
            lr=common.lr if asked.lr is None else asked.lr,
            scheduler=asked.scheduler or common.scheduler,
            steps=common.steps,
            batch_size=common.batch_size,
            seed=asked.seed,
            device=common.device,
            metrics=common.metrics,
            evaluate_every=common.every,
            callbacks=asked.callbacks,
            progress=common.progress,
            guard="off",
            measure=False,
        )
    except GradientError as error:  # the others must not be lost with it
        run = error.run
    why = why or "with the others, a gradient was not finite"
    run.record.configuration = replace(run.record.configuration, runs=f"by itself: {why}")
    return run
