"""Checkpoints: whole or refused, atomic, the last two kept, and read without running code."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import resource
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import coterie
from coterie.errors import CheckpointError, KnobError
from coterie.recording import checkpoint

Users = Callable[..., list[coterie.User]]

CONTENT: dict[str, Any] = {
    "step": 40,
    "model": {"weight": torch.arange(12.0).view(3, 4), "count": torch.tensor(3)},
    "rule": {"c": torch.linspace(0, 1, 5, dtype=torch.float64), "seen": 7, "weight": 0.25},
    "best": {},
    "names": ["a", "b"],
    "none": None,
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return (
            isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        )
    return type(a) is type(b) and bool(a == b)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "new" / "folder", 40, CONTENT)
    assert same(checkpoint.load(path), CONTENT)
    head, _, body = path.read_bytes().partition(b"\n")
    assert head == b"coterie-checkpoint 3 " + hashlib.sha256(body).hexdigest().encode()


def test_numbers_of_numpy_become_pythons(tmp_path: Path) -> None:
    path = checkpoint.save(
        tmp_path, 1, {"a": np.float64(0.1), "b": [np.int64(3), (np.float32(0.5),)]}
    )
    assert same(checkpoint.load(path), {"a": 0.1, "b": [3, (0.5,)]})


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 15, 100_000):
        checkpoint.save(tmp_path, step, {"step": step})
    assert [path.name for path in checkpoint.saved(tmp_path)] == [
        "step-00000015.ckpt",
        "step-00100000.ckpt",
    ]
    assert sorted(os.listdir(tmp_path)) == ["step-00000015.ckpt", "step-00100000.ckpt"]
    assert checkpoint.saved(tmp_path / "nowhere") == []


# Damage.


def test_truncated_anywhere(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 40, CONTENT)
    whole = path.read_bytes()
    lengths = {0, 1, 20, 21, 50, 84, 85, 86, 87, *range(100, len(whole), 37), len(whole) - 1}
    for length in sorted(lengths):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"damaged|not a checkpoint"):
            checkpoint.load(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.load(path)
    path.write_bytes(whole)
    assert same(checkpoint.load(path), CONTENT)


def test_one_flipped_bit_anywhere(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 40, CONTENT)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    inside = rng.choice(8 * len(whole), size=300, replace=False).tolist()
    for bit in [*range(8 * 90), *inside]:  # every bit of the first line, then samples of the rest
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        with pytest.raises(CheckpointError):
            checkpoint.load(path)


def test_torch_alone_would_take_a_flipped_bit(tmp_path: Path) -> None:
    """Why there is a digest: the day this fails it may go."""
    buffer = io.BytesIO()
    torch.save({"weight": torch.full((1000,), 1.5)}, buffer)
    data = bytearray(buffer.getvalue())
    data[data.index(torch.full((4,), 1.5).numpy().tobytes())] ^= 1
    assert torch.load(io.BytesIO(data), weights_only=True)["weight"][0] != 1.5


def test_an_error_names_the_remedy(tmp_path: Path) -> None:
    first, second = (checkpoint.save(tmp_path, step, CONTENT) for step in (20, 40))
    second.write_bytes(second.read_bytes()[:-5])
    with pytest.raises(
        CheckpointError,
        match=r"step-00000040.ckpt is damaged .* delete it to go on from step-00000020",
    ):
        checkpoint.load(second)
    first.unlink()
    with pytest.raises(CheckpointError, match="delete it and start the run again"):
        checkpoint.load(second)
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load(tmp_path / "nowhere.ckpt")


class Trap:
    """What runs code when a pickle of it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def signed(path: Path, body: bytes) -> Path:
    path.write_bytes(checkpoint.MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    return path


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    sprung, buffer = tmp_path / "sprung", io.BytesIO()
    torch.save({"step": 1, "model": Trap(sprung)}, buffer)
    bodies = [
        buffer.getvalue(),
        pickle.dumps({"step": 1, "model": Trap(sprung)}),
        pickle.dumps(Trap(sprung)),
    ]
    for body in bodies:
        with pytest.raises(CheckpointError, match="not plain data"):
            checkpoint.load(signed(tmp_path / "step-00000001.ckpt", body))
    assert not sprung.exists()
    torch.load(io.BytesIO(bodies[0]), weights_only=False)
    assert sprung.exists()  # the trap does work


@pytest.mark.parametrize("body", [b"", b"\x80", b"PK\x03\x04", b"hello"])
def test_a_digest_does_not_make_a_checkpoint(tmp_path: Path, body: bytes) -> None:
    with pytest.raises(CheckpointError, match="not plain data"):
        checkpoint.load(signed(tmp_path / "step-00000001.ckpt", body))


# Atomicity.


@pytest.mark.parametrize("fails", ["write", "fsync", "replace"])
def test_a_failure_while_writing_leaves_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    for step in (10, 20):
        checkpoint.save(tmp_path, step, {"step": step})

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if fails == "write":  # part of the file is written, then the disk is full
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    elif fails == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    else:
        monkeypatch.setattr(Path, "replace", fail)
    try:
        with pytest.raises(OSError, match=r"No space|too large"):
            checkpoint.save(tmp_path, 30, {"step": 30})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.undo()
    assert [checkpoint.load(path)["step"] for path in checkpoint.saved(tmp_path)] == [10, 20]
    checkpoint.save(tmp_path, 30, {"step": 30})  # what the failure left is in nobody's way
    assert [checkpoint.load(path)["step"] for path in checkpoint.saved(tmp_path)] == [20, 30]


def test_a_file_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def noting_fsync(descriptor: int) -> None:
        order.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def noting_replace(path: Path, target: Path) -> Path:
        order.append("rename")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(Path, "replace", noting_replace)
    checkpoint.save(tmp_path, 1, CONTENT)
    assert order == ["file", "rename", "folder"]


# A run is taken up only with what it was begun with.


class Bare(nn.Module):
    """A model whose name does not tell its size."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Parameter(torch.ones(3, hidden) / 3),
            nn.Parameter(torch.ones(hidden, 3) / hidden),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.a @ self.b


def trained(out: Path, users: list[coterie.User], **changes: Any) -> coterie.Run:
    settings = {
        "model": nn.Linear(3, 3).double(),
        "rule": coterie.WeightedAveraging(0.5),
        "optimizer": torch.optim.SGD,
        "lr": 0.1,
        "steps": 6,
        "checkpoint_every": 2,
    }
    settings |= changes
    return coterie.train(loss=cross_entropy, me=users[0], peers=users[1:], out=out, **settings)  # type: ignore[arg-type]  # a mapping of many kinds


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"model": nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)).double()},
            "`model` was 'Linear",
        ),
        (
            {"rule": coterie.WeightedAveraging(0.6)},
            r"`rule` was 'WeightedAveraging\(alpha=0.5\)' and is now",
        ),
        ({"rule": coterie.Alone()}, "`rule` was"),
        ({"lr": 0.2}, "`lr` was 0.1 and is now 0.2"),
        ({"optimizer": torch.optim.Adam}, "`optimizer` was"),
        (
            {"optimizer": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9)},
            "`parameter_groups` was",
        ),
        (
            {"scheduler": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9)},
            "`scheduler` was",
        ),
        ({"batch_size": 5}, "`batch_size` was 32 and is now 5"),
        ({"seed": 1}, "`seed` was 0 and is now 1"),
    ],
)
def test_other_settings_are_refused(
    make_users: Users, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    users = make_users()
    trained(tmp_path, users)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=named) as caught:
        trained(tmp_path, users, resume=True, steps=12, **changes)
    assert "resume with the same settings, or name another folder" in str(caught.value)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_other_users_and_data_are_refused(make_users: Users, tmp_path: Path) -> None:
    users = make_users()
    trained(tmp_path, users)
    for others, named in ((users[:-1], "`peers` was"), (make_users((13, 16, 9, 5)), "`me` was")):
        with pytest.raises(CheckpointError, match=named):
            trained(tmp_path, others, resume=True)
    inputs, targets = users[1].batch(16, seed=0, step=0)
    changed = coterie.User("peer 1", inputs + 1e-9, targets)
    with pytest.raises(CheckpointError, match="`data` was"):
        trained(tmp_path, [users[0], changed, *users[2:]], resume=True)


def test_a_model_of_the_same_name_and_another_size_is_refused(
    make_users: Users, tmp_path: Path
) -> None:
    users = make_users()
    trained(tmp_path, users, model=Bare(4).double())
    with pytest.raises(CheckpointError, match=r"is of another model: [\s\S]*size mismatch"):
        trained(tmp_path, users, model=Bare(5).double(), resume=True)


@pytest.mark.parametrize("whose", [{}, [1, 2], {"configuration": 7}, "learner"])
def test_a_whole_file_that_is_no_state_of_a_run_is_refused(
    make_users: Users, tmp_path: Path, whose: Any
) -> None:
    """As somebody who knows the format can make one."""
    users = make_users()
    trained(tmp_path, users)
    folder = tmp_path / "checkpoints"
    last = checkpoint.saved(folder)[-1]
    content = checkpoint.load(last) | {whose: {}} if isinstance(whose, str) else whose
    checkpoint.save(folder, checkpoint.step_of(last), content)
    with pytest.raises(CheckpointError, match="does not hold the state of a run"):
        trained(tmp_path, users, resume=True)


def test_where_the_last_checkpoint_is_damaged_the_one_before_serves(
    make_users: Users, tmp_path: Path
) -> None:
    users = make_users()
    model = nn.Linear(3, 3).double()
    whole = trained(tmp_path / "whole", users, model=model, steps=8)
    trained(tmp_path / "cut", users, model=model)
    last = checkpoint.saved(tmp_path / "cut" / "checkpoints")[-1]
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=r"damaged .* going on from step-00000004\.ckpt"):
        resumed = trained(tmp_path / "cut", users, model=model, steps=8, resume=True)
    assert last.with_name(f"{last.name}.damaged").exists(), "it is kept for who wants to know"
    assert same(dict(resumed.model.state_dict()), dict(whole.model.state_dict()))


def test_where_all_checkpoints_are_damaged_none_is_set_aside(tmp_path: Path) -> None:
    for step in (2, 4):
        path = checkpoint.save(tmp_path, step, CONTENT)
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="step-00000002"):
        checkpoint.load_last(checkpoint.saved(tmp_path))
    assert len(checkpoint.saved(tmp_path)) == 2


def test_what_inflates_is_refused(tmp_path: Path) -> None:
    """Zeros that take a thousandth of their size on the disk, with a right digest."""
    path = checkpoint.save(tmp_path, 1, {"x": torch.zeros(10**6)})
    body, packed = path.read_bytes().partition(b"\n")[2], io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(body)) as plain,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as small,
    ):
        for each in plain.infolist():
            small.writestr(each.filename, plain.read(each))
    data = packed.getvalue()
    assert len(data) < len(body) / 100
    assert torch.load(io.BytesIO(data), weights_only=True)["x"].shape == (10**6,), (
        "torch alone would take it"
    )
    path.write_bytes(checkpoint.MAGIC + hashlib.sha256(data).hexdigest().encode() + b"\n" + data)
    with pytest.raises(CheckpointError, match="inflates to"):
        checkpoint.load(path)


def test_a_folder_that_holds_a_run(make_users: Users, tmp_path: Path) -> None:
    users = make_users()
    trained(tmp_path, users, steps=2)
    with pytest.raises(KnobError, match="already holds a run"):
        trained(tmp_path, users)
    (tmp_path / "record.jsonl").unlink()
    with pytest.raises(KnobError, match="already holds a run"):
        trained(tmp_path, users)
    with pytest.raises(CheckpointError, match=r"stands without the record .*record\.jsonl"):
        trained(tmp_path, users, resume=True)


def test_more_steps_may_be_asked_for(make_users: Users, tmp_path: Path) -> None:
    users, model = make_users(), nn.Linear(3, 3).double()
    whole = trained(tmp_path / "whole", users, model=model, steps=12, evaluate_every=2)
    trained(tmp_path / "longer", users, model=model, steps=6, evaluate_every=2)
    longer = trained(
        tmp_path / "longer", users, model=model, steps=12, evaluate_every=2, resume=True
    )
    assert longer.record.points == whole.record.points
    assert longer.record.configuration.steps == 12
    assert same(dict(longer.model.state_dict()), dict(whole.model.state_dict()))


def test_more_steps_than_adaptive_averaging_has_divided_are_refused(
    make_users: Users, tmp_path: Path
) -> None:
    users, rule = make_users(), coterie.AdaptiveAveraging()
    trained(tmp_path, users, rule=rule, steps=6)
    with pytest.raises(CheckpointError, match=r"`steps` was 6 and is now 8"):
        trained(tmp_path, users, rule=rule, steps=8, resume=True)
    assert [path.stem for path in checkpoint.saved(tmp_path / "checkpoints")][-1] == "step-00000006"


def test_fewer_steps_than_were_taken_are_refused(make_users: Users, tmp_path: Path) -> None:
    users = make_users()
    trained(tmp_path, users, steps=6)
    with pytest.raises(
        CheckpointError, match=r"has taken 6 steps, more than `steps`, 4; ask for at least as many"
    ):
        trained(tmp_path, users, steps=4, resume=True)


def test_resuming_where_nothing_was_saved_starts(make_users: Users, tmp_path: Path) -> None:
    assert trained(tmp_path / "run", make_users(), resume=True).step == 6
    # finished: nothing left to do
    assert trained(tmp_path / "run", make_users(), resume=True).step == 6
