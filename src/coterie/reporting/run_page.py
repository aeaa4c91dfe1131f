"""The page of one run.

The verdict, whom the model listens to, how Alone does, the cost; details fold.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coterie.arguments import settings_of
from coterie.recording.configuration import StepSettings
from coterie.recording.record import Record
from coterie.recording.result import Comparison, Difference, End
from coterie.reporting.page import (
    Interval,
    Lead,
    Points,
    Section,
    Tile,
    interval_chart,
    line_chart,
    write_page,
)
from coterie.reporting.phrases import cells, note, numbers, sure_speedup
from coterie.reporting.summary import beside_alone, leaderboard, length_of, shown, summary
from coterie.reporting.verdict import HEADLINES, Verdict, difference, verdict
from coterie.reporting.verdict import interval as ends_of
from coterie.reporting.whom import whom_section
from coterie.theory import best_averaging, plan_for_peers
from coterie.theory.estimates import Estimates, Measured


def details(record: Record, weight: float | None = None) -> list[Section]:
    """Return the folded sections of a run's page, as far as the record has something to say."""
    stepwise = "exchanges" not in record.end.account
    return [
        Section("How it was trained", summary(record, weight)[2:], folded=True),
        *(_loss_curves(record) + _weights(record) if stepwise else []),
        *_leaderboard(record),
        *_constants(record),
        _peers(record),
        _settings(record),
    ]


def _loss_curves(record: Record) -> list[Section]:
    wanted = {
        "own_loss": "own training loss",
        "validation_loss": "validation loss",
        "alone_validation_loss": "validation loss of the model trained alone beside it",
    }
    curves: dict[str, Points] = {
        title: record.curve(name) for name, title in wanted.items() if record.curve(name)[0]
    }
    restarts = max(record.curve("guard_restarts")[1], default=0)
    text = (
        [f"The guard let the run start again from the model trained alone {restarts} times."]
        if restarts
        else []
    )
    if "weights" in record.end.account:
        text.append(
            "The training loss is that of a copy trained alone. The validation loss is that of the"
            " best candidate so far."
        )
    charts = [line_chart(curves, record.configuration.counts, "loss")]
    return [Section("Learning curves", text, charts=charts, folded=True)] if curves else []


def _weights(record: Record) -> list[Section]:
    charts, counts = [], record.configuration.counts
    steps, weight = record.curve("weight")
    if any(weight):
        charts.append(
            line_chart({"all peers": (steps, weight)}, counts, "weight of the peers in the run")
        )
    account = record.end.account
    if account.get("weights"):
        peers = sorted(account["weights"].items(), key=lambda one: one[1][-1], reverse=True)
        lines = {"nobody": account["nobody"], **dict(peers[:5])}
        shown: dict[str, Points] = {
            name: (account["steps"], values) for name, values in lines.items()
        }
        most = "" if len(peers) <= 5 else ", the five largest"
        charts.append(
            line_chart(
                shown, "steps", f"weights in the first half, where the own examples judge{most}"
            )
        )
    return [Section("Weights over the run", charts=charts, folded=True)] if charts else []


def _leaderboard(record: Record) -> list[Section]:
    text = [
        "All losses are of examples that a model was not fitted to: own ones, each by models that"
        " were fitted, and mixed, without it; and those of the test set. A difference is that of"
        " the model served, with its interval of 95 %."
    ]
    rows = leaderboard(record.end)
    return [Section("Leaderboard", text, [rows])] if rows else []


def _constants(record: Record) -> list[Section]:
    configuration = record.configuration
    if configuration.not_measured:
        return [Section("Constants", [f"Not measured: {configuration.not_measured}."], folded=True)]
    if not configuration.estimates:
        return []
    estimates = Estimates.from_plain(configuration.estimates)
    return [_measured_constants(estimates), _what_follows(estimates, configuration.steps)]


def _measured_constants(estimates: Estimates) -> Section:
    own = {
        "noise σ_0": _shown(estimates.noise),
        "gradient ‖∇f_0‖": _shown(estimates.gradient),
        "smoothness L": _shown(estimates.smoothness),
        "PL constant μ": f"{estimates.pl:.3g}",
        "loss, for F_0": f"{estimates.loss:.3g}",
    }
    table = [{"constant": name, "value": value} for name, value in own.items()]
    each = [
        {
            "peer": name,
            "noise σ_k": _shown(peer.noise),
            "bias ζ_k": _shown(peer.bias_floor),
            "its growth m_k": _shown(peer.bias_growth),
            "Hessian gap δ_k": _shown(peer.hessian_gap),
        }
        for name, peer in estimates.peers.items()
    ]
    text = [
        f"From {estimates.batches} batches, at the start of training and a little downhill, ± one"
        " standard error over batches. The least loss is taken to be 0; curvature is that on the"
        " way from one point to the other."
    ]
    return Section("Constants, measured", text, [table, each], folded=True)


def _what_follows(estimates: Estimates, steps: int) -> Section:
    peers = estimates.constants(steps)
    choices, tau = plan_for_peers(peers, steps), best_averaging(peers, steps).tau
    sure = sure_speedup(
        choices["wga"], steps, estimates.constants(steps, bias_errors=2).constants(tau)
    )
    rows = {name: numbers(choice) for name, choice in choices.items()}
    first = "What the theory's bounds give for these constants, each method at its best knobs."
    doubt = (
        "Biases that are not clear of their errors count as none there; with all two standard"
        " errors larger"
    )
    text = [f"{first} {doubt} the speedup of WGA is {sure:.3g}.", note(rows)]
    table = [cells(name, row) for name, row in rows.items()]
    return Section("What the theory makes of them", text, [table], folded=True)


def _shown(one: Measured) -> str:
    return f"{one.value:.3g} ± {one.error:.2g}"


def _peers(record: Record) -> Section:
    """Return what each user has, and what the run asked of it."""
    costs, me = record.end.costs, record.configuration.me
    everyone = {me.name: me.examples, **record.configuration.peers}
    rows = [
        {
            "user": name,
            "examples": examples,
            "gradients computed": f"{costs[name].gradients:,}" if name in costs else "–",
            "numbers sent": f"{costs[name].numbers_sent:,}" if name in costs else "–",
        }
        for name, examples in everyone.items()
    ]
    if promises := record.end.promises:
        for row in rows:
            made = promises.get(str(row["user"]))
            private = (
                made
                and f"ε = {made['epsilon']:g} at δ = {made['delta']:g}; {made['spent']:.3g} spent"
            )
            row["promises for each example"] = private or "–"
    return Section("Users and what it cost each", tables=[rows], folded=True)


def _settings(record: Record) -> Section:
    """Return what the run was asked to do, and by which versions it was done."""
    asked = record.configuration
    names = ["rule", "loss", "model", "guard"]
    if "exchanges" in record.end.account:
        names.append("seed")
    else:
        names += ["optimizer", "scheduler", *settings_of(StepSettings), "capture"]
    shown: dict[str, Any] = {name.replace("_", " "): getattr(asked, name) for name in names}
    rows = [
        {"setting": name, "value": value} for name, value in {**shown, **record.versions}.items()
    ]
    return Section("Settings and versions", tables=[rows], folded=True)


def write_run_page(
    path: Path, record: Record, weight: float | None = None, *, more: Sequence[Section] = ()
) -> Path:
    """Write the page of an ended run to one HTML file that needs nothing else, and return its path.

    More sections come before the details.
    """
    title = f"A model for {record.configuration.me.name}"
    return write_page(
        path, title, [*_first(record), *more, *details(record, weight)], lead=lead(record)
    )


def lead(record: Record) -> Lead:
    """Return what the page of a run says first: what was found, in two sentences, and what to do.

    The numbers stand below, and the sentence with all its evidence in small print.
    """
    said, name = verdict(record.configuration, record.end), record.configuration.me.name
    tiles = [*_measured(said, record.end), _cost(record)]
    cut = said.sentence.find(": ", said.sentence.find(name) + len(name))  # in no user's name
    claim, evidence = said.sentence, ""
    if cut > 0:
        claim, evidence = f"{said.sentence[:cut]}.", said.sentence
    return Lead(claim, HEADLINES[said.finding], said.finding, tiles, said.advice, evidence)


def _measured(said: Verdict, end: End) -> list[Tile]:
    """Return the numbers that the verdict rests on.

    The model's own where there is nothing to compare.
    """
    if said.measures:
        return [
            Tile(
                f"{name}, against alone",
                difference(one),
                f"{shown(one.ours)} served, {shown(one.alone)} alone",
            )
            for name, one in said.measures.items()
        ]
    which, measures = end.judged_on
    return [
        Tile(f"{which} {name}", shown(value), "of the model served")
        for name, value in measures.items()
    ][:2]


def _cost(record: Record) -> Tile:
    """Return what the run cost: time, gradients, and what travelled."""
    me, end = record.configuration.me.name, record.end
    own = end.costs[me].gradients if me in end.costs else 0
    of_peers = end.gradients_of_others(me)
    sent = end.traffic[me].bytes_sent + end.traffic[me].bytes_received if me in end.traffic else 0
    travelled = f", {sent / 1e6:.3g} MB" if sent else ""
    note = f"{length_of(record)}; {own:,} own gradients, {of_peers:,} of peers{travelled}"
    return Tile("it took", f"{end.seconds:.3g} s", note)


def _first(record: Record) -> list[Section]:
    configuration, end = record.configuration, record.end
    sections = [whom_section(configuration, end)]
    said = verdict(configuration, end)
    comparison = said.comparison
    rows = beside_alone(record)
    if comparison is None:
        return [*sections, *([Section("The model served", tables=[rows])] if rows else [])]
    intervals = [
        interval(name, one, said.clear.get(name), comparison)
        for name, one in comparison.measures.items()
    ]
    text = (
        f"On {comparison.on}. A difference is clear where its line, of 95 %, leaves out the mark;"
        " right of it is better."
    )
    charts = [
        interval_chart([one], f"difference of {one.name} to training alone") for one in intervals
    ]
    return [*sections, Section("Beside a model trained alone", [text], [rows], charts=charts)]


def interval(
    name: str, one: Difference, better: bool | None, comparison: Comparison | None
) -> Interval:
    """Return a difference as the interval that says whether it is clear, what is better to the right."""
    if comparison is None:
        return Interval(name, one.difference, one.error, difference(one), better)
    low, high = ends_of(one, comparison.examples, 2 if len(comparison.measures) > 1 else 1)
    gain, reach = one.difference, (low, high)
    if one.less_is_better:
        gain, reach = -gain, (-high, -low)
    return Interval(name, gain, one.error, difference(one), better, reach)
