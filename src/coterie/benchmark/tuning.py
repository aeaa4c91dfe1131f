"""One method on one task: every setting tried, one chosen by validation, the test set looked at once."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.nn.utils import vector_to_parameters
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler

from coterie.benchmark.methods import RATES, Making, Way
from coterie.benchmark.sets import SetTask
from coterie.choosing import chooser_for
from coterie.engines.in_process.engine import InProcess
from coterie.errors import DataError, GradientError
from coterie.evaluation.evaluate import errors, evaluate
from coterie.learners.spec import Problem
from coterie.methods import Method
from coterie.rules import Rule, weights_in
from coterie.training.many import Wanted, train_many
from coterie.training.run import Run, Step
from coterie.training.train import train
from coterie.users.examples import Examples
from coterie.users.user import Loss


@dataclass(frozen=True)
class Trial:
    """One setting, trained.

    Args:
        way: how.
        lr: with which step size.
        model: the model it gave.
        validation_loss: of that model.
        wrong_weight: the weight that peers with wrong labels had in the last step, where there are weights.
        seconds: of CPU time that it took; of a program of many, its share by examples.
    """

    way: Way
    lr: float
    model: nn.Module
    validation_loss: float
    wrong_weight: float | None
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """What a method reached on a task.

    Args:
        metric: "accuracy", or "-rmse" in standard deviations of all targets.
        score: that, on the test examples.
        errors: what each test example costs: 1 if wrong, or its squared error in those units.
        loss: the mean loss on the test examples.
        validation_loss: by which the setting was chosen.
        setting: the way and the step size chosen.
        settings: how many were trained to choose from.
        wrong_weight: the weight that peers with wrong labels had in the last step of the setting chosen, or None.
        seconds: of CPU time that all settings took, those too that another method had trained before.
    """

    metric: str
    score: float
    errors: list[float]
    loss: float
    validation_loss: float
    setting: str
    settings: int
    wrong_weight: float | None
    seconds: float


class Tuning:
    """All trials on one task, each trained once, however many methods use it.

    Args:
        task: the task.
        model: what every trial starts from.
        steps: of each trial.
        batch_size: how many examples each user draws for a gradient.
        seed: what batches are drawn from.
    """

    def __init__(self, task: SetTask, model: nn.Module, *, steps: int, batch_size: int, seed: int) -> None:
        self.task, self.model, self.steps, self.batch_size, self.seed = task, model, steps, batch_size, seed
        self.regression = task.n_outputs == 1
        self.loss: Loss = nn.functional.mse_loss if self.regression else nn.functional.cross_entropy
        self.me = copy.copy(task.me)
        self.me.test = None  # the trials see neither the test examples nor a result on them
        self._trials: dict[tuple[Way, float], Trial] = {}
        self._chosen: dict[Making, tuple[Rule, float]] = {}
        self._falling = partial(_falling, steps=steps)

    def outcome(self, ways: Sequence[Way]) -> Outcome:
        """Return what a method with these ways reaches, at the setting with the least validation loss."""
        self.prepare(ways)
        best = self._best(ways)
        starts = dict.fromkeys(way.start for way in ways if way.start is not None)
        trials = [self.trial(way, lr) for way in (*ways, *starts) for lr in way.rates]
        test = _held_out(self.task.me.test)
        found = errors(best.model, test, 1 / self.task.spread)
        mean = float(found.mean())
        return Outcome(
            metric="-rmse" if self.regression else "accuracy",
            score=-(mean**0.5) if self.regression else 1 - mean,
            errors=found.tolist(),
            loss=evaluate(best.model, self.loss, test)["loss"],
            validation_loss=best.validation_loss,
            setting=f"{best.way.name}, lr {best.lr:g}",
            settings=len(trials),
            wrong_weight=best.wrong_weight,
            seconds=sum(trial.seconds for trial in trials) + self._chosen.get(best.way.rule, (None, 0.0))[1],
        )

    def prepare(self, ways: Sequence[Way]) -> None:
        """Train all settings of these ways that are not trained yet, as many at once as can be."""
        first = [way.start or way for way in ways]
        for some in (first, ways):  # a start is chosen before what starts from it
            settings = dict.fromkeys((way, lr) for way in some for lr in way.rates)
            self._train_together([setting for setting in settings if setting not in self._trials])

    def trial(self, way: Way, lr: float) -> Trial:
        """Return a setting's trial, trained now or before."""
        if (way, lr) not in self._trials:
            self._train_together([(way, lr)])
        return self._trials[way, lr]

    def _best(self, ways: Sequence[Way]) -> Trial:
        trials = [self.trial(way, lr) for way in ways for lr in way.rates]
        return min(trials, key=lambda trial: (math.isnan(trial.validation_loss), trial.validation_loss))

    def _train_together(self, settings: Sequence[tuple[Way, float]]) -> None:
        """Train settings, those that follow a rule without a guard as one program."""
        rules = {(way, lr): self._rule(way) for way, lr in settings}
        together: dict[tuple[Way, float], tuple[Wanted, _Tail | None]] = {}
        for (way, lr), rule in rules.items():
            if isinstance(rule, Method) or way.options:
                self._trials[way, lr] = self._train(way, lr, rule)
            else:
                together[way, lr] = self._wanted(way, lr, rule)
        if not together:
            return
        began = time.process_time()
        runs = train_many(
            self.model,
            self.loss,
            [wanted for wanted, _ in together.values()],
            steps=self.steps,
            batch_size=self.batch_size,
            evaluate_every=max(1, self.steps // 10),
            progress=False,
        )
        # A run's share of the program's time is that of its examples.
        examples = [sum(cost.examples for cost in run.record.end.costs.values()) for run in runs]
        seconds = [n / sum(examples) * (time.process_time() - began) for n in examples]
        for ((way, lr), (_, tail)), run, share in zip(together.items(), runs, seconds, strict=True):
            self._trials[way, lr] = self._trial(way, lr, run, tail.model() if tail else run.model, share)

    def _wanted(self, way: Way, lr: float, rule: Rule) -> tuple[Wanted, _Tail | None]:
        """Return the run of a setting, and what gathers its tail."""
        start = self.model if way.start is None else self._best([way.start]).model
        tail = _Tail(start, self.steps) if way.tail else None
        wanted = Wanted(
            self.me,
            self.task.peers,
            rule,
            seed=self.seed,
            lr=lr,
            model=start,
            optimizer=partial(Adam, weight_decay=way.weight_decay),
            scheduler=self._falling if way.steps == "decreasing" else None,
            callbacks=[tail] if tail else [],
        )
        return wanted, tail

    def _train(self, way: Way, lr: float, rule: Rule | Method) -> Trial:
        """Train a setting that cannot be trained with others."""
        wanted, tail = self._wanted(way, lr, cast("Rule", rule))
        began = time.process_time()
        # At equal gradients: a round of a method is as many steps as user 0 computes gradients in it.
        steps = max(1, self.steps // rule.gradients_a_round) if isinstance(rule, Method) else self.steps
        try:
            run = train(
                wanted.model or self.model,
                self.loss,
                self.me,
                self.task.peers,
                rule,
                optimizer=None if isinstance(rule, Method) else wanted.optimizer,
                lr=lr,
                scheduler=wanted.scheduler,
                steps=steps,
                batch_size=self.batch_size,
                seed=self.seed,
                evaluate_every=max(1, steps // 10),
                callbacks=wanted.callbacks,
                progress=False,
                measure=False,
                **{"guard": "off", **way.options},
            )
        except GradientError as error:  # too large a step: what was best before counts, and seldom wins
            run = error.run
        model = tail.model() if tail else run.model
        return self._trial(way, lr, run, model, time.process_time() - began)

    def _trial(self, way: Way, lr: float, run: Run, model: nn.Module, seconds: float) -> Trial:
        if run.stopped == "Ctrl-C":
            raise KeyboardInterrupt
        found = evaluate(model, self.loss, _held_out(self.me.validation))["loss"]
        return Trial(way, lr, model, found, self._wrong_weight(self._rule(way), run), seconds)

    def _rule(self, way: Way) -> Rule | Method:
        """Return the rule of a way; one that has to see the data first does so once, at the smallest step size."""
        rule = way.rule(self.task, self.steps)
        chooser = chooser_for(rule)
        if isinstance(rule, Method) or chooser is None:
            return cast("Rule", rule)
        if way.rule not in self._chosen:
            began, model = time.process_time(), copy.deepcopy(self.model)
            optimizer = Adam(model.parameters(), lr=min(RATES))
            problem = Problem(
                model,
                self.loss,
                self.me,
                tuple(self.task.peers),
                optimizer,
                steps=self.steps,
                batch_size=self.batch_size,
                seed=self.seed,
            )
            engine = InProcess(model, self.loss, self.me, problem.peers, batch_size=self.batch_size, seed=self.seed)
            choice = chooser.choose(problem, engine, progress=False)
            self._chosen[way.rule] = choice.rule, time.process_time() - began
        return self._chosen[way.rule][0]

    def _wrong_weight(self, rule: Rule | Method, run: Run) -> float | None:
        names = [peer.name for peer in self.task.peers]
        if isinstance(rule, Method):
            weights = run.state.get("weights")
            return None if weights is None else float(sum(weights[1 + names.index(n)] for n in self.task.wrong))
        if getattr(rule, "aggregator", None) is not None:  # which has no weights
            return None
        tau = weights_in(run.state) or rule.weights(names)
        share = sum(tau.get(name, 0.0) for name in self.task.wrong) / (sum(tau.values()) or 1.0)
        return float(run.state["weight"] * share)


class _Tail:
    """The mean of a model's parameters over the last half of the steps, gathered by a callback."""

    def __init__(self, start: nn.Module, steps: int) -> None:
        self.first, self.start, self.count = steps // 2, start, 0
        self.mean = torch.zeros(0)

    def __call__(self, step: Step) -> None:
        self.count = max(0, step.step - self.first)
        if self.count:
            x = torch.cat([p.detach().flatten() for p in step.model.parameters()])
            self.mean = x if self.count == 1 else self.mean.lerp_(x, 1 / self.count)

    def model(self) -> nn.Module:
        """Return a model with the mean; at the start where no step was late enough."""
        model = copy.deepcopy(self.start)
        if self.count:
            vector_to_parameters(self.mean, model.parameters())
        return model


def _held_out(examples: Examples | None) -> Examples:
    if examples is None:
        raise DataError("user 0 needs examples held out for validation and test")
    return examples


def _falling(optimizer: Optimizer, steps: int) -> LRScheduler:
    return LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=steps)
