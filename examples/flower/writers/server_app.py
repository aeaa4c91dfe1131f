"""User 0: it trains its own model, and asks the SuperNodes in a few exchanges."""

from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import coterie
from coterie.flower import FlowerGrid
from writers.task import LOSS, make_model, me

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train with the SuperNodes, and say whether it helped."""
    knobs = context.run_config
    run = coterie.train(
        make_model(),
        LOSS,
        me(),
        [],
        coterie.WeightedAveraging(alpha=0.5),
        engine=FlowerGrid(grid, peers=int(knobs["peers"])),
        lr=0.01,
        steps=int(knobs["rounds"]),
        local_steps=int(knobs["local-steps"]),
        out=Path(str(knobs["folder"])) if knobs["folder"] else None,
        resume=True,  # from where the last run left this folder, if it did
    )
    print(run.summary())
    if knobs["out"]:
        torch.save(run.model.state_dict(), Path(str(knobs["out"])))
