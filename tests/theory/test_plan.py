"""`coterie plan`: the table, the JSON, the sentence, the picture and the errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from tests.support import records
from typer.testing import CliRunner

from coterie import theory
from coterie.cli import app
from coterie.recording import Record
from coterie.reporting.phrases import in_short, verdict

PROBLEM: dict[str, Any] = {
    "n_peers": 10,
    "noise": 10,
    "bias_floor": 0.4,
    "bias_growth": 0,
    "hessian_gap": 0.1,
    "smoothness": 2,
    "pl": 1,
    "steps": 1000,
    "initial_gap": 5,
}


@pytest.fixture(autouse=True)
def few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the sliders of a page have one place, which takes less time."""
    monkeypatch.setattr("coterie.reporting.plan_page.POSITIONS", 1)


def run(*more: str, **changes: Any) -> Result:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in (PROBLEM | changes).items()]
    return CliRunner().invoke(app, ["plan", *options, *more])


def as_json(**changes: Any) -> dict[str, dict[str, float]]:
    result = run("--json", **changes)
    assert result.exit_code == 0, result.output
    answer: dict[str, dict[str, float]] = json.loads(result.stdout)
    return answer


def test_json_has_every_method_and_the_closed_forms() -> None:
    plan = as_json()
    assert list(plan) == ["alone", "wga", "bc_oracle", "bc"]
    assert list(plan["wga"]) == list(plan["alone"]) == ["alpha", "lr", "bound", "speedup"]
    assert list(plan["bc"]) == ["alpha", "beta", "lr", "bound", "speedup", "alone_bound"]
    alpha = 1 / (1 + 1 / 10 + 1 * 0.4**2 * 1000 / (2 * 10**2))
    assert plan["alone"]["alpha"] == 0
    assert plan["alone"]["speedup"] == 1
    assert plan["wga"]["alpha"] == pytest.approx(alpha)
    assert plan["bc_oracle"]["alpha"] == pytest.approx(10 / 11)
    assert plan["bc"]["alpha"] == pytest.approx(10 / 11)


def test_a_speedup_is_of_the_bound_shown_beside_it() -> None:
    """In as many times more steps, at its best, Alone's bound is the same."""
    own = theory.alone(
        theory.Constants(**{name: value for name, value in PROBLEM.items() if name != "steps"})
    )
    for changes in ({}, {"bias_floor": 0.0}):
        plan = as_json(**changes)
        for name in ("wga", "bc_oracle"):
            steps = plan[name]["speedup"] * PROBLEM["steps"]
            assert own.loss_bound(own.best_loss_lr(steps), steps) == pytest.approx(
                plan[name]["bound"], rel=1e-9
            )


def test_json_bounds_are_the_theorys_at_the_knobs_shown() -> None:
    plan = as_json(peer_noise=5, bias_growth=0.3)
    problem = theory.Constants(
        n_peers=10,
        noise=10,
        peer_noise=5,
        bias_floor=0.4,
        bias_growth=0.3,
        hessian_gap=0.1,
        smoothness=2,
        pl=1,
        initial_gap=5,
    )
    wga, bc = plan["wga"], plan["bc"]
    assert wga["bound"] == pytest.approx(
        theory.averaging(problem, wga["alpha"]).loss_bound(wga["lr"], 1000)
    )
    bound = theory.correction_bound(problem, bc["alpha"], bc["beta"], bc["lr"], 1000)
    assert bc["bound"] == pytest.approx(bound / 2)
    assert bc["speedup"] == pytest.approx(theory.steps_alone(problem, bound) / 1000)


def test_a_given_alpha_is_used() -> None:
    plan, best = as_json(alpha=0.2), as_json()
    assert plan["wga"]["alpha"] == 0.2
    assert plan["wga"]["speedup"] < best["wga"]["speedup"]


def test_infinite_speedups_are_null_in_json_and_a_sign_in_the_table() -> None:
    assert as_json(peer_noise=0)["bc_oracle"]["speedup"] is None
    assert "∞" in run(peer_noise=0).output


def test_table_and_sentence() -> None:
    result = run(bias_floor=0)
    assert result.exit_code == 0
    for name in ("Alone", "WGA", "BC, oracle", "BC", "alpha", "beta", "step size", "speedup"):
        assert name in result.output
    words = " ".join(result.output.split())
    assert "Collaboration pays: averaging with alpha = 0.909 needs 11 times fewer steps" in words


@pytest.mark.parametrize(
    ("changes", "first", "second"),
    [
        ({"bias_floor": 40.0}, "Averaging does not pay", "it needs a Hessian gap below"),
        ({"hessian_gap": 0.0}, "Collaboration pays", "a better first estimate"),
        ({"hessian_gap": 0.0, "noise": 0.1}, "Averaging does not pay", "Bias correction pays"),
        ({"noise": 0.0}, "Averaging does not pay", "there is no noise to save"),
    ],
)
def test_the_verdict_says_why(changes: dict[str, float], first: str, second: str) -> None:
    constants = {name: value for name, value in (PROBLEM | changes).items() if name != "steps"}
    problem, steps = theory.Constants(**constants), 100_000 if changes.get("noise") else 1000
    sentences = verdict(problem, theory.plan(problem, steps), steps)
    assert first in sentences[0]
    assert second in sentences[1]


def test_a_plan_in_words() -> None:
    problem = theory.Constants(smoothness=1, pl=1, initial_gap=1, noise=1, n_peers=9)
    plan = theory.plan(problem, 1000)
    assert in_short(plan) == "WGA alpha 0.9, speedup 10; BC alpha 0.9, beta 0.0307, speedup 1.08"
    assert verdict(problem, plan, 1000)[0] == (
        "Collaboration pays: averaging with alpha = 0.9 needs 10 times fewer steps than training alone."
    )


def test_a_step_size_of_0_is_explained() -> None:
    problem = theory.Constants(smoothness=1, pl=1, initial_gap=0.5, noise=10, n_peers=9)
    for steps, said in (
        (10, ["Alone's step size is 0 because its bound is least where no step is taken"]),
        (10**4, []),
    ):
        choices = theory.plan(problem, steps)
        assert (choices["alone"].lr == 0) == bool(said)
        assert [
            sentence.partition(":")[0] for sentence in verdict(problem, choices, steps)[2:]
        ] == said


def test_a_bound_above_the_loss_of_the_start_says_nothing_about_who_gains() -> None:
    constants = {
        "hessian_gap": 1.0,
        "smoothness": 5.0,
        "pl": 1.0,
        "initial_gap": 2.0,
        "n_peers": 10,
    }
    vacuous = theory.Constants(noise=30.0, bias_floor=4.0, **constants)
    choices = theory.plan(vacuous, 10)
    assert min(choices["alone"].bound, choices["wga"].bound) >= 2.0  # what the start has
    assert verdict(vacuous, choices, 10)[0].startswith("The theory's bound says nothing here")
    telling = theory.Constants(noise=0.01, bias_floor=4.0, **constants)
    choices = theory.plan(telling, 1000)
    assert choices["alone"].bound < 0.1
    assert verdict(telling, choices, 1000)[0].startswith("Averaging does not pay")


def test_out_writes_the_picture_and_a_page(tmp_path: Path) -> None:
    result = run("--out", str(tmp_path / "plan"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "plan" / "gain_factor.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "plan" / "gain_factor.pdf").read_bytes().startswith(b"%PDF")
    page = (tmp_path / "plan" / "index.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert "Collaboration pays" in page


@pytest.mark.parametrize(
    "changes", [{"bias_floor": 0}, {"noise": 0}, {"bias_floor": 0, "noise": 0}]
)
def test_out_copes_with_points_off_the_picture(tmp_path: Path, changes: dict[str, float]) -> None:
    assert run("--out", str(tmp_path), **changes).exit_code == 0
    assert (tmp_path / "index.html").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pl": 3}, "`--pl` must not exceed `--smoothness`, got pl = 3 and smoothness = 2"),
        ({"noise": -1}, "`--noise` must not be negative, got -1"),
        (
            {"alpha": 0.8, "bias_growth": 4},
            "`--alpha` must be below 1/√m, m being `--bias-growth`, got 0.8",
        ),
        ({"n_peers": 0}, "`--n-peers` must be at least 1, got 0"),
        ({"steps": 0}, "`--steps` must be at least 1, got 0"),
        ({"pl": 0}, "`--pl` must be positive"),
        ({"noise": np.nan}, "`--noise` must be finite, got nan"),
    ],
)
def test_inconsistent_constants_are_one_message_and_exit_code_2(
    changes: dict[str, Any], message: str
) -> None:
    result = run(**changes)
    assert result.exit_code == 2
    assert result.stderr.startswith("coterie: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_an_exchange_cost_asks_how_often_to_exchange() -> None:
    asked = "plan --n-peers 9 --noise 1 --bias-floor 0 --hessian-gap 0 --smoothness 1 --pl 1 --initial-gap 2"
    run = CliRunner().invoke(
        app, [*asked.split(), "--steps", "1000", "--exchange-cost", "20", "--json"]
    )
    found = json.loads(run.stdout)["exchanges"]
    assert set(found) == {"alone", "at every step", "stale peers", "local work"}
    assert found["at every step"]["every"] == 1 < found["local work"]["every"]
    assert found["local work"]["bound"] < found["at every step"]["bound"]
    refused = CliRunner().invoke(app, [*asked.split(), "--exchange-cost", "inf"])
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "`--exchange-cost` must be finite" in refused.stderr
    shown = CliRunner().invoke(app, [*asked.split(), "--exchange-cost", "20"]).stdout
    assert "the least bound with peers is that of" in " ".join(shown.split())


def test_no_more_is_claimed_of_measured_constants_than_their_errors_allow(tmp_path: Path) -> None:
    """A bias of 3 ± 2 is not clear of its error: the table takes it for none, but averaging is not said to pay."""
    peer = {"noise": (1.0, 0.1), "bias_growth": (0.0, 0.0), "hessian_gap": (0.0, 0.1)}
    own = {
        "loss": 2.0,
        "gradient": (2.0, 0.5),
        "noise": (1.5, 0.5),
        "smoothness": (1.0, 0.1),
        "pl": 1.0,
    }

    def said(bias: tuple[float, float], *more: str) -> str:
        configuration = {"rule": "WeightedAveraging(alpha=0.5)", "peers": {"a": 40}, "steps": 100}
        estimates = {**own, "peers": {"a": {**peer, "bias_floor": bias}}}
        path = tmp_path / f"{bias}.jsonl"
        path.unlink(missing_ok=True)
        Record(records.configuration(**configuration, estimates=estimates), path)
        return " ".join(CliRunner().invoke(app, ["plan", str(path), *more]).output.split())

    unclear = said((3.0, 2.0))
    assert "It is not known whether averaging pays: the speedup of 3." in unclear
    assert "Collaboration pays" not in unclear
    assert "with biases as measured" in said((0.0, 0.05))
    wga = json.loads(said((3.0, 2.0), "--json"))["wga"]
    assert wga["sure_speedup"] < 1 < wga["speedup"]
    given = said((3.0, 2.0), "--bias-floor", "0")
    assert "Collaboration pays" in given
    assert "unless" not in given
    page = said((3.0, 2.0), "--out", str(tmp_path / "page"))
    assert "index.html" in page
    assert "It is not known whether averaging pays" in (tmp_path / "page" / "index.html").read_text(
        "utf-8"
    )
