"""`coterie demo`: one digits writer, by the default rule and by others."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from coterie.benchmark import demo as experiment
from coterie.cli import terminal
from coterie.cli.options.groups import grouped
from coterie.cli.terminal import bar, rich_table


@grouped
def demo(
    out: Path = Path("coterie-demo"),
    me: int = 0,
    own_examples: int = 30,
    seeds: Annotated[int, Option(min=1)] = 8,
    steps: Annotated[int, Option(min=1)] = 200,
) -> None:
    """Train a model for one writer of digits by the default rule, alone, on pooled data, and by the paper's two.

    Each method takes the step size that does best on the writer's validation examples and is then
    judged on its test examples. The numbers are written as they come; Ctrl-C shows those there are.
    The page begins with the conclusion; whom.svg shows whom the writer listens to.

    Args:
        out: Folder for the page and the numbers.
        me: The writer segment that is user 0, from 0 to 13.
        own_examples: How many examples user 0 learns from.
        seeds: How often all is repeated, with other examples.
        steps: Steps of each run.
    """
    import torch

    torch.set_num_threads(1)  # the model is so small that threads would only wait for each other
    console = terminal.console()
    results: list[experiment.Result] = []
    try:
        with bar("digits", seeds * len(experiment.METHODS)) as advance:
            for result in experiment.results(me, own_examples, seeds, steps):
                results.append(result)
                out.mkdir(parents=True, exist_ok=True)
                lines = [dataclasses.asdict(one) for one in results]
                (out / "results.json").write_text(json.dumps(lines, indent=1), encoding="utf-8")
                advance(
                    f"seed {result.seed}, {result.method}: test accuracy {result.test_accuracy:.3f}"
                )
    except KeyboardInterrupt:
        console.print(f"stopped after {len(results)} of {seeds * len(experiment.METHODS)} results")
        if not results:
            raise typer.Exit(130) from None
    title = f"Writer segment {me} with {own_examples} own examples, {seeds} seeds"
    page = experiment.write_demo_page(out, me, title, results)
    console.print(experiment.conclusion(results, me).sentence.replace("`", ""), highlight=False)
    console.print(rich_table(title, experiment.table(results)))
    console.print(
        "± is one standard error over seeds; differences are paired by seed. Every method chose"
        f" its step size among {', '.join(f'{lr:g}' for lr in experiment.RATES)} by validation"
        " loss."
    )
    console.print(f"The page: {page}")
