"""The command line: one file a command, gathered here and imported when it is called."""

import importlib
import os
import re
import signal
import sys
import warnings
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperCommand, TyperGroup

from coterie.cli.options.groups import Command, bare_flags
from coterie.errors import CoterieError, not_installed
from coterie.registry import IMPORTS, import_from_environment

COMMANDS = {
    "demo": (
        "Train a model for one writer of digits by the default rule, alone, on pooled data, "
        "and by the paper's two."
    ),
    "train": (
        "Train a personal model for one user of a table, and say whether it is better than one"
        " trained alone."
    ),
    "worker": (
        "Be a peer: give user 0 gradients of these rows, until its run ends. For a trusted network"
        " only."
    ),
    "predict": (
        "Predict the target for every row of a table, in order, with the personal model of a run."
    ),
    "explore": (
        "Compare runs on one page: each one's verdict, numbers, cost and weights, "
        "and their curves together."
    ),
    "plan": (
        "Say whether collaboration pays: the best alpha, beta and step size of each method, by its"
        " bound."
    ),
    "reproduce": (
        "Reproduce the paper's figures: exact curves, 100 sampled runs as bands, "
        "a page that explains them."
    ),
    "bench": (
        "Compare the methods on real users: honest peers, wrong peers, users alike, a user like"
        " nobody."
    ),
    "list": (
        "List rules, methods, aggregators, data sets, metrics and trackers by name, your own among"
        " them."
    ),
    "federate": "Train with other organisations, over NVFLARE (`coterie\\[flare]`).",
}
"""Each command with the first sentence of its help, which `coterie --help` shows without importing the command."""


def _command(name: str) -> Any:
    """Import a command."""
    module = importlib.import_module(f"coterie.cli.{'listing' if name == 'list' else name}")
    if name == "federate":
        return typer.main.get_group(module.federate)
    single = typer.Typer(add_completion=False)
    single.command(name, cls=Command)(getattr(module, "list_" if name == "list" else name))
    return typer.main.get_command(single)


class Commands(TyperGroup):
    """All commands; an error is shown as one message, with a traceback only where `--debug` asks for it."""

    def __init__(self, **about: Any) -> None:
        super().__init__(**about)
        self.commands = {name: TyperCommand(name, help=words) for name, words in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that is called."""
        if args and args[0] in COMMANDS:
            self.commands[args[0]] = _command(args[0])
        return super().resolve_command(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options of all commands."""
        return bare_flags(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        """Run the command asked for."""
        if ctx.params.get("debug"):
            return super().invoke(ctx)
        with warnings.catch_warnings():
            warnings.filterwarnings("always", category=UserWarning, module="coterie")
            warnings.showwarning = lambda message, *_, **__: _show(
                self._by_options(ctx, str(message))
            )
            try:
                return super().invoke(ctx)
            except CoterieError as error:
                message, code = self._by_options(ctx, str(error)), 2
            except BrokenPipeError:  # who read what is printed, `head` for example, has had enough
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise typer.Exit(128 + signal.SIGPIPE) from None
            except ModuleNotFoundError as error:
                message, code = _missing(error), 2
            except OSError as error:
                message, code = f"{error.strerror or error}: {error.filename or 'the system'}", 2
            except MemoryError:
                message = (
                    "there is not enough memory; take fewer rows or columns, or a smaller model"
                )
                code = 2
            except Exception as error:
                if type(error).__module__.startswith(OF_THE_FRAMEWORK):
                    raise
                what = f"{type(error).__name__}: {error}"
                message = f"an error that was not foreseen, {what}; `coterie --debug …` shows where"
                code = 1
        _show(message)
        raise typer.Exit(code)

    def _by_options(self, ctx: Any, message: str) -> str:
        """Return what is said of arguments, such as `leave_out`, with the names of the command's options."""
        command = self.commands.get(ctx.invoked_subcommand or "")
        names = {
            each.name: each.opts[0]
            for each in getattr(command, "params", ())
            if each.opts[0].startswith("--")
        }
        return re.sub(r"`(\w+)`", lambda match: f"`{names.get(match[1], match[1])}`", message)


OF_THE_FRAMEWORK = ("click", "typer")
"""Where the errors come from by which commands end, and by which wrong options are told."""


EXTRAS = {
    "nvflare": "flare",
    "psutil": "flare",
    "cryptography": "privacy",
    "transformers": "hugging-face",
    "peft": "hugging-face",
}
"""Which extra of coterie brings a package that is not always there."""


def _missing(error: ModuleNotFoundError) -> str:
    """Say which package is not there, and what brings it."""
    name = (error.name or str(error)).partition(".")[0]
    said = f"the package {name!r}"
    if name in EXTRAS:
        return not_installed(said, EXTRAS[name])
    return f"{said} is not installed; `pip install {name}`"


def _show(message: str) -> None:
    typer.echo(f"coterie: {message}", err=True)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"coterie {metadata.version('coterie')}")
        raise typer.Exit


app = typer.Typer(
    name="coterie",
    cls=Commands,
    no_args_is_help=True,
    suggest_commands=False,  # click does
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


@app.callback()
def main(
    imports: Annotated[
        list[str] | None,
        Option(
            "--import",
            metavar="FILE.py|MODULE",
            help=(
                "Import your own rules, methods, aggregators, sets, metrics or trackers first;"
                " repeat it. "
                f"{IMPORTS} in the environment does the same."
            ),
        ),
    ] = None,
    debug: Annotated[bool, Option("--debug", help="Show where an error comes from.")] = False,
    version: Annotated[
        bool,
        Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version, and end."
        ),
    ] = False,
) -> None:
    """Train your model with your peers' gradients: personalized collaborative learning."""
    named = [str(Path(name).absolute()) if name.endswith(".py") else name for name in imports or ()]
    if named:  # in the environment, so that processes started by a command import the same
        os.environ[IMPORTS] = os.pathsep.join(filter(None, (os.environ.get(IMPORTS), *named)))
    import_from_environment()
