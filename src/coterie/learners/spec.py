"""The description of a run: what is trained, for whom, with whom and how."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from types import FunctionType, MethodType
from typing import Annotated, Any, Literal, Self, TypeAlias, cast

import torch
from torch import nn
from torch.optim import LBFGS, Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from coterie.arguments import (
    ANYTHING,
    COUNT,
    FLAG,
    POSITIVE,
    Check,
    check_settings,
    either,
    function,
    instance,
    listed,
    mapped,
    one_of,
    optional,
    real,
    shown,
    where,
)
from coterie.engines.engine import Engine, MakeEngine
from coterie.engines.in_process.engine import InProcess
from coterie.engines.in_process.forward_options import DEFAULT_FORWARD, ForwardOptions
from coterie.errors import KnobError, ModelError, attributing_errors_to
from coterie.evaluation.losses import as_loss, on_device
from coterie.evaluation.metrics import Metric
from coterie.gradients.norm_bound import FACTOR
from coterie.gradients.parameters import Parameters, copied
from coterie.recording.configuration import StepSettings
from coterie.users.user import PEERS, USER, Loss, User

OptimizerLike: TypeAlias = Optimizer | Callable[..., Optimizer]
"""An optimizer of the model, or what makes one from its parameters."""

Scheduler: TypeAlias = Callable[[Optimizer], LRScheduler]
"""What makes a scheduler of an optimizer's step size."""

LR = 0.01
"""Adam's step size, where nothing says one."""

RESERVED_METRICS = frozenset({"loss", "step"})
"""Names that the record uses itself."""


def _folder(value: Any) -> Path:
    """Return the path of a folder, which need not be there yet."""
    folder = Path(value)
    if not str(value) or "\0" in str(value) or (folder.exists() and not folder.is_dir()):
        raise ValueError
    return folder


MODEL = instance(
    nn.Module, "a `torch.nn.Module`", {type: "make one of it: `model=Net()`"}, ModelError
)
LOSS = function(
    "a function of (output, target), the mean over the batch",
    {type: "make one of it: `loss=Loss()`"},
    ModelError,
)
_OPTIMIZER = either(
    instance(Optimizer, ""),
    function(
        "a class of `torch.optim`, a function of the parameters, or an optimizer of this model",
        {
            str: "write `torch.optim.SGD`",
            (list, tuple): "one optimizer may have several parameter groups",
        },
    ),
)
_SCHEDULER = function(
    "a function of the optimizer that returns a learning-rate scheduler",
    {(LRScheduler, str): "write `scheduler=lambda optimizer: StepLR(optimizer, 10)`"},
)
_METRICS = mapped(
    function("a function of (outputs, targets)"),
    "functions of (outputs, targets) by name",
    {(list, tuple, set): 'name them: `metrics={"f1": f1}`'},
)
_HOOKS = listed(
    ANYTHING,
    "a list of functions of a `Step` or instances of `coterie.Hook`",
    {(FunctionType, MethodType): "for one hook write `hooks=[hook]`"},
)
_TRACKERS = listed(instance(str, ""), "a list of names", {str: 'write `trackers=["tensorboard"]`'})
_ENGINE = Check(
    "be an engine, or a function that makes one",
    where(lambda value: callable(value) or hasattr(value, "gradients")),
    remedies={type(None): "leave it out for this process"},
)
_FORWARD = instance(ForwardOptions, "a `coterie.ForwardOptions`", {type(None): "leave it out"})
_YES_NO_AUTO = one_of(*(True, False, None))


@dataclass(frozen=True, eq=False, kw_only=True)
class RunSettings(StepSettings):
    """How a model is trained, whether for one user or for everybody.

    A field here is an argument of `coterie.train` and `coterie.train_everyone`. One of plain data
    that commands, federations and records should have as well stands in `StepSettings`.

    Args:
        optimizer: A class of `torch.optim` (or a function of the parameters), or an optimizer
            of this very model, e.g. with parameter groups; Adam when None. A method takes plain
            steps of its own.
        scheduler: A function of the optimizer that returns a learning-rate scheduler, stepped
            at every step (`ReduceLROnPlateau`: at every evaluation, with the validation loss).
        clip_norm: Norm that the rule's direction is clipped to; not clipped when None.
        norm_bound: Ignore a peer's gradient longer than `norm_bound` times the median of all
            (if only the sum is known: times the longest sum so far), and a peer that keeps
            opposing user 0 and most peers. The record counts what is ignored; None ignores
            nothing. Only None matters to `AdaptiveAveraging`. See docs/reliability.md.
        device: Where to train; where the model is when None.
        metrics: By name, functions of (outputs, targets) over a whole set; accuracy or RMSE
            when None.
        evaluate_every: Steps between evaluations; a fiftieth of the run when None.
        out: A folder for the record, checkpoints and what trackers write.
        trackers: Names of trackers that follow a run with `out`; TensorBoard, where it is
            installed, when None. Your own can be registered; see docs/extending.md.
        checkpoint_every: Steps between checkpoints in `out`; a tenth of the run when None.
            With peers elsewhere also every ten seconds.
        resume: Go on from the last checkpoint in `out`; from the start where there is none.
        progress: Show a progress bar; None: when standard error is a terminal.
        guard: "held-out" trains a model alone beside, compares the two on the validation set at
            every evaluation, restarts from it where the peers do harm, and returns the better
            of the two, for one more own gradient a step; "off" does not; "auto" does where
            there are validation examples. The default rule trains alone beside in any case, and
            without validation examples compares on own examples held out. A method is not
            restarted, and the model beside it takes as many own steps as it computes own
            gradients.
        measure: Measure noise, bias and curvature before the first step, by sixteen passes over
            the users, and report them with the plan that they imply. None: for a rule with
            knobs, where all examples are in this process.
        threads: CPU threads of torch while the run goes on. None: one where passes are small,
            so that threads would only wait for each other, else as many as torch has.
    """

    optimizer: Annotated[OptimizerLike | None, optional(_OPTIMIZER)] = None
    scheduler: Annotated[Scheduler | None, optional(_SCHEDULER)] = None
    clip_norm: Annotated[float | None, optional(POSITIVE)] = None
    norm_bound: Annotated[
        float | None, optional(real("be at least 1", lambda value: value >= 1))
    ] = FACTOR
    device: Annotated[
        torch.device | str | None,
        optional(instance((str, torch.device), 'a device such as "cpu" or "cuda:0"')),
    ] = None
    metrics: Annotated[Mapping[str, Metric] | None, optional(_METRICS)] = None
    evaluate_every: Annotated[int | None, optional(COUNT)] = None
    out: Annotated[Path | str | None, optional(Check("be the path of a folder", _folder))] = None
    trackers: Annotated[Sequence[str] | None, optional(_TRACKERS)] = None
    checkpoint_every: Annotated[int | None, optional(COUNT)] = None
    resume: Annotated[bool, FLAG] = False
    progress: Annotated[bool | None, _YES_NO_AUTO] = None
    guard: Annotated[Literal["auto", "held-out", "off"], one_of("auto", "held-out", "off")] = "auto"
    measure: Annotated[bool | None, _YES_NO_AUTO] = None
    threads: Annotated[int | None, optional(COUNT)] = None

    def __post_init__(self) -> None:
        check_settings(self)
        for name in RESERVED_METRICS & set(self.metrics or ()):
            raise KnobError(
                f"a metric cannot be called {name!r}, as the record has its own; rename it"
            )
        if self.resume and self.out is None:
            raise KnobError(
                "`resume` has no effect without `out`; name the folder of the run, or leave it out"
            )
        if self.out is None and self.trackers:
            raise KnobError(
                "`trackers` follow a run that has a folder; name it by `out`, or leave them out"
            )


@dataclass(frozen=True, eq=False)
class RunSpec(RunSettings):
    """A run, described: `dataclasses.replace(spec, rule=…, seed=…)` is another.

    The fields are the arguments of `coterie.train`.

    Args:
        model: Any module; training starts from its parameters, in the mode (train or eval) it
            is in. It is not changed.
        loss: The mean loss of a batch from (output, target).
        me: User 0; its validation set chooses the best model, its test set is evaluated once,
            at the end.
        peers: The others.
        rule: How gradients become a direction: `Alone`, `WeightedAveraging`, `BiasCorrection`,
            …; `AdaptiveAveraging`, which has nothing to set, when None; knobs that are "auto"
            are chosen before the first step. Or a method of `coterie.methods`, whose rounds are
            then the steps. Or a name of either, as in `coterie list`: "wga".
        epochs: In the place of `steps`, as many as user 0 has batches in so many passes over
            its examples.
        hooks: Called as the run goes on: functions of a `Step`, called after every step, or
            instances of `coterie.Hook`. One that returns True from a step ends the run.
        capture: Take steps as one program that the host looks into only where something is
            recorded: on a GPU a captured CUDA graph. None: on a GPU. What cannot be captured is
            reported, with the reason, and taken step by step. Hooks are called after every step
            all the same. See docs/performance.md.
        forward_options: Autocast, channels last and `torch.compile` for training; see
            `ForwardOptions`.
        engine: Where the users are: `InProcess`, another function that makes an engine over
            this run's model and users, which is closed at the end, or an engine.

    Example:
        >>> from dataclasses import replace
        >>> me, peer = (User(name, [[1.0]], [[1.0]]) for name in ("me", "a"))
        >>> base = RunSpec(nn.Linear(1, 1), nn.functional.mse_loss, me, [peer], lr=0.1)
        >>> [replace(base, seed=seed).seed for seed in range(3)]
        [0, 1, 2]
    """

    model: Annotated[nn.Module, MODEL]
    loss: Annotated[Loss, LOSS]
    me: Annotated[User, USER]
    peers: Annotated[Sequence[User], PEERS]
    rule: Any = None
    _: KW_ONLY
    epochs: Annotated[int | None, optional(COUNT)] = None
    hooks: Annotated[Sequence[Any], _HOOKS] = ()
    capture: Annotated[bool | None, _YES_NO_AUTO] = None
    forward_options: Annotated[ForwardOptions, _FORWARD] = DEFAULT_FORWARD
    engine: Annotated[Engine | MakeEngine, _ENGINE] = InProcess

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "loss", as_loss(self.loss))
        if self.epochs is not None:
            object.__setattr__(self, "steps", self._steps_in(self.epochs))
            object.__setattr__(self, "epochs", None)  # so that `replace` may give other steps

    def _steps_in(self, epochs: int) -> int:
        """Return how many batches user 0 has in some passes over its examples."""
        if self.steps != StepSettings.steps:
            raise KnobError(
                f"`steps` ({self.steps}) and `epochs` ({epochs}) were both given; leave one out"
            )
        if self.me.is_stream:
            raise KnobError("`epochs` has no meaning for a stream, which has no end; give `steps`")
        return epochs * math.ceil(len(self.me) / self.batch_size)

    @property
    def every(self) -> int:
        """Steps between evaluations."""
        return max(1, self.steps // 50) if self.evaluate_every is None else int(self.evaluate_every)

    @property
    def save_every(self) -> int:
        """Steps between checkpoints."""
        if self.checkpoint_every is None:
            return max(1, self.steps // 10)
        return int(self.checkpoint_every)

    def prepared(self) -> Self:
        """Return the same run with copies of model and loss on the device, and of its optimizer, made."""
        Parameters(self.model)  # refuses what cannot be trained, before it is copied
        ready_made = self.optimizer if isinstance(self.optimizer, Optimizer) else None
        if ready_made is not None and self.lr is not None:
            raise KnobError(
                f"`lr` ({self.lr}) and an optimizer that has its own were both given; set it in"
                " the optimizer"
            )
        with attributing_errors_to("a copy of the model, which stays as it is,"):
            model, optimizer = copied((self.model, ready_made), self.model)
        try:
            model = model.to(self.device)
        except (RuntimeError, AssertionError) as error:  # torch is without it, or there is none
            why = str(error).partition("\n")[0]
            raise KnobError(
                f"`device` {str(self.device)!r} cannot be used here: {why}; leave it out for the"
                " CPU"
            ) from error
        if optimizer is None:
            trainable = list(Parameters(model).named.values())
            lr = LR if self.lr is None and self.optimizer is None else self.lr
            make = cast("Callable[..., Optimizer]", self.optimizer or Adam)
            asked = {} if lr is None else {"lr": lr}
            with attributing_errors_to(
                "`optimizer`, called with the parameters" + (" and `lr`," if asked else ",")
            ):
                optimizer = make(trainable, **asked)
            if not isinstance(optimizer, Optimizer):
                raise KnobError(
                    f"`optimizer` must make an optimizer of `torch.optim`, got {shown(optimizer)}"
                )
        ours = {id(p) for p in model.parameters()}
        if any(id(p) not in ours for group in optimizer.param_groups for p in group["params"]):
            raise ModelError(
                "the optimizer holds parameters of another model; make it from `model.parameters()`"
            )
        if isinstance(optimizer, LBFGS):
            raise KnobError(
                "LBFGS evaluates the loss several times a step; use an optimizer that takes one"
                " gradient"
            )
        loss = on_device(self.loss, Parameters(model).device)
        ready = replace(self, model=model, loss=loss, optimizer=optimizer, lr=None, device=None)
        ready.made_scheduler(_like(optimizer))  # what cannot be made is told now
        return ready

    @property
    def made_optimizer(self) -> Optimizer:
        """The optimizer of a run that is prepared."""
        if not isinstance(self.optimizer, Optimizer):
            raise TypeError("this run has no optimizer yet; call `prepared()` first")
        return self.optimizer

    def at_rate(self, multiple: float) -> Self:
        """Return a run that is prepared with its optimizer's step sizes multiplied."""
        if multiple == 1:
            return self
        optimizer = _like(self.made_optimizer)
        for group in optimizer.param_groups:
            group["lr"] *= multiple
        return replace(self, optimizer=optimizer)

    def in_process(self, **options: Any) -> InProcess:
        """Return an engine over the users of a run that is prepared, in this process."""
        users = self.me, self.peers
        return InProcess(
            self.model, self.loss, *users, batch_size=self.batch_size, seed=self.seed, **options
        )

    def made_scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """Return the scheduler of an optimizer, made."""
        if self.scheduler is None:
            return None
        with attributing_errors_to("`scheduler`, called with the optimizer,"):
            made = self.scheduler(optimizer)
        if not isinstance(made, LRScheduler):
            raise KnobError(
                "`scheduler` must return a scheduler of `torch.optim.lr_scheduler`, got"
                f" {shown(made)}; write `scheduler=lambda optimizer: StepLR(optimizer, 10)`"
            )
        return made


def _like(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer of the same parameters with groups of its own, which may be changed."""
    other = copy.copy(optimizer)
    other.param_groups = [dict(group) for group in optimizer.param_groups]
    return other
