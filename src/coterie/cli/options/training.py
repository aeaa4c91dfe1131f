"""The options of `coterie train`, in groups.

The fields of a group are arguments of what takes them.
"""

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option

from coterie.cli.options.groups import check_effect
from coterie.cli.options.registered import ID, KnobOptions, knobs_of, once
from coterie.data.table import TableSettings
from coterie.engines.attacks import under_attack
from coterie.engines.compression import Compress
from coterie.engines.processes.engine import Mutual, TorchDistributed
from coterie.engines.processes.processes import Processes
from coterie.errors import KnobError
from coterie.methods import build, entry_of
from coterie.privacy.sums import SumsOnly
from coterie.recording.configuration import StepSettings
from coterie.registry import RunSizes
from coterie.rules import RULES


@dataclass(frozen=True, kw_only=True)
class TableOptions(TableSettings):
    """The table.

    Args:
        data: A CSV or Parquet file, one example a row; {user} in its name for a file of each
            user; torch: {rank} for a file of each process.
        me: Which user is user 0: the one the model is for. all: a model for each.
        validation: Share of user 0's rows held out to choose the best model; if left out none
            for adaptive and mixture, which judge by folds, and else 0.2.
    """

    data: Path = field(kw_only=False)
    me: str
    ids: Annotated[str | None, ID] = None
    validation: Annotated[float | None, Option(show_default=False)] = None

    def settings(self) -> dict[str, Any]:
        """Return the arguments of `coterie.data.from_table`."""
        validation = 0.2 if self.validation is None else self.validation
        return vars(self) | {"features": self.features or None, "validation": validation}


@dataclass(frozen=True, kw_only=True)
class RuleOptions(KnobOptions):
    """The rule.

    Args:
        rule: auto: mixture for linear models and trees where no option says how steps are
            taken, else adaptive. mixture: a linear model in closed form; adaptive: weights
            found from the data; pooled: everybody's rows alike; wga: averaging with --alpha;
            bc: bias correction with --alpha and --beta. All rules, described by `coterie list
            rules`: {rules}. Or a method, to compare with, described by `coterie list methods`:
            {methods}.
        tau: A peer's weight among the peers; repeat it. If left out, `auto` weighs the peers of
            wga, and leaves out those of bc whose Hessians differ too much from user 0's.
    """

    rule: Annotated[str, Option(metavar="NAME")] = "auto"
    tau: Annotated[list[str], Option(metavar="NAME=WEIGHT")] = field(default_factory=list)

    monotone: Annotated[
        list[str],
        Option(
            metavar="COLUMN=1|-1",
            help=(
                "A column of numbers in which predictions never fall (1) or never rise (-1), of two"
                " classes the last one's probability; repeat it."
            ),
        ),
    ] = field(default_factory=list)

    def __post_init__(self) -> None:
        _ = self.knobs, self.signs  # what cannot be meant is told before anything is read

    @property
    def signs(self) -> dict[str, int]:
        """The sign of each column in which predictions are monotone."""
        signs = {}
        for pair in self.monotone:
            column, _, sign = pair.rpartition("=")
            if not column or sign not in {"1", "-1"}:
                raise KnobError(f"`--monotone` is COLUMN=1 or COLUMN=-1, got {pair!r}")
            signs[column] = int(sign)
        return signs

    @functools.cached_property
    def knobs(self) -> dict[str, Any]:
        """The knobs that are given."""
        knobs = knobs_of(entry_of(self.name), self.knob, alpha=self.alpha, beta=self.beta)
        once([*knobs, *(["tau"] if self.tau else [])])
        return knobs | ({"tau": _weights(self.tau)} if self.tau else {})

    @property
    def is_method(self) -> bool:
        """Whether a method is named, not a rule."""
        return self.name not in RULES

    @property
    def name(self) -> str:
        """The rule that is named; where none is, what takes steps."""
        return "adaptive" if self.rule == "auto" else self.rule

    def build(self, facts: RunSizes) -> Any:
        """Return the rule or method for a run.

        What is wrong with a knob is told by the option that gave it.
        """
        try:
            return build(self.name, self.knobs, facts)
        except KnobError as error:
            message = str(error)
            for name in (pair.partition("=")[0] for pair in self.knob):
                message = message.replace(f"`{name}`", f"`--knob {name}`")
            raise KnobError(message) from error


@dataclass(frozen=True, kw_only=True)
class FitOptions(StepSettings):
    """The run.

    Args:
        out: Folder for the model, its preparation, records and checkpoints.
        model: linear, trees, mlp, or module.path:factory(n_inputs, n_outputs). auto: linear
            models and trees, mixed, where no option says how steps are taken, else linear.
        metrics: What the model is judged by, beside the loss; repeat it to report more. If left
            out accuracy, or rmse where the target is a number. All metrics: {metrics}.
        trackers: What follows the run, of {trackers}; tensorboard, where it is installed, if
            left out; repeat it.
        repeats: Split user 0's rows so many times, train on each, and judge by the mean, with
            an error that allows for the overlap: for small tables, where one split says little.
            10 take ten times as long.
        contributions: Say on the page what each peer adds to the model, with intervals, from
            fits with many coalitions of the peers: seconds for a few peers and a linear model,
            minutes for many, and long for a network. Peers must be in this process.
        guard: Train a model alone beside, start again from it where the peers do harm, and
            serve the better of the two on the validation rows; costs one more gradient of user
            0 a step (adaptive: nothing). A method does not start again, and the model beside it
            costs as many own gradients as the method.
        threads: CPU threads; more help large models only.
        device: Where to train: cpu, cuda, …
        resume: Go on with the run that is in --out.
    """

    out: Path
    model: str = "auto"
    metrics: Annotated[list[str], Option("--metric", metavar="NAME")] = field(default_factory=list)
    trackers: Annotated[list[str], Option("--tracker", metavar="NAME")] = field(
        default_factory=list
    )
    repeats: Annotated[int, Option(min=1)] = 1
    contributions: bool = False
    guard: bool = True
    threads: Annotated[int, Option(min=1)] = 1
    device: str = "cpu"
    resume: bool = False

    def settings(self) -> dict[str, Any]:
        """Return the arguments of `coterie.tables.fit.fit`."""
        settings = {**vars(self), "guard": "auto" if self.guard else "off"}
        return {
            name: v
            for name, v in settings.items()
            if name != "repeats" and (name != "trackers" or v)
        }


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Where the peers are.

    Args:
        engine: in-process, or torch: a process for each user, started by torchrun (trusted
            network).
        compress: torch: round what is sent; what is lost is added to the next message.
        secure_sums: torch: see the sum of the peers' gradients only, by masks; for wga and bc.
        timeout: torch: seconds after which a silent process is lost.
        attack: For research: let peers send what an attack says: {attacks}.
        attackers: How many peers attack, the first of the table.
    """

    engine: Literal["in-process", "torch"] = "in-process"
    compress: Compress | None = None
    secure_sums: bool = False
    timeout: Annotated[float | None, Option(show_default="120")] = None
    attack: str | None = None
    attackers: Annotated[int, Option(min=1)] = 1

    def __post_init__(self) -> None:
        options: dict[str, Any] = {"compress": self.compress, "timeout": self.timeout}
        options |= {"secure-sums": self.secure_sums}
        refused = [f"`--{name}`" for name, value in options.items() if value]
        if self.engine != "torch" and refused:
            raise KnobError(f"{refused[0]} has no effect without `--engine torch`; leave it out")
        if self.attack is None:
            check_effect(self, ("attackers",), "--attack")
        elif self.engine == "torch":
            raise KnobError("`--attack` is for peers in this process; leave out `--engine`")

    def attacked(self) -> dict[str, Any]:
        """Return the engine of a run under attack, as `train` takes it; nothing where none is."""
        return {"engine": under_attack(self.attack, self.attackers)} if self.attack else {}

    def over(self, processes: Processes, *, everyone: bool) -> Any:
        """Return what makes the engine of a run, over processes of which one trains, or all do."""
        settings: dict[str, Any] = {"compress": self.compress, "secure_sums": self.secure_sums}
        settings |= {"processes": processes} | ({"timeout": self.timeout} if self.timeout else {})
        if not everyone:
            return functools.partial(TorchDistributed, **settings)
        return functools.partial(Mutual, sums=SumsOnly() if self.secure_sums else None, **settings)


def _weights(pairs: list[str]) -> dict[str, float]:
    weights = {}
    once([pair.rpartition("=")[0] for pair in pairs])
    for pair in pairs:
        try:
            name, weight = pair.rsplit("=", 1)
            weights[name] = float(weight)
        except ValueError:
            raise KnobError(f"`--tau` must be NAME=WEIGHT, got {pair!r}") from None
    return weights
