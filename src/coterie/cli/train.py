"""`coterie train`: a personal model from a table, beside the one trained alone."""

import functools
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Option

from coterie.cli import terminal
from coterie.cli.registered import knobs_of
from coterie.cli.terminal import rich_table
from coterie.data import from_table
from coterie.engines.in_process.engine import InProcess
from coterie.engines.torch_distributed.engine import TorchDistributed, join
from coterie.errors import DataError, KnobError
from coterie.registry import RunFacts
from coterie.reporting.summary import beside_alone
from coterie.reporting.whom import listened_to
from coterie.rules import RULES
from coterie.tables import cluster


def train(
    data: Annotated[
        Path, Option(help="A CSV or Parquet file, one example a row; torch: {rank} in it for a file each.")
    ],
    user_column: Annotated[str, Option(help="The column that says whose row it is.")],
    target: Annotated[str, Option(help="The column to predict.")],
    me: Annotated[str, Option(help="Which user is user 0: the one the model is for.")],
    out: Annotated[Path, Option(help="Folder for the model, its preparation, records and checkpoints.")],
    rule: Annotated[
        str,
        Option(
            metavar="NAME",
            help="adaptive: weights found from the data; pooled: everybody's rows alike; wga: averaging with "
            "--alpha; bc: bias correction with --alpha and --beta. All rules, described by `coterie list rules`: "
            "{rules}.",
        ),
    ] = "adaptive",
    alpha: Annotated[
        str | None,
        Option(
            metavar="NUMBER|auto",
            help="The peers' weight, for wga and bc, in [0, 1]; 0.5 if left out. auto: what the theory advises for "
            "the noise and bias that a few batches show before the first step; wga then weighs every peer too, "
            "unless --tau does.",
        ),
    ] = None,
    beta: Annotated[
        str | None,
        Option(
            metavar="NUMBER|auto",
            help="How fast bc's estimate of the bias follows, in [0, 1]; 0.01 if left out. auto: what the theory "
            "advises; peers whose Hessians differ too much from user 0's are then left out, unless --tau names the "
            "peers.",
        ),
    ] = None,
    knob: Annotated[
        list[str] | None,
        Option(metavar="NAME=VALUE", help="Any knob of the rule, e.g. aggregator=median; repeat it."),
    ] = None,
    tau: Annotated[
        list[str] | None, Option(metavar="NAME=WEIGHT", help="A peer's weight among the peers; repeat it.")
    ] = None,
    model: Annotated[str, Option(help="linear, mlp, or module.path:factory(n_inputs, n_outputs).")] = "linear",
    kind: Annotated[
        Literal["auto", "classification", "regression"],
        Option(help="What the target is; auto tells by its values."),
    ] = "auto",
    categorical: Annotated[
        list[str] | None, Option(metavar="COLUMN", help="A column of numbers that are categories; repeat it.")
    ] = None,
    leave_out: Annotated[
        list[str] | None, Option(metavar="NAME", help="A user to take no notice of; repeat it.")
    ] = None,
    own_examples: Annotated[int | None, Option(help="Train on at most so many rows of user 0.")] = None,
    metric: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="A metric to report beside the usual one; repeat it. All metrics: {metrics}."),
    ] = None,
    tracker: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="What follows the run, of {trackers}; tensorboard if left out; repeat it."),
    ] = None,
    steps: Annotated[int, Option(help="Steps to take.")] = 1000,
    lr: Annotated[float, Option(help="Adam's step size.")] = 0.01,
    batch_size: Annotated[int, Option(help="Rows each user draws for a gradient.")] = 32,
    guard: Annotated[
        bool,
        Option(
            "--guard/--no-guard",
            help="Train a model alone beside, start again from it where the peers do harm, and serve the better of "
            "the two on the validation rows; costs one more gradient of user 0 a step (adaptive: nothing).",
        ),
    ] = True,
    seed: Annotated[int, Option(help="What splits, initial weights and batches depend on.")] = 0,
    threads: Annotated[int, Option(min=1, help="CPU threads; more help large models only.")] = 1,
    device: Annotated[str, Option(help="Where to train: cpu, cuda, …")] = "cpu",
    resume: Annotated[bool, Option("--resume", help="Go on with the run that is in --out.")] = False,
    engine: Annotated[
        Literal["in-process", "torch"],
        Option(help="in-process, or torch: a process for each user, started by torchrun (trusted network)."),
    ] = "in-process",
    gather: Annotated[
        bool, Option("--gather", help="torch: add up at user 0, in order, to reproducible bits.")
    ] = False,
    compress: Annotated[Literal["bf16", "fp16"] | None, Option(help="torch: round what is sent.")] = None,
    timeout: Annotated[float, Option(help="torch: seconds after which a silent process is lost.")] = 120.0,
) -> None:
    """Train a personal model for one user of a table, and say whether it is better than one trained alone.

    User 0's rows are split into training, validation (which chooses the best model) and test (used once,
    at the end). Ctrl-C saves and stops; --resume goes on.

    Example: coterie train --data visits.csv --user-column hospital --target ill --me Geneva --out run

    With the theory's knobs: add --rule bc --alpha auto --beta auto

    With a rule of your own: coterie --import own.py train --rule own --knob strength=0.3 …

    With a process for each user: torchrun --nproc-per-node 4 -m coterie train --engine torch …
    """
    import torch

    from coterie.tables.fit import fit

    torch.set_num_threads(threads)
    console = terminal.console()
    entry = RULES.entry(rule)
    knobs = knobs_of(entry, knob or [], alpha=alpha, beta=beta)
    knobs |= {"tau": _weights(tau)} if tau else {}
    columns: dict[str, Any] = {"user_column": user_column, "target": target, "me": me}
    columns |= {"kind": kind, "categorical": categorical or (), "own_examples": own_examples, "seed": seed}
    settings: dict[str, Any] = {"steps": steps, "lr": lr, "batch_size": batch_size, "device": device}
    settings["threads"] = threads
    settings |= {"trackers": tracker} if tracker else {}
    if engine != "torch" and (gather or compress):
        raise KnobError("`--gather` and `--compress` have no effect without `--engine torch`; leave them out")
    settings |= {} if guard else {"guard": "off"}
    if engine == "torch":
        group = join(timeout)
        if group.rank:
            part = functools.partial(cluster.part_of, group, str(data), user_column, me, leave_out or [])
            cluster.follow(group, part, model, device)
            return
        settings["device"] = cluster.here(device)
        task, peers = cluster.lead(group, str(data), model=model, **columns)
        wire: dict[str, Any] = {"gather": gather, "compress": compress, "group": group}
        where: Any = functools.partial(TorchDistributed, **wire)
    else:
        task, where = from_table(data, leave_out=leave_out or (), **columns), InProcess
        peers = {peer.name: len(peer) for peer in task.peers}
    chosen = entry.build(knobs, RunFacts(len(task.me), peers, steps))
    settings |= {"metrics": metric or (), "seed": seed, "resume": resume, "engine": where}
    try:
        run = fit(task, chosen, model, out, **settings)
    except KeyboardInterrupt:  # pressed twice
        run = None
    if run is None:
        console.print(f"stopped; everything is saved in {out}, and the same command with --resume goes on")
        raise typer.Exit(130)
    console.print(run.verdict.sentence, highlight=False)
    console.print(
        rich_table(f"{target} for {me}, {task.preparation.kind}, {len(peers)} peers", beside_alone(run.record))
    )
    if who := listened_to(run.record.configuration, run.record.end):
        console.print(who, highlight=False)
    console.print(f"Model, preparation, record and a page (index.html): {out}")
    console.print(f"To apply it: coterie predict {out} FILE")
    if wrong := [name for name, value in run.test.items() if not math.isfinite(value)]:
        raise DataError(
            f"the test {wrong[0]} is {run.test[wrong[0]]}, so the model is of no use; start again with a lower "
            "`--lr`, or look for extreme values in the table"
        )


def _weights(pairs: list[str]) -> dict[str, float]:
    weights = {}
    for pair in pairs:
        try:
            name, weight = pair.rsplit("=", 1)
            weights[name] = float(weight)
        except ValueError:
            raise KnobError(f"`--tau` must be NAME=WEIGHT, got {pair!r}") from None
    return weights
