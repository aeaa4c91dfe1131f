"""Tuning: no leakage from the test set, equal budgets, and the setting chosen by validation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tests.support.examples import everything
from tests.support.populations import make, parts, people, rows_of
from torch.optim.lr_scheduler import LinearLR

from coterie.benchmark.contenders import BUDGET, RATES, Contender, Fixed, MethodSetting
from coterie.benchmark.methods import contender, names
from coterie.benchmark.sets.user_set import MODELS
from coterie.benchmark.tasks import Population, SetTask
from coterie.benchmark.tools import OURS, TOOLS
from coterie.benchmark.tuning import Tuning
from coterie.evaluation.evaluate import evaluate
from coterie.learners.spec import RunSpec
from coterie.registry import RunSizes
from coterie.rules import Alone
from coterie.training.many import train_many
from coterie.training.train import train, train_spec
from coterie.users.examples import InMemory
from coterie.users.user import User


def settings(name: str) -> tuple[MethodSetting, ...]:
    one = contender(name)
    assert isinstance(one, Contender)
    return one.settings


def facts(task: SetTask, steps: int = 6) -> RunSizes:
    return RunSizes(len(task.me), {peer.name: len(peer) for peer in task.peers}, steps)


def changed_test_rows(source: Population, task: SetTask) -> Population:
    """Return the population with absurd inputs in user 0's test rows."""
    rows = rows_of(parts(task)["test"])
    assert isinstance(source.inputs, pd.DataFrame)
    inputs = source.inputs.copy()
    inputs.iloc[rows, 1:] = 1e6
    return Population(inputs, source.targets, source.owners, source.n_classes)


def test_test_rows_influence_neither_preparation_nor_training() -> None:
    plain, source = make(people()), people(as_table=True)
    odd = changed_test_rows(source, plain)
    outcomes = []
    for population in (source, odd):
        task = make(population)
        torch.manual_seed(0)
        tuned = Tuning(task, MODELS["linear"](3, 4), steps=10, batch_size=32, seed=0)
        outcome = tuned.outcome(settings("wga"))
        models = [tuned.trial(setting, lr).model for setting in settings("wga") for lr in RATES]
        outcomes.append((outcome, [p for model in models for p in model.parameters()]))
    assert outcomes[0][0].validation_loss == outcomes[1][0].validation_loss
    assert outcomes[0][0].setting == outcomes[1][0].setting
    assert outcomes[0][0].loss != outcomes[1][0].loss
    for a, b in zip(outcomes[0][1], outcomes[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_trials_never_see_the_test_set_and_settings_are_within_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[User] = []

    def spy(spec: RunSpec) -> Any:
        seen.append(spec.me)
        return train_spec(spec)

    def spy_many(specs: Sequence[RunSpec], **options: Any) -> Any:
        seen.extend(spec.me for spec in specs)
        return train_many(specs, **options)

    monkeypatch.setattr("coterie.benchmark.tuning.train_spec", spy)
    monkeypatch.setattr("coterie.benchmark.tuning.train_many", spy_many)
    task = make(people())
    tuned = Tuning(task, MODELS["linear"](3, 4), steps=2, batch_size=32, seed=0)
    whole = (
        "alone",
        "pooled",
        "fine-tuned",
        "wga-0.3",
        "wga",
        "wga-auto",
        "adaptive",
        "fedavg",
    )
    outcomes = {name: tuned.outcome(settings(name)) for name in whole}
    tried = {(setting, lr) for name in whole for setting in settings(name) for lr in setting.lrs}
    assert len(seen) == len(tried), "a setting that two methods share is trained once"
    assert (
        outcomes["alone"].settings
        == outcomes["wga"].settings
        == outcomes["fine-tuned"].settings
        == BUDGET
    )
    for name in names():
        if name in (tools := {**OURS, **TOOLS}):
            assert len(tools[name].strengths) <= BUDGET
            continue
        starts = {setting.start for setting in settings(name)} - {None}
        assert sum(len(setting.lrs) for setting in (*settings(name), *starts) if setting) <= BUDGET
        for setting in settings(name):
            tuned.trial(setting, setting.lrs[-1])  # every method can be tried
    assert all(user.test is None for user in seen)
    assert task.me.test is not None


def test_the_setting_is_the_best_by_validation_and_scored_on_the_test_set() -> None:
    task = make(people())
    tuned = Tuning(task, MODELS["mlp"](3, 4), steps=15, batch_size=8, seed=0)
    outcome = tuned.outcome(settings("alone"))
    trials = [tuned.trial(setting, lr) for setting in settings("alone") for lr in RATES]
    best = trials[int(np.argmin([trial.validation_loss for trial in trials]))]
    inputs, targets = everything(parts(task)["test"])
    with torch.no_grad():
        right = (best.model(inputs).argmax(1) == targets).double()
    assert outcome.score == pytest.approx(float(right.mean()))
    assert outcome.errors == (1 - right).tolist()
    assert outcome.setting == f"{best.setting.label(facts(task))}, lr {best.lr:g}"


def test_the_tail_is_the_mean_of_the_last_half_and_fine_tuning_starts_from_the_pooled_model() -> (
    None
):
    task = make(people())
    model = MODELS["linear"](3, 4)
    tuned = Tuning(task, model, steps=4, batch_size=32, seed=0)
    tail = tuned.trial(MethodSetting(Fixed(Alone()), tail_average=True), 0.1)
    steps = [Tuning(task, model, steps=n, batch_size=32, seed=0) for n in (3, 4)]
    last = []
    for one in steps:
        weights: list[torch.Tensor] = []
        train(
            model,
            one.loss,
            one.me,
            task.peers,
            Alone(),
            lr=0.1,
            steps=one.steps,
            seed=0,
            progress=False,
            hooks=[
                lambda step, weights=weights: weights.append(step.model[1].weight.detach().clone())
            ],
        )
        last.append(weights[-1])
    torch.testing.assert_close(tail.model.get_parameter("1.weight"), (last[0] + last[1]) / 2)
    pooled = min(
        (tuned.trial(settings("pooled")[0], lr) for lr in RATES),
        key=lambda trial: trial.validation_loss,
    )
    tuned_on = tuned.outcome(settings("fine-tuned"))
    assert tuned_on.validation_loss <= pooled.validation_loss


def test_a_trial_is_what_training_that_setting_by_itself_gives() -> None:
    task, model = make(people()), MODELS["mlp"](3, 4).double()
    for user in (task.me, *task.peers):
        inputs, targets = everything(user.examples)
        user.examples = InMemory(inputs.double(), targets)
    assert task.me.validation is not None
    inputs, targets = everything(task.me.validation)
    task.me.validation = InMemory(inputs.double(), targets)
    tuned = Tuning(task, model, steps=6, batch_size=5, seed=3)
    tried = [
        *settings("pooled")[:2],
        settings("pooled")[3],
        settings("wga-0.3")[0],
        settings("bc")[0],
    ]
    tuned.prepare(tried)
    for setting in tried:
        run = train(
            model,
            tuned.loss,
            tuned.me,
            task.peers,
            setting.make(facts(task)),
            optimizer=partial(torch.optim.Adam, weight_decay=setting.weight_decay),
            lr=0.03,
            scheduler=partial(LinearLR, start_factor=1.0, end_factor=0.0, total_iters=6)
            if setting.lr_schedule == "decreasing"
            else None,
            steps=6,
            batch_size=5,
            seed=3,
            evaluate_every=1,
            guard="off",
            progress=False,
        )
        trial = tuned.trial(setting, 0.03)
        for a, b in zip(trial.model.parameters(), run.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
        assert trial.wrong_weight == 0.0


def test_a_setting_that_diverges_counts_by_its_best_model_and_does_not_end_the_benchmark() -> None:
    task, model = make(people()), MODELS["mlp"](3, 4)
    tuned = Tuning(task, model, steps=6, batch_size=32, seed=0)
    trial = tuned.trial(settings("alone")[0], 1e36)
    # the start
    assert trial.validation_loss == evaluate(model, tuned.loss, parts(task)["validation"])["loss"]


def test_regression_is_scored_in_spreads_of_all_targets() -> None:
    source = people(regression=True, as_table=True)
    task = make(source)
    tuned = Tuning(task, MODELS["linear"](3, 1), steps=1, batch_size=32, seed=0)
    outcome = tuned.outcome(settings("pooled"))
    trials = [tuned.trial(setting, lr) for setting in settings("pooled") for lr in RATES]
    best = min(trials, key=lambda trial: trial.validation_loss)
    inputs, targets = everything(parts(task)["test"])
    with torch.no_grad():
        rmse = float((best.model(inputs) - targets).double().square().mean().sqrt())
    assert outcome.metric == "-rmse"
    assert outcome.score == pytest.approx(-rmse / task.spread, rel=1e-6)
