"""Many runs as one program: seeds, users as user 0, rules, step sizes, or coalitions of peers side by side."""

import copy
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from coterie.arguments import instance, listed
from coterie.choosing import chooser_for
from coterie.choosing.mixture import linear_losses, why_not_linear
from coterie.engines.asking import part_of
from coterie.engines.cpu_threads import cpu_threads, threads_for
from coterie.engines.in_process.copies import Copies
from coterie.engines.in_process.engine import InProcess
from coterie.errors import GradientError, KnobError, UserCodeError
from coterie.evaluation.evaluate import example_losses
from coterie.gradients.parameters import copied
from coterie.learners.captured import Captured, StackBlock
from coterie.learners.learner import RuleLearner
from coterie.learners.spec import RunSpec
from coterie.learners.stack import Stack, why_not_capturable, why_not_stacked
from coterie.mixture.candidates import FOLDS, folds_of
from coterie.mixture.contributions import Contribution, contributions
from coterie.mixture.families import Array
from coterie.recording.progress import Show, interruptible, progress_bar
from coterie.recording.record import Record
from coterie.rules import Alone
from coterie.training.algorithm import algorithm_of, with_choice
from coterie.training.loop import Loop, OngoingRun, Taken
from coterie.training.run import Run, Stopped
from coterie.training.together import HeldOutTogether, Program
from coterie.training.train import (
    check,
    configuration_of,
    costs_of,
    train_spec,
    with_rule,
    with_usable_peers,
)
from coterie.users.examples import InMemory
from coterie.users.sampling import seeded
from coterie.users.trees import as_arguments, called, form, leaves
from coterie.users.user import User

_NOT_TOGETHER = ("out", "engine", "forward_options", "capture", "threads")
"""What runs that are one program cannot have each in its own way."""


class ManyLoop(Loop):
    """Runs of rules that take the steps of one program: rows of one matrix from the question to the step."""

    def __init__(
        self, runs: Mapping[int, OngoingRun], copies: Copies, show: Show | None = None
    ) -> None:
        alike: dict[Any, dict[int, OngoingRun]] = {}
        for place, run in runs.items():
            alike.setdefault(_setting(run.spec), {})[place] = run
        runs = {place: run for group in alike.values() for place, run in group.items()}
        x = torch.stack([run.learner.x for run in runs.values()])
        stack = Stack(
            x, [(next(iter(group.values())).spec, len(group)) for group in alike.values()]
        )
        self.program = Program(copies, [run.spec for run in runs.values()], stack)
        self.captured = self._captured([run.spec.made_optimizer for run in runs.values()])
        of_all: dict[str, Any] = {"runs": f"one program of {len(runs)}"}
        of_all |= {"capture": "a CUDA graph"} if self.captured is not None and x.is_cuda else {}
        for run, row in zip(runs.values(), x, strict=True):
            run.learner.x = run.learner.parameters.share(row)
            run.captured = self.captured  # whose end it tells
            run.begin(Record(replace(run.configuration, **of_all)))
        held_out = HeldOutTogether(copies, list(runs.values()))
        super().__init__(runs, held_out=held_out.scores, show=show)
        self._row = {place: row for row, place in enumerate(runs)}
        self._hooked = any(run.spec.hooks for run in runs.values())
        self._every = next(iter(runs.values())).spec.every
        self._counted = 0  # the steps that the runs know of

    def _captured(self, optimizers: Sequence[Optimizer]) -> Captured | None:
        """Return the program's steps as captured ones, on a GPU, where that is possible."""
        possible = all(why_not_capturable(optimizer) is None for optimizer in optimizers)
        if not self.program.stack.x.is_cuda or not possible:
            return None
        return Captured(StackBlock(self.program, undone=False))

    def advance(self, most: int) -> Mapping[int, Taken]:
        """Take a step in every run, or several that are captured."""
        program = self.program
        if self.captured is None or self.captured.advance(most) is None:
            program.advance()
        for run in self.going.values():
            run.learner.step = program.step
        due = any(run.due for run in self.going.values())
        if not due and not self._hooked:
            return dict.fromkeys(self.going, (math.nan, {}))
        self._bring_up()
        if due:
            since = program.step % self._every or self._every
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
    able, reasons = _able(specs, progress)
    programs: dict[Hashable, dict[int, OngoingRun]] = {}
    for place, ongoing in able.items():
        programs.setdefault(_program(specs[place]), {})[place] = ongoing
    runs: dict[int, Run] = {}
    errors: list[UserCodeError] = []
    stopped = False
    for together in programs.values():
        if not stopped:
            first = next(iter(together.values()))
            bar = progress_bar(progress, f"{len(together)} runs", first.spec.steps)
            engine = cast("InProcess", first.learner.engine)
            threads = cpu_threads(threads_for(None, engine))
            with threads, interruptible() as interrupted, bar as show:
                loop = ManyLoop(together, engine.copies(), show)
                loop.run(interrupted)
            runs, stopped = runs | loop.ended, loop.stopped
            errors += loop.errors
    for place, spec in enumerate(specs):
        if place not in runs:
            try:
                run = (
                    _not_started(spec)
                    if stopped
                    else _by_itself(spec, progress, reasons.get(place))
                )
            except UserCodeError as error:
                errors.append(error)
                run = error.run
            runs[place] = run
            stopped = stopped or (run is not None and run.stopped is Stopped.CTRL_C)
    in_order = [runs[place] and replace(runs[place], spec=spec) for place, spec in enumerate(specs)]
    if errors:
        raise UserCodeError(
            f"{errors[0]}; all runs are in this error's `run`", in_order
        ) from errors[0].__cause__
    return in_order


def _able(
    specs: Sequence[RunSpec], progress: bool | None
) -> tuple[dict[int, OngoingRun], dict[int, str]]:
    """Return, by place, the runs that can take part in a program, and of the others the reason why not."""
    engines: dict[Hashable, InProcess] = {}
    first_engines: dict[Hashable, InProcess] = {}
    models: dict[Hashable, nn.Module] = {}
    forms: dict[Hashable, Hashable] = {}
    able: dict[int, tuple[RunSpec, InProcess]] = {}
    reasons: dict[int, str] = {}
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
        if why is None:
            able[place] = spec, engines[key]
        else:
            reasons[place] = why
    runs: dict[int, OngoingRun] = {}
    for place, (asked, engine) in able.items():
        spec, configuration = asked, configuration_of(asked, engine)
        chooser = chooser_for(asked.rule)
        if chooser is not None:
            choice = chooser.choose(asked, asked.in_process(), progress)
            spec = replace(asked, rule=choice.rule)
            configuration = with_choice(configuration, choice)
        if why := _not_stackable(spec.rule):
            reasons[place] = why
            continue
        costs = costs_of(spec, engine, configuration)
        # the program's stack has the schedule of step sizes
        learner = RuleLearner(replace(spec, scheduler=None), spec.rule, engine, costs)
        runs[place] = OngoingRun(spec, learner, configuration, spec.hooks)
    return runs, reasons


def _not_started(spec: RunSpec) -> Run:
    """Return a run as Ctrl-C left it: with no step taken, and nothing chosen."""
    asked = with_rule(replace(spec, guard="off", measure=False)).prepared()
    engine = asked.in_process()
    configuration = configuration_of(asked, engine)
    learner = RuleLearner(asked, Alone(), engine, costs_of(asked, engine, configuration))
    run = OngoingRun(asked, learner, configuration, asked.hooks)
    run.begin(Record(configuration))
    run.first_point()
    return run.finish(Stopped.CTRL_C, 0.0)


def _why_by_itself(spec: RunSpec, engine: InProcess) -> str | None:
    """Say why a run cannot take part, or None where it can."""
    if spec.sample is not None:
        return "each step asks another sample of its peers"
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


def contributions_to(
    spec: RunSpec, groups: Mapping[str, Sequence[str]] | None, permutations: int
) -> dict[str, Contribution]:
    """Return what peers contribute to user 0; see `Run.contributions`."""
    names = [peer.name for peer in spec.peers]
    if not names:
        raise KnobError(
            "there is nobody to contribute, or the peers' rows are elsewhere: give"
            " `coterie.mixture.contributions.contributions` the losses of each coalition"
        )
    if unknown := {name for group in (groups or {}).values() for name in group} - set(names):
        raise KnobError(f"`groups` names {min(unknown)!r}, and the peers are {', '.join(names)}")
    losses = trained_losses(spec) if why_not_linear(spec) else linear_losses(spec)
    return contributions(losses, groups or names, permutations=permutations)


def trained_losses(spec: RunSpec) -> Callable[[frozenset[str]], Array]:
    """Return what gives the out-of-fold losses of the own examples with a coalition of peers, by training anew.

    The runs of all folds are one program (`train_many`). Nobody is `Alone`.
    """
    n = len(spec.me)
    if spec.me.is_stream or n < 2:
        raise KnobError(f"contributions need some examples of {spec.me.name!r}, not a stream")
    folds = folds_of(np.zeros((n, 1)), min(FOLDS, n), spec.seed, classes=False)
    apart = {"out": None, "hooks": (), "trackers": (), "engine": InProcess, "guard": "off"}
    plain = replace(spec, **apart, measure=False, progress=False, resume=False)  # type: ignore[arg-type]

    def losses(who: frozenset[str]) -> Array:
        peers = tuple(peer for peer in spec.peers if peer.name in who)
        seen = [torch.from_numpy(folds != fold) for fold in range(folds.max() + 1)]
        rule = spec.rule if peers else Alone()
        parts = [part_of(spec.me, one) for one in seen]
        specs = [replace(plain, me=me, peers=peers, rule=rule) for me in parts]
        runs = train_many(specs, progress=False)
        found = np.empty(n)
        for fold, run in enumerate(runs):
            held = part_of(spec.me, ~seen[fold]).examples
            found[folds == fold] = example_losses(run.model, spec.loss, held).numpy()
        return found

    return losses
