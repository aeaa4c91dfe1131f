"""Figures, one function each, drawn without global state.

Every function returns a Matplotlib `Figure`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from coterie.errors import KnobError
from coterie.recording.record import Record
from coterie.theory import Constants, Numbers, averaging_speedup

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
"""Okabe and Ito's palette, told apart by colour-blind readers and in print."""

DASHES = ("-", "--", "-.", (0, (4, 1, 1, 1, 1, 1)), ":", (0, (1, 1)))
"""A second mark beside the colour, for copies in grey."""

MARKS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "h", "p")
"""Marks that tell twelve things apart without colours."""


def gain_factor(mark: tuple[float, float] | None = None) -> Figure:
    """Draw the speedup 1/(1 − α*) of weighted averaging over Lσ_0²/(μTζ²) and N, for m = 0.

    A point (Lσ_0²/(μTζ²), N) may be marked, with its speedup.
    """
    title = "Speedup of weighted averaging over training alone"
    figure, axes = new_figure(
        4.2, title, "noise against accumulated bias,  Lσ₀² / (μTζ²)", "number of peers  N"
    )
    ratio, n_peers = np.geomspace(1e-3, 1e5, 161), np.geomspace(1, 1e4, 121)
    speedup = np.asarray(gain(ratio, n_peers[:, None]))
    logarithmic_axes(axes)
    mesh = axes.pcolormesh(
        ratio,
        n_peers,
        speedup,
        norm=LogNorm(1, speedup.max()),
        cmap="viridis",
        shading="nearest",
        rasterized=True,
    )
    levels = [1.1, 2, 10, 100, 1000]
    lines = axes.contour(ratio, n_peers, speedup, levels, colors="white", linewidths=0.8)
    axes.clabel(lines, fmt=lambda level: f"×{level:g}", fontsize=8)
    figure.colorbar(mesh, ax=axes, label="speedup  1 / (1 − α*)", format=_power_of_ten)
    if mark is not None:
        x, y = np.clip(mark[0], ratio[0], ratio[-1]), np.clip(mark[1], n_peers[0], n_peers[-1])
        axes.plot(
            x, y, "o", color="white", markeredgecolor="black", markersize=9, clip_on=False, zorder=5
        )
        axes.annotate(
            f"×{float(gain(*mark)):.3g}",
            (float(x), float(y)),
            xytext=(10, 8) if x < 1e3 else (-10, 8),
            textcoords="offset points",
            ha="left" if x < 1e3 else "right",
            bbox={
                "boxstyle": "round,pad=0.25",
                "facecolor": "white",
                "edgecolor": "none",
                "alpha": 0.9,
            },
        )
    axes.grid(visible=False)
    return figure


def differences(
    values: Mapping[str, Mapping[str, tuple[float, float]]], title: str, unit: str
) -> Figure:
    """Draw the difference of each method to Alone with two standard errors, a group of lines a set.

    The values are the difference and its standard error, by set, by method.
    """
    methods = list(dict.fromkeys(method for of_set in values.values() for method in of_set))
    height = len(values) * (len(methods) + 1.5)
    xlabel = f"difference to Alone, {unit}, ± 2 standard errors"
    figure, axes = new_figure(1.3 + 0.13 * height, title, xlabel, "", width=7.6)
    axes.axvline(0, color="#444444", linewidth=0.8)
    for i, method in enumerate(methods):
        drawn = [(row, one[method]) for row, one in enumerate(values.values()) if method in one]
        places = [row + 0.8 * (i + 0.5) / len(methods) - 0.4 for row, _ in drawn]
        middle, error = np.array([pair for _, pair in drawn]).T
        colour, mark = COLOURS[i % len(COLOURS)], MARKS[i % len(MARKS)]
        axes.errorbar(
            middle,
            places,
            xerr=2 * np.nan_to_num(error),
            fmt=mark,
            ms=4,
            color=colour,
            label=method,
        )
    axes.set_yticks(range(len(values)), list(values))
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    add_legend(axes, loc="center left", bbox_to_anchor=(1.0, 0.5), ncols=1 + len(methods) // 25)
    return figure


def curves(record: Record, quantities: Sequence[str] = ()) -> Figure:
    """Draw quantities of a record over the steps or rounds: the losses where none is named."""
    known = list(record.frame().columns)
    for name in quantities:
        if name not in known:
            raise KnobError(
                f"the record has no {name!r}; it has {', '.join(known) or 'no point yet'}"
            )
    drawn = quantities or [name for name in known if name.endswith("loss")]
    figure, axes = new_figure(3.6, record.configuration.rule, record.configuration.counts, "")
    for i, name in enumerate(drawn):
        steps, values = record.curve(name)
        axes.plot(
            steps,
            values,
            color=COLOURS[i % 6],
            linestyle=DASHES[i % 6],
            label=name.replace("_", " "),
        )
    if drawn:
        add_legend(axes)
    return figure


def gain(ratio: Numbers, n_peers: Numbers) -> Numbers:
    """Return the speedup 1/(1 − α*) at Lσ_0²/(μTζ²) = `ratio` and N peers, for m = 0."""
    problem = Constants(
        smoothness=1, pl=1, initial_gap=1, noise=1, n_peers=n_peers, bias_floor=1 / np.sqrt(ratio)
    )
    return averaging_speedup(problem, steps=1)


def logarithmic_axes(axes: Axes) -> None:
    """Make both axes logarithmic, labelled at powers of ten in plain text.

    Mathtext is slow to draw.
    """
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(_power_of_ten)
        axis.set_minor_formatter(NullFormatter())


def _power_of_ten(value: float, _: float | None = None) -> str:
    """Return 10 to a power with the power raised."""
    return "10" + f"{round(np.log10(value))}".translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def new_figure(
    height: float, title: str, xlabel: str, ylabel: str, width: float = 6.4
) -> tuple[Figure, Axes]:
    """Return a figure of one pair of axes, with its words."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    label_axes(axes, title, xlabel, ylabel)
    return figure, axes


def label_axes(axes: Axes, title: str, xlabel: str, ylabel: str) -> None:
    """Set the words and the plain style that all figures share."""
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def add_legend(axes: Axes, **options: Any) -> None:
    """Add the legend in the style that all figures share."""
    axes.legend(fontsize=8, framealpha=0.85, facecolor="#fdfdfd", edgecolor="none", **options)
