"""The lines of a record on disk; what this version cannot read, as of earlier ones, is refused with the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coterie.errors import CheckpointError, FileError
from coterie.recording import (
    Cost,
    GuardCheck,
    GuardDecision,
    Record,
    Traffic,
    UserSummary,
    checkpoint,
)
from coterie.recording.costs import total
from coterie.recording.files import ChainedLines

CONFIGURATION: dict[str, Any] = {
    "alone": False,
    "rule": "BiasCorrection(alpha=0.5, beta=0.1)",
    "optimizer": "Adam(lr=0.001)",
    "parameter_groups": [{"lr": "0.001"}],
    "scheduler": "None",
    "loss": "mse_loss",
    "model": "Linear(in_features=4, out_features=1, bias=True)",
    "me": {"name": "me", "examples": 20, "validation": 100, "test": 9},
    "peers": {"a": 20, "b": "a stream"},
    "batch_size": 32,
    "seed": 4,
    "steps": 10,
    "counts": "steps",
    "engine": {"engine": "in process", "device": "cpu", "average": "one pass", "rows": "one pass"},
    "guard": "held-out: 100 validation examples",
    "evaluate_every": 5,
    "norm_bound": 3.0,
    "exchange_every": 1,
    "local_steps": 1,
    "memory": None,
    "sample": None,
    "lr": 0.001,
    "data": "",
    "frozen": "",
    "choice": {},
    "estimates": {},
    "not_measured": "no peer's gradient can be used",
    "runs": "",
    "capture": "off",
}
POINTS: list[dict[str, Any]] = [
    {"step": 0, "weight": 0.0, "validation_loss": 1.5, "validation_rmse": 1.2},
    {
        "step": 10,
        "weight": 0.5,
        "own_loss": 0.25,
        "left_out": 3,
        "validation_loss": 0.5,
        "validation_rmse": 0.7,
        "alone_validation_loss": 0.6,
        "guard_difference": -0.1,
        "guard_error": 0.02,
        "guard_restarts": 1,
    },
]
END: dict[str, Any] = {
    "step": 10,
    "best_step": 10,
    "stopped": None,
    "test": {"loss": 0.4},
    "guard": {"served": "collaborative", "difference": -0.1, "error": 0.02, "alone_step": 5},
    "tau": {"a": 1.0},
    "left_out": {"b": {"not finite": 3}},
    "costs": {"me": {"gradients": 20, "examples": 400, "numbers_sent": 50, "numbers_received": 60}},
    "traffic": {
        "me": {
            "bytes_sent": 200,
            "bytes_received": 240,
            "seconds_waiting": 0.5,
            "seconds_computing": 1.5,
            "rounding": 0.0,
            "messages": 0,
        }
    },
    "seconds": 2.5,
}


def written(path: Path, configuration: dict[str, Any], end: dict[str, Any] = END) -> Path:
    lines = [
        {"configuration": configuration, "versions": {"coterie": "0.0.9"}},
        *POINTS,
        {"end": end},
    ]
    ChainedLines(path, "").write(lines)
    return path


def test_a_record_is_read(tmp_path: Path) -> None:
    record = Record.load(written(tmp_path / "record.jsonl", CONFIGURATION))
    configuration, (first, last), end = record.configuration, record.points, record.end
    assert (configuration.rule, configuration.alone, configuration.seed) == (
        CONFIGURATION["rule"],
        False,
        4,
    )
    assert configuration.me == UserSummary(name="me", examples=20, validation=100, test=9)
    assert configuration.peers == {"a": 20, "b": "a stream"}
    in_process = {
        "engine": "in process",
        "device": "cpu",
        "average": "one pass",
        "rows": "one pass",
    }
    assert configuration.engine == in_process
    assert configuration.not_measured == "no peer's gradient can be used"
    assert not configuration.estimates
    assert (first.own_loss, first.guard, first.validation) == (
        None,
        None,
        {"loss": 1.5, "rmse": 1.2},
    )
    assert last.guard == GuardCheck(alone_loss=0.6, difference=-0.1, error=0.02, restarts=1)
    assert [point.to_plain() for point in record.points] == POINTS
    assert end.guard == GuardDecision(
        served="collaborative", difference=-0.1, error=0.02, alone_step=5
    )
    assert end.costs == {
        "me": Cost(gradients=20, examples=400, numbers_sent=50, numbers_received=60)
    }
    assert end.traffic == {
        "me": Traffic(
            bytes_sent=200, bytes_received=240, seconds_waiting=0.5, seconds_computing=1.5
        )
    }
    assert end.left_out == {"b": {"not finite": 3}}
    assert configuration.to_plain() == CONFIGURATION
    assert end.to_plain() == END


def test_a_record_from_before_methods_had_a_guard_is_read(tmp_path: Path) -> None:
    before = {name: value for name, value in CONFIGURATION.items() if name != "counts"}
    decision = {name: value for name, value in END["guard"].items() if name != "alone_step"}
    record = Record.load(written(tmp_path / "record.jsonl", before, END | {"guard": decision}))
    assert record.configuration.counts == "steps"
    assert record.end.guard == GuardDecision(served="collaborative", difference=-0.1, error=0.02)


REMEDY = r"with the version that wrote it \(coterie 0.0.9\), or train again"


@pytest.mark.parametrize("missing", ["rule", "me", "peers", "steps"])
def test_a_record_that_cannot_be_read_names_the_remedy(tmp_path: Path, missing: str) -> None:
    rest = {name: value for name, value in CONFIGURATION.items() if name != missing}
    path = written(tmp_path / "record.jsonl", rest)
    with pytest.raises(FileError, match=rf"'{missing}'.*{REMEDY}"):
        Record.load(path)


@pytest.mark.parametrize(
    ("configuration", "end"),
    [
        # the engine's entries beside the others
        ({**CONFIGURATION, "engine": "in process", "device": "cpu"}, END),
        (
            CONFIGURATION,
            {
                **END,
                "costs": {"me": {"gradients": 20, "examples": 400, "sent": 50, "received": 60}},
            },
        ),
        (CONFIGURATION, {**END, "traffic": {"me": {"sent": 200, "received": 240}}}),
        (
            CONFIGURATION,
            {"step": 10, "best_step": 10, "seconds": 2.5, "stopped": None, "served": "alone"},
        ),
    ],
)
def test_a_record_with_the_names_of_before_is_refused(
    tmp_path: Path, configuration: dict[str, Any], end: dict[str, Any]
) -> None:
    with pytest.raises(FileError, match=REMEDY):
        Record.load(written(tmp_path / "record.jsonl", configuration, end))


@pytest.mark.parametrize("version", [b"1", b"2"])
def test_a_checkpoint_of_an_earlier_version_names_the_remedy(
    tmp_path: Path, version: bytes
) -> None:
    path = checkpoint.save(tmp_path, 3, {"step": 3})
    path.write_bytes(
        path.read_bytes().replace(checkpoint.MAGIC, b"coterie-checkpoint " + version + b" ", 1)
    )
    with pytest.raises(
        CheckpointError, match=r"by an earlier version.*resume with that version, or start again"
    ):
        checkpoint.load(path)


def test_the_traffic_of_sessions_adds_up() -> None:
    both = total(
        {"a": Traffic(bytes_sent=40, rounding=0.01)}, {"a": Traffic(bytes_sent=2, rounding=0.02)}
    )
    assert both == {"a": Traffic(bytes_sent=42, rounding=0.02)}
