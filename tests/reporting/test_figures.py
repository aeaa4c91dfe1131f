"""Figures: what stands at their axes, and the numbers that they draw."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from tests.support.records import configuration

from coterie.errors import KnobError
from coterie.recording import Point, Record
from coterie.reporting import figures
from coterie.reporting.page import Interval, interval_chart


def test_every_figure_says_what_it_shows() -> None:
    speedup = figures.gain_factor(mark=(0.5, 10)).axes[0]
    assert speedup.get_title() == "Speedup of weighted averaging over training alone"
    compared = figures.differences({"digits": {"wga": (0.05, 0.01)}}, "honest", "accuracy").axes[0]
    assert compared.get_xlabel() == "difference to Alone, accuracy, ± 2 standard errors"


def test_a_line_that_nothing_can_end_goes_over_the_whole_axis() -> None:
    endless = Interval("few splits", 3.0, 0.5, "", reach=(-math.inf, math.inf))
    chart = interval_chart([endless], "differences")
    left, width = map(
        float, re.findall(r'class="reach" style="left:([\d.]+)%;width:([\d.]+)%', chart)[0]
    )
    assert (left, width) == (0, 100)  # two standard errors would leave out zero


def test_curves_are_those_of_the_record() -> None:
    record = Record(configuration(rule="WeightedAveraging(alpha=0.5)"))
    for step in (0, 5):
        record.add(
            Point(step=step, own_loss=1 / (1 + step), validation={"loss": 2.0, "accuracy": 0.5})
        )
    drawn = figures.curves(record).axes[0]
    assert {line.get_label(): line.get_xydata().tolist() for line in drawn.get_lines()} == {  # type: ignore[union-attr]
        "own loss": [[0.0, 1.0], [5.0, 1 / 6]],
        "validation loss": [[0.0, 2.0], [5.0, 2.0]],
    }
    (line,) = figures.curves(record, ["validation_accuracy"]).axes[0].get_lines()
    assert line.get_label() == "validation accuracy"
    with pytest.raises(
        KnobError, match="no 'loss'; it has own_loss, validation_loss, validation_accuracy"
    ):
        figures.curves(record, ["loss"])


def test_the_speedup_and_its_labels() -> None:
    assert round(float(figures.gain(np.inf, 10.0)), 12) == 11.0
    assert round(float(figures.gain(1.0, 1.0)), 12) == 1.5
    assert (figures._power_of_ten(0.001), figures._power_of_ten(1.0)) == ("10⁻³", "10⁰")
