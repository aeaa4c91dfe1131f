"""The options of `coterie federate init`, in groups. The fields of a group are settings of what takes them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from coterie.cli.options.registered import knobs_of
from coterie.errors import KnobError
from coterie.federation.settings import MessageSettings
from coterie.methods import entry_of
from coterie.recording.configuration import StepSettings
from coterie.registry import FromRun


@dataclass(frozen=True, kw_only=True)
class ConsortiumOptions:
    """The consortium."""

    folder: Annotated[
        Path,
        Argument(help="Folder to write: user 0's, with one for each site in it.", rich_help_panel="Arguments"),
    ]
    site: Annotated[list[str], Option(help="The name of a site; repeat it.")]
    server: Annotated[str, Option(help="The host name by which sites reach user 0.")]
    me: Annotated[str, Option(help="The name of user 0.")] = "user0"
    name: Annotated[str, Option(help="The name of the consortium.")] = "coterie"
    port: Annotated[int, Option(help="The server's port for sites.")] = 8002
    admin_port: Annotated[int, Option(help="The server's port for user 0's own commands.")] = 8003
    everyone: Annotated[
        bool, Option("--everyone", help="Every site trains a model of its own; the server passes messages on.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class OwnTableOptions:
    """User 0's table."""

    data: Annotated[Path, Option(help="User 0's table, a CSV or Parquet file with one example a row.")]
    target: Annotated[str, Option(help="The column to predict.")]
    kind: Annotated[str, Option(help="auto, classification or regression.")] = "auto"
    categorical: Annotated[
        list[str], Option(metavar="COLUMN", help="A column of numbers that are categories; repeat it.")
    ] = field(default_factory=list)
    drop: Annotated[
        list[str],
        Option(
            metavar="COLUMN",
            help="A column not to predict from, such as a name: the sites are told what is in the others. "
            "Repeat it.",
        ),
    ] = field(default_factory=list)
    ids: Annotated[
        str | None,
        Option(
            "--id",
            metavar="COLUMN",
            help="The column that tells rows apart: not predicted from, and written beside every prediction.",
        ),
    ] = None
    own_examples: Annotated[int | None, Option(help="Train on at most so many rows of user 0.")] = None

    def columns(self) -> dict[str, Any]:
        """Return what the columns are for, as `from_table` takes it."""
        return {name: getattr(self, name) for name in ("kind", "categorical", "drop", "ids")}


@dataclass(frozen=True, kw_only=True)
class SettingsRuleOptions:
    """The rule."""

    rule: Annotated[
        str, Option(metavar="NAME", help="The rule, one of {rules}; or a method, one of {methods}.")
    ] = "adaptive"
    alpha: Annotated[
        str | None,
        Option(
            metavar="NUMBER|auto",
            help="The peers' weight, for wga and bc, in [0, 1]; 0.5 if left out. auto: what the theory advises for "
            "what gradients of the sites show before the first step.",
        ),
    ] = None
    beta: Annotated[
        str | None,
        Option(
            metavar="NUMBER|auto",
            help="How fast bc's bias estimate follows, in [0, 1]; 0.01 if left out. auto: as for --alpha.",
        ),
    ] = None
    knob: Annotated[list[str], Option(metavar="NAME=VALUE", help="Any knob of the rule or method; repeat it.")] = (
        field(default_factory=list)
    )

    def settings(self) -> dict[str, Any]:
        """Return the rule as it is written to the settings."""
        knobs = knobs_of(entry_of(self.rule), self.knob, alpha=self.alpha, beta=self.beta)
        for name in [name for name, value in knobs.items() if isinstance(value, FromRun) or value is None]:
            raise KnobError(f"`--knob {name}` cannot be written to the settings; import a rule of your own")
        return {"rule": self.rule, "knobs": knobs}


@dataclass(frozen=True, kw_only=True)
class StepOptions(StepSettings):
    """The run."""

    model: Annotated[str, Option(help="linear, mlp, or module.path:factory, installed everywhere.")] = "linear"


@dataclass(frozen=True, kw_only=True)
class MessageOptions(MessageSettings):
    """Messages, and sites that do not answer."""

    secure_sums: Annotated[
        bool, Option("--secure-sums", help="See only the sum of the sites' gradients; for wga and bc.")
    ] = False
