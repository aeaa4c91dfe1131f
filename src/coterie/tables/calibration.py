"""A model's scores on rows to calibrate it with, in its folder.

See `coterie.evaluation.conformal`.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from coterie.data import Preparation
from coterie.errors import DataError, FileError
from coterie.evaluation.conformal import Calibration, scores, scores_of_losses
from coterie.evaluation.evaluate import evaluation_mode
from coterie.recording import files
from coterie.training.run import Run
from coterie.users.examples import Examples
from coterie.users.user import User

FILE = "calibration.json"
MOST_ROWS = 500
"""How many rows of a user are scored, evenly spaced."""


def save_calibration(folder: Path, run: Run, preparation: Preparation) -> None:
    """Write the scores of user 0's rows, and of its peers' rows where they are in this process.

    Own ones are those of the held-out rows and, where the rule fits in folds, of the others by
    models that did not see their fold.
    """
    if run.spec is None:
        return
    me, peers = run.spec.me, run.spec.peers
    own = _of_all(run.model, _held_out(me), preparation)
    if run.out_of_fold is not None and not (preparation.weights or preparation.class_weights):
        classes = preparation.kind == "classification"
        unit = 1.0 if classes else preparation.scale
        own += (unit * scores_of_losses(run.out_of_fold, classes=classes)).tolist()
    lent = {
        one.name: _scores(run.model, one.examples, preparation)
        for one in peers
        if not one.is_stream
    }
    files.write_json(folder / FILE, asdict(Calibration(own, lent)))


def save_pooled_calibration(
    folder: Path, model: nn.Module, users: Sequence[User], preparation: Preparation
) -> None:
    """Write the scores of everybody's held-out rows, for the model of users who come later."""
    held = [part for user in users for part in _held_out(user)]
    files.write_json(folder / FILE, asdict(Calibration(_of_all(model, held, preparation))))


def _held_out(user: User) -> list[Examples]:
    return [part for part in (user.validation, user.test) if part is not None]


def _of_all(model: nn.Module, parts: Sequence[Examples], preparation: Preparation) -> list[float]:
    return [score for part in parts for score in _scores(model, part, preparation)]


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
