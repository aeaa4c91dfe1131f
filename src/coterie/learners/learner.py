"""A learner: parameters, optimizer, the rule's state and the step count, and the one way to take a step."""

import copy
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from coterie.engines.engine import Answers, Engine, LocalWork, Question, require
from coterie.errors import GradientError, KnobError, PeerLost, attributing_errors_to
from coterie.gradients.gradients import Gradients, complete, cut, gave_nothing
from coterie.gradients.norm_bound import NormBound
from coterie.gradients.parameters import (
    Parameters,
    copied,
    is_finite,
    load_trained_state,
    trained_state,
)
from coterie.learners.captured import StackBlock
from coterie.learners.spec import RunSpec
from coterie.learners.stack import Stack, Steps, why_not_capturable
from coterie.recording.costs import Costs, Traffic
from coterie.recording.result import GuardDecision
from coterie.rules import Alone, Capturable, Rule, State, weights_in
from coterie.users.sampling import sample_of


@dataclass(frozen=True, eq=False)
class NextStep:
    """A step that is computed and not yet taken."""

    own: Tensor  # user 0's gradient, or whatever is not finite where the step must not be taken
    own_loss: Tensor | float  # on user 0's batch
    left_out: Mapping[str, str]  # the peers left out of it, each with the reason
    # write the directions that the learner's stacks are to follow
    write: Callable[[], None]


class Learner(ABC):
    """A model, its optimizer, and the best it has been; what it follows says how it steps.

    Everything that a later step depends on is in `state_dict`; all randomness is a function of
    (seed, user, step), so there is no generator to save. The run must be prepared; the parameters
    of its model become views of the flat vector `x`.
    """

    stacks: Sequence[Stack] = ()
    """The rows of parameters that follow the directions written."""
    can_restart: ClassVar[bool] = True
    """Whether the guard may let it go on from the model trained alone."""
    can_capture: ClassVar[bool] = True
    """Whether its steps are ever alike, so that why they are not is worth a warning."""

    def __init__(self, spec: RunSpec, engine: Engine, costs: Costs) -> None:
        self.spec, self.model, self.engine, self.costs = spec, spec.model, engine, costs
        self.optimizer, self.clip_norm = spec.made_optimizer, spec.clip_norm
        self.scheduler = spec.made_scheduler(self.optimizer)
        self.parameters = Parameters(spec.model)
        self.x = self.parameters.share()
        self.state = self.initial_state()
        self.step = 0
        self.listens_from = 0
        self.exchange_every, self.local_steps = spec.exchange_every, spec.local_steps
        self.last_exchange: dict[str, Any] | None = (
            None  # what the peers last said, where it is used again
        )
        self.bound: NormBound | None = None  # on peers' gradients
        self.best: dict[str, Any] = {}

    @property
    def followed(self) -> Any:
        """What the learner follows."""
        return self.spec.rule

    def initial_state(self) -> State:
        """Return the state before the first step."""
        return {"step": 0, "weight": 0.0}

    def block(self) -> StackBlock | str:
        """Return the steps as blocks of the same work, or why they cannot be taken so."""
        return f"`{type(self.followed).__name__}` takes steps of its own kind"

    def advanced(self, n: int) -> None:
        """Go on after n steps that the stacks have taken."""
        self.step += n

    def take_step(self) -> None:
        """Ask, and take a step by itself, as the loop does for many at once."""
        self.next_step().write()
        Steps().take(self.stacks)
        self.advanced(1)

    @abstractmethod
    def next_step(self, answers: Answers | None = None) -> NextStep:
        """Return the step that the answers make; what it needs is asked for here when None."""

    def question(self) -> Question:
        """Return what the next step asks, where it can be asked together with the questions of other runs."""
        raise NotImplementedError

    def _holds(self) -> bool:
        """Say whether this step uses what the peers said at the last exchange."""
        return (
            self.last_exchange is not None
            and self.step % self.exchange_every > 0
            and self.step >= self.listens_from
        )

    def count(self, asked: list[str], steps: int = 1) -> None:
        """Count what steps cost.

        Gradients of everybody asked who gave one, and parameters sent there and back.
        """
        self.costs.compute([self.costs.me, *asked], times=steps * self.local_steps)
        self.costs.exchange(asked, down=self.x.numel(), up=self.x.numel(), times=steps)

    def consider(self, validation_loss: float) -> None:
        """Keep the model if it is the best by validation loss so far, and tell a scheduler that wants to know."""
        if validation_loss < self.best.get("loss", float("inf")):
            state = {
                k: v.clone() if isinstance(v, Tensor) else v
                for k, v in trained_state(self.model).items()
            }
            self.best = {"step": self.step, "loss": validation_loss, "model": state}
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(validation_loss)

    @property
    def weight(self) -> float:
        """The weight that the peers had in the last step; NaN where there is no such thing."""
        return float(self.state.get("weight", math.nan))

    def tau(self) -> Mapping[str, float]:
        """Return the weight of each peer among the peers in the last step, where there is such a thing."""
        return {}

    def served(self) -> tuple[nn.Module, dict[str, Any], GuardDecision | None]:
        """Return the model to serve, what it was the best of, and how it compares with Alone, if known."""
        model = copied(self.model)
        if self.best:
            load_trained_state(model, self.best["model"])
        return model, self.best, None

    def trained_alone(self) -> nn.Module | None:
        """Return the model trained alone beside this one, where there is one."""
        return None

    def out_of_fold(self) -> NDArray[np.float64] | None:
        """Return the loss of each own example under models that did not see it, where there are such."""
        return None

    def account(self, travelled: Mapping[str, Traffic]) -> Mapping[str, Any]:
        """Return what was found out on the way, and by which traffic, as plain data.

        Empty where nothing was.
        """
        return {}

    def models(self) -> dict[str, nn.Module]:
        """Return the personal models of all users, where there are any beside user 0's."""
        return {}

    def restart_from(self, other: "Learner", listens_from: int) -> None:
        """Take over another learner's model and optimizer, and listen to nobody until a step.

        Peers are heard again from the first exchange on that is due then: a restart asks nobody
        more often.
        """
        fresh = self.initial_state() | {"step": self.step}
        due = math.ceil(listens_from / self.exchange_every) * self.exchange_every
        mine = {"rule": fresh, "best": self.best, "listens_from": due, "last_exchange": None}
        # else the optimizers would share tensors
        self.load_state_dict(copy.deepcopy(other.state_dict()) | mine)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later steps depend on."""
        return {
            "step": self.step,
            "listens_from": self.listens_from,
            "model": trained_state(self.model),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler and self.scheduler.state_dict(),
            "rule": self.state,
            "last_exchange": self.last_exchange,
            "longest": self.bound and self.bound.longest,
            "opposition": self.bound and self.bound.opposition.state_dict(),
            "best": self.best,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state."""
        load_trained_state(self.model, state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.step, self.listens_from = state["step"], state["listens_from"]
        self.state = state["rule"]
        self.best = state["best"]
        self.last_exchange = state.get("last_exchange")
        if self.bound is not None:
            self.bound.longest.copy_(state["longest"])
            self.bound.opposition.load_state_dict(state["opposition"])


class RuleLearner(Learner):
    """The learner of a rule: it asks at x, and the rule makes a direction of the gradients."""

    def __init__(self, spec: RunSpec, rule: Rule, engine: Engine, costs: Costs) -> None:
        self.rule = rule
        # the weights in the last question
        self._asked_for: tuple[dict[str, float], Tensor] | None = None
        super().__init__(spec, engine, costs)
        if spec.norm_bound is not None:
            self.bound = NormBound(spec.norm_bound, self.x)
        self._stack = Stack.of_model(spec, self.x, self.scheduler)
        self.stacks = (self._stack,)

    @property
    def followed(self) -> Any:
        """What the learner follows: its rule."""
        return self.rule

    def initial_state(self) -> State:
        """Return the rule's state before the first step."""
        return self.rule.init(self.x)

    def question(self) -> Question:
        """Return what the next step asks: the peers' sum at x, and user 0's gradient there."""
        weights = self._weights()
        if self._asked_for is None or self._asked_for[0] != weights:
            row = self.x.new_tensor([[weights.get(name, 0.0) for name in self.engine.names]])
            self._asked_for = weights, row if weights else row[:0]
        asked = self._asked_for[1]
        return Question(self.x.detach().expand(1 + len(asked), -1), self.step, asked, own=[0])

    def next_step(self, answers: Answers | None = None) -> NextStep:
        """Return the step that the rule makes of the answers, or of everybody's gradients at x when None."""
        g = self.gradients() if answers is None else self._received(answers)
        return NextStep(g.own, g.own_loss, g.left_out, partial(self._follow, g))

    def gradients(self) -> Gradients:
        """Ask everybody for gradients at x.

        Nobody but user 0 before step `listens_from` and between exchanges.
        """
        weights = self._weights()
        if self.last_exchange is not None and self._holds():
            g = self._asked({}, rows=False)
            self.count([])
            return _with_last_exchange(g, self.last_exchange)
        rows = self.rule.needs_rows
        at_hand = self.bound is not None and self.engine.capabilities.rows_at_hand
        g = self._asked(weights, rows=rows or at_hand)
        silent = gave_nothing(g.left_out)
        self.count([name for name in weights if name not in silent])
        return g if self.bound is None or not weights else self.bound.kept(g, weights, rows=rows)

    def _weights(self) -> dict[str, float]:
        if self.step < self.listens_from:
            return {}
        weights = self.rule.weights(self.engine.names)
        if self.spec.sample is None:
            return weights
        return sample_of(weights, self.spec.sample, self.spec.seed, self.step)

    def _received(self, answers: Answers) -> Gradients:
        """Return the answers to `question`, all of them finite, as gradients."""
        weights = self._weights()
        if answers.sums is None or answers.losses is None:
            raise AssertionError("sums were asked for")
        *sums, own = answers.sums
        g = Gradients(own, sums[0] if sums else None, x=self.x, own_loss=answers.losses[0])
        self.count(list(weights))
        return g if self.bound is None or not weights else self.bound.kept(g, weights, rows=False)

    def _asked(self, weights: Mapping[str, float], *, rows: bool) -> Gradients:
        """Return everybody's gradients at x, or what everybody's local steps from x follow, added up."""
        if self.local_steps == 1:
            return self.engine.gradients(self.x, self.step, weights, rows)
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        work = LocalWork(self.local_steps, one_rate(self.optimizer))
        waiting = None
        if weights:
            engine = require(self.engine, "local_work", "`local_steps`")
            row = [[weights.get(name, math.nan) for name in engine.names]]
            asked, at = torch.tensor(row, dtype=torch.float64), self.step * work.count
            waiting = engine.ask(Question(self.x.detach()[None], at, asked, rows, work=work))
        g = self._own_work(work)
        try:
            return g if waiting is None else _with_answers(g, waiting(), self.engine.names, weights)
        except PeerLost:
            for name, buffer in before.items():  # the step is not taken, and so moves nothing
                self.model.get_buffer(name).copy_(buffer)
            raise

    def _own_work(self, work: LocalWork) -> Gradients:
        """Return what user 0's own steps from x follow, added up, and its mean loss on the way."""
        losses = []

        def gradient(x: Tensor, k: int) -> Tensor:
            g = self.engine.gradients(x, self.step * work.count + k, {})
            losses.append(torch.as_tensor(g.own_loss))
            return g.own

        followed = work.followed(self.x.detach(), gradient)
        return Gradients(followed, x=self.x, own_loss=torch.stack(losses).mean())

    def _follow(self, g: Gradients) -> None:
        """Write the direction that the rule makes of these gradients.

        A `GradientError` where it is not finite.
        """
        if self.step >= self.listens_from:
            with attributing_errors_to(f"the rule `{type(self.rule).__name__}`"):
                direction, state = self._direction(g)
                if direction.shape != g.own.shape:
                    shapes = f"{tuple(direction.shape)}, not {tuple(g.own.shape)} as the gradients"
                    raise ValueError(f"the direction is of shape {shapes}")
            if direction is not g.own and not is_finite(direction):
                made = f"the rule `{type(self.rule).__name__}` made a direction that is not finite"
                raise GradientError(f"{made} of finite gradients at step {self.step}")
        else:
            direction, state = g.own, self.state | {"step": self.step + 1, "weight": 0.0}
        self.state = state
        self.write(direction)

    def write(self, direction: Tensor) -> None:
        """Let the optimizer find a direction, cut to the norm that is allowed."""
        direction = direction if self.clip_norm is None else cut(direction, self.clip_norm)
        self.parameters.set_gradient(direction)
        self._stack.direction = direction.unsqueeze(0)

    def _direction(self, g: Gradients) -> tuple[Tensor, State]:
        """Return the rule's direction and its next state.

        Between exchanges it learns nothing of its peers.

        Then it makes of the new g_0, and of what the peers last said, what it would have made of
        both at the
        exchange: bias correction takes off the bias that it took off there.
        """
        if self.last_exchange is not None and self._holds():
            direction, after = self.rule(
                g, self.last_exchange["state"] | {"step": self.state["step"]}
            )
            return direction, self.state | {
                name: after[name] for name in ("step", "weight") if name in after
            }
        if self.exchange_every > 1:
            self.last_exchange = _exchanged(g, self.state)
        return self.rule(g, self.state)

    def block(self) -> StackBlock | str:
        """Return the steps as blocks of the same work, or why they cannot be taken so."""
        if max(self.exchange_every, self.local_steps) > 1:
            return "not all steps are alike with `exchange_every` or `local_steps`"
        if len(self.rule.weights(self.engine.names)) > (self.spec.sample or math.inf):
            return "each step asks another sample of the peers"
        if not isinstance(self.rule, Capturable):
            return f"`{type(self.rule).__name__}` does not say beforehand what a step needs"
        if getattr(self.rule, "aggregator", None) is not None:
            return "an aggregator looks into its rows"
        can = self.engine.capabilities
        why = can.rows_not_captured if self.rule.needs_rows else can.not_captured
        why = why_not_capturable(self.optimizer) or why
        return why or StackBlock(_RuleSteps(self, self.rule))

    def tau(self) -> Mapping[str, float]:
        """Return the weight of each peer among the peers in the last step, where there is such a thing."""
        weights = (
            weights_in(self.state) if "tau" in self.state else self.rule.weights(self.engine.names)
        )
        return {name: weights[name] for name in self.engine.names if name in weights}


def one_rate(optimizer: Optimizer) -> float:
    """Return an optimizer's step size; a `KnobError` where its parameter groups have several."""
    rates = {float(group["lr"]) for group in optimizer.param_groups}
    if len(rates) > 1:
        raise KnobError(
            "`local_steps` are plain steps of one size, but the optimizer's groups have"
            f" {sorted(rates)}; give all groups one `lr`"
        )
    return rates.pop()


def _exchanged(g: Gradients, state: State) -> dict[str, Any] | None:
    """Return what later steps use of an exchange.

    What the peers said, where, and the rule's state before it.
    """
    if g.peers is None and g.rows is None:
        return None
    peers = g.peers
    if peers is not None:  # g_0 stands in it for who did not answer
        peers = peers.clone() if g.answered == 1 else peers - (1 - g.answered) * g.own
    said = {
        "peers": peers,
        "rows": None if g.rows is None else g.rows.clone(),
        "names": list(g.names),
    }
    return said | {
        "answered": g.answered,
        "x": None if g.x is None else g.x.clone(),
        "state": state,
    }


def _with_last_exchange(g: Gradients, last: Mapping[str, Any]) -> Gradients:
    """Return a new own gradient together with what the peers last said."""
    peers, answered, names = last["peers"], last["answered"], tuple(last["names"])
    if peers is not None:
        peers, answered = complete(g.own, peers, answered)
    return replace(g, peers=peers, rows=last["rows"], names=names, answered=answered, x=last["x"])


def _with_answers(
    g: Gradients, answers: Answers, names: Sequence[str], weights: Mapping[str, float]
) -> Gradients:
    """Return the own gradient together with what peers answered at the same point."""
    if answers.sums is not None:
        peers, answered = complete(g.own, answers.sums[0], float(answers.answered[0]))
        return replace(g, peers=peers, answered=answered, left_out=answers.left_out)
    matrix = g.own.new_empty(0, len(g.own)) if answers.rows is None else answers.rows[0]
    there = [
        name for name, row in zip(names, matrix, strict=False) if name in weights and is_finite(row)
    ]
    matrix = matrix[[names.index(name) for name in there]]
    return g.with_peers(matrix, tuple(there), weights, answers.left_out, rows=True)


class _RuleSteps:
    """The steps of a rule's learner that are the same work but for examples, knobs and step sizes."""

    def __init__(self, learner: RuleLearner, rule: Capturable) -> None:
        self.learner, self.stacks, self._rule = learner, learner.stacks, rule
        self._engine = require(learner.engine, "capture", "a captured step")
        self._after: State = {}  # the rule's state after the steps whose numbers are known
        self._knobs: list[str] = []
        self._memory: dict[str, Tensor] = {}

    @property
    def step(self) -> int:
        return self.learner.step

    @property
    def rule(self) -> Capturable:
        """The rule, or that of a learner that listens to nobody for a while."""
        return self._rule if self.step >= self.learner.listens_from else Alone()

    @property
    def drawn_for(self) -> tuple[str, ...]:
        return tuple(self.rule.weights(self._engine.names))

    @property
    def held(self) -> list[Tensor]:
        """What the rule and the bound remember."""
        bound = [] if self.learner.bound is None else [self.learner.bound.longest]
        return bound + [value for value in self.learner.state.values() if isinstance(value, Tensor)]

    def repeats(self) -> int:
        """Return how many of the next steps are alike; in the first an optimizer makes its state."""
        if not self.step or not self.rule.repeats(self.learner.state):
            return 0
        silent = self.learner.listens_from - self.step
        return silent if silent > 0 else sys.maxsize

    def drawn(self, step: int) -> list[Tensor]:
        return [self._engine.indices(self.drawn_for, step)]

    def numbers(self, step: int) -> list[float]:
        """Return the knobs of a step; the steps of a block are asked for in order."""
        if step == self.step:
            self._after = self._in_place()
        knobs, plain = self.rule.next_knobs(self._after)
        self._after, self._knobs = {**self._after, **plain}, list(knobs)
        return list(knobs.values())

    def _in_place(self) -> State:
        """Return the rule's state, its tensors where the steps of earlier blocks look for them."""
        for name, value in self.learner.state.items():
            kept = self._memory.get(name)
            if isinstance(value, Tensor) and kept is not value:
                if kept is None or kept.shape != value.shape:
                    self._memory[name] = value.clone()
                else:
                    kept.copy_(value)
        here = {name: kept for name, kept in self._memory.items() if name in self.learner.state}
        self.learner.state = {**self.learner.state, **here}
        return self.learner.state

    def directions(self, drawn: Sequence[Tensor], numbers: Tensor) -> Tensor:
        """Write the direction of one step, not a number where a sum is too long; return the own loss."""
        learner, weights = self.learner, self.rule.weights(self._engine.names)
        g = self._engine.gradients_of(learner.x, drawn[0], weights, rows=self.rule.needs_rows)
        rule = self.rule.with_knobs(dict(zip(self._knobs, numbers, strict=True)))
        direction, state = rule(g, learner.state)
        for name, tensor in learner.state.items():
            if isinstance(tensor, Tensor) and name in state:
                tensor.copy_(state[name])
        if learner.bound is not None and weights:
            direction = direction.masked_fill(learner.bound.exceeded(g), torch.nan)
        learner.write(direction)
        return cast("Tensor", g.own_loss)

    def taken(self, n: int, losses: Tensor) -> None:
        """Count n steps."""
        learner, asked = self.learner, list(self.drawn_for)
        learner.state, learner.step = self._after, learner.step + n
        learner.count(asked, steps=n)
