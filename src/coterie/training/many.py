"""Many runs as one program: seeds, users as user 0, rules and step sizes side by side."""

import copy
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.optim.lr_scheduler import ReduceLROnPlateau

from coterie.arguments import instance, listed
from coterie.choosing import chooser_for
from coterie.engines.cpu_threads import cpu_threads, threads_for
from coterie.engines.in_process.engine import InProcess
from coterie.errors import GradientError, KnobError, UserCodeError
from coterie.gradients.parameters import copied
from coterie.learners.captured import Captured, StackBlock
from coterie.learners.learner import RuleLearner
from coterie.learners.program import Program
from coterie.learners.spec import RunSpec
from coterie.learners.stack import Stack, why_not_capturable, why_not_stacked
from coterie.recording.configuration import Configuration
from coterie.recording.progress import Show, interruptible, progress_bar
from coterie.recording.record import Record
from coterie.rules import Alone
from coterie.training import setup
from coterie.training.algorithm import algorithm_of, with_choice
from coterie.training.loop import Loop
from coterie.training.ongoing import OngoingRun, Taken
from coterie.training.run import Run, Stopped
from coterie.training.setup import check, costs_of, with_rule, with_usable_peers
from coterie.training.together import HeldOutTogether
from coterie.training.train import train_spec
from coterie.users.examples import InMemory
from coterie.users.sampling import seeded
from coterie.users.trees import as_arguments, called, form, leaves
from coterie.users.user import User

_NOT_TOGETHER = ("out", "engine", "forward_options", "capture", "threads")
"""What runs that are one program cannot have each in its own way."""


@dataclass(frozen=True, eq=False)
class ReadyRun:
    """A run before its first step."""

    place: int  # among the runs asked for
    spec: RunSpec  # prepared; its rule is the one to follow, once it is chosen
    engine: InProcess  # over its users, with a model like its own
    configuration: Configuration  # what its record begins with
    why_by_itself: str | None  # why it cannot take part in a program

    def loop(self, *, follows: bool = True) -> OngoingRun:
        """Return its loop, of which the program takes the steps.

        Without the rule where that is not chosen.
        """
        costs = costs_of(self.spec, self.engine.names, self.configuration.peers)
        rule = self.spec.rule if follows else Alone()
        learner = RuleLearner(replace(self.spec, scheduler=None), rule, self.engine, costs)
        loop = OngoingRun(self.spec, learner, self.spec.hooks)
        loop.begin(Record(self.configuration))
        return loop

    def not_started(self) -> Run:
        """Return the run as Ctrl-C left it: with no step taken."""
        loop = self.loop(follows=False)
        loop.evaluate()
        return loop.finish(Stopped.CTRL_C, 0.0)


class ManyLoop(Loop):
    """Runs of rules that take the steps of one program: rows of one matrix from the question to the step."""

    def __init__(self, ready: Sequence[ReadyRun], show: Show | None = None) -> None:
        alike: dict[Any, list[ReadyRun]] = {}
        for each in ready:
            alike.setdefault(_setting(each.spec), []).append(each)
        together = f"one program of {len(ready)}"
        self.ready = [
            replace(each, configuration=replace(each.configuration, runs=together))
            for some in alike.values()
            for each in some
        ]
        self.loops = [each.loop() for each in self.ready]
        x = torch.stack([run.learner.x for run in self.loops])
        stack = Stack(x, [(some[0].spec, len(some)) for some in alike.values()])
        for run, row in zip(self.loops, x, strict=True):
            run.learner.x = run.learner.parameters.share(row)
        copies = self.ready[0].engine.copies()
        self.program = Program(copies, [each.spec for each in self.ready], stack)
        self.captured = self._captured()
        runs = {each.place: run for each, run in zip(self.ready, self.loops, strict=True)}
        super().__init__(runs, held_out=HeldOutTogether(copies, self.loops), show=show)
        self._row = {place: row for row, place in enumerate(runs)}
        self._counted = 0  # the steps that the runs know of

    def _captured(self) -> Captured | None:
        """Return the program's steps as captured ones, on a GPU, where that is possible."""
        possible = all(why_not_capturable(each.spec.made_optimizer) is None for each in self.ready)
        if not self.program.stack.x.is_cuda or not possible:
            return None
        for each, run in zip(self.ready, self.loops, strict=True):
            run.record.configuration = replace(each.configuration, capture="a CUDA graph")
        captured = Captured(StackBlock(self.program, undone=False))
        for run in self.loops:
            run.captured = captured  # whose end it tells
        return captured

    def advance(self, most: int) -> Mapping[int, Taken]:
        """Take a step in every run, or several that are captured."""
        program = self.program
        if self.captured is None or self.captured.advance(most) is None:
            program.advance()
        for run in self.going.values():
            run.learner.step = program.step
        due = any(run.due for run in self.going.values())
        if not due and not any(each.spec.hooks for each in self.ready):
            return dict.fromkeys(self.going, (math.nan, {}))
        self._bring_up()
        if due:
            first = next(iter(self.loops))
            since = program.step % first.spec.every or first.spec.every
            losses = (program.losses / since).tolist()
            program.losses.zero_()
            for place, run in self.going.items():
                run.losses = [losses[self._row[place]]]
        own = program.own_loss.tolist()
        return {place: (own[self._row[place]], {}) for place in self.going}

    def finish(self, stopped: Stopped | None, places: Sequence[int] | None = None) -> None:
        """End runs, those not that have failed."""
        self._bring_up()
        super().finish(stopped, places)

    def _bring_up(self) -> None:
        """Let the runs know of the steps that were taken, and drop those that have failed."""
        failed, steps = self.program.failed(), self.program.step - self._counted
        self._counted = self.program.step
        for place, run in list(self.going.items()):
            row, learner = self._row[place], run.learner
            if failed[row]:
                self.going.pop(place)
                continue
            learner.state = self.program.state(row)
            asked = list(run.spec.rule.weights(learner.engine.names))
            learner.count(asked, steps=steps)


def _setting(spec: RunSpec) -> tuple[Any, ...]:
    """Return what runs must have in common to share an optimizer and its scheduler."""
    names = {id(p): name for name, p in spec.model.named_parameters()}
    groups = spec.made_optimizer.param_groups
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    held = tuple(tuple(names[id(p)] for p in group["params"]) for group in groups)
    return type(spec.made_optimizer), str(options), held, id(spec.scheduler), spec.clip_norm


def train_many(specs: Sequence[RunSpec], *, progress: bool | None = None) -> list[Run]:
    """Train many personal models at once, and return what `train` without a guard returns for each.

    The parameters of all runs are the rows of one matrix. In every step the own batches of all go
    through the model together, then the peers', drawn once for all runs that share them; rules and
    optimizers work on all rows. Batches are those of `train`, so that a run differs from the same
    run by itself in rounding only. `Alone` and every `FormulaRule` can take part
    (`WeightedAveraging`, `BiasCorrection`, one's own), and whatever chooses one of them before the
    first step. Runs with the same loss, steps, evaluations, metrics and device, whose models differ
    in parameters only, are one program.

    A run that cannot take part is trained by `train` after the others, and
    `record.configuration.runs` says why. So is one whose gradients turn out not to be finite; where
    they are user 0's own, its `stopped` says so. Its hooks are then told of its steps from the
    first again. A run whose own code raises ends, the others go on, and a `UserCodeError` at the
    end has all of them. Ctrl-C ends all runs after the step they are in.

    Args:
        specs: the runs, each complete: `dataclasses.replace(base, rule=…, seed=…)` is a run like
            another.
        progress: show a progress bar; None: when standard error is a terminal.

    Example:
        >>> import coterie
        >>> inputs = torch.eye(4).repeat(5, 1)
        >>> me, *peers = (User(name, inputs, inputs.sum(1, keepdim=True)) for name in ("me", "a", "b"))
        >>> base = coterie.RunSpec(nn.Linear(4, 1), nn.functional.mse_loss, me, peers, lr=0.1, steps=500)
        >>> rules = [coterie.WeightedAveraging(alpha) for alpha in (0.1, 0.9)]
        >>> runs = train_many([replace(base, rule=rule, seed=seed) for rule in rules for seed in (0, 1)])
        >>> [run.record.points[-1].own_loss < 1e-3 for run in runs]
        [True, True, True, True]
        >>> runs[0].record.configuration.runs
        'one program of 4'
    """
    specs = listed(instance(RunSpec, ""), "a list of `coterie.RunSpec`s")("specs", specs)
    for name in _NOT_TOGETHER:
        if any(getattr(spec, name) != getattr(RunSpec, name) for spec in specs):
            raise KnobError(
                f"`train_many` takes no `{name}`: leave it out, or train that run by `train`"
            )
    specs = [with_usable_peers(spec) for spec in specs]
    ready = _ready(specs, progress)
    programs: dict[Hashable, list[ReadyRun]] = {}
    for each in ready:
        if each.why_by_itself is None:
            programs.setdefault(_program(specs[each.place]), []).append(each)
    runs: dict[int, Run] = {}
    errors: list[UserCodeError] = []
    stopped = False
    for some in programs.values():
        if not stopped:
            bar = progress_bar(progress, f"{len(some)} runs", some[0].spec.steps)
            threads = cpu_threads(threads_for(None, some[0].engine))
            with threads, interruptible() as interrupted, bar as show:
                loop = ManyLoop(some, show)
                loop.run(interrupted)
            runs, stopped = runs | loop.ended, loop.stopped
            errors += loop.errors
    for each, spec in zip(ready, specs, strict=True):
        if each.place not in runs:
            try:
                run = (
                    each.not_started()
                    if stopped
                    else _by_itself(spec, progress, each.why_by_itself)
                )
            except UserCodeError as error:
                errors.append(error)
                run = error.run
            runs[each.place] = run
            stopped = stopped or (run is not None and run.stopped is Stopped.CTRL_C)
    in_order = [runs[place] and replace(runs[place], spec=spec) for place, spec in enumerate(specs)]
    if errors:
        raise UserCodeError(
            f"{errors[0]}; all runs are in this error's `run`", in_order
        ) from errors[0].__cause__
    return in_order


def _ready(specs: Sequence[RunSpec], progress: bool | None) -> list[ReadyRun]:
    """Return every run before its first step; those that cannot take part with the reason."""
    engines: dict[Hashable, InProcess] = {}
    first_engines: dict[Hashable, InProcess] = {}
    models: dict[Hashable, nn.Module] = {}
    forms: dict[Hashable, Hashable] = {}
    ready: list[ReadyRun] = []
    for place, asked in enumerate(specs):
        spec, program = with_rule(asked).prepared(), _program(asked)
        model = models.setdefault(program, asked.model)
        alike = asked.model is model or _alike(model, spec)
        users = tuple(id(user) for user in (asked.me, *asked.peers))
        key = (program, users, asked.batch_size, None if alike else place)
        if key not in engines:
            check(spec)
            first = first_engines.get((program, _form(spec.me), spec.batch_size)) if alike else None
            engines[key] = spec.in_process(like=first)
            if alike:
                first_engines.setdefault((program, _form(spec.me), spec.batch_size), engines[key])
        algorithm_of(spec.rule).check(spec, engines[key])
        why = _why_by_itself(spec, engines[key])
        if not alike:
            why = why or "its model is not the one of the first run with other parameters"
        if why is None and forms.setdefault(program, _form(spec.me)) != _form(spec.me):
            why = "its examples have another shape or dtype than those of the first run"
        ready.append(
            ReadyRun(place, spec, engines[key], setup.configuration_of(spec, engines[key]), why)
        )
    return [_chosen(each, progress) for each in ready]


def _chosen(ready: ReadyRun, progress: bool | None) -> ReadyRun:
    """Let the chooser of a run choose its rule, where it has one and can take part."""
    chooser = chooser_for(ready.spec.rule)
    if ready.why_by_itself is not None or chooser is None:
        return ready
    choice = chooser.choose(ready.spec, ready.spec.in_process(), progress)
    if why := _not_stackable(choice.rule):
        return replace(ready, why_by_itself=why)
    configuration = with_choice(ready.configuration, choice)
    return replace(ready, spec=replace(ready.spec, rule=choice.rule), configuration=configuration)


def _why_by_itself(spec: RunSpec, engine: InProcess) -> str | None:
    """Say why a run cannot take part, or None where it can."""
    if max(spec.exchange_every, spec.local_steps) > 1:
        return "it has exchanges of its own (`exchange_every`, `local_steps`)"
    if chooser_for(spec.rule) is None and (why := _not_stackable(spec.rule)):
        return why
    if getattr(spec.rule, "aggregator", None) is not None:
        return "an aggregator needs every peer's gradient"
    reason = engine.capabilities.not_stacked or why_not_stacked(spec.made_optimizer)
    if reason is None and spec.scheduler is not None:
        schedule = spec.made_scheduler(copy.deepcopy(spec.made_optimizer))
        if isinstance(schedule, ReduceLROnPlateau):
            return "`ReduceLROnPlateau` follows the validation loss of one run"
    return reason


def _not_stackable(rule: object) -> str | None:
    if algorithm_of(rule).in_rows:
        return None
    return f"`{type(rule).__name__}` is not a rule that runs can follow together"


def _program(spec: RunSpec) -> Hashable:
    """Return what runs must have in common to be one program, beside models that differ in parameters only."""
    return id(spec.loss), spec.steps, spec.every, id(spec.metrics), str(spec.device)


def _alike(model: nn.Module, spec: RunSpec) -> bool:
    """Say whether a run's model is another model with other parameters, as far as a batch tells."""
    ours, other = (dict(each.state_dict(keep_vars=True)) for each in (model, spec.model))
    a, b = (
        [(name, p.shape, p.dtype, p.requires_grad) for name, p in each.items()]
        for each in (ours, other)
    )
    if a != b:
        return False
    device = next(iter(other.values())).device
    inputs = spec.me.to(device).batch(spec.batch_size, seed=spec.seed, step=0)[0]
    trained = {name: p for name, p in other.items() if p.requires_grad}
    try:
        with torch.no_grad(), seeded(spec.seed, spec.me.name, 0, device):
            expected = called(copied(spec.model), inputs)
            output = functional_call(copied(model).to(device), trained, *as_arguments(inputs))
            return all(
                torch.allclose(*pair) for pair in zip(leaves(output), leaves(expected), strict=True)
            )
    except Exception:  # a model that does not fit says so better where it is tried by itself
        return False


def _form(user: User) -> Hashable:
    """Return what the examples of runs in one program have in common."""
    held = user.examples
    return (form(held.inputs), form(held.targets)) if isinstance(held, InMemory) else ()


def _by_itself(spec: RunSpec, progress: bool | None, why: str | None) -> Run:
    """Train a run by itself, and say why."""
    try:
        run = train_spec(replace(spec, guard="off", measure=False, progress=progress))
    except GradientError as error:  # the others must not be lost with it
        run = error.run
    why = why or "with the others, a gradient was not finite, or too long"
    run.record.configuration = replace(run.record.configuration, runs=f"by itself: {why}")
    return run
