"""`coterie list`: what is registered."""

from enum import StrEnum
from typing import Annotated, Any

import typer
from typer import Argument

from coterie.aggregators import AGGREGATORS
from coterie.benchmark.sets import SETS
from coterie.cli.options.groups import grouped
from coterie.evaluation import METRICS
from coterie.methods import METHODS
from coterie.registry import Registry
from coterie.rules import RULES
from coterie.training.hooks import TRACKERS

Kind = StrEnum("Kind", ["rules", "methods", "aggregators", "sets", "metrics", "trackers"])


@grouped
def list_(
    kinds: Annotated[list[Kind] | None, Argument()] = None,
) -> None:
    """List rules, methods, aggregators, data sets, metrics and trackers by name, your own among them.

    Example: coterie --import own.py list rules

    Args:
        kinds: Which kinds; all when none is named.
    """
    all_registries: list[Registry[Any]] = [RULES, METHODS, AGGREGATORS, SETS, METRICS, TRACKERS]
    registries = dict(zip(Kind, all_registries, strict=True))
    for kind in kinds or list(Kind):
        typer.echo(f"{kind.value}:")
        for name in registries[kind]:
            typer.echo(f"  {name:<20} {registries[kind].entry(name).description}")
