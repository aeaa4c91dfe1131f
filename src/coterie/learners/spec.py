"""The specification of a run: what is trained, for whom, with whom and how."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias

import torch
from torch import nn
from torch.optim import LBFGS, Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from coterie.engines.in_process.engine import InProcess
from coterie.errors import KnobError, ModelError
from coterie.evaluation.losses import as_loss
from coterie.evaluation.metrics import Metric
from coterie.gradients.parameters import Parameters
from coterie.users.user import Loss, User

OptimizerLike: TypeAlias = Optimizer | Callable[..., Optimizer]
"""An optimizer of the model, or what makes one from its parameters."""

Scheduler: TypeAlias = Callable[[Optimizer], LRScheduler]
"""What makes a scheduler of an optimizer's step size."""


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
    steps: int = 1000
    batch_size: int = 32
    seed: int = 0
    device: torch.device | str | None = None
    metrics: Mapping[str, Metric] | None = None
    evaluate_every: int | None = None
    hooks: Sequence[Any] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "peers", tuple(self.peers))
        object.__setattr__(self, "loss", as_loss(self.loss))
        for name in ("steps", "batch_size", "seed"):
            object.__setattr__(self, name, int(getattr(self, name)))

    @property
    def every(self) -> int:
        """Steps between evaluations."""
        return max(1, self.steps // 50) if self.evaluate_every is None else int(self.evaluate_every)

    def prepared(self) -> Self:
        """Return the same run with a copy of the model on the device, and with a copy of its optimizer, made."""
        if isinstance(self.optimizer, Optimizer):
            if self.lr is not None:
                raise KnobError(
                    f"`lr` ({self.lr}) and an optimizer that has its own were both given; set it in the optimizer"
                )
            model, optimizer = copy.deepcopy((self.model, self.optimizer))
            model = _moved(model, self.device)
        else:
            model = _moved(copy.deepcopy(self.model), self.device)
            trainable = list(Parameters(model).named.values())
            make: Callable[..., Optimizer] = self.optimizer or Adam
            optimizer = make(trainable) if self.lr is None else make(trainable, lr=self.lr)
        ours = {id(p) for p in model.parameters()}
        if any(id(p) not in ours for group in optimizer.param_groups for p in group["params"]):
            raise ModelError("the optimizer holds parameters of another model; make it from `model.parameters()`")
        if isinstance(optimizer, LBFGS):
            raise KnobError(
                "LBFGS evaluates the loss several times a step; use an optimizer that takes one gradient"
            )
        return replace(self, model=model, optimizer=optimizer, lr=None, device=None)

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
        made = self.scheduler and self.scheduler(optimizer)
        return None if isinstance(made, ReduceLROnPlateau) else made


def _moved(model: nn.Module, device: torch.device | str | None) -> nn.Module:
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:  # torch was built without it, or there is none
        why = str(error).partition("\n")[0]
        raise KnobError(f"`device` {str(device)!r} cannot be used here: {why}; leave it out for the CPU") from error
