"""From the folder of a personal model to predictions for the rows of a table."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from coterie.data import Preparation
from coterie.errors import DataError, ModelError
from coterie.evaluation.evaluate import evaluation_mode
from coterie.tables import models

if TYPE_CHECKING:
    import pandas as pd


def predict(folder: Path | str, rows: "pd.DataFrame", model: str | None = None) -> "pd.DataFrame":
    """Return the predictions of a folder's model for the rows of a table, in order.

    A folder may come from anybody, so the code of a model of one's own is named here, as `module.path:factory`,
    and never taken from the folder.
    """
    folder = Path(folder)
    try:
        about = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        state = torch.load(folder / "model.pt", weights_only=True)
    except FileNotFoundError as error:
        raise DataError(
            f"{folder} holds no finished model: there is no {error.filename}; run `coterie train`"
        ) from error
    preparation = Preparation.load(folder)
    if model is None and about["model"] not in models.BUILT_IN:
        raise ModelError(
            f"the model in {folder} is {about['model']!r}, which would run code; if you trust it, name it: "
            "`--model module.path:factory`, or `model=` in Python"
        )
    made = models.build(model or about["model"], int(about["n_inputs"]), int(about["n_outputs"]))
    made.load_state_dict(state)
    with torch.no_grad(), evaluation_mode(made):
        return preparation.predictions(made(preparation.inputs(rows)))
