"""From the folder of a personal model to predictions for the rows of a table."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from coterie.data import Preparation
from coterie.errors import DataError
from coterie.evaluation.evaluate import evaluation_mode
from coterie.tables import models

if TYPE_CHECKING:
    import pandas as pd


def predict(folder: Path, rows: "pd.DataFrame") -> "pd.DataFrame":
    """Return the predictions of a folder's model for the rows of a table, in order."""
    try:
        about = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        state = torch.load(folder / "model.pt", weights_only=True)
    except FileNotFoundError as error:
        raise DataError(
            f"{folder} holds no finished model: there is no {error.filename}; run `coterie train`"
        ) from error
    preparation = Preparation.load(folder)
    model = models.build(about["model"], about["n_inputs"], about["n_outputs"])
    model.load_state_dict(state)
    with torch.no_grad(), evaluation_mode(model):
        return preparation.predictions(model(preparation.inputs(rows)))
