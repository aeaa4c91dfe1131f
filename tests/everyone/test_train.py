"""`train_everyone`: everybody's run is the one that `train` gives, and what is said of all is said of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.everyone import everyone
from tests.support.small_runs import network, same, state_of
from torch.nn.functional import cross_entropy

import coterie
from coterie.errors import DataError
from coterie.everyone.folders import POOLED, folder_names
from coterie.reporting.verdict import with_error
from coterie.tables.predict import FILE

RULES: dict[str, Any] = {"wga": coterie.WeightedAveraging(0.5), "default": None}


@pytest.mark.parametrize("rule", RULES)
def test_everybodys_run_is_the_one_that_train_gives(rule: str) -> None:
    users = everyone()
    settings: dict[str, Any] = {"steps": 12, "lr": 0.05, "measure": False}
    runs = coterie.train_everyone(network(), cross_entropy, users, RULES[rule], **settings)
    for me in users:
        peers = [user for user in users if user is not me]
        one = coterie.train(network(), cross_entropy, me, peers, RULES[rule], **settings)
        mine = runs.runs[me.name]
        for a, b in zip(one.model.parameters(), mine.model.parameters(), strict=True):
            torch.testing.assert_close(a, b)
        assert mine.test == pytest.approx(one.test)
        assert mine.verdict.finding == one.verdict.finding
        shares = runs.weights.loc[me.name]
        assert shares[me.name] == 0
        assert {n: s for n, s in shares.items() if s} == pytest.approx(
            {n: s for n, s in one.record.end.tau.items() if s and one.verdict.finding != "alone"}
        )


def test_the_mean_and_the_worst_off_are_those_of_the_runs() -> None:
    users = everyone()
    runs = coterie.train_everyone(
        network(), cross_entropy, users, RULES["wga"], steps=12, lr=0.05, measure=False
    )
    text, served, alone = runs.summary(), {}, {}
    for name, run in runs.runs.items():
        assert f"{name}: {run.verdict.sentence}" in text
        found = {"loss": run.test["loss"]}
        served[name] = found["loss"]
        comparison = run.record.end.comparison
        alone[name] = served[name] if comparison is None else comparison.measures["loss"].alone
    worst = max(served, key=lambda name: served[name])
    assert f"the worst is {served[worst]:.4g} ({worst})" in text
    mean = sum(served[name] - alone[name] for name in served) / len(served)
    assert next(one for one in runs.overall if one.measure == "loss").mean == pytest.approx(mean)


def test_every_user_has_a_folder_and_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    users = everyone()
    settings: dict[str, Any] = {"lr": 0.05, "measure": False, "trackers": ()}
    first = coterie.train_everyone(
        network(), cross_entropy, users, RULES["wga"], steps=6, out=tmp_path, **settings
    )
    assert {path.name for path in tmp_path.iterdir()} >= {
        name.replace(" ", "_") for name in first.runs
    }
    again = coterie.train_everyone(
        network(),
        cross_entropy,
        users,
        RULES["wga"],
        steps=12,
        out=tmp_path,
        resume=True,
        **settings,
    )
    straight = coterie.train_everyone(
        network(), cross_entropy, users, RULES["wga"], steps=12, **settings
    )
    for name, run in straight.runs.items():
        assert same(state_of(run.model), state_of(again.models[name]))


def test_one_who_cannot_learn_is_left_out_and_told() -> None:
    users = everyone()
    users[1] = coterie.User(
        "lonely", torch.zeros(4, 3, dtype=torch.float64), torch.ones(4, dtype=torch.long)
    )
    with pytest.warns(UserWarning, match="'lonely' is left out"):
        runs = coterie.train_everyone(
            network(), cross_entropy, users, RULES["wga"], steps=2, measure=False
        )
    assert "one class only" in runs.not_trained["lonely"]
    assert "lonely" not in runs.models
    with (
        pytest.warns(UserWarning, match="'lonely' is left out"),
        pytest.raises(DataError, match="two or more who can learn"),
    ):
        coterie.train_everyone(network(), cross_entropy, users[:2], RULES["wga"], steps=2)


def test_the_page_says_what_the_summary_says(tmp_path: Path) -> None:
    users = [
        *everyone(),
        coterie.User("of one class", torch.randn(4, 3).double(), torch.zeros(4, dtype=torch.long)),
    ]
    with pytest.warns(UserWarning, match="left out"):
        runs = coterie.train_everyone(
            network(), cross_entropy, users, RULES["wga"], steps=6, measure=False
        )
    page = runs.report(tmp_path / "index.html").read_text(encoding="utf-8")
    assert runs.summary().splitlines()[0] in page
    assert "of one class: left out" in page
    assert runs.pooled is not None
    assert f"loss {runs.pooled.test['loss']:.4g}" in page
    assert page.count('<td class="own">') == len(runs.runs)


def test_the_page_says_why_not_one_model_for_all_and_chance_stands_below(tmp_path: Path) -> None:
    users = everyone()
    runs = coterie.train_everyone(network(), cross_entropy, users, RULES["wga"], steps=6)
    assert runs.pooled is not None
    changes = []
    for user in users:
        assert user.test is not None
        inputs, targets = user.test.take(torch.arange(len(user.test)))
        with torch.no_grad():
            own, pooled = (
                cross_entropy(model(inputs), targets, reduction="none")
                for model in (runs.models[user.name], runs.pooled.model)
            )
        changes.append(own - pooled)
    told = [gain.beside_pooled for gain in runs.gains]
    assert [one.difference for one in told if one] == pytest.approx(
        [float(c.mean()) for c in changes]
    )
    errors = [float(c.std()) / len(c) ** 0.5 for c in changes]
    mean = with_error(
        float(torch.stack(changes).mean()), sum(e**2 for e in errors) ** 0.5 / len(errors)
    )
    sentence = f"one pooled model for all: loss {mean} in the mean of 4 users"
    assert sentence in runs.summary()
    page = runs.report(tmp_path / "index.html").read_text(encoding="utf-8")
    first, _, rest = page.partition("Who gains")
    assert sentence in first
    assert "by chance" not in first.lower()
    assert "Why not one model for all?" in rest
    seconds = {run.record.end.seconds for run in runs.runs.values()}
    assert len(seconds) == 1  # of the one program that took all
    assert f">{seconds.pop():.3g} s<" in first


def test_one_whose_examples_are_not_like_those_of_most_is_left_out() -> None:
    users = everyone()
    wide = coterie.User("wide", torch.randn(6, 4).double(), torch.tensor([0, 1] * 3))
    with pytest.warns(UserWarning, match="'wide' is left out: the inputs of 'wide'"):
        runs = coterie.train_everyone(
            network(), cross_entropy, [wide, *users], RULES["wga"], steps=2, measure=False
        )
    assert set(runs.runs) == {user.name for user in users}
    assert "are not like those of" in runs.not_trained["wide"]
    with (
        pytest.warns(UserWarning, match="left out"),
        pytest.raises(DataError, match=r"the inputs of .* are not like those of"),
    ):
        coterie.train_everyone(network(), cross_entropy, [users[0], wide], RULES["wga"], steps=2)


def test_no_users_folder_is_one_that_something_else_has(tmp_path: Path) -> None:
    names = [
        "pooled",
        "everyone.json",
        "index.html",
        "..",
        "../x",
        "a/b",
        "a_b",
        "A_B",
        "x" * 300,
        "x" * 299 + "y",
    ]
    places = folder_names(names)
    taken = {place.casefold() for place in places.values()}
    assert len(taken) == len(names)
    assert not taken & {POOLED, FILE, "index.html"}
    for place in places.values():
        (tmp_path / place).mkdir()
        assert (tmp_path / place).resolve().parent == tmp_path.resolve()


def test_who_has_no_weights_is_not_said_to_be_served_alone(tmp_path: Path) -> None:
    users = everyone()
    rules: dict[str, Any] = {
        user.name: coterie.methods.FedAvg(local_steps=2) if user is users[0] else RULES["wga"]
        for user in users
    }
    settings: dict[str, Any] = {"steps": 2, "lr": 0.05, "measure": False, "guard": "off"}
    runs = coterie.train_everyone(network(), cross_entropy, users, rules, **settings)
    assert not runs.weights.loc[users[0].name].any()
    page = runs.report(tmp_path / "index.html").read_text(encoding="utf-8")
    assert f"trained alone, or whose rule gave no weights ({users[0].name})." in page
