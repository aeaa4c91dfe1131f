"""The figures: the settings of each, what the paper says of it, and what the exact values say."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coterie.paper.lines import (
    Line,
    Series,
    constant_steps,
    decreasing_steps,
    drifting_optimum,
    recorded,
)
from coterie.reporting.figures import (
    COLOURS,
    DASHES,
    add_legend,
    gain,
    gain_factor,
    label_axes,
    logarithmic_axes,
    new_figure,
)
from coterie.rules import Alone, BiasCorrection, Rule, WeightedAveraging
from coterie.theory import Constants, averaging_cost, averaging_speedup, best_alpha, mean_estimation
from coterie.theory.quadratic import NoisyQuadratic, Quadratic

METHODS = {"Alone": 0, "BC": 1, "WGA": 2, "BC, oracle": 3, "BC as printed": 4}
"""Methods keep their colours from figure to figure; the first three have the paper's."""

LOSS = "expected loss  E f₀(x) − f₀*"
NOTE = "lines: exact; bands: mean of 100 sampled runs ± 2 standard errors"


def loss_curves(series: Sequence[Series], title: str) -> Figure:
    """Draw expected losses over steps, each beside the mean of its sampled runs ± 2 standard errors."""
    figure, axes = new_figure(4.2, title, "steps taken", LOSS, width=7.6)
    _losses(axes, series)
    # beside the curves, which go everywhere
    add_legend(axes, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.supxlabel(NOTE, fontsize=8, color="#555555")
    return figure


def loss_panels(series: Sequence[Series]) -> Figure:
    """Draw every method at its own best, one panel a schedule, with one colour for one legend in all.

    The level to compare with, drawn across, is what a user's own gradients can tell.
    """
    floor, note = 100 / (2 * STEPS), "σ²/2T: all that g₀ can tell"
    figure = Figure(figsize=(10, 4.2), dpi=150, layout="constrained")
    figure.suptitle("Every method at its own best", fontsize=11)
    for i, (end, heading) in enumerate(_TUNED.items()):
        axes = figure.add_subplot(1, len(_TUNED), i + 1, sharey=figure.axes[0] if i else None)
        label_axes(axes, heading, "steps taken", "" if i else LOSS)
        of_panel = [one for one in series if one.label.endswith(end)]
        _losses(axes, of_panel if i else [*of_panel, series[0]])  # first is BC as printed
        add_legend(axes)
        axes.axhline(floor, color="#444444", linewidth=0.8)
        axes.annotate(
            note, (0.02, floor), xycoords=("axes fraction", "data"), va="bottom", fontsize=8
        )
        axes.tick_params(labelleft=not i)
    figure.supxlabel(NOTE, fontsize=8, color="#555555")
    return figure


def speedup_curves(series: Sequence[Series]) -> Figure:
    """Draw the speedup of weighted averaging over N + 1, for each m, at ζ = 0.

    The first, for m = 0, is linear.
    """
    title = "Speedup of weighted averaging at ζ = 0"
    figure, axes = new_figure(4.2, title, "number of users  N + 1", "speedup over training alone")
    for i, one in enumerate(series):
        axes.plot(
            one.x, one.exact, color=COLOURS[i], linestyle="-" if i else "--", label=one.legend
        )
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
            # a logarithmic axis has no zero
            low = np.maximum(one.mean - 2 * one.error, one.mean / 100)
            axes.fill_between(
                one.x, low, one.mean + 2 * one.error, color=colour, alpha=0.25, linewidth=0
            )
        width = 1.6 if i else 2.6  # what coincides with the first line stays visible on it
        axes.plot(
            one.x, one.exact, color=colour, linestyle=dashes, linewidth=width, label=one.legend
        )
    logarithmic_axes(axes)
    axes.margins(x=0)


STEPS = 700_000
DRIFT_STEPS = 40_000
N_PEERS = 10
ALPHA = N_PEERS / (N_PEERS + 1) * (1 - 1e-4 / 2)
"""BC's α in the paper's experiments with β = 1e-4."""


@dataclass(frozen=True, eq=False)
class Study:
    """One figure."""

    title: str  # its heading on the page
    claim: str  # what the paper says of it
    finding: str  # what the exact values say
    series: Callable[[int], list[Series]]  # its lines, from a seed
    draw: Callable[[Sequence[Series]], Figure]  # the figure, from its lines
    unit: str = "expected loss"  # what its values are
    # headings of its panels, by how labels end
    panels: Mapping[str, str] = field(default_factory=dict)


STUDIES: dict[str, Study] = {}
_TUNED = {
    "constant": "best constant steps",
    "decreasing": "decreasing steps",
    "averaged": "constant steps, averaged",
}
"""The panels of the tuned comparison, by how labels end."""


def study(
    name: str,
    title: str,
    draw: Callable[[Sequence[Series]], Figure],
    *,
    steps: int = STEPS,
    **about: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a figure of what returns its lines, or its series from a seed.

    The second paragraph of its docstring is what the paper says, the third what was found.
    """

    def register(make: Callable[..., Any]) -> Callable[..., Any]:
        claim, finding = (
            " ".join(text.split()) for text in (inspect.getdoc(make) or "").split("\n\n")[1:]
        )

        def series(seed: int) -> list[Series]:
            if inspect.signature(make).parameters:
                return list(make(seed))
            return [line.series(recorded(steps, first=10), seed) for line in make()]

        STUDIES[name] = Study(title, claim, finding, series, draw, **about)
        return make

    return register


def paper_problem(n_peers: int = N_PEERS, shift: float = 4.0) -> NoisyQuadratic:
    """Return the authors' quadratic.

    A_0 = 1, a_1 = 2, x_0* = 1, x_1* = 1 + shift, σ = 10, x_0 ~ N(0, 1).
    """
    average = Quadratic(2, 1 + shift, 10 / n_peers**0.5)
    return NoisyQuadratic(Quadratic(1, 1, 10), [average], x0_spread=1)


def notebook_correction(alpha: float) -> BiasCorrection:
    """Return bias correction as the authors' notebook starts it: c_0 = 0, no warm-up."""
    return BiasCorrection(alpha, 1e-4, start="zero", warm_up=False)


def _by_shift(rule: Rule, lr: float, knobs: str) -> list[Line]:
    """Return a rule for peers whose optimum is 10 to 100,000 away."""
    shifts = (10, 100, 1_000, 10_000, 100_000)
    return [
        Line(f"{s}", f"shift {s:,}", paper_problem(shift=s), rule, lr, knobs=knobs) for s in shifts
    ]


@study(
    "comparison", "Alone, WGA and BC", partial(loss_curves, title="Alone, WGA and BC at η = 10⁻⁴")
)
def comparison() -> list[Line]:
    """Return Alone, WGA and BC at the step size of the paper's first experiment.

    The paper: “BC achieves a lower loss than training alone or using WGA. The step sizes were
    tuned for training alone and WGA, but not for BC.”

    At this step size BC settles at 9.38e-4 and Alone at 2.50e-3. BC's rise at the start comes
    from c_0 = 0; a warm-up of β removes it, the first observed bias as c_0, a single noisy one,
    does not. At other step sizes and schedules the order is another: see the comparison of
    every method at its own best.
    """
    problem = paper_problem()
    return [
        Line("alone", "Alone", problem, Alone(), 1e-4, knobs="η = 1e-4"),
        Line("wga", "WGA", problem, WeightedAveraging(1e-3), 1e-4, knobs="η = 1e-4, α = 1e-3"),
        Line(
            "bc",
            "BC",
            problem,
            notebook_correction(ALPHA),
            1e-4,
            knobs=f"η = β = 1e-4, α = {ALPHA:.4f}",
        ),
    ]


@study(
    "bias_on_bc",
    "BC: the bias delays, and leaves nothing",
    partial(loss_curves, title="BC with peers ever farther away"),
)
def bias_on_bc() -> list[Line]:
    """Return BC for peers whose optimum is 10 to 100,000 away.

    The paper: “ζ influences the time needed for convergence but eventually all curves converge
    to the same error level.”

    The level is 9.38e-4 whatever the shift x_1* − x_0*; each factor of ten in the shift delays
    it by some 58,000 steps.
    """
    return _by_shift(notebook_correction(ALPHA), 1e-4, f"η = β = 1e-4, α = {ALPHA:.4f}")


@study(
    "bias_on_wga",
    "WGA: the bias stays",
    partial(loss_curves, title="WGA with peers ever farther away"),
)
def bias_on_wga() -> list[Line]:
    """Return WGA for peers whose optimum is 10 to 100,000 away.

    The paper: “The bigger ζ is the bigger the final loss will be. In fact, WGA can only
    converge up to O(α²ζ²).”

    The level is ½ (2α shift/(1 + α))², which grows with the square of the shift, above a noise
    floor of 1.25e-2.
    """
    return _by_shift(WeightedAveraging(1e-3), 5e-4, "η = 5e-4, α = 1e-3")


@study(
    "peers_on_bc",
    "BC: more peers, then saturation",
    partial(loss_curves, title="BC with 1 to 50 peers"),
)
def peers_on_bc() -> list[Line]:
    """Return BC with 1 to 50 peers.

    The paper: “Increasing N does improve the level to which BC converges [...]. However we
    observe the discussed saturation effect [...] resulting from using a β independent of N and
    T.”

    5.15e-3, 1.72e-3, 1.44e-3 and 1.26e-3 for 1, 10, 20 and 50 peers: what remains is user 0's
    own noise, which comes in through the bias estimate at the rate β.
    """

    def setting(n: int) -> Line:
        rule, knobs = notebook_correction(n / (n + 1)), f"η = 5e-4, β = 1e-4, α = {n / (n + 1):.4f}"
        return Line(f"{n}", f"N = {n}", paper_problem(n), rule, 5e-4, knobs=knobs)

    return [setting(n_peers) for n_peers in (1, 10, 20, 50)]


@study(
    "alone_steps", "Alone at six step sizes", partial(loss_curves, title="Alone at six step sizes")
)
def alone_steps() -> list[Line]:
    """Return Alone at six step sizes.

    The paper: “The step sizes were tuned for training alone.” This is the tuning, among
    constant step sizes.

    The level is ησ²/(2(2 − η)), proportional to η; the time to reach it is proportional to 1/η.
    """
    return [
        Line(f"{lr:g}", f"η = {lr:g}", paper_problem(), Alone(), lr, knobs=f"η = {lr:g}")
        for lr in (5e-3, 2e-3, 1e-3, 5e-4, 2e-4, 1e-4)
    ]


@study(
    "gain_factor",
    "When weighted averaging pays",
    lambda _: gain_factor(),
    unit="speedup at the right edge",
)
def gain_factor_lines(seed: int) -> list[Series]:
    """Return the speedup of WGA over Lσ_0²/(μTζ²), for four N.

    The paper: “The bigger N and the smaller Tζ² (cumulative bias) is relative to σ_0², the
    bigger the resulting speedup from collaboration.”

    For m = 0 the speedup is 1 + 1/(1/N + μTζ²/(Lσ_0²)): at most N + 1, and at most 1 +
    Lσ_0²/(μTζ²) whatever N. A closed form: nothing is sampled, nothing settles.
    """
    ratio = np.geomspace(1e-3, 1e5, 81)
    return [
        Series(f"{n_peers}", f"N = {n_peers:,}", ratio, np.asarray(gain(ratio, float(n_peers))))
        for n_peers in (1, 10, 100, 1000)
    ]


@study(
    "bias_growth",
    "A bias that grows with the gradient",
    speedup_curves,
    unit="speedup at N + 1 = 100",
)
def bias_growth_lines(seed: int) -> list[Series]:
    """Return the speedup of WGA over N + 1 at ζ = 0, for four m.

    The paper: “As m grows the speedup becomes more and more sub-linear.”

    Among 100 users the speedup is 100, 65, 27 and 2.8 for m = 0, 0.2, 0.5 and 1. A formula:
    nothing is sampled, nothing settles.
    """
    users = np.arange(2.0, 101.0)

    def line(m: float) -> Series:
        problem = Constants(
            smoothness=1, pl=1, initial_gap=1, noise=1, n_peers=users - 1, bias_growth=m
        )
        speedup = np.asarray(averaging_speedup(problem, steps=1))
        return Series(f"{m:g}", "m = 0: linear" if not m else f"m = {m:g}", users, speedup)

    return [line(m) for m in (0.0, 0.2, 0.5, 1.0)]


@study(
    "mean_estimation",
    "Estimating a mean",
    partial(loss_curves, title="A mean from own and others' samples"),
)
def mean_estimation_lines(seed: int) -> list[Series]:
    """Return weighted means of 1 to 100,000 samples.

    The paper, for f_k = ½(x − μ_k)², recovers the known rate of the weighted mean, O(σ²(α)/T +
    α²(μ_0 − μ_1)²), up to logarithms that decreasing steps remove.

    With η_t = 1/(t + 1), WGA is the weighted mean, and its squared error is σ²(α)/T + α²(μ_0 −
    μ_1)² exactly. Here σ = 10, N = 10 and μ_1 − μ_0 = 0.3: in the end Alone overtakes every
    fixed α > 0.
    """
    noise, gap, horizon = 10.0, 0.3, 1_000
    constants = mean_estimation(noise, gap, N_PEERS)
    problem = NoisyQuadratic(Quadratic(1, 0, noise), [Quadratic(1, gap, noise / N_PEERS**0.5)])
    steps = recorded(100_000)
    lines = [
        Line(
            label,
            legend,
            problem,
            WeightedAveraging(alpha),
            lambda t: 1 / (t + 1),
            knobs=f"α = {alpha:.3g}",
        )
        for label, legend, alpha in (
            ("alone", "own samples only (α = 0)", 0.0),
            ("equal", "all samples alike (α = N/(N + 1))", N_PEERS / (N_PEERS + 1)),
            ("best_at_1000", "the best α for 1,000 steps", float(best_alpha(constants, horizon))),
        )
    ]
    x = np.array(steps, dtype=float)
    # the loss is half the squared error
    envelope = averaging_cost(constants, best_alpha(constants, x), x) / 2
    return [
        *(line.series(steps, seed) for line in lines),
        Series(
            "best_at_each",
            "the best α for each number of steps",
            x,
            np.asarray(envelope),
            knobs="α*(T)",
        ),
    ]


@study(
    "tuned_comparison",
    "Every method at its own best",
    loss_panels,
    panels=_TUNED | {"printed": "best constant steps"},
)
def tuned_comparison() -> list[Line]:
    """Return every method at its best constant steps, decreasing steps and, with averaging, constant steps.

    Not in the paper, which compares the methods at one step size.

    At the best constant knobs for 700,000 steps BC ends at 1.77e-4 and Alone at 2.13e-4. With
    decreasing steps Alone reaches σ²/2T = 7.1e-5, all that T of its own gradients can tell, a
    thirteenth of BC as printed. The best BC with decreasing steps (7.18e-5) or with averaging
    (7.30e-5) comes near that value and not below it, since at its slow end BC knows of f_0 only
    what g_0 tells. The oracle, which is told the bias, goes below by the factor N + 1.
    """
    problem = paper_problem()
    printed = comparison()[-1]
    return [
        Line("bc_printed", "BC as printed", problem, printed.rule, printed.lr, knobs=printed.knobs),
        *constant_steps(problem, N_PEERS, STEPS),
        *decreasing_steps(problem, N_PEERS, STEPS, bias_floor=8),
        *constant_steps(problem, N_PEERS, STEPS, average_from=STEPS // 10),
    ]


@study(
    "drift",
    "Where BC wins: objectives that drift together",
    partial(loss_curves, title="Tracking an optimum that drifts"),
    steps=DRIFT_STEPS,
)
def drift() -> list[Line]:
    """Return each method at its best on optima that all take the same random steps.

    Not in the paper. All optima take the same random steps: old gradients go out of date, the
    bias does not.

    Alone must trade noise for lag; its best constant step is the gain of the Kalman filter, so
    no schedule does better than .0500. BC averages the bias over the whole run and the noise
    over the peers: .0162 with 10 peers, .0062 with 100, near the oracle's .0151 and .0050. WGA
    gains nothing: its bias costs more than its noise.
    """
    return drifting_optimum(DRIFT_STEPS)
