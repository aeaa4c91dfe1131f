"""Options in groups: what typer sees, and what a command gets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import typer
from typer import Option
from typer.testing import CliRunner

from coterie.cli.options.groups import grouped


@dataclass
class Eaten:
    """What is eaten."""

    what: Annotated[str, Option(help="A dish.")]
    spices: Annotated[list[str], Option("--spice", help="A spice; repeat it.")] = field(
        default_factory=list
    )


@dataclass
class Drunk:
    """What is drunk."""

    glasses: Annotated[int, Option(help="How many.")] = 1


got: list[tuple[Eaten, Drunk]] = []
APP = typer.Typer()


@APP.command()
@grouped
def dine(eaten: Eaten, drunk: Drunk) -> None:
    """Dine."""
    got.append((eaten, drunk))


def test_a_command_gets_its_groups_and_the_help_shows_them_as_panels() -> None:
    given = ["--glasses", "2", "--what", "rice", "--spice", "salt", "--spice", "mace"]
    for words in (given, ["--what", "rice"]):
        assert CliRunner().invoke(APP, words).exit_code == 0
    assert got == [(Eaten("rice", ["salt", "mace"]), Drunk(2)), (Eaten("rice"), Drunk())]
    assert CliRunner().invoke(APP, []).exit_code == 2  # `--what` is needed
    shown = CliRunner().invoke(APP, ["--help"]).output
    eaten, drunk = shown.index("What is eaten"), shown.index("What is drunk")
    assert eaten < shown.index("--spice") < drunk < shown.index("--glasses")
