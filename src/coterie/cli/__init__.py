"""The command line: one file a command, gathered here."""

from typing import Any

import typer
from typer.core import TyperGroup

from coterie.cli.bench import bench
from coterie.cli.demo import demo
from coterie.cli.plan import plan
from coterie.cli.predict import predict
from coterie.cli.reproduce import reproduce
from coterie.cli.train import train
from coterie.cli.worker import worker
from coterie.errors import CoterieError


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
def main() -> None:
    """Train your model with your peers' gradients: personalized collaborative learning."""


for command in (demo, train, worker, predict, plan, reproduce, bench):
    app.command()(command)
