"""The page of one run: its summary, curves, weights, candidates, and the constants with their plan."""

from collections.abc import Sequence
from pathlib import Path

from coterie.recording.record import Record
from coterie.reporting.figures import learning_curves, weights_over_steps
from coterie.reporting.page import Section, write_page
from coterie.theory import plan_for_peers
from coterie.theory.estimates import Estimates, Measured
from coterie.theory.phrases import cells, note, numbers


def write_run_page(path: Path, record: Record, summary: Sequence[str]) -> Path:
    """Write the page of a run to one HTML file that needs nothing else, and return its path."""
    return write_page(path, f"A model for {record.configuration.me.name}", sections(record, summary))


def sections(record: Record, summary: Sequence[str] = ()) -> list[Section]:
    """Return the sections of a run's page, after its summary, as far as the record has something to say."""
    result = [Section("Result", summary)] if summary else []
    return [*result, *_curves(record), *_weights(record), *_candidates(record), *_constants(record)]


def _curves(record: Record) -> list[Section]:
    wanted = {
        "own_loss": "own training loss",
        "validation_loss": "validation loss",
        "alone_validation_loss": "validation loss of the model trained alone beside it (the guard)",
    }
    curves = {title: [record.curve(name)] for name, title in wanted.items() if record.curve(name)[0]}
    restarts = max(record.curve("guard_restarts")[1], default=0)
    text = [f"The guard let the run start again from the model trained alone {restarts} times."] if restarts else []
    return [Section("Learning curves", text, figures=[learning_curves(curves, "loss")])] if curves else []


def _weights(record: Record) -> list[Section]:
    steps, weight = record.curve("weight")
    figures = []
    if any(weight):
        figures.append(weights_over_steps({"all peers": (steps, weight)}, "weight of the peers in the run"))
    account = record.end.account if record.ended else {}
    if account.get("weights"):
        peers = sorted(account["weights"].items(), key=lambda one: one[1][-1], reverse=True)
        lines = {"nobody": account["nobody"], **dict(peers)}
        shown = {name: (account["steps"], values) for name, values in lines.items()}
        figures.append(weights_over_steps(shown, "weights in the trunk, where the own examples judge"))
    tau = record.end.tau if record.ended else {}
    ordered = sorted(tau, key=lambda name: tau[name], reverse=True)
    rows = [{"peer": name, "share of the peers' weight": f"{tau[name]:.3g}"} for name in ordered]
    return [Section("Weights", [], [rows], figures)] if figures or rows else []


def _candidates(record: Record) -> list[Section]:
    account = record.end.account if record.ended else {}
    if not account:
        return []
    rows = [
        {
            "path": name + (" (served)" if name == account["path"] else ""),
            "step": str(step),
            "best in": f"{share:.0%}",
        }
        for name, looks in account["looks"].items()
        for step, share in zip(looks["steps"], looks["frequencies"], strict=True)
        if share
    ]
    text = [
        "In how many resamples of the judging examples each look was the best of its path.",
    ]
    return [Section("When it stopped", text, [rows])]


def _constants(record: Record) -> list[Section]:
    configuration = record.configuration
    if configuration.not_measured:
        return [Section("Constants", [f"Not measured: {configuration.not_measured}."])]
    if not configuration.estimates:
        return []
    estimates, steps = Estimates.from_plain(configuration.estimates), configuration.steps
    peers = estimates.constants(steps)
    choices = plan_for_peers(peers, steps)
    rows = {name: numbers(choice) for name, choice in choices.items()}
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
        f"From {estimates.batches} batches, at the start of training and a little downhill, ± one standard error "
        "over batches. The least loss is taken to be 0; curvature is that on the way from one point to the other."
    ]
    plan = [
        "What the theory's bounds give for these constants, each method at its best knobs.",
        note(rows),
    ]
    return [
        Section("Constants, measured", text, [table, each]),
        Section("What the theory makes of them", plan, [[cells(name, row) for name, row in rows.items()]]),
    ]


def _shown(one: Measured) -> str:
    return f"{one.value:.3g} ± {one.error:.2g}"
