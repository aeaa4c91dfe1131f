"""The specification of a run: what is trained, for whom, with whom and how."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any, Self, TypeAlias

import torch
from torch import nn
from torch.optim import LBFGS, Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from coterie.arguments import (
    ANYTHING,
    COUNT,
    POSITIVE,
    SEED,
    Check,
    check_fields,
    either,
    function,
    instance,
    listed,
    mapped,
    optional,
    real,
    shown,
)
from coterie.engines.in_process.engine import InProcess
from coterie.errors import KnobError, ModelError, blaming
from coterie.evaluation.losses import as_loss, on_device
from coterie.evaluation.metrics import Metric
from coterie.gradients.norm_bound import FACTOR
from coterie.gradients.parameters import Parameters
from coterie.gradients.trained_part import copied
from coterie.users.user import PEERS, USER, Loss, User

OptimizerLike: TypeAlias = Optimizer | Callable[..., Optimizer]
"""An optimizer of the model, or what makes one from its parameters."""

Scheduler: TypeAlias = Callable[[Optimizer], LRScheduler]
"""What makes a scheduler of an optimizer's step size."""

STEPS = 1000
"""How many steps a run takes where nothing is said."""

RESERVED_METRICS = frozenset({"loss", "step"})
"""Names that the record uses itself."""

_METRIC = function("a function of (outputs, targets)")
CHECKS: Mapping[str, Check] = {
    "model": instance(nn.Module, "a `torch.nn.Module`", {type: "make one of it: `model=Net()`"}, ModelError),
    "loss": function(
        "a function of (output, target), the mean over the batch",
        {type: "make one of it: `loss=Loss()`"},
        ModelError,
    ),
    "me": USER,
    "peers": PEERS,
    "optimizer": optional(
        either(
            instance(Optimizer, ""),
            function(
                "a class of `torch.optim`, a function of the parameters, or an optimizer of this model",
                {str: "write `torch.optim.SGD`", (list, tuple): "one optimizer may have several parameter groups"},
            ),
        )
    ),
    "lr": optional(POSITIVE),
    "clip_norm": optional(POSITIVE),
    "norm_bound": optional(real("be at least 1", lambda value: value >= 1)),
    "scheduler": optional(
        function(
            "a function of the optimizer that returns a learning-rate scheduler",
            {
                LRScheduler: "write `scheduler=lambda optimizer: StepLR(optimizer, 10)`",
                str: "write `scheduler=lambda optimizer: StepLR(optimizer, 10)`",
            },
        )
    ),
    "steps": COUNT,
    "exchange_every": COUNT,
    "local_steps": COUNT,
    "batch_size": COUNT,
    "seed": SEED,
    "device": optional(instance((str, torch.device), 'a device such as "cpu" or "cuda:0"')),
    "metrics": optional(
        mapped(
            _METRIC,
            "functions of (outputs, targets) by name",
            {(list, tuple, set): 'name them: `metrics={"f1": f1}`'},
        )
    ),
    "evaluate_every": optional(COUNT),
    "hooks": listed(
        ANYTHING,
        "a list of functions of a `Step` or instances of `coterie.Hook`",
        {(FunctionType, MethodType): "for one hook write `hooks=[hook]`"},
    ),
}
"""What the fields of a run may be; `rule` is checked where it is followed."""


@dataclass(frozen=True, eq=False)
class RunSpec:
    """A run, specified: `dataclasses.replace(spec, rule=…, seed=…)` is another.

    The fields are those arguments of `coterie.train` that say what is trained, for whom, with whom and how.

    Example:
        >>> from dataclasses import replace
        >>> me, peer = (User(name, [[1.0]], [[1.0]]) for name in ("me", "a"))
        >>> base = RunSpec(nn.Linear(1, 1), nn.functional.mse_loss, me, [peer], lr=0.1)
        >>> [replace(base, seed=seed).seed for seed in range(3)]
        [0, 1, 2]
    """

    model: nn.Module
    loss: Loss
    me: User
    peers: Sequence[User]
    rule: Any = None
    optimizer: OptimizerLike | None = None
    lr: float | None = None
    scheduler: Scheduler | None = None
    steps: int = STEPS
    batch_size: int = 32
    seed: int = 0
    device: torch.device | str | None = None
    metrics: Mapping[str, Metric] | None = None
    evaluate_every: int | None = None
    hooks: Sequence[Any] = ()
    clip_norm: float | None = None
    norm_bound: float | None = FACTOR
    exchange_every: int = 1
    local_steps: int = 1

    def __post_init__(self) -> None:
        check_fields(self, CHECKS)
        object.__setattr__(self, "loss", as_loss(self.loss))
        for name in RESERVED_METRICS & set(self.metrics or ()):
            raise KnobError(f"a metric cannot be called {name!r}, as the record has its own; rename it")

    @property
    def every(self) -> int:
        """Steps between evaluations."""
        return max(1, self.steps // 50) if self.evaluate_every is None else int(self.evaluate_every)

    def prepared(self) -> Self:
        """Return the same run with copies of model and loss on the device, and of its optimizer, made."""
        Parameters(self.model)  # refuses what cannot be trained, before it is copied
        if isinstance(self.optimizer, Optimizer):
            if self.lr is not None:
                raise KnobError(
                    f"`lr` ({self.lr}) and an optimizer that has its own were both given; set it in the optimizer"
                )
            model, optimizer = _copied((self.model, self.optimizer), self.model)
            model = _moved(model, self.device)
        else:
            model = _moved(_copied(self.model, self.model), self.device)
            trainable = list(Parameters(model).named.values())
            optimizer = _made(self.optimizer or Adam, trainable, {} if self.lr is None else {"lr": self.lr})
        ours = {id(p) for p in model.parameters()}
        if any(id(p) not in ours for group in optimizer.param_groups for p in group["params"]):
            raise ModelError("the optimizer holds parameters of another model; make it from `model.parameters()`")
        if isinstance(optimizer, LBFGS):
            raise KnobError(
                "LBFGS evaluates the loss several times a step; use an optimizer that takes one gradient"
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

    def in_process(self, **options: Any) -> InProcess:
        """Return an engine over the users of a run that is prepared, in this process."""
        users = self.me, self.peers
        return InProcess(self.model, self.loss, *users, batch_size=self.batch_size, seed=self.seed, **options)

    def schedule(self, optimizer: Optimizer) -> LRScheduler | None:
        """Return the scheduler of an optimizer; None if it follows the validation loss, which is not known here."""
        made = self.made_scheduler(optimizer)
        return None if isinstance(made, ReduceLROnPlateau) else made

    def made_scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """Return the scheduler of an optimizer, made."""
        if self.scheduler is None:
            return None
        with blaming("`scheduler`, called with the optimizer,"):
            made = self.scheduler(optimizer)
        if not isinstance(made, LRScheduler):
            raise KnobError(
                f"`scheduler` must return a scheduler of `torch.optim.lr_scheduler`, got {shown(made)}; write "
                "`scheduler=lambda optimizer: StepLR(optimizer, 10)`"
            )
        return made


def _copied(thing: Any, model: nn.Module) -> Any:
    with blaming("a copy of the model, which stays as it is,"):
        return copied(thing, model)


def _moved(model: nn.Module, device: torch.device | str | None) -> nn.Module:
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:  # torch was built without it, or there is none
        why = str(error).partition("\n")[0]
        raise KnobError(f"`device` {str(device)!r} cannot be used here: {why}; leave it out for the CPU") from error


def _made(make: Callable[..., Optimizer], parameters: list[nn.Parameter], settings: Mapping[str, Any]) -> Optimizer:
    """Return the optimizer that a class or a function makes."""
    with blaming("`optimizer`, called with the parameters" + (" and `lr`," if settings else ",")):
        optimizer = make(parameters, **settings)
    if not isinstance(optimizer, Optimizer):
        raise KnobError(f"`optimizer` must make an optimizer of `torch.optim`, got {shown(optimizer)}")
    return optimizer


def _like(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer of the same parameters with groups of its own, which may be changed."""
    other = copy.copy(optimizer)
    other.param_groups = [dict(group) for group in optimizer.param_groups]
    return other
