"""A personal model in a folder: `model.pt`, its parameters as torch saves them, and `model.json`, what it is."""

import io
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from coterie.errors import FileError, ModelError
from coterie.recording import files
from coterie.recording.checkpoint import tensors_in
from coterie.tables import models

ABOUT, PARAMETERS = "model.json", "model.pt"
MOST = 2**30
"""How many bytes the parameters of a built-in model may have."""
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
    files.write(folder / PARAMETERS, buffer.getbuffer())
    about = About(name, n_inputs, n_outputs, files.sha256(buffer.getbuffer()))
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
    name = model or about.model
    data = files.read(folder / PARAMETERS, REMEDY, most=MOST if name in models.BUILT_IN else files.MOST)
    if files.sha256(data) != about.parameters:
        raise FileError(
            f"{folder / PARAMETERS} is damaged (truncated or altered), or not what {ABOUT} describes; {REMEDY}"
        )
    try:
        if name in models.BUILT_IN and 2 * (numbers := _n_numbers(about, name)) > len(data):
            raise ValueError(f"{numbers} numbers do not fit into its {len(data)} bytes")  # noqa: TRY301  # see below
        made = models.build(name, about.n_inputs, about.n_outputs)
        made.load_state_dict(tensors_in(data))
    except ModelError:
        raise
    except Exception as error:  # a folder may come from anybody, so anything may be wrong with it
        remedy = f"name the model that it was trained with, not {model!r}" if model else REMEDY
        raise ModelError(f"{folder / PARAMETERS} does not fit the model {name!r}: {error}; {remedy}") from error
    return made


def _n_numbers(about: About, name: str) -> int:
    """Return how many numbers a model has, without making it: a folder may tell of any size."""
    with torch.device("meta"):
        made = models.build(name, about.n_inputs, about.n_outputs)
    return sum(int(value.numel()) for value in made.state_dict().values())


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
