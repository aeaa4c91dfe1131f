"""A personal model in a folder: `model.pt`, its parameters as torch saves them, and `model.json`, what it is."""

import io
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from coterie.errors import FileError, ModelError
from coterie.recording import files
from coterie.tables import models

ABOUT, PARAMETERS = "model.json", "model.pt"
REMEDY = "train it again: `coterie train` with `--resume` writes it anew from the last checkpoint"


@dataclass(frozen=True)
class About:
    """What `model.json` says."""

    model: str  # "linear", "mlp", or "module.path:factory"
    n_inputs: int
    n_outputs: int
    parameters: str  # the SHA-256 of `model.pt`


def save_model(folder: Path, model: nn.Module, name: str, n_inputs: int, n_outputs: int) -> None:
    """Write a model's parameters, and then what it is; a folder without the latter holds no finished model."""
    buffer = io.BytesIO()
    torch.save({key: value.clone().cpu() for key, value in model.state_dict().items()}, buffer)
    with buffer.getbuffer() as body:
        files.write(folder / PARAMETERS, body)
        about = About(name, n_inputs, n_outputs, files.sha256(body))
    files.write_json(folder / ABOUT, asdict(about))


def load_model(folder: Path, model: str | None = None) -> nn.Module:
    """Return the model of a folder; damage is a `FileError`.

    A folder may come from anybody, so the code of a model of one's own is named here, as `module.path:factory`,
    and never taken from the folder.
    """
    about = _about(folder)
    if model is None and about.model not in models.BUILT_IN:
        raise ModelError(
            f"the model in {folder} is {about.model!r}, which would run code; if you trust it, name it: "
            "`--model module.path:factory`, or `model=` in Python"
        )
    data = files.read(folder / PARAMETERS, REMEDY)
    if files.sha256(data) != about.parameters:
        raise FileError(
            f"{folder / PARAMETERS} is damaged (truncated or altered), or not what {ABOUT} describes; {REMEDY}"
        )
    name = model or about.model
    try:
        made = models.build(name, about.n_inputs, about.n_outputs)
        made.load_state_dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
    except ModelError:
        raise
    except Exception as error:  # a folder may come from anybody, so anything may be wrong with it
        remedy = f"name the model that it was trained with, not {model!r}" if model else REMEDY
        raise ModelError(f"{folder / PARAMETERS} does not fit the model {name!r}: {error}; {remedy}") from error
    return made


def check_finished(folder: Path) -> None:
    """Refuse a folder without a finished model."""
    if not (folder / ABOUT).exists():
        raise FileError(f"{folder} holds no finished model: there is no {folder / ABOUT}; run `coterie train`")


def _about(folder: Path) -> About:
    check_finished(folder)
    path = folder / ABOUT
    plain = files.read_json(path, REMEDY, ("model", "n_inputs", "n_outputs", "parameters"))
    try:
        return About(str(plain["model"]), int(plain["n_inputs"]), int(plain["n_outputs"]), str(plain["parameters"]))
    except (TypeError, ValueError) as error:
        raise FileError(f"{path} must have whole numbers of inputs and outputs ({error}); {REMEDY}") from error
