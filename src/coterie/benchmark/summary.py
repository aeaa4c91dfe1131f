"""What the cells say together: means, paired differences to Alone, who won, who was harmed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

TASK = ["set", "model", "condition", "user", "seed"]
PLACE = ["set", "model", "condition"]

HARMED = 2.0
"""A user is harmed whose test examples say so by more than this many standard errors."""

SIGNIFICANT = 3.0
"""A method is better or worse than Alone in a set and condition by more than this many standard errors."""


def table(rows: Sequence[dict[str, Any]]) -> "pd.DataFrame":
    """Return a row a cell, each with its difference to Alone on the same test examples.

    `difference` is in the units of the score. `difference_error` is its standard error over the test examples,
    paired; for −RMSE that of (MSE_alone − MSE)/(RMSE_alone + RMSE), which is the difference. The rows are
    those of the cells, with the `errors` of each test example.
    """
    import pandas as pd

    frame = pd.DataFrame(rows)
    alone = frame[frame["method"] == "alone"].set_index(TASK)
    differences = []
    for row in rows:
        other = alone.loc[tuple(row[field] for field in TASK)]
        costs = np.asarray(other["errors"]) - np.asarray(row["errors"])
        scale = -(other["score"] + row["score"]) or 1.0 if row["metric"] == "-rmse" else 1.0
        error = costs.std(ddof=1) / np.sqrt(len(costs)) / scale
        differences.append({"difference": row["score"] - other["score"], "difference_error": float(error)})
    frame["wrong_weight"] = frame["wrong_weight"].astype(float)  # nothing where a method has no weights
    counted = frame.drop(columns="errors").assign(test_examples=[len(row["errors"]) for row in rows])
    return counted.join(pd.DataFrame(differences))


def by_user(frame: "pd.DataFrame") -> "pd.DataFrame":
    """Return a row a user and method, the seeds averaged, and whether the user was harmed."""
    groups = frame.groupby([*PLACE, "user", "method"], sort=False)
    users = groups[["score", "difference", "wrong_weight", "settings", "seconds"]].mean()
    users["difference"] = users["difference"].round(12)  # a tie is one in spite of rounding
    users["seeds"] = groups.size()
    users["metric"] = groups["metric"].first()
    keys = [frame[key] for key in (*PLACE, "user", "method")]
    squares = (frame["difference_error"] ** 2).groupby(keys, sort=False)
    users["difference_error"] = np.sqrt(squares.sum()) / users["seeds"]
    users["harmed"] = users["difference"] < -HARMED * users["difference_error"]
    return users.reset_index()


def summary(frame: "pd.DataFrame") -> "pd.DataFrame":
    """Return a row a set, model, condition and method: means over users, with standard errors over users."""
    users = by_user(frame)
    groups = users.groupby([*PLACE, "method"], sort=False)
    means = groups.agg(
        metric=("metric", "first"),
        users=("user", "size"),
        seeds=("seeds", "max"),
        score=("score", "mean"),
        score_error=("score", "sem"),
        difference=("difference", "mean"),
        difference_error=("difference", "sem"),
        wins=("difference", lambda d: int((d > 0).sum())),
        ties=("difference", lambda d: int((d == 0).sum())),
        losses=("difference", lambda d: int((d < 0).sum())),
        harmed=("harmed", "sum"),
        wrong_weight=("wrong_weight", "mean"),
        settings=("settings", "max"),
        seconds=("seconds", "mean"),
    )
    return means.reset_index()


def overall(frame: "pd.DataFrame") -> "pd.DataFrame":
    """Return a row a method over all sets and conditions.

    `better` and `worse` count those where it differs from Alone by more than three standard errors over users;
    `near_best` those where it is the best method, or behind the best by no more than one standard error of
    their paired difference.
    """
    import pandas as pd

    means = summary(frame)
    users = by_user(frame)
    near = []
    for place, scores in users.groupby(PLACE, sort=False):
        wide = scores.pivot_table(index="user", columns="method", values="score")
        behind = (-wide).add(wide[wide.mean().idxmax()], axis=0)
        close = behind.mean() <= behind.sem(ddof=1).fillna(0.0)
        near += [{"place": place, "method": method, "near_best": bool(ok)} for method, ok in close.items()]
    ratio = means["difference"] / means["difference_error"].where(means["difference_error"] > 0)
    rows = means.assign(better=ratio > SIGNIFICANT, worse=ratio < -SIGNIFICANT).groupby("method", sort=False)
    sums = rows[["wins", "ties", "losses", "harmed", "better", "worse"]].sum()
    sums.insert(0, "places", rows.size())
    sums["near_best"] = pd.DataFrame(near).groupby("method")["near_best"].sum()
    return sums.reset_index()
