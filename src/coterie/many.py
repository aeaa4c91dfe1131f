"""Many runs at once: one model trained side by side in K runs, each blind to some of user 0's examples.

Cross-fitting and cross-validation need the same training many times over, with other examples left out and other
weights. All runs draw the same batches of the peers, so that they are one program with a dimension more: the
parameters are stacked, `torch.func.vmap` maps the gradient over them, and an optimizer that works element by
element does not notice. `OneByOne` is the same in a plain loop, for models and optimizers that allow no more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import Subset

from coterie.engines.in_process import InProcess
from coterie.engines.passes import mean_of_each
from coterie.evaluation import evaluation_mode, losses
from coterie.parameters import Parameters
from coterie.rules import WeightedAveraging
from coterie.users import FromDataset, InMemory, Loss, User, draw, stream

Scheduler: TypeAlias = Callable[[Optimizer], LRScheduler]

ELEMENTWISE = frozenset(
    {"Adadelta", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
"""The optimizers of `torch.optim` that treat every number of a parameter by itself. Adagrad does too, but makes its
state before the first step, when the parameters are not stacked yet."""

MEMORY = {"cpu": 2**25, "cuda": 2**30}
"""About how many bytes of activations the runs that share a pass may hold: on a CPU, no more than its caches."""


@dataclass(frozen=True, eq=False)
class Problem:
    """What is to be learned and how, as `coterie.train` was told.

    Args:
        model: the model, at the parameters to start from.
        loss: the mean loss of a batch from (output, target).
        me: user 0.
        peers: the others.
        optimizer: an optimizer of this model that has taken no step.
        scheduler: a function of the optimizer that returns a learning-rate scheduler.
        steps: how many steps a run takes.
        batch_size: examples each user draws for a gradient.
        seed: what batches are drawn from, with the user's name and the step.
    """

    model: nn.Module
    loss: Loss
    me: User
    peers: tuple[User, ...]
    optimizer: Optimizer
    scheduler: Scheduler | None = None
    steps: int = 1000
    batch_size: int = 32
    seed: int = 0


class Runs(Protocol):
    """K runs side by side."""

    @property
    def x(self) -> Tensor:
        """The parameters of each run, of shape (K, d)."""

    def advance(self, weights: Tensor) -> None:
        """Take one step in every run.

        Args:
            weights: of shape (K, 1 + N): of the own gradient, then of each peer's; every row sums to 1.
        """

    def grams(self) -> Tensor:
        """Return what each gradient lacks of the held-out one, multiplied out, of shape (K, 1 + N, 1 + N).

        With the rows of G the own gradient on the examples that the run sees and the peers' gradients, and h
        the gradient on those it is blind to: (G − 1hᵀ)(G − 1hᵀ)ᵀ, in double precision.
        """

    def held_out_losses(self) -> Tensor:
        """Return the loss of each of user 0's examples, of shape (K, n); NaN where the run sees it."""


def side_by_side(problem: Problem, seen: Tensor, *, starts: Tensor | None = None) -> Runs:
    """Return K runs, as one program where model, loss and optimizer allow it, else one by one.

    Args:
        problem: what to train.
        seen: of shape (K, n): which of user 0's examples each run learns from.
        starts: of shape (K, d): where each run starts; all at the model's parameters when None.

    Example:
        >>> users = [User(name, torch.randn(6, 2), torch.randn(6, 1)) for name in ("me", "a", "b")]
        >>> model = nn.Linear(2, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> problem = Problem(model, nn.functional.mse_loss, users[0], tuple(users[1:]), sgd)
        >>> runs = side_by_side(problem, seen=torch.arange(6) % 2 == torch.tensor([[0], [1]]))
        >>> runs.advance(torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]))
        >>> type(runs).__name__, runs.x.shape, runs.grams().shape
        ('Batched', torch.Size([2, 3]), torch.Size([2, 3, 3]))
    """
    engine = _engine(problem)
    if why_one_by_one(problem, engine) is None:
        return Batched(problem, engine, seen, starts)
    return OneByOne(problem, seen, starts)


def why_one_by_one(problem: Problem, engine: InProcess | None = None) -> str | None:
    """Say why runs cannot be one program, or None where they can."""
    engine = engine or _engine(problem)
    if engine.allowed.loop:
        return engine.allowed.loop
    if not all(isinstance(user.examples, InMemory) for user in (problem.me, *problem.peers)):
        return "not all examples are in memory"
    if engine.passes.per_example is None:
        return "the loss is not known to be a mean over examples"
    kind = type(problem.optimizer)
    if kind.__name__ not in ELEMENTWISE or kind is not getattr(torch.optim, kind.__name__):
        return f"{kind.__name__} is not known to work element by element"
    return "the optimizer has taken steps before" if problem.optimizer.state else None


class Batched:
    """K runs as one program: the parameters stacked, the gradient mapped over them."""

    def __init__(self, problem: Problem, engine: InProcess, seen: Tensor, starts: Tensor | None = None) -> None:
        self._passes, self._everyone, self._step = engine.passes, engine.everyone, 0
        self._names = engine.names
        parameters = self._passes.parameters
        self._memory = MEMORY.get(parameters.device.type, 2**28)
        x = parameters.vector().expand(len(seen), -1) if starts is None else starts.to(parameters.device)
        pieces = zip(parameters.named, torch.split(x, parameters.lengths, dim=1), parameters.shapes, strict=True)
        self._x = {name: piece.reshape(len(x), *shape).clone() for name, piece, shape in pieces}
        self._optimizer = _moved(problem, self._x)
        self._scheduler = _constant_unless_told(problem.scheduler, self._optimizer)
        key = stream(problem.seed, problem.me.name)
        self._seen = seen.to(parameters.device)
        self._own = _Draws(seen, problem.batch_size, key, x)
        self._held_out = _Draws(~seen, problem.batch_size, stream(problem.seed, f"{problem.me.name}/held out"), x)

    @property
    def x(self) -> Tensor:
        """The parameters of each run, of shape (K, d)."""
        return torch.cat([value.flatten(1) for value in self._x.values()], dim=1)

    def advance(self, weights: Tensor) -> None:
        """Take one step in every run; see `Runs.advance`."""
        weights = weights.to(self._own.like)
        indices, own = self._own.at(self._step)
        inputs, targets = ([part] for part in self._everyone.me.examples.take(indices))
        shares = [weights[:, :1] * own]
        for batch in self._everyone.draw(self._names, self._step)[1]:
            size = len(batch.inputs) // len(batch.positions)
            theirs = weights[:, [1 + position for position in batch.positions]] / size
            shares.append(theirs.repeat_interleave(size, dim=1))
            inputs.append(batch.inputs)
            targets.append(batch.targets)
        found = self._gradients(torch.cat(shares, dim=1), torch.cat(inputs), torch.cat(targets), slice(None))
        for name, value in self._x.items():
            value.grad = found[name]
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        self._step += 1

    def grams(self) -> Tensor:
        """Return the Gram matrices of what each gradient lacks; see `Runs.grams`."""
        n_rows = 1 + len(self._names)
        bytes_a_run = n_rows * self._passes.parameters.size * self._own.like.element_size()
        runs = torch.split(torch.arange(len(self._seen)), max(1, 8 * self._memory // bytes_a_run))
        return torch.cat([self._grams(slice(int(some[0]), int(some[-1]) + 1)) for some in runs])

    def held_out_losses(self) -> Tensor:
        """Return the loss of each example that a run is blind to; see `Runs.held_out_losses`."""
        inputs, targets = self._everyone.me.examples.take(torch.arange(self._seen.shape[1]).to(self._seen.device))

        def losses(values: dict[str, Tensor]) -> Tensor:
            return self._losses(values, inputs, targets)

        with torch.no_grad(), evaluation_mode(self._passes.model):
            found: Tensor = vmap(losses, chunk_size=self._chunk(inputs))(self._x)
        return found.double().masked_fill(self._seen, torch.nan)

    def _grams(self, runs: slice) -> Tensor:
        """Return the Gram matrices of some runs, added up layer by layer."""
        values = {name: value[runs] for name, value in self._x.items()}
        own, held_out = (
            self._gradients(draws.at(self._step)[1][runs], *self._take(draws), runs)
            for draws in (self._own, self._held_out)
        )

        def loss(values: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
            return self._passes.loss(functional_call(self._passes.model, values, (inputs,)), targets)

        rows = vmap(vmap(grad(loss), in_dims=(None, 0, 0)), in_dims=(0, None, None))
        batches = self._everyone.draw(self._names, self._step)[1]
        theirs = [rows(values, b.by_user(b.inputs), b.by_user(b.targets)) for b in batches]
        grams: Tensor | float = 0.0
        for name in values:
            lacking = torch.cat([own[name].unsqueeze(1), *(found[name] for found in theirs)], dim=1).flatten(2)
            lacking -= held_out[name].flatten(1).unsqueeze(1)
            grams = grams + (lacking @ lacking.mT).double()
        order = [0, *(1 + position for batch in batches for position in batch.positions)]
        back = torch.tensor(order).argsort()
        return torch.as_tensor(grams)[:, back][:, :, back].cpu()

    def _take(self, draws: _Draws) -> tuple[Tensor, Tensor]:
        return self._everyone.me.examples.take(draws.at(self._step)[0])

    def _gradients(self, shares: Tensor, inputs: Tensor, targets: Tensor, runs: slice) -> dict[str, Tensor]:
        """Return the gradient of each run's weighted sum of the examples' losses."""

        def loss(values: dict[str, Tensor], shares: Tensor) -> Tensor:
            return shares @ self._losses(values, inputs, targets)

        values = {name: value[runs] for name, value in self._x.items()}
        found: dict[str, Tensor] = vmap(grad(loss), chunk_size=self._chunk(inputs))(values, shares)
        return found

    def _losses(self, values: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        each = self._passes.per_example
        if each is None:
            raise AssertionError("`why_one_by_one` keeps losses that are no means over examples away")
        return mean_of_each(each(functional_call(self._passes.model, values, (inputs,)), targets))

    def _chunk(self, inputs: Tensor) -> int:
        """Return how many runs may share a pass, guessing that activations are a few times the inputs."""
        numbers = 2 * self._passes.parameters.size + 8 * inputs.numel()
        return max(1, self._memory // (numbers * self._own.like.element_size()))


class OneByOne:
    """K runs in a plain loop: the readable twin of `Batched`, for any model, loss and optimizer."""

    def __init__(self, problem: Problem, seen: Tensor, starts: Tensor | None = None) -> None:
        self._runs = [_One(problem, kept, None if starts is None else starts[q]) for q, kept in enumerate(seen)]

    @property
    def x(self) -> Tensor:
        """The parameters of each run, of shape (K, d)."""
        return torch.stack([run.x for run in self._runs])

    def advance(self, weights: Tensor) -> None:
        """Take one step in every run; see `Runs.advance`."""
        for run, (own, *peers) in zip(self._runs, weights.tolist(), strict=True):
            run.advance(own, peers)

    def grams(self) -> Tensor:
        """Return the Gram matrices of what each gradient lacks; see `Runs.grams`."""
        return torch.stack([run.gram() for run in self._runs])

    def held_out_losses(self) -> Tensor:
        """Return the loss of each example that a run is blind to; see `Runs.held_out_losses`."""
        return torch.stack([run.held_out_losses() for run in self._runs])


class _One:
    """One run of `OneByOne`: its own copy of model and optimizer, its own view of user 0's examples."""

    def __init__(self, problem: Problem, seen: Tensor, start: Tensor | None) -> None:
        self.model, self.optimizer = copy.deepcopy((problem.model, problem.optimizer))
        self.scheduler = _constant_unless_told(problem.scheduler, self.optimizer)
        self.parameters = Parameters(self.model)
        self.x = self.parameters.share()
        if start is not None:
            self.x.copy_(start)
        self.me = _part(problem.me, seen)
        self.engine = InProcess(
            self.model, problem.loss, self.me, problem.peers, batch_size=problem.batch_size, seed=problem.seed
        )
        self.seen, self.loss, self.step = seen, problem.loss, 0
        self.held_out = None if bool(seen.all()) else _part(problem.me, ~seen).to(self.parameters.device)
        self.batch_size, self.seed = problem.batch_size, problem.seed

    def advance(self, own: float, peers: list[float]) -> None:
        alpha = sum(peers)
        tau = {name: weight / alpha for name, weight in zip(self.engine.names, peers, strict=True) if weight}
        rule = WeightedAveraging(min(1.0, max(0.0, 1 - own)), tau or None)
        g = self.engine.gradients(self.x, self.step, tau)
        direction = rule(g, rule.init(self.x))[0] if tau else g.own
        self.parameters.set_gradient(direction)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.step += 1

    def gram(self) -> Tensor:
        equal = dict.fromkeys(self.engine.names, 1 / len(self.engine.names))
        buffers = self.engine.passes.buffers()
        g = self.engine.gradients(self.x, self.step, equal, rows=True)
        for name, buffer in self.model.named_buffers():
            buffer.copy_(buffers[name])  # only a step may move them
        if self.held_out is None or g.rows is None or len(g.rows) < len(equal):
            return torch.full((1 + len(equal), 1 + len(equal)), torch.nan, dtype=torch.float64)
        batch = _named(self.held_out, f"{self.me.name}/held out").batch(
            self.batch_size, seed=self.seed, step=self.step
        )
        held_out, _ = self.engine.passes.single(self.x, *batch, self.engine.passes.buffers())
        lacking = torch.cat([g.own.unsqueeze(0), g.rows]) - held_out
        return (lacking @ lacking.T).double().cpu()

    def held_out_losses(self) -> Tensor:
        found = torch.full((len(self.seen),), torch.nan, dtype=torch.float64)
        if self.held_out is not None:
            found[~self.seen] = losses(self.model, self.loss, self.held_out.examples)
        return found


class _Draws:
    """User 0's batches in all runs at once: which examples any run draws, and their weights in each.

    Run q draws from its part of the examples as a user with those examples alone would.
    """

    def __init__(self, part: Tensor, batch_size: int, key: int, like: Tensor) -> None:
        masks, self.which = torch.unique(part.cpu(), dim=0, return_inverse=True)
        self.parts = [mask.nonzero().flatten() for mask in masks]
        self.n, self.batch_size, self.key, self.like = part.shape[1], batch_size, key, like[:1, :1]
        self.whole = all(len(part) <= batch_size for part in self.parts)
        self.kept: tuple[int, tuple[Tensor, Tensor]] | None = None

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the indices drawn by any run, and the weight of each in every run."""
        if self.kept is None or (self.kept[0] != step and not self.whole):
            shares = torch.zeros(len(self.parts), self.n, dtype=torch.float64)
            for row, part in zip(shares, self.parts, strict=True):
                size = min(self.batch_size, len(part))
                if size:
                    drawn = part[draw([self.key], [len(part)], size, [step])[0, 0]]
                    row.index_put_((drawn,), row.new_tensor(1 / size), accumulate=True)
            used = shares.any(0).nonzero().flatten()
            found = used.to(self.like.device), shares[:, used][self.which].to(self.like)
            self.kept = step, found
        return self.kept[1]


def _engine(problem: Problem) -> InProcess:
    return InProcess(
        problem.model,
        problem.loss,
        problem.me,
        problem.peers,
        batch_size=problem.batch_size,
        seed=problem.seed,
    )


def _moved(problem: Problem, stacked: Mapping[str, Tensor]) -> Optimizer:
    """Return a copy of the optimizer that holds the stacked parameters in the place of the model's."""
    model, optimizer = copy.deepcopy((problem.model, problem.optimizer))
    names = {id(p): name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        held = [names[id(p)] for p in group["params"]]
        group["params"] = [stacked[name] for name in held if name in stacked]
    return optimizer


def _constant_unless_told(scheduler: Scheduler | None, optimizer: Optimizer) -> LRScheduler | None:
    """Return the scheduler; none in the place of one that waits for a validation loss, which runs here have not."""
    made = scheduler and scheduler(optimizer)
    return None if isinstance(made, ReduceLROnPlateau) else made


def _part(user: User, kept: Tensor) -> User:
    """Return a user with some of its examples only, and the same name."""
    indices, part = kept.cpu().nonzero().flatten(), copy.copy(user)
    if isinstance(user.examples, FromDataset):
        part.examples = FromDataset(Subset(user.examples.dataset, indices.tolist()), user.examples.device)
    elif isinstance(user.examples, InMemory):
        part.examples = InMemory(*user.examples.take(indices))
    return part


def _named(user: User, name: str) -> User:
    """Return a user under another name, and so with other batches."""
    other = copy.copy(user)
    other.name = name
    return other
