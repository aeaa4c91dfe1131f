"""`coterie train`: a personal model from a table, beside the one trained alone."""

import functools
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import typer

from coterie.cli import terminal
from coterie.cli.options.groups import grouped
from coterie.cli.options.training import EngineOptions, FitOptions, RuleOptions, TableOptions
from coterie.cli.terminal import quietly, rich_table, to_apply
from coterie.data import TableTask, from_table, users_from_table
from coterie.data.reading import rank_file, users_in
from coterie.engines.processes.processes import Processes
from coterie.engines.processes.rendezvous import Address, Rendezvous
from coterie.errors import DataError, KnobError, few_of
from coterie.everyone.gains import beside_pooled
from coterie.everyone.runs import Runs
from coterie.recording.configuration import StepSettings, counted
from coterie.recording.record import Record
from coterie.registry import RunSizes
from coterie.reporting.summary import beside_alone
from coterie.reporting.verdict import HEADLINES, weight_of_peers
from coterie.reporting.whom import listened_to, peer_shares, weighs
from coterie.tables import cluster
from coterie.training.run import Run, Stopped

ALL = "all"
"""What `--me` says for everybody."""
LEAST, NAMED = 0.005, 3
"""From which weight on a peer is named, and how many are."""


@grouped
def train(
    table: TableOptions, rule: RuleOptions, options: FitOptions, where: EngineOptions
) -> None:
    """Train a personal model for one user of a table, and say whether it is better than one trained alone.

    User 0's rows are split into training, validation (which chooses the best model) and test (used
    once, at the end). Ctrl-C saves and stops; --resume goes on.

    Example: coterie train --data visits.csv --user-column hospital --target ill --me Geneva --out
        run

    A model for each user, in one command: --me all

    A small table, judged by ten splits of its rows: add --repeats 10

    With the theory's knobs: add --rule bc --alpha auto --beta auto

    A method to compare with, in rounds: add --rule fedavg --knob local_steps=5

    With a rule of your own: coterie --import own.py train --rule own --knob strength=0.3 …

    With a process for each user, also with --me all: torchrun --nproc-per-node 4 -m coterie train
    --engine torch …
    """
    import torch

    from coterie.tables.fit import fit

    torch.set_num_threads(options.threads)
    if rule.rule == "alone" and options.exchange_every > 1:
        raise KnobError(
            "`--exchange-every` has no effect with `--rule alone`, which asks nobody; leave it out"
        )
    everyone = _for_everyone(table, rule, options, where)
    table, rule, options = _in_closed_form(table, rule, options, where)
    _check_repeats(rule, options, where)
    if everyone and where.engine == "in-process":
        return _train_all(table, rule, options)
    users = _users(table, options, where, everyone=everyone)
    if users is None:
        return None
    task, peers, changed = users
    settings = options.settings() | changed | where.attacked()
    chosen = rule.build(RunSizes(len(task.me), peers, options.steps))
    settings["again"] = [
        functools.partial(_split_again, table, rule, options, k) for k in range(1, options.repeats)
    ]
    try:
        run = fit(task, chosen, **settings)
    except KeyboardInterrupt:  # pressed twice
        run = None
    console, out = terminal.console(), settings["out"]
    if run is None:
        raise _stopped(out)
    about = task.preparation.kind, counted(len(peers), "peer")
    _print_result(run, ", ".join((f"{table.target} for {task.me.name}", *about)))
    only = ", which no other process sees" if everyone else ""
    console.print(f"Model, preparation, record and a page (index.html){only}: {out}")
    console.print(f"To apply it: {to_apply(out, options.model)}", soft_wrap=True)
    _check_finite(run)
    return None


def _in_closed_form(
    table: TableOptions, rule: RuleOptions, options: FitOptions, where: EngineOptions
) -> tuple[TableOptions, RuleOptions, FitOptions]:
    """Name the rule and the model that auto stands for.

    The closed form and adaptive averaging judge by folds of the own rows, and hold none out. Trees
    are mixed with linear models, unless `--model` says which.
    """
    stepwise = any(
        getattr(options, each.name) != each.default
        for each in fields(StepSettings)
        if each.name != "seed"
    )
    knobs = bool(rule.knob or rule.tau or rule.alpha or rule.beta)
    plain = not (table.class_weight is not None or where.secure_sums or where.attack is not None)
    signs = [f"monotonic_cst={rule.signs!r}"] if rule.signs else []
    kinds = {"auto": ["trees=True"], "trees": ["trees=only"], "linear": []}
    if where.engine != "in-process" and table.me == ALL:  # where all train
        kinds = {}
    if table.validation is None and rule.rule in {"auto", "adaptive", "mixture"}:
        table = replace(table, validation=0.0)
    if rule.rule != "auto" or stepwise or knobs or not plain or options.model not in kinds:
        if options.model == "trees":
            raise KnobError(
                "`--model trees` takes no steps, and needs classes that count alike and one user who"
                " trains; leave out `--rule`, what says how steps are taken, `--class-weight`,"
                " `--me all` over processes and `--secure-sums`"
            )
        if signs and rule.rule != "mixture":
            raise KnobError(
                "`--monotone` is for models in closed form; leave out another `--rule` than mixture,"
                " `--model mlp`, what says how steps are taken, `--class-weight` and"
                " `--secure-sums`"
            )
        rule = replace(rule, knob=[*rule.knob, *signs])
        return table, rule, replace(options, model=_linear(options.model))
    closed = replace(rule, rule="mixture", knob=[*kinds[options.model], *signs])
    return table, closed, replace(options, model=_linear(options.model))


def _linear(model: str) -> str:
    """Return the model that is built: trees grow beside a linear one."""
    return "linear" if model in {"auto", "trees"} else model


def _users(
    table: TableOptions, options: FitOptions, where: EngineOptions, *, everyone: bool
) -> tuple[TableTask, Mapping[str, int], dict[str, Any]] | None:
    """Return this process's task, its peers with their rows, and settings that are others for it.

    None where it is a peer, and the run is over.
    """
    changed: dict[str, Any] = {"device": cluster.here(options.device)}
    if where.engine == "in-process":
        task = from_table(seed=options.seed, **table.settings())
        return task, {peer.name: len(peer) for peer in task.peers}, changed
    others = Processes(Rendezvous(where.timeout or 120.0))
    if everyone:
        with others.or_leave():
            task, sizes, folder = cluster.meet(others, table.settings(), seed=options.seed)
        changed["out"] = options.out / folder
    elif others.rank:
        _follow(others, table, options, where)
        return None
    else:
        with others.or_leave():
            settings = table.settings() | {"seed": options.seed}
            task, sizes = cluster.lead(others, settings, model=options.model)
    return task, sizes, changed | {"engine": where.over(others, everyone=everyone)}


def _check_repeats(rule: RuleOptions, options: FitOptions, where: EngineOptions) -> None:
    """Refuse to repeat what has nothing to be compared with, or whose peers are elsewhere."""
    if options.repeats > 1 and where.engine == "torch":
        raise KnobError(
            "`--repeats` is for users in this process; leave it out, or `--engine torch`"
        )
    if options.repeats > 1 and rule.rule == "alone":
        raise KnobError(
            "`--repeats` compares with training alone, which `--rule alone` is; leave it out"
        )


def _split_again(
    table: TableOptions, rule: RuleOptions, options: FitOptions, k: int
) -> tuple[TableTask, Any]:
    """Return the task with user 0's rows split in another way, and the rule for it."""
    task = quietly(from_table, seed=options.seed + k, **table.settings())
    sizes = {peer.name: len(peer) for peer in task.peers}
    return task, rule.build(RunSizes(len(task.me), sizes, options.steps))


def _stopped(out: Path) -> typer.Exit:
    """Say that a run was stopped, and how it goes on."""
    terminal.console().print(
        f"stopped; everything is saved in {out}, and the same command with --resume goes on"
    )
    return typer.Exit(130)


def _follow(
    others: Processes, table: TableOptions, options: FitOptions, where: EngineOptions
) -> None:
    """Be a peer among the processes of torchrun, until the run ends."""
    whose = table.user_column, table.me, table.leave_out
    part = functools.partial(cluster.part_of, others, table.data, *whose, form=table)
    cluster.follow(others, part, options.model, options.device, secure_sums=where.secure_sums)


def _print_result(run: Run, title: str) -> None:
    """Print the verdict, the numbers beside those of the model trained alone, and whom the model listens to."""
    console = terminal.console()
    console.print(f"{run.verdict.sentence} {run.verdict.advice}", highlight=False)
    console.print(rich_table(title, beside_alone(run.record)))
    if who := listened_to(run.record.configuration, run.record.end):
        console.print(who, highlight=False)


def _check_finite(run: Run) -> None:
    loss = run.test["loss"]
    if not math.isfinite(loss):
        raise DataError(
            f"the test loss is {loss}, so the model is of no use; start again with a lower `--lr`,"
            " or look for extreme values in the table"
        )


def _for_everyone(
    table: TableOptions, rule: RuleOptions, options: FitOptions, where: EngineOptions
) -> bool:
    """Say whether a model for each user is asked for.

    One who is called "all" is meant where there is one.
    """
    if table.me != ALL:
        return False
    rank = None if where.engine == "in-process" else Address.told().rank
    data = table.data if rank is None else rank_file(table.data, rank)
    everyone = ALL not in users_in(data, table.user_column, table)
    if everyone and where.attack:
        raise KnobError("`--attack` is for the peers of one user; name one in `--me`")
    if everyone and rule.is_method and where.engine != "in-process":
        raise KnobError(
            f"{rule.rule!r} is a method, which `--me all` takes in one process; leave out `--engine`"
        )
    if everyone and rule.tau:
        raise KnobError("`--tau` weighs the peers of one user; leave it out, or name one in `--me`")
    return everyone


def _train_all(table: TableOptions, rule: RuleOptions, options: FitOptions) -> None:
    """Train a model for each user of the table, and say who gains."""
    from coterie.tables.fit import fit_everyone

    columns = {name: value for name, value in table.settings().items() if name != "me"}
    split = functools.partial(users_from_table, **columns)
    console, settings = terminal.console(), {**options.settings(), "user_column": table.user_column}
    settings["again"] = [
        functools.partial(quietly, split, seed=options.seed + k) for k in range(1, options.repeats)
    ]
    try:
        runs = fit_everyone(split(seed=options.seed), rule.build, **settings)
    except KeyboardInterrupt:  # pressed twice
        runs = None
    if runs is None:
        raise _stopped(options.out)
    console.print(runs.summary().splitlines()[0], highlight=False)
    for line in filter(None, [*map(str, runs.overall), beside_pooled(runs.gains)]):
        console.print(line, highlight=False)
    console.print(rich_table(table.target, _rows_of(runs)))
    console.print(f"The page of all, which leads to everybody's own: {options.out / 'index.html'}")
    console.print(
        f"Everybody's model, preparation, record and page, in a folder each: {options.out}"
    )
    console.print(f"To apply them: {to_apply(options.out, options.model)}", soft_wrap=True)
    _check_all_finite(runs)


def _check_all_finite(runs: Runs) -> None:
    """Refuse runs whose gradients or test losses are not finite, once everybody's is written."""
    bad = [
        name
        for name, run in runs.runs.items()
        if run.stopped is Stopped.NOT_FINITE or not math.isfinite(run.test.get("loss", 0.0))
    ]
    if bad:
        raise DataError(
            f"the gradients or the test loss of {few_of(bad)} are not finite: do not use those"
            " models; start again with a lower `--lr`, or look for extreme values in their rows"
        )


def _rows_of(runs: Runs) -> list[dict[str, str]]:
    """Return a row for each user: the verdict, and the numbers that it rests on."""
    measures = [one.measure for one in runs.overall]
    rows = []
    for gain in runs.gains:
        record = runs.runs[gain.name].record
        differences = gain.differences()
        rows.append(
            {"user": gain.name, "verdict": HEADLINES[gain.verdict.finding]}
            | {f"{name}, against alone": differences.get(name, "") for name in measures}
            | {"listens to": _listened_to(record)}
        )
    return rows


def _listened_to(record: Record) -> str:
    """Name the peers with most weight in what is served, or say why none is named."""
    if not weighs(record.configuration, record.end):
        return "no weights"
    asked = weight_of_peers(record.end)
    shares = {
        peer.name: peer.share * (1.0 if asked is None else asked)
        for peer in peer_shares(record.configuration, record.end)
    }
    named = [f"{name} {share:.0%}" for name, share in shares.items() if share >= LEAST]
    return ", ".join(named[:NAMED] or ["nobody"]) + (" …" if len(named) > NAMED else "")
