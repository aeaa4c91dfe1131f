"""Many users: each asks a sample of the others in closed form, and nobody's run is held ready."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.small_runs import same, state_of
from torch import nn
from torch.nn.functional import mse_loss

import coterie
from coterie.choosing.mixture import ClosedForm
from coterie.everyone import train as everyone
from coterie.everyone.runs import Runs
from coterie.mixture.answers import EStep, StackedUsers
from coterie.mixture.families import SQUARED
from coterie.mixture.posterior import Priors, Rows
from coterie.mixture.scaling import Scaling


def users(count: int, rows: int = 12, first: int | None = None) -> list[coterie.User]:
    """Return users of a linear regression, the first with so many rows."""
    random, made = np.random.default_rng(0), []
    for k in range(count):
        n = first if first is not None and not k else rows
        x = torch.from_numpy(random.normal(size=(n, 3)))
        y = x.sum(1, keepdim=True) + torch.from_numpy(random.normal(size=(n, 1)))
        made.append(coterie.User(f"user {k}", x, y))
    return made


def together(some: list[coterie.User], **settings: Any) -> Runs:
    """Train everybody in closed form."""
    return coterie.train_everyone(
        nn.Linear(3, 1).double(), mse_loss, some, measure=False, **settings
    )


def numbers_of(runs: Runs) -> int:
    """How many gradients everybody's runs asked for, of peers and of user 0."""
    return sum(c.gradients for r in runs.runs.values() for c in r.record.end.costs.values())


def test_each_asks_so_many_others_and_its_run_is_that_of_train() -> None:
    everybody = users(9)
    runs = together(everybody, sample=5)
    heard = set[str]()
    for me in everybody:
        run = runs.runs[me.name]
        asked = list(run.record.configuration.peers)
        assert len(asked) == 5
        assert me.name not in asked
        heard |= set(asked)
        peers = [user for user in everybody if user.name in asked]
        one = coterie.train(nn.Linear(3, 1).double(), mse_loss, me, peers, measure=False)
        for name, value in state_of(one.model).items():
            torch.testing.assert_close(state_of(run.model)[name], value, rtol=1e-9, atol=1e-11)
        others = [user for user in everybody if user is not me]
        by_train = coterie.train(nn.Linear(3, 1).double(), mse_loss, me, others, sample=5)
        assert list(by_train.record.configuration.peers) == asked
    assert heard == {user.name for user in everybody}
    again = together(everybody, sample=5)
    assert all(
        same(state_of(again.models[name]), state_of(model)) for name, model in runs.models.items()
    )


def test_work_grows_with_users_once_each_asks_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(everyone, "MOST_ASKED", 5)
    few, many = (together(users(n)) for n in (8, 16))
    assert numbers_of(many) == 2 * numbers_of(few)
    assert all(len(run.record.configuration.peers) == 5 for run in many.runs.values())
    assert {run.record.configuration.sample for run in many.runs.values()} == {5}
    whole = together(users(6))  # five others each: everybody asks everybody, and no sample is told
    assert {run.record.configuration.sample for run in whole.runs.values()} == {None}
    rule = coterie.WeightedAveraging(0.5)  # steps of a rule ask all others unless `sample` is given
    by_steps = together(users(8), rule=rule, steps=2)
    assert all(len(run.record.configuration.peers) == 7 for run in by_steps.runs.values())


def test_no_closed_form_is_held_ready_before_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of many users is that of their results: a run is set up, fitted and let go."""
    begun, most, fit = 0, list[int](), ClosedForm._fit
    init = ClosedForm.__init__

    def count(self: ClosedForm, *arguments: Any) -> None:
        nonlocal begun
        begun += 1
        init(self, *arguments)

    def fitted(self: ClosedForm) -> Any:
        nonlocal begun
        most.append(begun)
        begun -= 1
        return fit(self)

    monkeypatch.setattr(ClosedForm, "__init__", count)
    monkeypatch.setattr(ClosedForm, "_fit", fitted)
    together(users(7))
    assert most == [1] * 8  # the pooled model's too


def test_one_user_with_many_rows_costs_the_others_no_more_than_its_sums() -> None:
    """What an exchange passes over: as many rows of it as there are columns and outputs, and the intercept."""
    passed = list[int]()
    answers = EStep.answers

    def noted(self: EStep, stacked: StackedUsers, *rest: Any) -> Any:
        passed.append(stacked.there.shape[1])
        return answers(self, stacked, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EStep, "answers", noted)
        runs = together(users(6, rows=7, first=3000))
    assert set(passed) == {7, 3 + 1 + 1}
    assert all(run.out_of_fold is not None for run in runs.runs.values())


@pytest.mark.parametrize("told", ["gradient", "posterior", "gradient curvature posterior"])
def test_sums_of_rows_answer_as_the_rows_do(told: str) -> None:
    """In pieces, with rows beyond all that user 0 knows, and of users with more and fewer rows."""
    random = np.random.default_rng(0)
    made = [Rows(random.normal(size=(n, 3)), random.normal(size=(n, 1))) for n in (40, 33, 37)]
    made[1].inputs[2] *= 1e4  # counts as 100 standard deviations
    made[2] = made[2]._replace(weights=random.random(37))
    scaling = Scaling.of(*made[0][:2], SQUARED, intercept=True)
    shape = (4, 2, 1)
    priors = Priors(random.normal(size=shape), random.random(shape) + 0.1, np.array([0.5, 2.0]))
    asked = EStep("squared", scaling, priors, told, examples=40.0)
    stack = StackedUsers.of(made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coterie.mixture.answers.STACKED", 150)
        summed = asked.scaled(stack)
    assert summed is not None
    assert summed.there.shape == (3, 5)
    found = asked.answers(summed)
    expected = [asked.answer(asked.rows(each)) for each in made]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
