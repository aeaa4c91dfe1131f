"""One method on one task: train every setting, choose one by validation, use the test set once."""

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler

from coterie.benchmark.contenders import RATES, Fixed, Knobs, MethodSetting
from coterie.benchmark.tasks import SetTask
from coterie.choosing import chooser_for
from coterie.errors import DataError, GradientError
from coterie.evaluation.evaluate import errors_of, evaluate, outputs_on
from coterie.learners.spec import RunSpec
from coterie.registry import RunSizes
from coterie.rules import Rule, weights_in
from coterie.training.algorithm import Followed, algorithm_of
from coterie.training.many import train_many
from coterie.training.run import Run, Step, Stopped
from coterie.training.train import train_spec
from coterie.users.examples import Examples, InMemory
from coterie.users.trees import joined
from coterie.users.user import Loss, User


@dataclass(frozen=True)
class Trial:
    """One setting, trained."""

    setting: MethodSetting
    lr: float
    model: nn.Module  # the model that training gave
    validation_loss: float  # of that model
    # of peers with wrong labels in the last step, where there are weights
    wrong_weight: float | None
    seconds: float  # of CPU time that it took; of a program of many, its share by examples


@dataclass(frozen=True)
class Outcome:
    """What a method reached on a task."""

    metric: str  # "accuracy", or "-rmse" in standard deviations of all targets
    score: float  # that, on the test examples
    # what each test example costs: 1 if wrong, or its squared error in those units
    errors: list[float]
    loss: float  # the mean loss on the test examples
    validation_loss: float  # by which the setting was chosen
    setting: str  # what was chosen, with its step size
    settings: int  # how many were trained to choose from
    wrong_weight: float | None  # of peers with wrong labels in the last step of the setting chosen
    # of CPU time that all settings took, those too that another method had trained before
    seconds: float


class Tuning:
    """All trials on one task from one initial model, each trained once, however many methods use it."""

    def __init__(
        self, task: SetTask, model: nn.Module, *, steps: int, batch_size: int, seed: int
    ) -> None:
        self.task = task
        self.model = model
        self.steps = steps
        self.batch_size = batch_size
        self.seed = seed
        self.regression = task.n_outputs == 1
        self.loss: Loss = nn.functional.mse_loss if self.regression else nn.functional.cross_entropy
        self.me = copy.copy(task.me)
        self.me.test = None  # the trials see neither the test examples nor a result on them
        self._trials: dict[tuple[MethodSetting, float], Trial] = {}
        self._chosen: dict[Knobs | Fixed, tuple[Rule, float]] = {}
        self._facts = RunSizes(len(task.me), {peer.name: len(peer) for peer in task.peers}, steps)
        self._falling = partial(_falling, steps=steps)

    def outcome(self, settings: Sequence[MethodSetting]) -> Outcome:
        """Return what a method with these settings reaches, at the one with the least validation loss."""
        self.prepare(settings)
        best = self._best(settings)
        starts = dict.fromkeys(setting.start for setting in settings if setting.start is not None)
        trials = [self.trial(setting, lr) for setting in (*settings, *starts) for lr in setting.lrs]
        outputs = torch.cat(
            [output for output, _, _ in outputs_on(best.model, held_out(self.task.me.test))]
        )
        return outcome_of(
            self.task,
            outputs,
            validation_loss=best.validation_loss,
            setting=best.setting.label(self._facts)
            + ("" if best.setting.as_it_comes else f", lr {best.lr:g}"),
            settings=len(trials),
            wrong_weight=best.wrong_weight,
            seconds=sum(trial.seconds for trial in trials)
            + self._chosen.get(best.setting.make, (None, 0.0))[1],
        )

    def prepare(self, settings: Sequence[MethodSetting]) -> None:
        """Train these settings where they are not trained yet, as many at once as can be."""
        first = [setting.start or setting for setting in settings]
        for group in (first, settings):  # a start is chosen before what starts from it
            pairs = dict.fromkeys((setting, lr) for setting in group for lr in setting.lrs)
            self._train_together([pair for pair in pairs if pair not in self._trials])

    def trial(self, setting: MethodSetting, lr: float) -> Trial:
        """Return a setting's trial, trained now or before."""
        if (setting, lr) not in self._trials:
            self._train_together([(setting, lr)])
        return self._trials[setting, lr]

    def _best(self, settings: Sequence[MethodSetting]) -> Trial:
        trials = [self.trial(setting, lr) for setting in settings for lr in setting.lrs]
        return min(
            trials, key=lambda trial: (math.isnan(trial.validation_loss), trial.validation_loss)
        )

    def _train_together(self, pairs: Sequence[tuple[MethodSetting, float]]) -> None:
        """Train settings, those that follow a rule without a guard as one program."""
        rules = {(setting, lr): self._rule(setting) for setting, lr in pairs}
        together: dict[tuple[MethodSetting, float], tuple[RunSpec, TailAverage | None]] = {}
        for (setting, lr), rule in rules.items():
            if algorithm_of(rule).rule is None or setting.options:
                self._trials[setting, lr] = self._train(setting, lr, rule)
            else:
                together[setting, lr] = self._spec(setting, lr, rule)
        if not together:
            return
        began = time.process_time()
        runs = train_many([spec for spec, _ in together.values()], progress=False)
        # A run's share of the program's time is that of its examples.
        examples = [sum(cost.examples for cost in run.record.end.costs.values()) for run in runs]
        seconds = [n / sum(examples) * (time.process_time() - began) for n in examples]
        for ((setting, lr), (_, tail)), run, share in zip(
            together.items(), runs, seconds, strict=True
        ):
            self._trials[setting, lr] = self._trial(
                setting, lr, run, tail.model() if tail else run.model, share
            )

    def _spec(
        self, setting: MethodSetting, lr: float, rule: Followed
    ) -> "tuple[RunSpec, TailAverage | None]":
        """Return the run of a setting, and what gathers its tail."""
        start = self.model if setting.start is None else self._best([setting.start]).model
        me = self._with_all_rows if setting.as_it_comes else self.me
        tail = TailAverage(start, self.steps) if setting.tail_average else None
        # At equal gradients: a round of a method is as many steps as user 0 computes gradients in
        # it. Two rounds at least: fine-tuning needs one before and one after it has begun.
        algorithm = algorithm_of(rule)
        rounds = algorithm.counts == "rounds"
        steps = max(2, self.steps // algorithm.gradients_a_round) if rounds else self.steps
        spec = RunSpec(
            *(start, self.loss, me, self.task.peers, rule),
            optimizer=None if rounds or setting.as_it_comes else _optimizer(setting),
            lr=None if setting.as_it_comes else lr,
            scheduler=self._falling if setting.lr_schedule == "decreasing" else None,
            steps=steps,
            batch_size=self.batch_size,
            seed=self.seed,
            evaluate_every=max(1, steps // 10),
            hooks=[tail] if tail else [],
        )
        return spec, tail

    @cached_property
    def _with_all_rows(self) -> User:
        """User 0, whose validation rows are own rows like others."""
        parts = [
            held.take(torch.arange(len(held)))
            for held in (self.me.examples, held_out(self.me.validation))
        ]
        me = copy.copy(self.me)
        me.examples = InMemory(*(joined(list(each)) for each in zip(*parts, strict=True)))
        me.validation = None
        return me

    def _train(self, setting: MethodSetting, lr: float, rule: Followed) -> Trial:
        """Train a setting that cannot be trained with others."""
        spec, tail = self._spec(setting, lr, rule)
        began = time.process_time()
        spec = replace(
            spec, **{"progress": False, "measure": False, "guard": "off", **setting.options}
        )
        try:
            run = train_spec(spec)
        except (
            GradientError
        ) as error:  # too large a step: what was best before counts, and seldom wins
            run = error.run
        model = tail.model() if tail else run.model
        return self._trial(setting, lr, run, model, time.process_time() - began)

    def _trial(
        self, setting: MethodSetting, lr: float, run: Run, model: nn.Module, seconds: float
    ) -> Trial:
        if run.stopped is Stopped.CTRL_C:
            raise KeyboardInterrupt
        loss = run.record.end.account.get("out_of_fold") if setting.as_it_comes else None
        if loss is None:
            loss = evaluate(model, self.loss, held_out(self.me.validation))["loss"]
        return Trial(
            setting, lr, model, loss, self._wrong_weight(self._rule(setting), run), seconds
        )

    def _rule(self, setting: MethodSetting) -> Followed:
        """Return a setting's rule.

        One that is chosen from the data is chosen once, at the smallest step size.
        """
        rule = setting.make(self._facts)
        chooser = chooser_for(rule)
        if chooser is None:
            return cast("Followed", rule)
        if setting.make not in self._chosen:
            began = time.process_time()
            spec = RunSpec(
                *(self.model, self.loss, self.me, self.task.peers),
                lr=min(RATES),
                steps=self.steps,
                batch_size=self.batch_size,
                seed=self.seed,
            ).prepared()
            choice = chooser.choose(spec, spec.in_process(), progress=False)
            self._chosen[setting.make] = choice.rule, time.process_time() - began
        return self._chosen[setting.make][0]

    def _wrong_weight(self, rule: Followed, run: Run) -> float | None:
        names = list(run.record.configuration.peers)  # without those that could not be used
        algorithm = algorithm_of(rule)
        if algorithm.counts == "rounds":
            weights = run.state.get("weights")
            wrong = [1 + names.index(name) for name in self.task.wrong if name in names]
            return None if weights is None else float(sum(weights[k] for k in wrong))
        if algorithm.rule is None:  # no weight but it changes it; zero where Alone is served
            return float(
                sum(run.record.end.account["tau"].get(name, 0.0) for name in self.task.wrong)
            )
        if getattr(rule, "aggregator", None) is not None:  # which has no weights
            return None
        tau = weights_in(run.state) or algorithm.rule.weights(names)
        share = sum(tau.get(name, 0.0) for name in self.task.wrong) / (sum(tau.values()) or 1.0)
        return float(run.state["weight"] * share)


class TailAverage:
    """The mean of a model's parameters over the last half of the steps, gathered by a hook."""

    def __init__(self, start: nn.Module, steps: int) -> None:
        self.first, self.start, self.count = steps // 2, start, 0
        self.mean = torch.zeros(0)

    def __call__(self, step: Step) -> None:
        """Take a step's parameters into the mean."""
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


def outcome_of(task: SetTask, outputs: Tensor, **about: Any) -> Outcome:
    """Return what outputs on the test examples are worth, with what else is known of the method."""
    _, targets = held_out(task.me.test).take(torch.arange(len(outputs)))
    regression = task.n_outputs == 1
    costs = errors_of(outputs, targets, 1 / task.spread)
    mean = float(costs.mean())
    loss = nn.functional.mse_loss if regression else nn.functional.cross_entropy
    return Outcome(
        metric="-rmse" if regression else "accuracy",
        score=-(mean**0.5) if regression else 1 - mean,
        errors=costs.tolist(),
        loss=float(loss(outputs, targets.to(outputs.dtype) if regression else targets)),
        **about,
    )


def held_out(examples: Examples | None) -> Examples:
    """Return examples that must be there."""
    if examples is None:
        raise DataError("user 0 needs examples held out for validation and test")
    return examples


def _optimizer(setting: MethodSetting) -> Callable[..., Optimizer]:
    return SGD if setting.plain_steps else partial(Adam, weight_decay=setting.weight_decay)


def _falling(optimizer: Optimizer, steps: int) -> LRScheduler:
    return LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=steps)
