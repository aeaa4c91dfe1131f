"""`coterie train`: a personal model from a table, beside the one trained alone."""

import functools
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import typer

from coterie.cli import terminal
from coterie.cli.everyone import ALL, for_everyone, train_all
from coterie.cli.options.groups import grouped
from coterie.cli.options.training import EngineOptions, FitOptions, RuleOptions, TableOptions
from coterie.cli.terminal import quietly, rich_table, to_apply
from coterie.data import TableTask, from_table
from coterie.engines.processes.processes import Processes
from coterie.engines.processes.rendezvous import Rendezvous
from coterie.errors import DataError, KnobError
from coterie.recording.configuration import StepSettings
from coterie.registry import RunFacts
from coterie.reporting.summary import beside_alone
from coterie.reporting.whom import listened_to
from coterie.tables import cluster
from coterie.training.run import Run


@grouped
def train(table: TableOptions, rule: RuleOptions, how: FitOptions, where: EngineOptions) -> None:
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

    torch.set_num_threads(how.threads)
    if rule.rule == "alone" and how.exchange_every > 1:
        raise KnobError(
            "`--exchange-every` has no effect with `--rule alone`, which asks nobody; leave it out"
        )
    everyone = for_everyone(table, rule, how, where)
    table, rule, how = _in_closed_form(table, rule, how, where)
    _check_repeats(rule, how, where)
    if everyone and where.engine == "in-process":
        return train_all(table, rule, how)
    users = _users(table, how, where, everyone=everyone)
    if users is None:
        return None
    task, peers, changed = users
    settings, chosen = (
        how.settings() | changed | where.attacked(),
        rule.build(RunFacts(len(task.me), peers, how.steps)),
    )
    settings["again"] = [
        functools.partial(_split_again, table, rule, how, k) for k in range(1, how.repeats)
    ]
    try:
        run = fit(task, chosen, **settings)
    except KeyboardInterrupt:  # pressed twice
        run = None
    console, out = terminal.console(), settings["out"]
    if run is None:
        console.print(
            f"stopped; everything is saved in {out}, and the same command with --resume goes on"
        )
        raise typer.Exit(130)
    _print_result(
        run, f"{table.target} for {task.me.name}, {task.preparation.kind}, {_counted(len(peers))}"
    )
    only = ", which no other process sees" if everyone else ""
    console.print(f"Model, preparation, record and a page (index.html){only}: {out}")
    console.print(f"To apply it: {to_apply(out, how.model)}", soft_wrap=True)
    _check_finite(run)
    return None


def _in_closed_form(
    table: TableOptions, rule: RuleOptions, how: FitOptions, where: EngineOptions
) -> tuple[TableOptions, RuleOptions, FitOptions]:
    """Name the rule and the model that auto stands for.

    The closed form and adaptive averaging judge by folds of the own rows, and hold none out. Trees
    are mixed with linear models, unless `--model` says which.
    """
    stepwise = any(
        getattr(how, each.name) != each.default
        for each in fields(StepSettings)
        if each.name != "seed"
    )
    knobs = bool(rule.knob or rule.tau or rule.alpha or rule.beta)
    weighted = table.weights is not None or table.class_weight is not None
    plain = not (weighted or where.secure_sums or where.attack is not None)
    kinds = {"auto": ["trees=True"], "trees": ["trees=only"], "linear": []}
    if where.engine != "in-process" and table.me == ALL:  # where all train
        kinds = {}
    if table.validation is None and rule.rule in {"auto", "adaptive", "mixture"}:
        table = replace(table, validation=0.0)
    if rule.rule != "auto" or stepwise or knobs or not plain or how.model not in kinds:
        if how.model == "trees":
            raise KnobError(
                "`--model trees` takes no steps, and needs rows that count alike and one user who"
                " trains; leave out `--rule`, what says how steps are taken, `--weights`, `--me all`"
                " over processes and `--secure-sums`"
            )
        return table, rule, replace(how, model=_linear(how.model))
    closed = replace(rule, rule="mixture", knob=kinds[how.model])
    return table, closed, replace(how, model=_linear(how.model))


def _linear(model: str) -> str:
    """Return the model that is built: trees grow beside a linear one."""
    return "linear" if model in {"auto", "trees"} else model


def _users(
    table: TableOptions, how: FitOptions, where: EngineOptions, *, everyone: bool
) -> tuple[TableTask, Mapping[str, int], dict[str, Any]] | None:
    """Return this process's task, its peers with their rows, and settings that are others for it.

    None where it is a peer, and the run is over.
    """
    changed: dict[str, Any] = {"device": cluster.here(how.device)}
    if where.engine == "in-process":
        task = from_table(seed=how.seed, **table.settings())
        return task, {peer.name: len(peer) for peer in task.peers}, changed
    others = Processes(Rendezvous(where.timeout or 120.0))
    if everyone:
        with others.or_leave():
            task, sizes, folder = cluster.meet(others, table.settings(), seed=how.seed)
        changed["out"] = how.out / folder
    elif others.rank:
        _follow(others, table, how, where)
        return None
    else:
        with others.or_leave():
            settings = table.settings() | {"seed": how.seed}
            task, sizes = cluster.lead(others, settings, model=how.model)
    return task, sizes, changed | {"engine": where.over(others, everyone=everyone)}


def _counted(peers: int) -> str:
    return f"{peers} peer{'' if peers == 1 else 's'}"


def _check_repeats(rule: RuleOptions, how: FitOptions, where: EngineOptions) -> None:
    """Refuse to repeat what has nothing to be compared with, or whose peers are elsewhere."""
    if how.repeats > 1 and where.engine == "torch":
        raise KnobError(
            "`--repeats` is for users in this process; leave it out, or `--engine torch`"
        )
    if how.repeats > 1 and rule.rule == "alone":
        raise KnobError(
            "`--repeats` compares with training alone, which `--rule alone` is; leave it out"
        )


def _split_again(
    table: TableOptions, rule: RuleOptions, how: FitOptions, k: int
) -> tuple[TableTask, Any]:
    """Return the task with user 0's rows split in another way, and the rule for it."""
    task = quietly(from_table, seed=how.seed + k, **table.settings())
    return task, rule.build(
        RunFacts(len(task.me), {peer.name: len(peer) for peer in task.peers}, how.steps)
    )


def _follow(others: Processes, table: TableOptions, how: FitOptions, where: EngineOptions) -> None:
    """Be a peer among the processes of torchrun, until the run ends."""
    whose = table.user_column, table.me, table.leave_out
    part = functools.partial(cluster.part_of, others, table.data, *whose, form=table)
    cluster.follow(others, part, how.model, how.device, secure_sums=where.secure_sums)


def _print_result(run: Run, title: str) -> None:
    """Print the verdict, the numbers beside those of the model trained alone, and whom the model listens to."""
    console = terminal.console()
    console.print(run.verdict.sentence, highlight=False)
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
