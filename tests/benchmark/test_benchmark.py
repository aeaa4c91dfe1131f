"""The benchmark: conditions, no leakage, the summary's numbers, and that nothing finished is lost."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.optim.lr_scheduler import LinearLR
from typer.testing import CliRunner

from coterie import benchmark
from coterie.benchmark.methods import BUDGET, METHODS, RATES, Way
from coterie.benchmark.models import MODELS
from coterie.benchmark.sets import CONDITIONS, SETS, Population, SetTask, candidates, task_of
from coterie.benchmark.summary import by_user, overall, summary, table
from coterie.benchmark.tuning import Tuning
from coterie.cli import app
from coterie.engines.in_process.engine import InProcess
from coterie.errors import DataError, KnobError
from coterie.evaluation.evaluate import evaluate
from coterie.reporting.figures import differences
from coterie.rules import Alone
from coterie.training.many import train_many
from coterie.training.train import train
from coterie.users.examples import Examples, InMemory
from coterie.users.user import User

RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def people(n_users: int = 5, n: int = 40, *, regression: bool = False, as_table: bool = False) -> Population:
    """Make users whose first feature is the number of the row, so that every example can be known again."""
    rng = np.random.default_rng(0)
    rows = n_users * n
    inputs = np.column_stack([np.arange(rows), rng.normal(size=(rows, 2))])
    targets = inputs[:, 1] + 3.0 if regression else rng.permutation(np.arange(rows) % 4)
    owners = np.repeat([f"user {k}" for k in range(n_users)], n)
    held: Any = pd.DataFrame(inputs, columns=list("abc")) if as_table else torch.tensor(inputs, dtype=torch.float32)
    return Population(held, targets, owners, n_classes=0 if regression else 4)


def parts(task: SetTask) -> dict[str, Examples]:
    assert task.me.validation is not None
    assert task.me.test is not None
    return {"own": task.me.examples, "validation": task.me.validation, "test": task.me.test}


def everything(examples: Examples) -> tuple[torch.Tensor, torch.Tensor]:
    return examples.take(torch.arange(len(examples)))


def rows_of(examples: Examples) -> list[int]:
    return [int(row) for row in everything(examples)[0][:, 0]]


def make(source: Population, condition: str = "honest", seed: int = 0) -> SetTask:
    return task_of(source, "user 1", own_examples=12, most_peers=10, condition=condition, seed=seed)


@pytest.mark.parametrize("condition", list(CONDITIONS))
def test_no_example_is_in_two_places(condition: str) -> None:
    task = make(people(), condition)
    found = [rows_of(part) for part in parts(task).values()] + [rows_of(peer.examples) for peer in task.peers]
    assert [len(rows) for rows in found[:3]] == [12, 12, 16]
    flat = [row for rows in found for row in rows]
    assert sorted(flat) == list(range(200))
    own = set(flat[:40])
    assert (own == set(range(40, 80))) == (condition != "permuted")


def test_parts_have_the_classes_in_equal_shares_and_depend_on_the_seed() -> None:
    source = people()
    tasks = [make(source, seed=seed) for seed in (0, 0, 1)]
    shares = np.bincount(source.targets[source.rows("user 1")], minlength=4) / 40
    for part in parts(tasks[0]).values():
        counts = np.bincount(everything(part)[1].numpy(), minlength=4)
        assert np.abs(counts - shares * len(part)).max() < 1.5
    rows = [rows_of(task.me.examples) for task in tasks]
    assert rows[0] == rows[1] != rows[2]


def test_peers_are_drawn_and_need_several_classes() -> None:
    source = people()
    source.targets[source.rows("user 4")] = 2
    names = {
        tuple(peer.name for peer in task_of(source, "user 1", own_examples=9, most_peers=2, seed=seed).peers)
        for seed in range(20)
    }
    assert names == {("user 0", "user 2"), ("user 0", "user 3"), ("user 2", "user 3")}
    assert "user 4" not in candidates(source, 9)
    with pytest.raises(DataError, match="'user 4' cannot be user 0"):
        task_of(source, "user 4", own_examples=9, most_peers=2)
    with pytest.raises(KnobError, match="unknown condition 'odd'"):
        make(source, "odd")


def test_wrong_labels_are_wrong_in_half_of_the_peers_only() -> None:
    source = people()
    task = make(source, "wrong-labels")
    assert len(task.peers) == 4
    assert len(task.wrong) == 2
    for peer in task.peers:
        truth = source.targets[rows_of(peer.examples)]
        labels = everything(peer.examples)[1].numpy()
        if peer.name in task.wrong:
            np.testing.assert_array_equal(labels, (truth + 1) % 4)
        else:
            np.testing.assert_array_equal(labels, truth)
    for part in parts(task).values():
        np.testing.assert_array_equal(everything(part)[1].numpy(), source.targets[rows_of(part)])


def test_a_stranger_has_other_labels_in_all_its_parts_and_its_peers_do_not() -> None:
    source = people()
    task = make(source, "stranger")
    for part in parts(task).values():
        np.testing.assert_array_equal(everything(part)[1].numpy(), (source.targets[rows_of(part)] + 1) % 4)
    for peer in task.peers:
        np.testing.assert_array_equal(everything(peer.examples)[1].numpy(), source.targets[rows_of(peer.examples)])


def test_a_stranger_in_regression_is_mirrored() -> None:
    source = people(regression=True, as_table=True)
    honest, strange = make(source), make(source, "stranger")
    for name, part in parts(honest).items():
        inputs, targets = everything(part)
        torch.testing.assert_close(everything(parts(strange)[name])[0], inputs)
        torch.testing.assert_close(everything(parts(strange)[name])[1], -targets)  # zero is the own mean


def test_permuted_users_hold_a_mixture_and_keep_their_sizes() -> None:
    task = make(people(), "permuted")
    assert [len(peer) for peer in task.peers] == [40] * 4
    owners = {row // 40 for row in rows_of(task.peers[0].examples)}
    assert owners == {0, 1, 2, 3, 4}


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
        outcome = tuned.outcome(METHODS["wga"])
        models = [tuned.trial(way, lr).model for way in METHODS["wga"] for lr in RATES]
        outcomes.append((outcome, [p for model in models for p in model.parameters()]))
    assert outcomes[0][0].validation_loss == outcomes[1][0].validation_loss
    assert outcomes[0][0].setting == outcomes[1][0].setting
    assert outcomes[0][0].loss != outcomes[1][0].loss
    for a, b in zip(outcomes[0][1], outcomes[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_trials_never_see_the_test_set_and_settings_are_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[User] = []

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(args[2])
        return train(*args, **kwargs)

    def spy_many(*args: Any, **kwargs: Any) -> Any:
        seen.extend(wanted.me for wanted in args[2])
        return train_many(*args, **kwargs)

    monkeypatch.setattr("coterie.benchmark.tuning.train", spy)
    monkeypatch.setattr("coterie.benchmark.tuning.train_many", spy_many)
    task = make(people())
    tuned = Tuning(task, MODELS["linear"](3, 4), steps=2, batch_size=32, seed=0)
    outcomes = {name: tuned.outcome(ways) for name, ways in METHODS.items()}
    assert all(user.test is None for user in seen)
    assert task.me.test is not None
    assert outcomes["alone"].settings == outcomes["wga"].settings == outcomes["fine-tuned"].settings == BUDGET
    assert all(outcome.settings <= BUDGET for outcome in outcomes.values())
    distinct = {way for ways in METHODS.values() for way in ways}
    assert len(seen) == sum(len(way.rates) for way in distinct)  # a setting that two methods share is trained once


def test_the_setting_is_the_best_by_validation_and_scored_on_the_test_set() -> None:
    task = make(people())
    tuned = Tuning(task, MODELS["mlp"](3, 4), steps=15, batch_size=8, seed=0)
    outcome = tuned.outcome(METHODS["alone"])
    trials = [tuned.trial(way, lr) for way in METHODS["alone"] for lr in RATES]
    best = trials[int(np.argmin([trial.validation_loss for trial in trials]))]
    inputs, targets = everything(parts(task)["test"])
    with torch.no_grad():
        right = (best.model(inputs).argmax(1) == targets).double()
    assert outcome.score == pytest.approx(float(right.mean()))
    assert outcome.errors == (1 - right).tolist()
    assert outcome.setting == f"{best.way.name}, lr {best.lr:g}"


def test_the_tail_is_the_mean_of_the_last_half_and_fine_tuning_starts_from_the_pooled_model() -> None:
    task = make(people())
    model = MODELS["linear"](3, 4)
    tuned = Tuning(task, model, steps=4, batch_size=32, seed=0)
    tail = tuned.trial(Way("tail", lambda task, steps: Alone(), tail=True), 0.1)
    steps = [Tuning(task, model, steps=n, batch_size=32, seed=0) for n in (3, 4)]
    last = []
    for one in steps:
        found: list[torch.Tensor] = []
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
            callbacks=[lambda step, found=found: found.append(step.model[1].weight.detach().clone())],  # type: ignore[misc]
        )
        last.append(found[-1])
    torch.testing.assert_close(tail.model.get_parameter("1.weight"), (last[0] + last[1]) / 2)
    pooled = min((tuned.trial(METHODS["pooled"][0], lr) for lr in RATES), key=lambda trial: trial.validation_loss)
    tuned_on = tuned.outcome(METHODS["fine-tuned"])
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
    ways = [*METHODS["pooled"][:2], METHODS["pooled"][3], METHODS["wga-0.3"][0], METHODS["bc"][0]]
    tuned.prepare(ways)
    for way in ways:
        run = train(
            model,
            tuned.loss,
            tuned.me,
            task.peers,
            way.rule(task, 6),
            optimizer=partial(torch.optim.Adam, weight_decay=way.weight_decay),
            lr=0.03,
            scheduler=partial(LinearLR, start_factor=1.0, end_factor=0.0, total_iters=6)
            if way.steps == "decreasing"
            else None,
            steps=6,
            batch_size=5,
            seed=3,
            evaluate_every=1,
            guard="off",
            progress=False,
        )
        trial = tuned.trial(way, 0.03)
        for a, b in zip(trial.model.parameters(), run.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
        assert trial.wrong_weight == 0.0


def test_a_setting_that_diverges_counts_by_its_best_model_and_does_not_end_the_benchmark() -> None:
    task, model = make(people()), MODELS["mlp"](3, 4)
    tuned = Tuning(task, model, steps=6, batch_size=32, seed=0)
    trial = tuned.trial(METHODS["alone"][0], 1e36)
    assert trial.validation_loss == evaluate(model, tuned.loss, parts(task)["validation"])["loss"]  # the start


def test_regression_is_scored_in_spreads_of_all_targets() -> None:
    source = people(regression=True, as_table=True)
    task = make(source)
    tuned = Tuning(task, MODELS["linear"](3, 1), steps=1, batch_size=32, seed=0)
    outcome = tuned.outcome(METHODS["pooled"])
    trials = [tuned.trial(way, lr) for way in METHODS["pooled"] for lr in RATES]
    best = min(trials, key=lambda trial: trial.validation_loss)
    inputs, targets = everything(parts(task)["test"])
    with torch.no_grad():
        rmse = float((best.model(inputs) - targets).double().square().mean().sqrt())
    assert outcome.metric == "-rmse"
    assert outcome.score == pytest.approx(-rmse / task.spread, rel=1e-6)


def cell_rows(metric: str = "accuracy") -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    rows = []
    for condition in ("honest", "stranger"):
        for user in ("a", "b", "c"):
            for seed in (0, 1):
                for method, risk in (("alone", 0.4), ("wga", 0.2 if condition == "honest" else 0.9)):
                    errors = (
                        (rng.random(50) < risk).astype(float) if metric == "accuracy" else rng.random(50) * risk
                    )
                    score = 1 - errors.mean() if metric == "accuracy" else -np.sqrt(errors.mean())
                    rows.append(
                        {
                            **{"set": "digits", "model": "linear", "condition": condition, "user": user},
                            **{"seed": seed, "method": method, "metric": metric, "score": float(score)},
                            **{"errors": errors.tolist(), "wrong_weight": 0.25, "settings": 12, "seconds": 1.0},
                        }
                    )
    return rows


def by(frame: pd.DataFrame, *keys: str) -> dict[Any, dict[Any, Any]]:
    """Return the rows of a frame by these columns."""
    return {tuple(row[key] for key in keys): row for row in frame.to_dict("records")}


def test_differences_and_errors_are_those_of_plain_formulas() -> None:
    rows = cell_rows()
    frame = table(rows)
    found = by(summary(frame), "condition", "method")
    for condition in ("honest", "stranger"):
        differences, harmed = [], 0
        for user in ("a", "b", "c"):
            per_seed, variances = [], []
            for seed in (0, 1):
                own = [r for r in rows if (r["condition"], r["user"], r["seed"]) == (condition, user, seed)]
                alone, wga = (np.array(r["errors"]) for r in sorted(own, key=lambda r: str(r["method"])))
                per_seed.append((alone - wga).mean())
                variances.append((alone - wga).var(ddof=1) / 50)
            differences.append(np.mean(per_seed))
            harmed += np.mean(per_seed) < -2 * np.sqrt(np.sum(variances)) / 2
        row = found[condition, "wga"]
        assert row["difference"] == pytest.approx(np.mean(differences))
        assert row["difference_error"] == pytest.approx(np.std(differences, ddof=1) / np.sqrt(3))
        assert (row["wins"], row["losses"]) == (sum(d > 0 for d in differences), sum(d < 0 for d in differences))
        assert row["harmed"] == harmed == (0 if condition == "honest" else 3)
    assert [found["honest", "alone"][key] for key in ("difference", "ties", "harmed")] == [0, 3, 0]


def test_the_error_of_an_rmse_difference_agrees_with_the_bootstrap() -> None:
    rows = cell_rows("-rmse")[:2]
    alone, wga = (np.array(row["errors"]) for row in rows)
    found = by(table(rows), "method")["wga",]
    assert found["difference"] == pytest.approx(np.sqrt(alone.mean()) - np.sqrt(wga.mean()))
    draws = np.random.default_rng(0).integers(0, 50, (4000, 50))
    spread = np.std(np.sqrt(alone[draws].mean(1)) - np.sqrt(wga[draws].mean(1)))
    assert found["difference_error"] == pytest.approx(spread, rel=0.1)


def test_overall_counts_where_a_method_is_better_worse_and_near_the_best() -> None:
    frame = table(cell_rows())
    found = by(overall(frame), "method")
    users = by_user(frame)
    for condition, best in (("honest", "wga"), ("stranger", "alone")):
        means = users[users["condition"] == condition].groupby("method")["score"].mean()
        assert means.idxmax() == best
    counts = ("places", "better", "worse", "near_best")
    assert [found["wga",][key] for key in counts] == [2, 1, 1, 1]
    assert [found["alone",][key] for key in counts] == [2, 0, 0, 1]
    assert [found["wga",][key] for key in ("wins", "ties", "losses")] == [3, 0, 3]


SMALL = ["bench", "--sets", "digits", "--methods", "wga-0.3,pooled", "--conditions", "honest,stranger"]
SMALL += ["--users", "2", "--steps", "3"]


def results(out: Path) -> pd.DataFrame:
    return pd.read_parquet(out / "results.parquet").drop(columns="seconds")


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bench") / "serial"
    result = RUNNER.invoke(app, [*SMALL, "--jobs", "1", "--out", str(out)])
    assert result.exit_code == 0, result.output
    return out


def test_a_row_for_every_set_condition_user_seed_and_method(serial: Path) -> None:
    frame = results(serial)
    assert len(frame) == 2 * 2 * 3
    assert not frame.duplicated(["set", "model", "condition", "user", "seed", "method"]).any()
    written = json.loads((serial / "results.json").read_text(encoding="utf-8"))
    pd.testing.assert_frame_equal(pd.DataFrame(written["rows"]).drop(columns="seconds"), frame)
    assert written["settings"]["steps"] == 3
    page = (serial / "index.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 2
    assert "Condition: stranger" in page
    assert "<script" not in page


def test_resuming_measures_only_what_is_missing_and_gives_the_same_table(
    serial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "again"
    store = benchmark.Store(out, 3)
    cells = list(benchmark.Selection(["digits"], ["wga-0.3"], ["stranger"], None, 1, 1).cells(None))
    assert [cell.method for cell in cells] == ["alone", "wga-0.3"]
    for _ in benchmark.run(cells[1:], store, None):
        pass
    before = {path: path.stat().st_mtime_ns for path in store.cells.iterdir()}
    assert len(before) == 1
    result = RUNNER.invoke(app, [*SMALL, "--jobs", "1", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert {path: path.stat().st_mtime_ns for path in before} == before
    pd.testing.assert_frame_equal(results(out), results(serial))
    monkeypatch.setattr("coterie.benchmark.running.measure", None)  # nothing is left to measure
    assert RUNNER.invoke(app, [*SMALL, "--jobs", "1", "--out", str(out)]).exit_code == 0


def test_ctrl_c_loses_nothing_that_is_finished(
    serial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Tuning.outcome, []

    def interrupted(self: Tuning, ways: Any) -> Any:
        calls.append(ways)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(self, ways)

    monkeypatch.setattr(Tuning, "outcome", interrupted)
    out = tmp_path / "stopped"
    result = RUNNER.invoke(app, [*SMALL, "--jobs", "1", "--out", str(out)])
    assert result.exit_code == 130
    assert "the same command goes on" in result.output
    assert len(results(out)) == len(list((out / "cells").iterdir())) == 4
    result = RUNNER.invoke(app, [*SMALL, "--jobs", "1", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert len(calls) == 5 + 8
    pd.testing.assert_frame_equal(results(out), results(serial))


def test_processes_stopped_and_resumed_give_the_table_of_one_process(serial: Path, tmp_path: Path) -> None:
    store = benchmark.Store(tmp_path / "parallel", 3)
    selection = benchmark.Selection(["digits"], ["wga-0.3", "pooled"], ["honest", "stranger"], None, 2, 1)
    cells = list(selection.cells(None))
    running = benchmark.run(cells, store, None, jobs=2)
    first = next(running)
    with pytest.raises(KeyboardInterrupt):
        running.throw(KeyboardInterrupt())
    assert not multiprocessing.active_children()
    assert all(cell in store for cell in first)
    kept = store.rows()  # every file is whole
    assert len(first) <= len(kept) <= len(cells)
    for _ in benchmark.run(cells, store, None, jobs=2):
        pass
    benchmark.write_results(store, tmp_path)
    pd.testing.assert_frame_equal(results(tmp_path), results(serial))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sets", "letters"], "unknown set 'letters'; the sets are digits, mnist"),
        (["--sets", "digits", "--methods", "magic"], "unknown method 'magic'; the methods are alone, pooled"),
        (["--sets", "digits", "--conditions", "rain"], "unknown condition 'rain'; the conditions are honest"),
        (["--sets", "digits", "--models", "oracle"], "unknown model 'oracle'; the models are linear, mlp"),
        (["--sets", "digits", "--users", "0"], "`users` must be at least 1, got 0"),
        (["--sets", "digits", "--steps", "0"], "`steps` must be at least 1, got 0"),
        (["--sets", "digits", "--jobs", "0"], "--jobs"),
        (["--sets", "vowels"], "name it with `--data`"),
        (["--sets", "vowels", "--data", "nowhere"], "vowels needs nowhere/vowel_deterding/vowel-context.data"),
        (["--sets", "digits", "--models", "gru"], "nothing to measure"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_written(
    options: list[str], words: str, tmp_path: Path
) -> None:
    result = RUNNER.invoke(app, ["bench", *options, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert words in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_a_folder_begun_with_other_settings_is_refused(serial: Path) -> None:
    result = RUNNER.invoke(app, [*SMALL, "--steps", "4", "--out", str(serial)])
    assert result.exit_code == 2
    assert "was begun with steps = 3, not 4" in result.output


def test_sets_that_are_not_there_are_left_out_with_a_word_about_each(tmp_path: Path) -> None:
    options = ["--data", str(tmp_path), "--methods", "pooled", "--conditions", "honest", "--users", "1"]
    result = RUNNER.invoke(app, ["bench", *options, "--steps", "1", "--jobs", "1", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    for name in SETS:
        assert (f"left out: {name} needs" in result.output) == (name != "digits")
    assert set(results(tmp_path / "out")["set"]) == {"digits"}


@pytest.mark.parametrize("name", list(MODELS))
def test_every_model_goes_through_the_engine_in_one_pass(name: str) -> None:
    recurrent = name in ("rnn", "gru")
    inputs = torch.randint(0, 10, (12, 7)) if recurrent else torch.rand(12, 1, 8, 8)
    targets = torch.randint(0, 10, (12, 7) if recurrent else (12,))
    users = [User(user, inputs, targets) for user in ("me", "a", "b")]
    engine = InProcess(MODELS[name](64, 10), torch.nn.functional.cross_entropy, users[0], users[1:])
    rows = "vmap" if name == "gru" else "by layer"  # whose weights are no layer's
    assert (engine.describe()["average"], engine.describe()["rows"]) == ("one pass", rows)


def test_a_figure_holds_as_many_methods_as_there_are() -> None:
    values = {"digits": dict.fromkeys(METHODS, (0.1, 0.01))}
    (axes,) = differences(values, "honest", "accuracy").axes
    assert axes.get_legend_handles_labels()[1] == list(METHODS)
