"""Figures: what stands at their axes, and the numbers that they draw."""

from __future__ import annotations

import numpy as np

from coterie.reporting import figures


def test_every_figure_says_what_it_shows() -> None:
    speedup = figures.gain_factor(mark=(0.5, 10)).axes[0]
    assert speedup.get_title() == "Speedup of weighted averaging over training alone"
    compared = figures.differences({"digits": {"wga": (0.05, 0.01)}}, "honest", "accuracy").axes[0]
    assert compared.get_xlabel() == "difference to Alone, accuracy, ± 2 standard errors"


def test_the_speedup_and_its_labels() -> None:
    assert round(float(figures.gain(np.inf, 10.0)), 12) == 11.0
    assert round(float(figures.gain(1.0, 1.0)), 12) == 1.5
    assert (figures._power_of_ten(0.001), figures._power_of_ten(1.0)) == ("10⁻³", "10⁰")
