"""What the cells say together.

Means, paired differences to the best Alone, who won, who was harmed.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import special

TASK = ["set", "model", "condition", "user", "seed"]
PLACE = ["set", "model", "condition"]

ALONE = ("alone", "sklearn-alone")
"""What uses no peer: by gradient steps, and by scikit-learn.

The better of the two is what others must beat.
"""

HARMED = 2.0
"""A user is harmed whose test examples say so by more than this many standard errors."""

SIGNIFICANT = 3.0
"""A method is better or worse than the best Alone in a set and condition by more than this many standard errors."""

LEVEL = 0.05
"""How often one of all comparisons may be called better or worse by chance, where they are corrected for number."""


def table(rows: Sequence[dict[str, Any]]) -> "pd.DataFrame":
    """Return a row a cell, each with its difference to the best Alone on the same test examples.

    The best Alone of a set, model and condition is the method in `ALONE` with the highest mean
    score there, and for `loss_difference` the one with the least mean loss. `difference` is in the
    units of the score; `difference_error` is its standard error over the test examples, paired; for
    −RMSE that of (MSE_alone − MSE)/(RMSE_alone + RMSE), which is the difference. The rows are those
    of the cells, with the `errors` of each test example.
    """
    frame = pd.DataFrame(rows)
    alone = {(*_task(row), row["method"]): row for row in rows if row["method"] in ALONE}
    best, surest = {}, {}
    for place, of_alone in frame[frame["method"].isin(ALONE)].groupby(PLACE, sort=False):
        wide = of_alone.pivot_table(
            index=["user", "seed"], columns="method", values=["score", "loss"]
        )
        # of what every task of it has, also where Ctrl-C came between
        means = wide.dropna(axis="columns").mean()
        best[place], surest[place] = means["score"].idxmax(), means["loss"].idxmin()
    differences = []
    for row in rows:
        place = tuple(row[field] for field in PLACE)
        other = alone[*_task(row), best[place]]
        costs = np.asarray(other["errors"]) - np.asarray(row["errors"])
        scale = -(other["score"] + row["score"]) or 1.0 if row["metric"] == "-rmse" else 1.0
        error = costs.std(ddof=1) / np.sqrt(len(costs)) / scale
        differences.append(
            {
                "best_alone": best[place],
                "difference": row["score"] - other["score"],
                "difference_error": float(error),
                "loss_difference": row["loss"] - alone[*_task(row), surest[place]]["loss"],
            }
        )
    # nothing where a method has no weights
    frame["wrong_weight"] = frame["wrong_weight"].astype(float)
    counted = frame.drop(columns="errors").assign(
        test_examples=[len(row["errors"]) for row in rows]
    )
    return counted.join(pd.DataFrame(differences))


def _task(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[field] for field in TASK)


def by_user(frame: "pd.DataFrame") -> "pd.DataFrame":
    """Return a row a user and method, the seeds averaged, and whether the user was harmed.

    The test examples of a user's seeds overlap by more than half, so that its error is the mean of
    theirs: what it is if they err alike, and no smaller for being repeated.
    """
    groups = frame.groupby([*PLACE, "user", "method"], sort=False)
    users = groups[
        ["score", "difference", "loss", "loss_difference", "wrong_weight", "settings", "seconds"]
    ].mean()
    users["difference"] = users["difference"].round(12)  # a tie is one in spite of rounding
    users["seeds"] = groups.size()
    users[["metric", "best_alone"]] = groups[["metric", "best_alone"]].first()
    keys = [frame[key] for key in (*PLACE, "user", "method")]
    users["difference_error"] = frame["difference_error"].groupby(keys, sort=False).mean()
    users["harmed"] = users["difference"] < -HARMED * users["difference_error"]
    return users.reset_index()


def summary(frame: "pd.DataFrame") -> "pd.DataFrame":
    """Return a row a set, model, condition and method.

    Means over users, with standard errors over users.
    """
    users = by_user(frame)
    groups = users.groupby([*PLACE, "method"], sort=False)
    means = groups.agg(
        metric=("metric", "first"),
        best_alone=("best_alone", "first"),
        users=("user", "size"),
        seeds=("seeds", "max"),
        score=("score", "mean"),
        score_error=("score", "sem"),
        difference=("difference", "mean"),
        difference_error=("difference", "sem"),
        loss=("loss", "mean"),
        loss_difference=("loss_difference", "mean"),
        loss_difference_error=("loss_difference", "sem"),
        wins=("difference", lambda d: int((d > 0).sum())),
        ties=("difference", lambda d: int((d == 0).sum())),
        losses=("difference", lambda d: int((d < 0).sum())),
        harmed=("harmed", "sum"),
        wrong_weight=("wrong_weight", "mean"),
        settings=("settings", "max"),
        seconds=("seconds", "mean"),
    )
    means["chance"] = _chance(means["difference"], means["difference_error"], means["users"])
    return means.reset_index()


def by_condition(frame: "pd.DataFrame") -> "pd.DataFrame":
    """Return a row a method and condition.

    The mean differences over sets, with standard errors between sets.

    `loss_difference` is that of the log loss, over the sets with classes.
    """
    means = summary(frame)
    means["log_loss"] = means["loss_difference"].where(means["metric"] == "accuracy")
    groups = means.groupby(["condition", "method"], sort=False)
    return groups.agg(
        sets=("difference", "size"),
        difference=("difference", "mean"),
        difference_error=("difference", "sem"),
        loss_difference=("log_loss", "mean"),
        loss_difference_error=("log_loss", "sem"),
    ).reset_index()


def overall(frame: "pd.DataFrame") -> "pd.DataFrame":
    """Return a row a method over all sets and conditions.

    `better` and `worse` count those where it differs from the best Alone by more than three
    standard errors over users; `by_chance` is how many chance would show on either side, by
    Student's t; `surely_better` and `surely_worse` count what is left where all comparisons, of all
    methods, are corrected for their number (Bonferroni). `harmed_by_chance` is how many users
    chance would show as harmed; `best` counts where its mean score is the highest, `near_best`
    where it is that or behind it by no more than one standard error of their paired difference.
    """
    means = summary(frame)
    users = by_user(frame)
    near = []
    for _, scores in users.groupby(PLACE, sort=False):
        wide = scores.pivot_table(index="user", columns="method", values="score")
        behind = (-wide).add(wide[wide.mean().idxmax()], axis=0)
        close = behind.mean() <= behind.sem(ddof=1).fillna(0.0)
        best = {method: bool(mean == behind.mean().min()) for method, mean in behind.mean().items()}
        near += [
            {"method": method, "near_best": bool(ok), "best": best[method]}
            for method, ok in close.items()
        ]
    ratio = means["difference"] / means["difference_error"].where(means["difference_error"] > 0)
    compared = means["method"] != means["best_alone"]
    several = means["users"] > 1  # one user has no error, and is called neither better nor worse
    sure = means["chance"] < LEVEL / max(1, compared.sum())
    counted = means.assign(
        better=ratio > SIGNIFICANT,
        worse=ratio < -SIGNIFICANT,
        surely_better=sure & (ratio > 0),
        surely_worse=sure & (ratio < 0),
        by_chance=special.stdtr(np.maximum(1, means["users"] - 1), -SIGNIFICANT)
        * (compared & several),
        harmed_by_chance=special.ndtr(-HARMED) * means["users"] * compared,
    )
    rows = counted.groupby("method", sort=False)
    sums = rows[
        ["wins", "ties", "losses", "harmed", "better", "worse", "surely_better", "surely_worse"]
    ].sum()
    sums[["by_chance", "harmed_by_chance"]] = rows[["by_chance", "harmed_by_chance"]].sum()
    sums[["users", "settings"]] = rows.agg(users=("users", "sum"), settings=("settings", "max"))
    sums.insert(0, "places", rows.size())
    sums[["near_best", "best"]] = pd.DataFrame(near).groupby("method")[["near_best", "best"]].sum()
    return sums.reset_index()


def _chance(
    difference: "pd.Series[float]", error: "pd.Series[float]", users: "pd.Series[int]"
) -> Any:
    """Return how often chance shows a mean over users as far from 0, two-sided, by Student's t."""
    t = (difference.abs() / error.where(error > 0)).to_numpy()
    return np.nan_to_num(2 * special.stdtr(np.maximum(1, users.to_numpy() - 1), -t), nan=1.0)
