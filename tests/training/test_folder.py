"""A run whose folder fails goes on: the disk is full, the folder read-only or deleted, or another process's."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.folders import Disk, claimed_elsewhere
from tests.support.small_runs import network, same, state_of
from torch.nn.functional import cross_entropy

import coterie
from coterie.errors import FileError, KnobError
from coterie.recording import checkpoint

Users = Callable[..., list[coterie.User]]
STEPS = 12


def trained(
    users: list[coterie.User], out: Path | None, *hooks: Any, **settings: Any
) -> coterie.Run:
    how: dict[str, Any] = {
        "steps": STEPS,
        "evaluate_every": 2,
        "checkpoint_every": 3,
        "lr": 0.05,
        "trackers": (),
    } | settings
    if out is None:
        how.pop("checkpoint_every")
    rule = coterie.WeightedAveraging(0.5)
    return coterie.train(
        network(), cross_entropy, users[0], users[1:], rule, out=out, hooks=hooks, **how
    )


@pytest.mark.parametrize(
    ("call", "number", "between"),
    [
        ("pwrite", errno.ENOSPC, (1, 4)),
        ("pwrite", errno.EROFS, (5, 8)),
        ("pwrite", errno.EIO, (1, 11)),
        ("fsync", errno.ENOSPC, (5, 8)),
        ("fsync", errno.EACCES, (1, 11)),
    ],
)
def test_what_could_not_be_written_is_written_later(
    make_users: Users,
    tmp_path: Path,
    *,
    call: str,
    number: int,
    between: tuple[int, int],
) -> None:
    users = make_users()
    whole = trained(users, tmp_path / "whole")
    disk = Disk(number, *between, calls=[call])
    with (
        disk.used(),
        pytest.warns(UserWarning, match="cannot be written .*The run goes on in memory") as warned,
    ):
        run = trained(users, tmp_path / "run", disk.follow)
    assert disk.failures
    # once for the record, once for the checkpoint, and once more after a success
    assert len(warned) <= 3
    assert not run.unwritten
    assert same(state_of(run.model), state_of(whole.model))
    assert coterie.Record.load(tmp_path / "run" / "record.jsonl").points == whole.record.points
    last = checkpoint.saved(tmp_path / "run" / "checkpoints")[-1]
    assert checkpoint.load(last)["learner"]["step"] == STEPS


def test_a_disk_that_stays_full_costs_no_run(make_users: Users, tmp_path: Path) -> None:
    users = make_users()
    whole = trained(users, None)
    disk = Disk(errno.ENOSPC, 5, STEPS)
    with disk.used(), pytest.warns(UserWarning, match="cannot be written") as warned:
        run = trained(users, tmp_path / "run", disk.follow)
    assert len(warned) == 3
    assert re.search(
        "not all of this run is in .* The run returned is whole", str(warned[-1].message)
    )
    assert same(state_of(run.model), state_of(whole.model))
    assert run.test == whole.test
    assert run.record.points == whole.record.points
    assert "No space left on device" in run.unwritten
    assert f"Not all of this run is in its folder: {run.unwritten}" in run.summary()
    resumed = trained(users, tmp_path / "run", resume=True)  # once there is room again
    assert same(state_of(resumed.model), state_of(whole.model))
    assert coterie.Record.load(tmp_path / "run" / "record.jsonl").points == whole.record.points


@pytest.mark.parametrize("step", [1, 4, STEPS])
@pytest.mark.parametrize("again", [False, True])
def test_a_folder_deleted_on_the_way_is_written_anew(
    make_users: Users, tmp_path: Path, step: int, again: bool
) -> None:
    users, out = make_users(), tmp_path / "run"
    whole = trained(users, tmp_path / "whole")

    def delete(now: Any) -> None:
        if now.step == step:
            shutil.rmtree(out)
            if again:
                out.mkdir()

    with pytest.warns(
        UserWarning, match="was deleted while a run wrote to it, and is written anew"
    ):
        run = trained(users, out, delete)
    assert not run.unwritten
    assert same(state_of(run.model), state_of(whole.model))
    assert coterie.Record.load(out / "record.jsonl").points == whole.record.points
    assert coterie.Record.load(out / "record.jsonl").end.test == whole.test
    assert [path.name for path in checkpoint.saved(out / "checkpoints")][
        -1
    ] == f"step-{STEPS:08d}.ckpt"


def test_a_folder_that_cannot_be_used_is_told_before_the_first_step(
    make_users: Users, tmp_path: Path
) -> None:
    users, steps = make_users(), list[int]()
    (tmp_path / "file").touch()
    note = lambda step: steps.append(step.step)  # noqa: E731
    with pytest.raises(KnobError, match=r"`out` must be .* folder"):
        trained(users, tmp_path / "file", note)
    with pytest.raises(FileError, match=r"cannot be written \(Not a directory\)"):
        trained(users, tmp_path / "file" / "run", note)
    with (
        claimed_elsewhere(tmp_path / "run"),
        pytest.raises(FileError, match=r"run is in use by process \d+ on"),
    ):
        trained(users, tmp_path / "run", note)
    for number in (errno.ENOSPC, errno.EROFS):
        with Disk(number, 0, STEPS).used(), pytest.raises(FileError, match=os.strerror(number)):
            trained(users, tmp_path / "run", note)
    assert not steps


def test_two_processes_that_resume_one_folder_do_not_alter_its_record(
    make_users: Users, tmp_path: Path
) -> None:
    users = make_users()
    trained(users, tmp_path, lambda step: step.step == 5)
    before = (tmp_path / "record.jsonl").read_bytes()
    with claimed_elsewhere(tmp_path):
        for _ in range(3):
            with pytest.raises(FileError, match="is in use by process"):
                trained(users, tmp_path, resume=True)
    assert (tmp_path / "record.jsonl").read_bytes() == before
    assert trained(users, tmp_path, resume=True).step == STEPS


def test_a_full_disk_ends_tensorboard_and_not_the_run(
    make_users: Users, tmp_path: Path, monkeypatch: Any
) -> None:
    writer = pytest.importorskip("torch.utils.tensorboard.writer")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for method in ("add_scalar", "__init__"):
        with monkeypatch.context() as patch:
            patch.setattr(writer.SummaryWriter, method, full)
            with pytest.warns(
                UserWarning, match="TensorBoard tracks this run no more: .*No space left"
            ):
                run = trained(make_users(), tmp_path / method, trackers=["tensorboard"])
        assert (run.step, run.unwritten) == (STEPS, "")
        assert torch.isfinite(torch.tensor(run.test["loss"]))
