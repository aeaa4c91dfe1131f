"""The paper's figures, drawn from their lines: each function returns a Matplotlib `Figure`."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coterie.paper.series import Series
from coterie.reporting.figures import COLOURS, DASHES, add_legend, label_axes, logarithmic_axes

METHODS = {"Alone": 0, "BC": 1, "WGA": 2, "BC, oracle": 3, "BC as printed": 4}
"""Methods keep their colours from figure to figure; the first three have the paper's."""

NOTE = "lines: exact; bands: mean of 100 sampled runs ± 2 standard errors"


def loss_curves(series: Sequence[Series], title: str) -> Figure:
    """Draw expected losses over steps, each beside the mean of its sampled runs ± 2 standard errors."""
    figure = Figure(figsize=(7.6, 4.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    label_axes(axes, title, "steps taken", "expected loss  E f₀(x) − f₀*")
    _losses(axes, series)
    add_legend(axes, loc="upper left", bbox_to_anchor=(1.01, 1.0))  # beside the curves, which go everywhere
    figure.supxlabel(NOTE, fontsize=8, color="#555555")
    return figure


def loss_panels(panels: Mapping[str, Sequence[Series]], title: str, floor: float, note: str) -> Figure:
    """Draw expected losses over steps, one panel a group by its heading, with one colour for one legend in all.

    `floor` is a level to compare with, drawn across, and `note` says what it is.
    """
    figure = Figure(figsize=(10, 4.2), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=11)
    for i, (heading, series) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), i + 1, sharey=figure.axes[0] if i else None)
        label_axes(axes, heading, "steps taken", "" if i else "expected loss  E f₀(x) − f₀*")
        _losses(axes, series)
        add_legend(axes)
        axes.axhline(floor, color="#444444", linewidth=0.8)
        axes.annotate(note, (0.02, floor), xycoords=("axes fraction", "data"), va="bottom", fontsize=8)
        axes.tick_params(labelleft=not i)
    figure.supxlabel(NOTE, fontsize=8, color="#555555")
    return figure


def bias_growth(series: Sequence[Series]) -> Figure:
    """Draw the speedup of weighted averaging over N + 1, for each m, at ζ = 0; the first, for m = 0, is linear."""
    figure = Figure(figsize=(6.4, 4.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    title = "Speedup of weighted averaging at ζ = 0"
    label_axes(axes, title, "number of users  N + 1", "speedup over training alone")
    for i, one in enumerate(series):
        axes.plot(one.x, one.exact, color=COLOURS[i], linestyle="-" if i else "--", label=one.legend)
    logarithmic_axes(axes)
    axes.margins(x=0)
    add_legend(axes)
    return figure


def _losses(axes: Axes, series: Sequence[Series]) -> None:
    """Draw exact curves as lines and sampled means ± 2 standard errors as bands, on logarithmic axes."""
    for i, one in enumerate(series):
        number = METHODS.get(one.legend, i)
        colour, dashes = COLOURS[number], DASHES[number]
        if one.mean is not None and one.error is not None:
            low = np.maximum(one.mean - 2 * one.error, one.mean / 100)  # a logarithmic axis has no zero
            axes.fill_between(one.x, low, one.mean + 2 * one.error, color=colour, alpha=0.25, linewidth=0)
        width = 1.6 if i else 2.6  # what coincides with the first line stays visible on it
        axes.plot(one.x, one.exact, color=colour, linestyle=dashes, linewidth=width, label=one.legend)
    logarithmic_axes(axes)
    axes.margins(x=0)
