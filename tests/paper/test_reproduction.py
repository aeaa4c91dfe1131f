"""`coterie reproduce`: the file format, the numbers against closed forms, the page."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from typer.testing import CliRunner

from coterie.cli import app
from coterie.paper import STUDIES, Line
from coterie.paper.lines import best, constant_steps, decreasing_steps, drifting_optimum, recorded
from coterie.paper.studies import DRIFT_STEPS, STEPS, paper_problem
from coterie.reporting.figures import gain_factor
from coterie.rules import Alone, BiasCorrection
from coterie.theory.quadratic import NoisyQuadratic, Quadratic

LABELS = {
    "comparison": ["alone", "wga", "bc"],
    "bias_on_bc": ["10", "100", "1000", "10000", "100000"],
    "bias_on_wga": ["10", "100", "1000", "10000", "100000"],
    "peers_on_bc": ["1", "10", "20", "50"],
    "alone_steps": ["0.005", "0.002", "0.001", "0.0005", "0.0002", "0.0001"],
    "gain_factor": ["1", "10", "100", "1000"],
    "bias_growth": ["0", "0.2", "0.5", "1"],
    "mean_estimation": ["alone", "equal", "best_at_1000", "best_at_each"],
    "drift": ["alone", "wga_100", "bc_10", "oracle_10", "bc_100", "oracle_100"],
    "tuned_comparison": [
        "bc_printed",
        *(
            f"{method}_{how}"
            for how in ("constant", "decreasing", "averaged")
            for method in ("alone", "wga", "bc", "oracle")
        ),
    ],
}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reproduction")
    result = CliRunner().invoke(app, ["reproduce", "--out", str(folder)])
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="module")
def figures(out: Path) -> dict[str, Any]:
    loaded = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert list(loaded) == ["figures"]
    return dict(loaded["figures"])


def finals(figures: dict[str, Any], name: str) -> dict[str, float]:
    return {label: one["exact_final"] for label, one in figures[name]["series"].items()}


def test_results_have_the_promised_names_and_fields(figures: dict[str, Any]) -> None:
    assert set(figures) == set(LABELS) == set(STUDIES)
    for name, labels in LABELS.items():
        series = figures[name]["series"]
        assert list(series) == labels
        for label, one in series.items():
            assert list(one) == [
                "exact_final",
                "exact_stationary",
                "sampled_final_mean",
                "sampled_final_se",
            ]
            assert math.isfinite(one["exact_final"])
            assert figures[name]["curves"][label]["exact"][-1] == one["exact_final"]


def test_sampled_runs_agree_with_the_exact_values(figures: dict[str, Any]) -> None:
    for name, figure in figures.items():
        for label, one in figure["series"].items():
            if one["sampled_final_mean"] is None:
                assert name in ("gain_factor", "bias_growth") or label == "best_at_each"
                continue
            deviation = abs(one["sampled_final_mean"] - one["exact_final"])
            assert deviation < 4 * one["sampled_final_se"], (name, label)


def test_the_paper_figures_settle_at_the_known_levels(figures: dict[str, Any]) -> None:
    levels = {
        name: {k: s["exact_stationary"] for k, s in figures[name]["series"].items()}
        for name in LABELS
    }
    assert levels["comparison"]["alone"] == pytest.approx(2.50e-3, rel=1e-3)
    assert levels["comparison"]["bc"] == pytest.approx(9.375e-4, rel=1e-4)
    assert f"{levels['comparison']['wga']:.2e}" == "2.52e-03"
    assert list(levels["bias_on_bc"].values()) == pytest.approx([9.375e-4] * 5, rel=1e-4)
    assert [float(f"{level:.2e}") for level in levels["peers_on_bc"].values()] == [
        5.15e-3,
        1.72e-3,
        1.44e-3,
        1.26e-3,
    ]
    for lr, level in levels["alone_steps"].items():
        assert level == pytest.approx(float(lr) * 100 / (2 * (2 - float(lr))))
    for shift, level in levels["bias_on_wga"].items():
        alpha, lr = 1e-3, 5e-4
        rate, variance = 1 + alpha, (1 - alpha) ** 2 * 100 + alpha**2 * 10
        bias, noise = 2 * alpha * float(shift) / rate, lr * variance / (rate * (2 - lr * rate))
        assert level == pytest.approx((bias**2 + noise) / 2, rel=1e-9)


def test_no_legend_covers_a_curve() -> None:
    """Beside curves that go everywhere the legend is outside of the axes."""
    figure = STUDIES["bias_on_bc"].draw(STUDIES["bias_on_bc"].series(0))
    FigureCanvasAgg(figure).draw()  # type: ignore[no-untyped-call]
    axes = figure.axes[0]
    legend = axes.get_legend()
    assert legend is not None
    assert legend.get_window_extent().x0 >= axes.get_window_extent().x1
    assert legend.get_window_extent().x1 <= figure.bbox.x1


def test_growing_bias_is_drawn_on_logarithmic_axes() -> None:
    axes = STUDIES["bias_growth"].draw(STUDIES["bias_growth"].series(0)).axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_the_table_of_a_figure_with_panels_says_which(out: Path) -> None:
    page = (out / "index.html").read_text(encoding="utf-8")
    table = page[page.index("Every method at its own best") :]
    for heading in ("best constant steps", "decreasing steps", "constant steps, averaged"):
        assert table.count(f">{heading}<") >= 4


def test_alone_follows_its_closed_form_at_every_step(figures: dict[str, Any]) -> None:
    for lr, curve in figures["alone_steps"]["curves"].items():
        decay = (1 - float(lr)) ** (2 * np.array(curve["x"]))
        level = float(lr) * 100 / (2 - float(lr))
        np.testing.assert_allclose(curve["exact"], (2 * decay + level * (1 - decay)) / 2, rtol=1e-9)


def test_closed_forms_are_drawn_as_such(figures: dict[str, Any]) -> None:
    for n_peers, curve in figures["gain_factor"]["curves"].items():
        np.testing.assert_allclose(
            curve["exact"], 1 + 1 / (1 / float(n_peers) + 1 / np.array(curve["x"])), rtol=1e-9
        )
    alpha = np.linspace(0, 1, 20_001)[:-1]
    for m, curve in figures["bias_growth"]["curves"].items():
        for users, speedup in zip(curve["x"][::20], curve["exact"][::20], strict=True):
            cost = ((1 - alpha) ** 2 + alpha**2 / (users - 1)) / (1 - alpha**2 * float(m)) ** 2
            assert speedup == pytest.approx(1 / cost.min(), rel=1e-5)


def test_a_mean_is_estimated_as_the_weighted_mean(figures: dict[str, Any]) -> None:
    for label, alpha in (
        ("alone", 0.0),
        ("equal", 10 / 11),
        ("best_at_1000", 1 / (1 + 0.1 + 0.09 * 1000 / 100)),
    ):
        curve = figures["mean_estimation"]["curves"][label]
        variance = 100 * ((1 - alpha) ** 2 + alpha**2 / 10) / np.array(curve["x"])
        np.testing.assert_allclose(curve["exact"], (variance + (0.3 * alpha) ** 2) / 2, rtol=1e-9)


def test_alone_reaches_the_information_bound(figures: dict[str, Any]) -> None:
    final, bound = finals(figures, "tuned_comparison"), 100 / (2 * STEPS)
    assert final["alone_decreasing"] == pytest.approx(bound, rel=1e-9)
    assert final["oracle_decreasing"] == pytest.approx(bound / 11, rel=1e-9)
    assert final["bc_printed"] == pytest.approx(9.375e-4, rel=1e-4)
    for how in ("constant", "decreasing", "averaged"):
        assert final[f"bc_{how}"] > bound
    assert final["bc_constant"] < final["alone_constant"]


def test_correction_wins_where_objectives_drift_together(figures: dict[str, Any]) -> None:
    final = finals(figures, "drift")

    def kalman(variance: float, drift: float = 1e-4) -> float:
        # half the predicted variance
        return (drift + math.sqrt(drift**2 + 4 * drift * variance)) / 4

    assert final["alone"] == pytest.approx(kalman(100), rel=1e-4)
    for n_peers in (10, 100):
        assert final[f"oracle_{n_peers}"] == pytest.approx(kalman(100 / (n_peers + 1)), rel=1e-3)
        assert (
            final[f"oracle_{n_peers}"] < final[f"bc_{n_peers}"] < 1.3 * final[f"oracle_{n_peers}"]
        )
    assert final["wga_100"] == pytest.approx(final["alone"], rel=0.01)


def scaled(setting: Line, factor: float) -> Line:
    assert not callable(setting.lr)
    return dataclasses.replace(setting, lr=setting.lr * factor)


def test_tuned_step_sizes_are_the_best() -> None:
    tuned = [(one, STEPS) for one in constant_steps(paper_problem(), 10, STEPS)]
    tuned += [(one, DRIFT_STEPS) for one in drifting_optimum(DRIFT_STEPS)]
    for setting, steps in tuned:
        for factor in (0.8, 1.25):
            assert setting.final(steps) < scaled(setting, factor).final(steps), setting.label


def test_forgetting_the_bias_only_hurts_in_the_drift_problem() -> None:
    for setting in drifting_optimum(DRIFT_STEPS):
        if isinstance(setting.rule, BiasCorrection):
            for beta in (1e-4, 1e-3, 1e-2):
                other = dataclasses.replace(
                    setting, rule=dataclasses.replace(setting.rule, beta=beta)
                )
                assert setting.final(DRIFT_STEPS) < other.final(DRIFT_STEPS)


def test_decreasing_knobs_do_not_depend_on_the_horizon() -> None:
    problem: NoisyQuadratic = paper_problem()
    short, long = (
        decreasing_steps(problem, 10, steps, bias_floor=8)[2] for steps in (100_000, 400_000)
    )
    assert short.knobs == long.knobs


@pytest.mark.parametrize(
    "name", ["comparison", "bias_on_bc", "peers_on_bc", "tuned_comparison", "drift"]
)
def test_losses_in_the_text_are_those_of_the_figure(name: str, figures: dict[str, Any]) -> None:
    quoted = re.findall(r"\d\.(\d+)e-(\d)|(?<!\d)\.(\d{4})", STUDIES[name].finding)
    numbers = [
        match[0] for match in re.finditer(r"\d\.\d+e-\d|(?<!\d)\.\d{4}", STUDIES[name].finding)
    ]
    values = [
        one[key]
        for one in figures[name]["series"].values()
        for key in ("exact_final", "exact_stationary")
    ]
    assert numbers
    for number, (digits, exponent, decimals) in zip(numbers, quoted, strict=True):
        unit = 10.0 ** -(len(digits) + int(exponent)) if digits else 10.0 ** -len(decimals)
        assert any(
            abs(value - float(number)) <= 0.501 * unit for value in values if value is not None
        ), number


def test_speedups_in_the_text_are_those_of_the_figure(figures: dict[str, Any]) -> None:
    speedups = [
        f"{speedup:.2g}" if speedup < 10 else f"{speedup:.0f}"
        for speedup in finals(figures, "bias_growth").values()
    ]
    assert "{}, {}, {} and {}".format(*speedups) in STUDIES["bias_growth"].finding


def test_every_figure_is_written_and_the_page_needs_nothing_else(out: Path) -> None:
    for name in LABELS:
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (out / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    page = (out / "index.html").read_text(encoding="utf-8")
    assert page.count("<svg") == len(LABELS)
    for study in STUDIES.values():
        assert study.title in page
    assert not re.search(r"""<link|<script|(src|href)\s*=\s*["'](?!#|data:)|url\((?!#)""", page)


def test_one_figure_can_be_made_and_the_seed_moves_the_samples_only(tmp_path: Path) -> None:
    results = []
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        command = ["reproduce", "comparison", "--out", str(tmp_path / folder), "--seed", str(seed)]
        assert CliRunner().invoke(app, command).exit_code == 0
        loaded = json.loads((tmp_path / folder / "results.json").read_text(encoding="utf-8"))
        assert list(loaded["figures"]) == ["comparison"]
        results.append(loaded["figures"]["comparison"]["series"]["bc"])
    assert results[0] == results[1]
    assert results[0]["exact_final"] == results[2]["exact_final"]
    assert results[0]["sampled_final_mean"] != results[2]["sampled_final_mean"]


def test_the_help_names_all_figures() -> None:
    text = CliRunner().invoke(app, ["reproduce", "--help"], env={"COLUMNS": "300"}).output
    assert f"of {', '.join(STUDIES)};" in text


def test_an_unknown_figure_is_refused_with_the_names_of_all(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["reproduce", "nonsense", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "unknown figure 'nonsense'" in result.output
    assert all(name in result.output for name in LABELS)
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    result = CliRunner().invoke(app, ["reproduce", "comparison", "--out", str(tmp_path / "taken")])
    assert result.exit_code == 2
    assert "must be a folder" in result.output


@pytest.mark.parametrize("mark", [None, (0.5, 10.0), (1e-9, 1.0), (math.inf, 1e6)])
def test_the_gain_factor_marks_a_point_even_off_the_map(mark: tuple[float, float] | None) -> None:
    axes = gain_factor(mark).axes[0]
    texts = [text.get_text() for text in axes.texts]
    if mark is not None:
        assert texts[-1] == f"×{1 + 1 / (1 / mark[1] + 1 / mark[0]):.3g}"


def test_recorded_steps_and_the_best_step_size() -> None:
    assert recorded(1000, points=4) == [1, 10, 100, 1000]
    problem = NoisyQuadratic(Quadratic(1, 0, 10), drift=0.01)
    tuned = best(lambda lr: Line("alone", "Alone", problem, Alone(), lr), [1e-2], steps=100_000)
    assert tuned.lr == pytest.approx(0.001, abs=5e-5)
