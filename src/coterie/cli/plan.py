"""`coterie plan`: what the theory advises for a problem whose constants are known, or measured."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from typer import Argument, Option

from coterie import theory
from coterie.cli import terminal
from coterie.cli.options.groups import check_effect, grouped, option_of
from coterie.cli.terminal import record_of, rich_table
from coterie.data.reading import FileForm
from coterie.errors import DataError, KnobError
from coterie.privacy.privacy import Privacy
from coterie.recording.record import Record
from coterie.reporting.phrases import (
    cells,
    exchange_cells,
    exchange_choices,
    exchange_sentence,
    note,
    numbers,
    promise_cells,
    promise_sentences,
    sure_speedup,
    verdict,
)
from coterie.theory.estimates import Estimates

NEEDED = ("n_peers", "noise", "bias_floor", "hessian_gap", "smoothness", "pl", "initial_gap")


@dataclass(frozen=True, kw_only=True)
class SourceOptions(FileForm):
    """Where the constants are measured.

    Args:
        run: A run's folder or record, whose measured constants are taken.
        data: A table to measure the constants on, as `coterie train` reads it.
        user_column: With --data: the column that says whose row it is.
        target: With --data: the column to predict.
        me: With --data: which user is user 0.
        drop: With --data: a column not to predict from; repeat it.
        model: With --data: linear, mlp, or module.path:factory.
    """

    run: Annotated[Path | None, Argument(metavar="[RUN]")] = None
    data: Path | None = None
    user_column: str = ""
    target: str = ""
    me: str = ""
    drop: Annotated[list[str], Option(metavar="COLUMN")] = field(default_factory=list)
    model: str = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.run is not None and self.data is not None:
            raise KnobError(
                "a run and `--data` both say where the constants are measured; give one of them"
            )
        if self.data is None:
            names = ("user_column", "target", "me", "drop", *self.form, "model")
            check_effect(self, names, "--data")


@dataclass
class ConstantOptions:
    """Constants that are given.

    Args:
        n_peers: N, the number of peers.
        noise: σ_0, the standard deviation of the own gradient noise.
        peer_noise: σ_k of one peer; as --noise if left out.
        bias_floor: ζ, the peers' bias where your objective is stationary.
        bias_growth: m, how their squared bias grows with ‖∇f_0‖²; else 0.
        hessian_gap: δ, how much the peers' Hessians differ from yours.
        smoothness: L, the smoothness of your objective.
        pl: μ, its Polyak-Łojasiewicz constant, at most L.
        initial_gap: F_0, the loss at the start above the least.
    """

    n_peers: int | None = None
    noise: float | None = None
    peer_noise: float | None = None
    bias_floor: float | None = None
    bias_growth: float | None = None
    hessian_gap: float | None = None
    smoothness: float | None = None
    pl: float | None = None
    initial_gap: float | None = None


@dataclass
class PlanOptions:
    """What is asked.

    Args:
        steps: T, the number of steps; else the run's, or 1000.
        alpha: α for WGA; the best if left out.
        exchange_cost: R, what an exchange costs in gradients: also say how often to exchange.
            Else that of the run, where its peers were elsewhere.
        as_json: Print JSON instead of a table.
        out: Folder for a page with sliders and the gain-factor picture.
    """

    steps: int | None = None
    alpha: float | None = None
    exchange_cost: Annotated[float | None, Option(min=0.0)] = None
    as_json: Annotated[bool, Option("--json")] = False
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.exchange_cost is not None and not np.isfinite(self.exchange_cost):
            raise KnobError(f"`--exchange-cost` must be finite, got {self.exchange_cost}")


@dataclass
class PromiseOptions:
    """Peers that promise privacy: what it costs, and when it pays.

    Args:
        epsilon: ε that each peer promises for each of its rows, over the whole run.
        delta: With --epsilon: δ, less than one over --examples.
        clip: With --epsilon: the norm that each row's gradient is clipped to. Few should be
            longer.
        examples: With --epsilon: how many rows a peer has; else the run's mean.
        parameters: With --epsilon: d, how many the model trains.
        batch_size: With --epsilon: rows behind a gradient; all of them if left out.
        gradients: With --epsilon: how many a peer gives; one a step if left out, adaptive
            averaging: 4.5.
    """

    epsilon: float | None = None
    delta: float = 1e-05
    clip: float = 1.0
    examples: Annotated[int | None, Option(min=1)] = None
    parameters: Annotated[int | None, Option(min=1)] = None
    batch_size: Annotated[int | None, Option(min=1)] = None
    gradients: Annotated[int | None, Option(min=1)] = None

    def __post_init__(self) -> None:
        if self.epsilon is None:
            check_effect(self, tuple(each.name for each in fields(self)), "--epsilon")


@grouped
def plan(
    measured: SourceOptions, known: ConstantOptions, promised: PromiseOptions, asked: PlanOptions
) -> None:
    """Say whether collaboration pays: the best alpha, beta and step size of each method, by its bound.

    The constants are given by options, or measured: by a run (`coterie plan RUN`), or now, on a
    table (--data). An option goes before what was measured. Measured peers count as alike, with the
    mean of their constants.

    With --epsilon peers promise (ε, δ) for each of their rows. For that they add noise to every
    gradient: less of it with more rows, fewer parameters, fewer gradients. Averaging then needs
    more peers for the same gain; how many, and what is lost with those there are, is printed below
    the table.

    Example: coterie plan run --steps 5000 --epsilon 4 --parameters 650 --out plan
    """
    problem, doubted, steps = _problem(measured, known, asked.steps)
    choices = theory.plan(problem, steps, asked.alpha)
    every = asked.exchange_cost
    if every is None and measured.run is not None and (record := record_of(measured.run)).ended:
        every = record.end.exchange_cost
    promise = (
        None if promised.epsilon is None else _promise(promised, promised.epsilon, measured, steps)
    )
    cost = None if promise is None else theory.promise_cost(problem, steps, promise, asked.alpha)
    if asked.as_json:
        _print_json(problem, steps, choices, every, cost, doubted)
    else:
        _print_tables(problem, steps, choices, every, doubted)
        if promise is not None and cost is not None:
            _print_promise(promise, cost, choices["alone"], int(problem.n_peers))
    if asked.out is not None:
        from coterie.reporting.plan_page import write_plan_page

        page = write_plan_page(asked.out, problem, steps, doubted)
        typer.echo(f"wrote {page}, and the picture as PNG and PDF beside it", err=True)


def _problem(
    measured: SourceOptions, known: ConstantOptions, steps: int | None
) -> tuple[theory.Constants, theory.Constants | None, int]:
    """Return the constants, a given one before a measured one, and the number of steps.

    Where they are measured, also those with biases two standard errors larger, which say what may
    be claimed.
    """
    estimates: Estimates | None = None
    if measured.run is not None:
        record = record_of(measured.run)
        steps = record.configuration.steps if steps is None else steps
        estimates = _estimates(record, measured.run)
    steps = 1000 if steps is None else steps
    if measured.data is not None:
        estimates = _on_table(measured.data, measured, steps)
    options = {name: value for name, value in asdict(known).items() if value is not None}
    constants = (_constants_of(estimates, steps) if estimates else {}) | options
    if missing := [name for name in NEEDED if name not in constants]:
        raise KnobError(
            f"`{option_of(missing[0])}` is missing; give it, or a run whose constants were measured"
        )
    doubted = None
    if estimates and known.bias_floor is None:
        doubted = theory.Constants(**_constants_of(estimates, steps, bias_errors=2) | options)
    return theory.Constants(**constants), doubted, steps


def _promise(
    promised: PromiseOptions, epsilon: float, measured: SourceOptions, steps: int
) -> theory.Promise:
    """Return what peers promise.

    How many rows they have is a run's to tell where it is not said.
    """
    examples = promised.examples
    if examples is None and measured.run is not None:
        sizes = [
            n for n in record_of(measured.run).configuration.peers.values() if isinstance(n, int)
        ]
        examples = round(np.mean(sizes)) if sizes else None
    for name, value in {"examples": examples, "parameters": promised.parameters}.items():
        if value is None:
            raise KnobError(f"`--{name}` is missing: the noise behind `--epsilon` depends on it")
    privacy = Privacy(epsilon, promised.delta, promised.clip)
    count = promised.gradients or steps
    return theory.Promise(
        privacy, examples or 0, promised.parameters or 0, count, promised.batch_size
    )


def _on_table(data: Path, roles: SourceOptions, steps: int) -> Estimates:
    from coterie.tables.fit import measured

    table = {
        name: value for name, value in asdict(roles).items() if name not in ("run", "data", "model")
    }
    return measured(data, model=roles.model, steps=steps, **table)


def _print_json(
    problem: theory.Constants,
    steps: int,
    choices: dict[str, theory.Choice],
    exchange_cost: float | None,
    cost: theory.PromiseCost | None,
    doubted: theory.Constants | None,
) -> None:
    shown: dict[str, Any] = {name: numbers(choice) for name, choice in choices.items()}
    if doubted is not None:
        shown["wga"]["sure_speedup"] = sure_speedup(choices["wga"], steps, doubted)
    if exchange_cost is not None:
        fewer = exchange_choices(problem, steps, exchange_cost)
        shown["exchanges"] = {kind: asdict(one) for kind, one in fewer.items()}
    if cost is not None:
        choice = {
            name: numbers(each) for name, each in (("plain", cost.plain), ("private", cost.private))
        }
        shown["promise"] = {
            "noise": cost.noise,
            "worth": cost.worth,
            **choice,
            "pays_from": cost.pays_from,
        }
    typer.echo(json.dumps(shown, indent=2))


def _print_tables(
    problem: theory.Constants,
    steps: int,
    choices: dict[str, theory.Choice],
    exchange_cost: float | None,
    doubted: theory.Constants | None,
) -> None:
    console = terminal.console()
    rows = {name: numbers(choice) for name, choice in choices.items()}
    console.print(rich_table(None, [cells(name, row) for name, row in rows.items()], note(rows)))
    for sentence in verdict(problem, choices, steps, doubted):
        console.print(sentence, highlight=False)
    if exchange_cost is not None:
        title = f"In the time of {steps} steps with an exchange each"
        console.print(rich_table(title, exchange_cells(problem, steps, exchange_cost)))
        console.print(
            exchange_sentence(exchange_choices(problem, steps, exchange_cost), exchange_cost),
            highlight=False,
        )


def _print_promise(
    promise: theory.Promise, cost: theory.PromiseCost, alone: theory.Choice, n_peers: int
) -> None:
    console = terminal.console()
    title = f"With peers that promise {promise.privacy.in_words()}"
    console.print(rich_table(title, promise_cells(alone, cost)))
    for sentence in promise_sentences(promise, cost, n_peers):
        console.print(sentence, highlight=False)


def _estimates(record: Record, run: Path) -> Estimates:
    if not record.configuration.estimates:
        why = (
            record.configuration.not_measured
            or "it was trained alone, by a method, by a rule without knobs, or with"
            " `measure=False`; train with `measure=True`"
        )
        raise DataError(f"the run in {run} has no measured constants: {why}; give them by options")
    return Estimates.from_plain(record.configuration.estimates)


def _constants_of(
    estimates: Estimates, steps: int, *, bias_errors: float | None = None
) -> dict[str, Any]:
    """Return the constants of peers that are all alike and together do as those measured, equally weighed."""
    peers = estimates.constants(steps, bias_errors=bias_errors)
    n = len(estimates.peers)

    def mean(values: Any, power: int = 1) -> float:
        return float(np.mean(np.asarray(values) ** power) ** (1 / power))

    return {
        "n_peers": n,
        "noise": peers.noise,
        "peer_noise": mean(peers.peer_noise, 2),
        "bias_floor": mean(peers.bias_floor, 2),
        "bias_growth": mean(peers.bias_growth),
        "hessian_gap": mean(peers.hessian_gap),
        "smoothness": peers.smoothness,
        "pl": peers.pl,
        "initial_gap": peers.initial_gap,
    }
