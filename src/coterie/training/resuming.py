"""What the later steps of a run depend on: its checkpoints, and how it is resumed."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from coterie.errors import CheckpointError, KnobError
from coterie.learners.learner import Learner
from coterie.learners.spec import RunSpec
from coterie.recording import checkpoint
from coterie.recording.checkpoint import RunFolder
from coterie.recording.claim import Claim
from coterie.recording.configuration import Configuration
from coterie.recording.costs import Cost, Traffic, total
from coterie.recording.record import Record
from coterie.training.algorithm import algorithm_of
from coterie.training.guard import Guard

MAY_DIFFER = frozenset({"steps", "evaluate_every", "estimates", "not_measured", "capture"})
"""Settings that may change when a run is resumed."""


def with_earlier_choice(
    configuration: Configuration, out: Path | None, resume: bool
) -> Configuration:
    """Return the configuration with choice and constants of the run left in `out`, if all else is as it was.

    A folder that holds a run is refused, unless it is to be resumed.
    """
    if out is None:
        return configuration
    path = out / "record.jsonl"
    if not resume and (path.exists() or checkpoint.saved(out / "checkpoints")):
        raise KnobError(
            f"{out} already holds a run; resume it (`resume=True`, `--resume`), or name another"
            " folder"
        )
    if not path.exists():
        return configuration
    before = Record.load(path).configuration
    if configuration.differences(before, MAY_DIFFER):
        return configuration
    configuration = replace(configuration, choice=before.choice, estimates=before.estimates)
    return replace(configuration, not_measured=before.not_measured)


class ResumableRun:
    """What the later steps of a run depend on, and the folder that it is saved in."""

    def __init__(
        self, spec: RunSpec, learner: Learner, guard: Guard | None, claim: Claim | None
    ) -> None:
        self.spec, self.learner, self.guard = spec, learner, guard
        self.left_out: dict[str, dict[str, int]] = {}  # how often each peer was, by reason
        # the steps without each peer: the first and the last one of every stretch
        self.absent: dict[str, list[list[int]]] = {}
        self.travelled: dict[str, Traffic] = {}  # before this session
        self.losses: list[float] = []  # user 0's, since the last evaluation
        self.folder = RunFolder(claim)
        self.record: Record

    def resumed(self, out: Path, configuration: Configuration) -> Record | None:
        """Go on from the last checkpoint in a folder and return the record there.

        None where nothing was saved.
        """
        saved, path = checkpoint.saved(out / "checkpoints"), out / "record.jsonl"
        if not saved:
            return None
        if not path.exists():
            raise CheckpointError(
                f"{saved[-1]} stands without the record {path}; put it back, or name another folder"
            )
        record = Record.load(path)
        state, path = checkpoint.load_last(saved, self.learner.x.device)
        self.load_state_dict(state, configuration, path)
        record.configuration = configuration
        record.cut(self.learner.step)
        self.folder.saved_at = self.learner.step
        return record

    def save(self) -> Path | None:
        """Write a checkpoint, where there is a folder for it and this step has none yet, and return its path."""

        def content() -> dict[str, Any]:
            self.record.before_checkpoint(self.learner.step)
            return self.state_dict()

        return self.folder.save(self.learner.step, content)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later steps depend on."""
        return {
            "configuration": self.record.configuration.to_plain(),
            "learner": self.learner.state_dict(),
            "guard": self.guard and self.guard.state_dict(),
            "left_out": self.left_out,
            "absent": self.absent,
            "traffic": _plain(total(self.travelled, self.learner.engine.traffic())),
            "losses": self.losses,
            "costs": _plain(self.learner.costs.by_user()),
        }

    def load_state_dict(
        self, state: dict[str, Any], configuration: Configuration, path: Path
    ) -> None:
        """Go on from a state; one of another run, or of something else, is a `CheckpointError`."""
        try:
            self._take_up(state, configuration, path)
        except (
            AttributeError,
            LookupError,
            TypeError,
        ) as error:  # whole, but not made by `state_dict`
            raise CheckpointError(
                f"the checkpoint {path} does not hold the state of a run ({error!r}); delete it, or"
                " name another folder"
            ) from error

    def _take_up(self, state: dict[str, Any], configuration: Configuration, path: Path) -> None:
        before = Configuration.from_plain(state["configuration"])
        # which it plans by
        divided = {"steps"} if algorithm_of(self.spec.rule).plans_by_steps else set()
        for key, (then, now) in configuration.differences(before, MAY_DIFFER - divided).items():
            why = "resume with the same settings, or name another folder"
            if key in divided:
                why = (
                    "the rule divides the steps before the first one, so that a run with others is"
                )
                why += " another from its start: name another folder"
            raise CheckpointError(
                f"the checkpoint {path} is of another run: `{key}` was {then!r} and is now {now!r};"
                f" {why}"
            )
        try:
            self.learner.load_state_dict(state["learner"])
            if self.guard is not None:
                self.guard.load_state_dict(state["guard"])
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint {path} is of another model: {error}; resume with the same model,"
                " or name another folder"
            ) from error
        if self.learner.step > self.spec.steps:
            raise CheckpointError(
                f"the checkpoint {path} is of a run that has taken {self.learner.step} steps, more"
                f" than `steps`, {self.spec.steps}; ask for at least as many, or name another"
                " folder"
            )
        self.left_out, self.losses = state["left_out"], state["losses"]
        self.absent = state.get("absent", {})  # which earlier versions did not note
        self.travelled = {name: Traffic(**each) for name, each in state["traffic"].items()}
        self.learner.costs.load(state["costs"])


def _plain(by_user: Mapping[str, Cost | Traffic]) -> dict[str, dict[str, float]]:
    return {name: asdict(each) for name, each in by_user.items()}
