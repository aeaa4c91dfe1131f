"""`coterie train`: a personal model from a table, beside the one trained alone."""

from __future__ import annotations

import functools
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.registered import knobs_of
from coterie.errors import KnobError
from coterie.registry import RunFacts
from coterie.rules import RULES


class KindName(StrEnum):
    """What the target is."""

    auto = "auto"
    classification = "classification"
    regression = "regression"


class EngineName(StrEnum):
    """Where the users are."""

    in_process = "in-process"
    torch = "torch"


class CompressName(StrEnum):
    """What is sent is rounded to this."""

    bf16 = "bf16"
    fp16 = "fp16"


def train(
    data: Annotated[
        Path, typer.Option(help="A CSV or Parquet file, one example a row; torch: {rank} in it for a file each.")
    ],
    user_column: Annotated[str, typer.Option(help="The column that says whose row it is.")],
    target: Annotated[str, typer.Option(help="The column to predict.")],
    me: Annotated[str, typer.Option(help="Which user is user 0: the one the model is for.")],
    out: Annotated[Path, typer.Option(help="Folder for the model, its preparation, records and checkpoints.")],
    rule: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="adaptive: weights found from the data; pooled: everybody's rows alike; wga: averaging with "
            "--alpha; bc: bias correction with --alpha and --beta. All rules, described by `coterie list rules`: "
            "{rules}.",
        ),
    ] = "adaptive",
    alpha: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER|auto",
            help="The peers' weight, for wga and bc, in [0, 1]; 0.5 if left out. auto: what the theory advises for "
            "the noise and bias that a few batches show before the first step; wga then weighs every peer too, "
            "unless --tau does.",
        ),
    ] = None,
    beta: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER|auto",
            help="How fast bc's estimate of the bias follows, in [0, 1]; 0.01 if left out. auto: what the theory "
            "advises; peers whose Hessians differ too much from user 0's are then left out, unless --tau names the "
            "peers.",
        ),
    ] = None,
    knob: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Any knob of the rule, e.g. aggregator=median; repeat it."),
    ] = None,
    tau: Annotated[
        list[str] | None, typer.Option(metavar="NAME=WEIGHT", help="A peer's weight among the peers; repeat it.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="linear, mlp, or module.path:factory(n_inputs, n_outputs).")
    ] = "linear",
    kind: Annotated[KindName, typer.Option(help="What the target is; auto tells by its values.")] = KindName.auto,
    categorical: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="A column of numbers that are categories; repeat it.")
    ] = None,
    leave_out: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A user to take no notice of; repeat it.")
    ] = None,
    own_examples: Annotated[int | None, typer.Option(help="Train on at most so many rows of user 0.")] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A metric to report beside the usual one; repeat it. All metrics: {metrics}.",
        ),
    ] = None,
    tracker: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="What follows the run, of {trackers}; tensorboard if left out; repeat it."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps to take.")] = 1000,
    lr: Annotated[float, typer.Option(help="Adam's step size.")] = 0.01,
    batch_size: Annotated[int, typer.Option(help="Rows each user draws for a gradient.")] = 32,
    seed: Annotated[int, typer.Option(help="What splits, initial weights and batches depend on.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; more help large models only.")] = 1,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda, …")] = "cpu",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run that is in --out.")] = False,
    engine: Annotated[
        EngineName,
        typer.Option(help="in-process, or torch: a process for each user, started by torchrun (trusted network)."),
    ] = EngineName.in_process,
    gather: Annotated[
        bool, typer.Option("--gather", help="torch: add up at user 0, in order, to reproducible bits.")
    ] = False,
    compress: Annotated[CompressName | None, typer.Option(help="torch: round what is sent.")] = None,
    timeout: Annotated[float, typer.Option(help="torch: seconds after which a silent process is lost.")] = 120.0,
) -> None:
    """Train a personal model for one user of a table, and report it beside the model trained alone.

    User 0's rows are split into training, validation (which chooses the best model) and test (used once,
    at the end). Ctrl-C saves and stops; --resume goes on.

    Example: coterie train --data visits.csv --user-column hospital --target ill --me Geneva --out run

    With the theory's knobs: add --rule bc --alpha auto --beta auto

    With a rule of your own: coterie --import own.py train --rule own --knob strength=0.3 …

    With a process for each user: torchrun --nproc-per-node 4 -m coterie train --engine torch --rule wga …
    """
    import torch
    from rich.console import Console

    from coterie.cli.terminal import rich_table
    from coterie.data import from_table
    from coterie.engines.in_process.engine import InProcess
    from coterie.engines.torch_distributed.engine import TorchDistributed, join
    from coterie.tables import cluster
    from coterie.tables.fit import fit

    torch.set_num_threads(threads)
    console = Console()
    entry = RULES.entry(rule)
    knobs = knobs_of(entry, knob or [], alpha=alpha, beta=beta)
    knobs |= {"tau": _weights(tau)} if tau else {}
    columns: dict[str, Any] = {"user_column": user_column, "target": target, "me": me}
    columns |= {"kind": kind.value, "categorical": categorical or (), "own_examples": own_examples, "seed": seed}
    settings: dict[str, Any] = {"steps": steps, "lr": lr, "batch_size": batch_size, "device": device}
    settings |= {"trackers": tracker} if tracker else {}
    if engine is EngineName.torch:
        if hasattr(entry.thing, "choose"):
            raise KnobError(f"`--rule {rule}` needs all rows in one process; choose wga or bc for `--engine torch`")
        group = join(timeout)
        if group.rank:
            part = functools.partial(cluster.part_of, group, str(data), user_column, me, leave_out or [])
            cluster.follow(group, part, model, device)
            return
        settings["device"] = cluster.here(device)
        task, peers = cluster.lead(group, str(data), model=model, **columns)
        wire: dict[str, Any] = {"gather": gather, "compress": compress and compress.value, "group": group}
        where: Any = functools.partial(TorchDistributed, **wire)
    else:
        task, where = from_table(data, leave_out=leave_out or (), **columns), InProcess
        peers = {peer.name: len(peer) for peer in task.peers}
    chosen = entry.build(knobs, RunFacts(len(task.me), peers, steps))
    try:
        fitted = fit(
            task, chosen, model, out, metrics=metric or (), seed=seed, resume=resume, engine=where, **settings
        )
    except KeyboardInterrupt:  # between the two runs, or pressed twice
        fitted = None
    if fitted is None:
        console.print(f"stopped; everything is saved in {out}, and the same command with --resume goes on")
        raise typer.Exit(130)
    console.print(rich_table(f"{target} for {me}, {task.preparation.kind}, {len(peers)} peers", fitted.table()))
    console.print(fitted.sentence())
    console.print(f"Model, preparation, records and a page (index.html): {out}")
    console.print(f"To apply it: coterie predict {out} FILE")


def _weights(pairs: list[str]) -> dict[str, float]:
    weights = {}
    for pair in pairs:
        name, equals, weight = pair.rpartition("=")
        try:
            weights[name] = float(weight)
        except ValueError:
            equals = ""
        if not equals:
            raise KnobError(f"`--tau` must be NAME=WEIGHT, got {pair!r}")
    return weights
