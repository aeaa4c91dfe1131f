"""Charts as pieces of a page.

Words and numbers are text of the page, lines are SVG that stretches with its width.

Colours are those of the page's stylesheet, light or dark; a line also has dashes of its own, a bar
its number.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

DASHES = ("", "7 4", "2 3", "9 3 2 3", "4 2", "1 4")
"""What tells lines apart beside their colour."""

Points = tuple[Sequence[float], Sequence[float]]
"""The places and the values of a line."""


@dataclass(frozen=True)
class Bar:
    """A bar: its name, its length as a share of the longest, what stands at its end, and a note beside the name."""

    name: str
    value: float
    text: str
    note: str = ""


@dataclass(frozen=True)
class Interval:
    """A value with its standard error, on an axis that has a zero."""

    name: str
    value: float
    error: float
    text: str
    better: bool | None = None  # whether the difference is clear, and good or bad
    reach: tuple[float, float] | None = None  # where the interval ends, if not by the error

    @property
    def ends(self) -> tuple[float, float]:
        """The interval that was given, else two standard errors to either side, where they are known.

        One that is given may be without end: the line then leaves the axis.
        """
        if self.reach is not None:
            return self.reach
        reach = 2 * self.error if math.isfinite(self.error) else 0.0
        return self.value - reach, self.value + reach


def bar_chart(bars: Sequence[Bar], label: str) -> str:
    """Return horizontal bars, the longest as wide as there is room.

    Example:
        >>> "width:50.0%" in bar_chart([Bar("a", 2.0, "two"), Bar("b", 1.0, "one")], "some")
        True
    """
    most = max((bar.value for bar in bars), default=0) or 1.0
    rows = [
        f'<div class="bar{"" if bar.value else " none"}" role="listitem"><span'
        f' class="name">{escape(bar.name)}'
        f"{f'<small>{escape(bar.note)}</small>' if bar.note else ''}</span>"
        f'<span class="track"><i style="width:{100 * bar.value / most:.1f}%"></i></span>'
        f'<span class="number">{escape(bar.text)}</span></div>'
        for bar in bars
    ]
    return _listed(rows, label, "bars")


def bar_picture(bars: Sequence[Bar], title: str) -> str:
    """Return the same bars as an SVG file that stands by itself, with a title and colours of its own.

    Example:
        >>> bar_picture([Bar("a", 2.0, "two"), Bar("b", 1.0, "one")], "some").count("<rect")
        3
    """
    most, row = max((bar.value for bar in bars), default=0) or 1.0, 24
    height = 44 + row * len(bars)
    drawn = [
        f'<text x="16" y="{58 + row * i}">{escape(bar.name)}</text><rect x="130" y="{45 + row * i}"'
        f' width="{450 * bar.value / most:.1f}" height="16" rx="2" fill="#0b6e99"/><text'
        f' x="{138 + 450 * bar.value / most:.1f}" y="{58 + row * i}">{escape(bar.text)}</text>'
        for i, bar in enumerate(bars)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 660 {height}" width="660"'
        f' height="{height}" role="img" aria-label="{escape(title)}" font-family="sans-serif"'
        f' font-size="14" fill="#1b1f24"><rect width="660" height="{height}" rx="6"'
        ' fill="#f3f6f8"/><text x="16" y="28"'
        f' font-weight="600">{escape(title)}</text>{"".join(drawn)}</svg>\n'
    )


def interval_chart(intervals: Sequence[Interval], label: str) -> str:
    """Return values with two standard errors to either side, all on one axis with zero in sight.

    Example:
        >>> chart = interval_chart([Interval("a", 1.0, 0.5, "+1 ± 0.5")], "some")
        >>> chart.count("<i "), chart.count("+1 ± 0.5")
        (2, 1)
    """
    ends = [0.0, *(one.value for one in intervals)]
    for one in intervals:
        ends += [end for end in (*one.ends, *replace(one, reach=None).ends) if math.isfinite(end)]
    low, high = min(ends), max(ends)
    pad = 0.06 * (high - low) or 1.0
    low, high = low - pad, high + pad

    def place(value: float) -> float:
        return 100 * (min(max(value, low), high) - low) / (high - low)

    zero = place(0.0)
    rows = []
    for one in intervals:
        left, right = map(place, one.ends)
        kind = {True: " good", False: " bad", None: ""}[one.better]
        rows.append(
            f'<div class="bar{kind}" role="listitem"><span'
            f' class="name">{escape(one.name)}</span><span class="axis"'
            f' style="--zero:{zero:.2f}%"><i class="reach"'
            f' style="left:{left:.2f}%;width:{right - left:.2f}%"></i><i class="dot"'
            f' style="left:{place(one.value):.2f}%"></i></span><span'
            f' class="number">{escape(one.text)}</span></div>'
        )
    return _listed(rows, label, "bars intervals")


def line_chart(
    lines: Mapping[str, Points], xlabel: str, ylabel: str, bands: Mapping[str, Points] | None = None
) -> str:
    """Return lines over one pair of axes, with the values at their ends of the axes and a legend below.

    A band has the lower and the upper end at every place of the line of the same name.

    Example:
        >>> line_chart({"loss": ([0, 10], [2.0, 1.0])}, "steps", "loss").count("<polyline")
        1
    """
    finite = {name: _finite(line) for name, line in lines.items()}
    xs = [x for places, _ in finite.values() for x in places]
    ys = [y for _, values in finite.values() for y in values]
    for ends in (bands or {}).values():
        ys += [y for side in ends for y in side if math.isfinite(y)]
    if not xs:
        return ""
    ticks = _ticks(min(ys), max(ys))
    (left, right), (low, high) = (min(xs), max(xs)), (min(*ys, *ticks), max(*ys, *ticks))

    def at(x: float, y: float) -> str:
        across, up = (x - left) / ((right - left) or 1), (y - low) / ((high - low) or 1)
        return f"{1000 * across:.1f},{300 * (1 - up):.1f}"

    drawn = [
        f'<line class="grid" x1="0" x2="1000" y1="{at(left, y).split(",")[1]}"'
        f' y2="{at(left, y).split(",")[1]}"/>'
        for y in ticks
    ]
    for i, (name, (places, values)) in enumerate(finite.items()):
        if bands and name in bands:
            lower, upper = bands[name]
            outline = [at(x, y) for x, y in zip(places, upper, strict=True)]
            outline += [at(x, y) for x, y in reversed(list(zip(places, lower, strict=True)))]
            drawn.append(f'<polygon class="c{i % 6}" points="{" ".join(outline)}"/>')
        points = " ".join(at(x, y) for x, y in zip(places, values, strict=True))
        dashes = f' stroke-dasharray="{DASHES[i % 6]}"' if DASHES[i % 6] else ""
        drawn.append(f'<polyline class="c{i % 6}"{dashes} points="{points}"/>')
    marks = "".join(
        f'<span style="bottom:{100 * (y - low) / ((high - low) or 1):.2f}%">{y:g}</span>'
        for y in ticks
    )
    return (
        f'<figure class="lines"><figcaption>{escape(ylabel)}</figcaption>'
        f'<div class="plot"><div class="ticks">{marks}</div>'
        '<svg viewBox="0 0 1000 300" preserveAspectRatio="none" role="img"'
        f' aria-label="{escape(ylabel)} over '
        f'{escape(xlabel)}: {escape(", ".join(lines))}">{"".join(drawn)}</svg></div>'
        "<div"
        f' class="ends"><span>{left:g}</span><span>{escape(xlabel)}</span><span>{right:g}</span></div>'
        f"{_legend(list(lines))}</figure>"
    )


def _listed(rows: Sequence[str], label: str, kind: str) -> str:
    return f'<div class="{kind}" role="list" aria-label="{escape(label)}">{"".join(rows)}</div>'


def _legend(names: Sequence[str]) -> str:
    keys = [
        f'<span><svg viewBox="0 0 30 8" class="key" aria-hidden="true"><line class="c{i % 6}"'
        ' x1="0" x2="30" y1="4" y2="4"'
        f' stroke-dasharray="{DASHES[i % 6]}"/></svg>{escape(name)}</span>'
        for i, name in enumerate(names)
    ]
    return f'<div class="legend">{"".join(keys)}</div>'


def _finite(line: Points) -> tuple[list[float], list[float]]:
    kept = [(x, y) for x, y in zip(*line, strict=True) if math.isfinite(y)]
    return [x for x, _ in kept], [y for _, y in kept]


def _ticks(low: float, high: float) -> list[float]:
    """Return three to six round values that lie around an interval.

    Example:
        >>> _ticks(0.12, 0.97)
        [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    if not high > low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * k for k in (1, 2, 2.5, 5, 10) if power * k >= rough * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(step * k, 12) for k in range(first, last + 1)]
