"""What a resumed run must have in common with the run that was left in its folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from coterie.errors import CheckpointError, KnobError
from coterie.recording import checkpoint
from coterie.recording.configuration import Configuration
from coterie.recording.record import Record

MAY_DIFFER = frozenset({"steps", "evaluate_every", "estimates", "not_measured", "capture"})
"""Settings that may change when a run is resumed."""


def check_free(out: Path | None, resume: bool) -> None:
    """Refuse a folder that holds a run, unless it is to be resumed."""
    if out and not resume and ((out / "record.jsonl").exists() or checkpoint.saved(out / "checkpoints")):
        raise KnobError(f"{out} already holds a run; resume it (`resume=True`, `--resume`), or name another folder")


def check_same_run(configuration: Configuration, before: Configuration, path: Path) -> None:
    """Refuse the checkpoint of another run."""
    for key, (then, now) in configuration.differences(before, MAY_DIFFER).items():
        raise CheckpointError(
            f"the checkpoint {path} is of another run: `{key}` was {then!r} and is now {now!r}; "
            "resume with the same settings, or name another folder"
        )


def with_earlier_choice(configuration: Configuration, out: Path | None, resume: bool) -> Configuration:
    """Return the configuration with the choice and the constants of the run that was left in `out`.

    They are taken over where all other settings are the same.
    """
    check_free(out, resume)
    path = out and out / "record.jsonl"
    if path is None or not path.exists():
        return configuration
    before = Record.load(path).configuration
    if configuration.differences(before, MAY_DIFFER):
        return configuration
    return replace(
        configuration, choice=before.choice, estimates=before.estimates, not_measured=before.not_measured
    )
