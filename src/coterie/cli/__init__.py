"""The command line: one file a command, gathered here."""

import typer

from coterie.cli.plan import plan
from coterie.cli.reproduce import reproduce

app = typer.Typer(
    name="coterie",
    help="Train your model with your peers' gradients: personalized collaborative learning.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


@app.callback()
def main() -> None:
    """Train your model with your peers' gradients: personalized collaborative learning."""


app.command()(plan)
app.command()(reproduce)
