"""The command line: one file a command, gathered here."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperGroup

from coterie.cli.bench import bench
from coterie.cli.demo import demo
from coterie.cli.federate import federate
from coterie.cli.listing import list_
from coterie.cli.plan import plan
from coterie.cli.predict import predict
from coterie.cli.registered import Command
from coterie.cli.reproduce import reproduce
from coterie.cli.train import train
from coterie.cli.worker import worker
from coterie.errors import CoterieError
from coterie.registry import IMPORTS, import_from_environment


class Commands(TyperGroup):
    """All commands; what coterie raises on purpose is shown as one message, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command asked for."""
        try:
            return super().invoke(ctx)
        except CoterieError as error:
            typer.echo(f"coterie: {error}", err=True)
            raise typer.Exit(2) from None


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
) -> None:
    """Train your model with your peers' gradients: personalized collaborative learning."""
    named = [str(Path(name).absolute()) if name.endswith(".py") else name for name in imports or ()]
    if named:  # in the environment, so that processes started by a command import the same
        os.environ[IMPORTS] = os.pathsep.join(filter(None, (os.environ.get(IMPORTS), *named)))
    import_from_environment()


for command in (demo, train, worker, predict, plan, reproduce, bench):
    app.command(cls=Command)(command)
app.command("list")(list_)
app.add_typer(federate)
