"""Tables that trees may not know what to do with, through the command: they are fitted to, saved and applied."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from coterie.cli import app
from coterie.recording.record import Record

Change = Callable[[pd.DataFrame], None]


def visits(own: int = 40) -> pd.DataFrame:
    """Return the rows of four users, whose target is the sign of a product."""
    random = np.random.default_rng(0)
    who = np.repeat(list("abcd"), [own, 90, 90, 90])
    frame = pd.DataFrame({"who": who, "u": random.normal(size=len(who)).round(2)})
    frame["v"] = random.normal(size=len(who)).round(2)
    frame["kind"] = random.choice(["x", "y", "z"], len(who)).astype(object)
    signal = frame["u"] * frame["v"] + 0.3 * random.normal(size=len(who))
    return frame.assign(y=np.where(signal > 0, "yes", "no"), number=signal.round(3))


def put(whose: str, column: str, value: Any) -> Change:
    """Return what gives a column of some users another value."""

    def change(frame: pd.DataFrame) -> None:
        frame.loc[frame["who"].isin(list(whose)), column] = value

    return change


CHANGES: dict[str, tuple[Change, str, int]] = {
    "numbers that only peers have": (put("a", "v", np.nan), "y", 40),
    "numbers that only user 0 has": (put("bcd", "v", np.nan), "y", 40),
    "categories that only peers have": (put("a", "kind", None), "y", 40),
    "a category that user 0 never has": (put("b", "kind", "w"), "y", 40),
    "a column that nobody has": (put("abcd", "v", np.nan), "y", 40),
    "one class at user 0": (put("a", "y", "yes"), "y", 40),
    "one class": (put("abcd", "y", "yes"), "y", 40),
    "a constant target at user 0": (put("a", "number", 3.0), "number", 40),
    "a constant target": (put("abcd", "number", 3.0), "number", 40),
    "five own rows": (put("", "u", 0.0), "y", 5),
}


@pytest.mark.parametrize("model", ["auto", "trees"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_table_is_fitted_and_its_model_applied(name: str, model: str, tmp_path: Path) -> None:
    change, target, own = CHANGES[name]
    frame = visits(own).drop(columns="number" if target == "y" else "y")
    change(frame)
    frame.to_csv(tmp_path / "visits.csv", index=False)
    rows = "who,u,v,kind\na,0.3,0.4,x\na,,,never seen\na,1.5,,\n"
    (tmp_path / "new.csv").write_text(rows)
    columns = ["--user-column", "who", "--me", "a", "--target", target, "--model", model]
    data, run = ["--data", str(tmp_path / "visits.csv")], str(tmp_path / "run")
    fitted = CliRunner().invoke(app, ["train", *data, *columns, "--out", run])
    assert fitted.exit_code == 0, fitted.output
    applied = CliRunner().invoke(app, ["predict", run, str(tmp_path / "new.csv")])
    assert applied.exit_code == 0, applied.output
    told = [line for line in applied.stdout.splitlines() if not line.startswith("coterie")]
    assert len(told) == 4, applied.stdout
    numbers = [float(each) for line in told[1:] for each in line.split(",")[target == "y" :]]
    assert np.isfinite(numbers).all()
    board = Record.load(tmp_path / "run").end.account.get("leaderboard", {})
    trees = not name.startswith(("five", "one class", "a constant target"))
    assert not trees or "trees" in board
    assert "five" not in name or not {"trees", "forest, alone"} & set(board)
