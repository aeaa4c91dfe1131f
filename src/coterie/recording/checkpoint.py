"""Checkpoints that survive a kill and show damage.

Atomic, with a SHA-256, read without running code.

A file is one line, `coterie-checkpoint 3 <SHA-256 of the rest>`, followed by what `torch.save`
writes. torch's own loader accepts flipped bits in tensors, hence the digest; `weights_only=True`
keeps it from running code.
"""

import io
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from coterie.errors import CheckpointError
from coterie.recording import files
from coterie.recording.claim import Claim

T = TypeVar("T")
MAGIC = b"coterie-checkpoint 3 "
EARLIER = (b"coterie-checkpoint 1 ", b"coterie-checkpoint 2 ")
KEPT = 2
SECONDS_AT_RISK = 10.0
"""How long what peers elsewhere have given may be in memory alone: asked again, it counts again."""
MOST_OF_THE_TIME = 0.05
"""Of which saving so often takes at most so much."""


class RunFolder:
    """What a run writes to its folder, where it has one. A run does not end because that fails."""

    def __init__(self, claim: Claim | None = None, saved_at: int | None = None) -> None:
        self.claim, self.saved_at = claim, saved_at  # the step of the last checkpoint
        self._since, self._took = time.monotonic(), 0.0  # the time of that, and how long it took

    def is_due(self) -> bool:
        """Say whether a checkpoint should be written of what cannot be computed again for nothing."""
        seconds = time.monotonic() - self._since
        return seconds > max(SECONDS_AT_RISK, self._took / MOST_OF_THE_TIME)

    def write(self, what: str, write: Callable[[], T]) -> T | None:
        """Write something; where there is no folder it stays in memory."""
        return write() if self.claim is None else self.claim.attempt(what, write)

    def save(self, step: int, content: Callable[[], dict[str, Any]]) -> Path | None:
        """Write a checkpoint of a step, unless it has one, and return its path."""
        if self.claim is None:
            return None
        folder = self.claim.folder / "checkpoints"
        if (there := saved(folder)) and self.saved_at == step:
            return there[-1]

        def write() -> Path:
            began = time.monotonic()
            path = save(folder, step, content())
            self.saved_at, self._since = step, time.monotonic()
            self._took = self._since - began
            return path

        return self.write("checkpoint", write)

    def where(self) -> str:
        """Say where the state is that was saved last."""
        there = self.claim is not None and not self.claim.unwritten
        paths = saved(self.claim.folder / "checkpoints") if self.claim and there else []
        if paths:
            return f"what was computed is saved in {paths[-1]}"
        return "what was computed is in this error's `run`"

    def unwritten(self) -> str:
        """Say what could not be written, last of all in a warning; nothing where all is there."""
        missing = "; ".join(map(str, self.claim.unwritten.values())) if self.claim else ""
        if self.claim and missing:
            warnings.warn(
                f"not all of this run is in {self.claim.folder}: {missing}. The run returned is"
                " whole",
                stacklevel=3,
            )
        return missing


def save(folder: Path, step: int, content: dict[str, Any]) -> Path:
    """Write a checkpoint of a step, keep the last two, and return its path.

    At any moment the folder holds whole checkpoints only. The content is tensors, numbers, strings
    and containers of them.
    """
    buffer = io.BytesIO()
    torch.save(_plain(content), buffer)
    path = folder / f"step-{step:08d}.ckpt"
    # a view that an error's traceback keeps would keep the buffer from closing
    with buffer.getbuffer() as body:
        files.write(path, MAGIC, files.sha256(body).encode(), b"\n", body)
    for old in saved(folder)[:-KEPT]:
        with files.writing(old):
            old.unlink(missing_ok=True)
    return path


def saved(folder: Path) -> list[Path]:
    """Return a run's checkpoints, oldest first."""
    return sorted(folder.glob("step-*.ckpt"))


def step_of(path: Path) -> int:
    """Return the step that a checkpoint is of, which its name tells."""
    number = path.stem.removeprefix("step-")
    return int(number) if number.isdecimal() else -1


def load(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read a checkpoint, with its tensors on a device; any damage is a `CheckpointError`."""
    remedy = _remedy(path)
    data = files.read(path, remedy, CheckpointError)
    if data.startswith(EARLIER):
        raise CheckpointError(
            f"the checkpoint {path} was written by an earlier version of coterie, from which this"
            " one cannot go on; resume with that version, or start again in another folder"
        )
    if not data.startswith(MAGIC):
        raise CheckpointError(f"{path} is not a checkpoint of coterie; {remedy}")
    body = files.checked(path, MAGIC, b"\n", data, remedy=remedy, error=CheckpointError)
    try:
        content: dict[str, Any] = tensors_in(body, device)
    except Exception as error:  # not written by `save`, so anything may be wrong with it
        raise CheckpointError(
            f"the checkpoint {path} is not plain data: {error}; {remedy}"
        ) from error
    return content


def load_last(
    paths: Sequence[Path], device: torch.device | str = "cpu"
) -> tuple[dict[str, Any], Path]:
    """Read the newest of some checkpoints, oldest first, that is whole, and return it with its path.

    A newer one that is damaged is told by a warning and set aside, as `….damaged`.
    """
    try:
        return load(paths[-1], device), paths[-1]
    except CheckpointError as error:
        if len(paths) < 2:
            raise
        before, path = load_last(paths[:-1], device)
        aside = paths[-1].with_name(f"{paths[-1].name}.damaged")
        with files.writing(aside):
            paths[-1].replace(aside)
        warnings.warn(
            f"{error}. It is set aside as {aside.name}; going on from {path.name}", stacklevel=3
        )
        return before, path


def tensors_in(data: bytes, device: torch.device | str = "cpu") -> Any:
    """Return what `torch.save` has written, on a device.

    `ValueError` for what would take more memory than it has.

    torch stores numbers as they are. One that is compressed was not written by torch, and may
    inflate to anything.
    """
    files.check_inflated(data, len(data))
    return torch.load(io.BytesIO(data), map_location=device, weights_only=True)


def _plain(content: Any) -> Any:
    """Return the same with Python's numbers for NumPy's, which `weights_only` would refuse."""
    if isinstance(content, np.generic):
        return content.item()
    if type(content) is dict:
        return {key: _plain(value) for key, value in content.items()}
    return type(content)(map(_plain, content)) if type(content) in (list, tuple) else content


def _remedy(path: Path) -> str:
    others = [other for other in saved(path.parent) if other != path]
    if others:
        return f"delete it to go on from {others[-1].name}"
    return "delete it and start the run again"
