"""The summary's numbers against plain formulas and the bootstrap."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from coterie.benchmark.methods import names
from coterie.benchmark.results import conclusion
from coterie.benchmark.totals import by_condition, by_user, overall, summary, table
from coterie.reporting.figures import differences


def cell_rows(metric: str = "accuracy") -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    rows = []
    for condition in ("honest", "stranger"):
        for user in ("a", "b", "c"):
            for seed in (0, 1):
                for method, risk in (
                    ("alone", 0.4),
                    ("wga", 0.2 if condition == "honest" else 0.9),
                ):
                    errors = (
                        (rng.random(50) < risk).astype(float)
                        if metric == "accuracy"
                        else rng.random(50) * risk
                    )
                    score = 1 - errors.mean() if metric == "accuracy" else -np.sqrt(errors.mean())
                    rows.append(
                        {
                            **{
                                "set": "digits",
                                "model": "linear",
                                "condition": condition,
                                "user": user,
                            },
                            **{
                                "seed": seed,
                                "method": method,
                                "metric": metric,
                                "score": float(score),
                            },
                            "loss": float(errors.mean()) + 0.1,
                            **{
                                "errors": errors.tolist(),
                                "wrong_weight": 0.25,
                                "settings": 12,
                                "seconds": 1.0,
                            },
                        }
                    )
    return rows


def by(frame: pd.DataFrame, *keys: str) -> dict[Any, dict[Any, Any]]:
    """Return the rows of a frame by these columns."""
    return {tuple(row[key] for key in keys): row for row in frame.to_dict("records")}


def test_differences_and_errors_are_those_of_plain_formulas() -> None:
    rows = cell_rows()
    frame = table(rows)
    rows_by = by(summary(frame), "condition", "method")
    for condition in ("honest", "stranger"):
        differences, harmed = [], 0
        for user in ("a", "b", "c"):
            per_seed, variances = [], []
            for seed in (0, 1):
                own = [
                    r
                    for r in rows
                    if (r["condition"], r["user"], r["seed"]) == (condition, user, seed)
                ]
                alone, wga = (
                    np.array(r["errors"]) for r in sorted(own, key=lambda r: str(r["method"]))
                )
                per_seed.append((alone - wga).mean())
                variances.append((alone - wga).var(ddof=1) / 50)
            differences.append(np.mean(per_seed))
            harmed += np.mean(per_seed) < -2 * np.mean(np.sqrt(variances))
        row = rows_by[condition, "wga"]
        assert row["difference"] == pytest.approx(np.mean(differences))
        assert row["difference_error"] == pytest.approx(np.std(differences, ddof=1) / np.sqrt(3))
        assert (row["wins"], row["losses"]) == (
            sum(d > 0 for d in differences),
            sum(d < 0 for d in differences),
        )
        assert row["harmed"] == harmed == (0 if condition == "honest" else 3)
    assert [rows_by["honest", "alone"][key] for key in ("difference", "ties", "harmed")] == [
        0,
        3,
        0,
    ]


def test_the_error_of_an_rmse_difference_agrees_with_the_bootstrap() -> None:
    rows = cell_rows("-rmse")[:2]
    alone, wga = (np.array(row["errors"]) for row in rows)
    rows_by = by(table(rows), "method")["wga",]
    assert rows_by["difference"] == pytest.approx(np.sqrt(alone.mean()) - np.sqrt(wga.mean()))
    draws = np.random.default_rng(0).integers(0, 50, (4000, 50))
    spread = np.std(np.sqrt(alone[draws].mean(1)) - np.sqrt(wga[draws].mean(1)))
    assert rows_by["difference_error"] == pytest.approx(spread, rel=0.1)


def test_overall_counts_where_a_method_is_better_worse_and_near_the_best() -> None:
    frame = table(cell_rows())
    rows_by = by(overall(frame), "method")
    users = by_user(frame)
    for condition, best in (("honest", "wga"), ("stranger", "alone")):
        means = users[users["condition"] == condition].groupby("method")["score"].mean()
        assert means.idxmax() == best
    counts = ("places", "better", "worse", "near_best")
    assert [rows_by["wga",][key] for key in counts] == [2, 1, 1, 1]
    assert [rows_by["alone",][key] for key in counts] == [2, 0, 0, 1]
    assert [rows_by["wga",][key] for key in ("wins", "ties", "losses")] == [3, 0, 3]


def test_a_figure_holds_as_many_methods_as_there_are() -> None:
    values = {"digits": dict.fromkeys(names(), (0.1, 0.01))}
    (axes,) = differences(values, "honest", "accuracy").axes
    assert axes.get_legend_handles_labels()[1] == names()


def test_what_chance_would_show_stands_beside() -> None:
    frame = table(cell_rows())
    wga = by(overall(frame), "method")["wga",]
    rng = np.random.default_rng(0)
    t = rng.normal(size=(200_000, 3))
    t = t.mean(1) / (t.std(1, ddof=1) / np.sqrt(3))
    # two sets and conditions
    assert wga["by_chance"] == pytest.approx(2 * (t < -3).mean(), rel=0.05)
    assert wga["harmed_by_chance"] == pytest.approx(
        6 * (rng.normal(size=200_000) < -2).mean(), rel=0.1
    )
    assert (wga["users"], wga["settings"]) == (6, 12)
    assert wga["surely_better"] + wga["surely_worse"] <= wga["better"] + wga["worse"]
    sets = by(
        by_condition(
            pd.concat([frame, frame.assign(set="other", difference=frame["difference"] + 0.1)])
        ),
        "condition",
        "method",
    )
    honest = sets["honest", "wga"]
    assert honest["difference_error"] == pytest.approx(0.05)  # two sets that are 0.1 apart


def test_one_user_is_called_neither_better_nor_worse_also_by_chance() -> None:
    rows = cell_rows()
    totals = overall(table([row for row in rows if row["user"] == rows[0]["user"]]))
    wga = by(totals, "method")["wga",]
    assert (wga["better"], wga["worse"], wga["by_chance"]) == (0, 0, 0.0)
    assert conclusion(totals).endswith("no method can be called better or worse.")


def test_differences_are_to_the_better_alone_of_each_set_and_condition() -> None:
    rows = cell_rows()
    for row in [row for row in rows if row["method"] == "alone"]:
        gain = 0.1 if row["condition"] == "honest" else -0.1
        strong = row | {
            "method": "sklearn-alone",
            "score": row["score"] + gain,
            "loss": row["loss"] + 0.5,
        }
        rows.append(strong)
    means = by(summary(table(rows)), "condition", "method")
    plain = by(summary(table(cell_rows())), "condition", "method")
    for condition, weaker, gain in (("honest", "alone", 0.1), ("stranger", "sklearn-alone", 0.0)):
        assert means[condition, "wga"]["difference"] == pytest.approx(
            plain[condition, "wga"]["difference"] - gain
        )
        assert means[condition, weaker]["difference"] == pytest.approx(-0.1)
        # By the log loss `alone` is the better one in both.
        assert means[condition, "sklearn-alone"]["loss_difference"] == pytest.approx(0.5)
        assert means[condition, "wga"]["loss_difference"] == pytest.approx(
            plain[condition, "wga"]["loss_difference"]
        )
    # as after Ctrl-C
    without = [row for row in rows if (row["method"], row["user"]) != ("sklearn-alone", "c")]
    assert set(summary(table(without))["best_alone"]) == {"alone"}


def test_the_headline_names_all_that_are_near_the_best_equally_often_alone_too() -> None:
    rows = [row for row in cell_rows() if row["method"] == "alone"]
    rows += [row | {"method": "adaptive"} for row in rows]
    assert conclusion(overall(table(rows))) == (
        "Of 2 methods `alone`, `adaptive` are near the best most often: in 2 of 2 sets and conditions. "
        "No plain tool wins."
    )
    # honest
    rows += [row | {"method": "sklearn-trees", "score": row["score"] + 1} for row in rows[:6]]
    said = conclusion(overall(table(rows)))
    assert said.endswith("Plain tools have the highest mean: `sklearn-trees` in 1.")


def test_alone_by_itself_is_compared_with_nothing() -> None:
    """As after Ctrl-C, where only the first cells are there."""
    only = overall(table([row for row in cell_rows() if row["method"] == "alone"]))
    assert conclusion(only) == "Only Alone is measured yet; there is nothing to compare it with."
