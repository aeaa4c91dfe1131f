"""The options of `coterie federate init`, in groups. The fields of a group are settings of what takes them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from coterie.cli.options.registered import knobs_of
from coterie.cli.options.training import LR, STEPS
from coterie.errors import KnobError
from coterie.methods import entry_of
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
class StepOptions:
    """The run."""

    model: Annotated[str, Option(help="linear, mlp, or module.path:factory, installed everywhere.")] = "linear"
    steps: Annotated[int, Option(help=STEPS)] = 1000
    lr: Annotated[float | None, Option(help=LR, show_default=False)] = None
    batch_size: Annotated[int, Option(help="Rows each user draws for a gradient.")] = 32
    seed: Annotated[int, Option(help="What splits, initial weights and batches depend on.")] = 0
    exchange_every: Annotated[int, Option(help="Steps of user 0 for each exchange with the sites.")] = 1
    local_steps: Annotated[int, Option(help="Plain steps that every user takes for one step of the run.")] = 1

    def settings(self) -> dict[str, Any]:
        """Return how steps are taken, as it is written to the settings."""
        return {name: value for name, value in vars(self).items() if name != "model"}


@dataclass(frozen=True, kw_only=True)
class MessageOptions:
    """Messages, and sites that do not answer."""

    compress: Annotated[
        Literal["bf16", "fp16"] | None, Option(help="Send in half precision; what is lost is added to the next.")
    ] = None
    secure_sums: Annotated[
        bool, Option("--secure-sums", help="See the sum of the sites' gradients only; for wga and bc.")
    ] = False
    timeout: Annotated[float, Option(help="Seconds to wait for a site in one step.")] = 10.0
    misses: Annotated[int, Option(help="Steps without an answer until a site is not waited for.")] = 3
    probe_every: Annotated[int, Option(help="Steps from one look whether it is back to the next.")] = 10
    minimum: Annotated[int, Option(help="Answers without which a step is taken alone.")] = 1

    def settings(self) -> dict[str, Any]:
        """Return how sites are asked, as it is written to the settings."""
        return {**vars(self), "compress": self.compress or ""}
