"""A model's scores on rows to calibrate it with, in its folder.

See `coterie.evaluation.conformal`.
"""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from coterie.data import Preparation, TableTask
from coterie.errors import DataError, FileError
from coterie.evaluation.conformal import Calibration, scores
from coterie.evaluation.evaluate import evaluation_mode
from coterie.recording import files
from coterie.users.examples import Examples

FILE = "calibration.json"
MOST_ROWS = 500
"""How many rows of a user are scored, evenly spaced."""


def save_calibration(folder: Path, model: nn.Module, task: TableTask) -> None:
    """Write the scores of user 0's held-out rows, and of its peers' rows where they are in this process."""
    held = [part for part in (task.me.validation, task.me.test) if part is not None]
    own = [score for part in held for score in _scores(model, part, task.preparation)]
    peers = {
        peer.name: _scores(model, peer.examples, task.preparation)
        for peer in task.peers
        if not peer.is_stream
    }
    files.write_json(folder / FILE, asdict(Calibration(own, peers)))


def load_calibration(folder: Path) -> Calibration:
    """Read the scores of a folder; none are an error."""
    if not (folder / FILE).exists():
        raise DataError(
            f"{folder} has no {FILE}, which `coterie train` writes beside the model; train it anew"
        )
    plain = files.read_json(folder / FILE, "train the model anew")
    try:
        return Calibration(plain["own"], plain["peers"])
    except (KeyError, TypeError) as error:
        raise FileError(f"{folder / FILE} cannot be understood; train the model anew") from error


def _scores(model: nn.Module, examples: Examples, preparation: Preparation) -> list[float]:
    rows = torch.from_numpy(
        np.unique(np.linspace(0, len(examples) - 1, min(len(examples), MOST_ROWS)).astype(int))
    )
    inputs, targets = examples.take(rows)
    targets = targets["value"] if isinstance(targets, dict) else targets  # beside weights
    with torch.no_grad(), evaluation_mode(model):
        outputs = model(inputs.to(next(model.parameters()).device)).cpu().double()
    number = preparation.kind == "regression"
    found: NDArray[np.float64] = scores(
        (outputs if number else outputs.softmax(1)).numpy(), targets.double().numpy()
    )
    return [float(value) for value in found * (preparation.scale if number else 1.0)]
