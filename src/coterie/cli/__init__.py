"""The command line, gathered here: a file for each large command, and one for the short ones."""

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
from typer.core import TyperGroup

from coterie.cli.bench import bench
from coterie.cli.commands import explore, list_, predict, reproduce
from coterie.cli.demo import demo
from coterie.cli.federate import federate
from coterie.cli.options.registered import Command, bare_flags
from coterie.cli.plan import plan
from coterie.cli.train import train
from coterie.cli.worker import worker
from coterie.errors import CoterieError, not_installed
from coterie.registry import IMPORTS, import_from_environment


class Commands(TyperGroup):
    """All commands; an error is shown as one message, with a traceback only where `--debug` asks for it."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options of all commands."""
        return bare_flags(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        """Run the command asked for."""
        if ctx.params.get("debug"):
            return super().invoke(ctx)
        with warnings.catch_warnings():
            warnings.filterwarnings("always", category=UserWarning, module="coterie")
            warnings.showwarning = lambda message, *_, **__: _show(self._by_options(ctx, str(message)))
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
                message, code = "there is not enough memory; take fewer rows or columns, or a smaller model", 2
            except Exception as error:
                if type(error).__module__.startswith(OF_THE_FRAMEWORK):
                    raise
                what = f"{type(error).__name__}: {error}"
                message, code = f"an error that was not foreseen, {what}; `coterie --debug …` shows where", 1
        _show(message)
        raise typer.Exit(code)

    def _by_options(self, ctx: Any, message: str) -> str:
        """Return what is said of arguments, such as `leave_out`, with the names of the command's options."""
        command = self.commands.get(ctx.invoked_subcommand or "")
        names = {
            each.name: each.opts[0] for each in getattr(command, "params", ()) if each.opts[0].startswith("--")
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
    return not_installed(said, EXTRAS[name]) if name in EXTRAS else f"{said} is not installed; `pip install {name}`"


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
            help="Import your own rules, methods, aggregators, sets, metrics or trackers first; repeat it. "
            f"{IMPORTS} in the environment does the same.",
        ),
    ] = None,
    debug: Annotated[bool, Option("--debug", help="Show where an error comes from.")] = False,
    version: Annotated[
        bool, Option("--version", callback=_show_version, is_eager=True, help="Show the version, and end.")
    ] = False,
) -> None:
    """Train your model with your peers' gradients: personalized collaborative learning."""
    named = [str(Path(name).absolute()) if name.endswith(".py") else name for name in imports or ()]
    if named:  # in the environment, so that processes started by a command import the same
        os.environ[IMPORTS] = os.pathsep.join(filter(None, (os.environ.get(IMPORTS), *named)))
    import_from_environment()


for command in (demo, train, worker, predict, explore, plan, reproduce, bench):
    app.command(cls=Command)(command)
app.command("list", cls=Command)(list_)
app.add_typer(federate)
