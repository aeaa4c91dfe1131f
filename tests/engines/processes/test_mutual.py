"""Everybody trains, each user in a process of its own: the runs of one process, also where somebody is lost."""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # what an optimizer's first step would import in every child
from tests.support import processes
from tests.support.everyone import everyone
from torch import nn
from torch.nn.functional import cross_entropy

import coterie
from coterie.engines.peer import Caps
from coterie.engines.processes.engine import Mutual
from coterie.engines.processes.processes import LAST_THREAD
from coterie.engines.processes.rendezvous import SECRET_FILE
from coterie.errors import ModelError, PeerLost
from coterie.privacy.sums import SumsOnly

HOW: dict[str, Any] = {
    "lr": 0.05,
    "steps": 16,
    "batch_size": 8,
    "evaluate_every": 8,
    "trackers": (),
    "progress": False,
}
SLOW = pytest.mark.skipif(
    not os.environ.get("COTERIE_SLOW"), reason="takes seconds: COTERIE_SLOW=1 runs it"
)
RULES: dict[str, Any] = {
    "averaging": coterie.WeightedAveraging(0.5),
    "correction": coterie.BiasCorrection(0.5, beta=0.1),
    "adaptive": None,
}


def linear(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, outputs).double()


def batch_dependent() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 3)
    ).double()


def until(holds: Callable[[], object]) -> None:
    """Wait until something holds."""
    end = time.monotonic() + processes.PATIENCE
    while not holds():
        assert time.monotonic() < end, "it does not hold"
        time.sleep(0.01)


def trained(
    rank: int, rule: Any, engine: Mapping[str, Any] = {}, model: nn.Module | None = None, **how: Any
) -> Any:
    """Be one of four, in a process of its own, until all are done."""
    torch.set_num_threads(1)
    made = functools.partial(Mutual, **{"patience": processes.PATIENCE} | dict(engine))
    settings = HOW | how
    run = coterie.train(
        model or linear(), cross_entropy, everyone()[rank], [], rule, engine=made, **settings
    )
    for thread in threading.enumerate():
        if thread.name == LAST_THREAD:  # as the interpreter would at its end
            thread.join()
    return run


def saved(run: coterie.Run, path: Path) -> None:
    end = run.record.end
    found = {
        "model": run.model.state_dict(),
        "left_out": dict(end.left_out),
        "test": dict(end.test),
    }
    torch.save(found | {"finding": run.verdict.finding}, path)


def loaded(folder: Path, n: int = 4) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(n)]


def same(found: Mapping[str, Any], run: coterie.Run) -> None:
    for name, value in run.model.state_dict().items():
        torch.testing.assert_close(found["model"][name], value, rtol=1e-9, atol=1e-12)
    assert found["test"] == pytest.approx(dict(run.record.end.test), rel=1e-9)
    assert found["finding"] == run.verdict.finding
    assert found["left_out"] == {}


def ranks(work: Callable[[int], object], n: int = 4, **how: Any) -> processes.Started:
    return processes.Started([functools.partial(work, rank) for rank in range(n)], **how)


def test_everybody_has_the_run_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By each rule, one after the other in the same processes, with a secret."""
    (tmp_path / "secret").write_text("a secret of 16 bytes")
    (tmp_path / "secret").chmod(0o600)
    monkeypatch.setenv(SECRET_FILE, str(tmp_path / "secret"))

    def work(rank: int) -> None:
        for name, rule in RULES.items():
            (tmp_path / name).mkdir(exist_ok=True)
            saved(trained(rank, rule), tmp_path / name / f"{rank}.pt")

    assert ranks(work).end() == [0] * 4
    for name, rule in RULES.items():
        runs = coterie.train_everyone(linear(), cross_entropy, everyone(), rule, **HOW)
        for found, run in zip(loaded(tmp_path / name), runs.runs.values(), strict=True):
            same(found, run)


def test_who_is_done_first_answers_the_others(tmp_path: Path) -> None:
    """All have the runs that they would have in one process, though threads draw dropout at the same time."""
    steps = [2, 8, 16]

    def work(rank: int) -> None:
        run = trained(rank, RULES["correction"], model=batch_dependent(), steps=steps[rank])
        saved(run, tmp_path / f"{rank}.pt")

    assert ranks(work, 3).end() == [0] * 3
    users = everyone()[:3]
    for rank, found in enumerate(loaded(tmp_path, 3)):
        peers = [user for user in users if user is not users[rank]]
        how = HOW | {"steps": steps[rank]}
        same(
            found,
            coterie.train(
                batch_dependent(), cross_entropy, users[rank], peers, RULES["correction"], **how
            ),
        )


def test_a_process_keeps_its_caps(tmp_path: Path) -> None:
    """They hold for all others together; who is refused goes on."""

    def work(rank: int) -> None:
        engine = {"caps": Caps(gradients=7), "log": tmp_path / "log"} if rank == 1 else {}
        saved(trained(rank, RULES["averaging"], engine, steps=10), tmp_path / f"{rank}.pt")

    assert ranks(work, 3).end() == [0] * 3
    found = loaded(tmp_path, 3)
    missed = [sum(found[rank]["left_out"]["user 1"].values()) for rank in (0, 2)]
    assert sum(missed) == 2 * 10 - 7
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert {line["caller"] for line in lines if "caller" in line} == {"user 0", "user 2"}


def test_all_are_killed_and_resume(tmp_path: Path) -> None:
    """Each is at another step when all are killed; each goes on from its own checkpoint, to the same result."""

    def work(rank: int, *, again: bool) -> None:
        def hook(step: coterie.Step) -> None:
            if not again and step.step == 8 + rank:
                (tmp_path / f"at {rank}").touch()
                time.sleep(processes.PATIENCE)

        how: dict[str, Any] = {
            "out": tmp_path / str(rank),
            "checkpoint_every": 3,
            "resume": again,
            "hooks": [hook],
        }
        saved(trained(rank, RULES["adaptive"], **how), tmp_path / f"{rank}.pt")

    first = ranks(functools.partial(work, again=False), 3)
    until(lambda: all((tmp_path / f"at {rank}").exists() for rank in range(3)))
    first.kill()
    assert first.end() == [-signal.SIGKILL] * 3
    assert ranks(functools.partial(work, again=True), 3).end() == [0] * 3
    runs = coterie.train_everyone(linear(), cross_entropy, everyone()[:3], **HOW)
    for found, run in zip(loaded(tmp_path, 3), runs.runs.values(), strict=True):
        same(found, run)


@pytest.mark.parametrize("lost", [0, pytest.param(2, marks=SLOW)])
def test_one_is_killed_and_comes_back(lost: int, tmp_path: Path) -> None:
    """It is missing at once and used again when it is back, also where it kept the notes."""
    others = [rank for rank in range(3) if rank != lost]

    def work(rank: int, *, again: bool = False) -> None:
        def hook(step: coterie.Step) -> None:
            if rank != lost and step.step == 5:
                until((tmp_path / "lost").exists)
            if rank == lost and not again and step.step == 10:
                (tmp_path / "lost").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if rank != lost and step.step == 20:
                (tmp_path / f"without it {rank}").touch()
                until((tmp_path / "back").exists)
            if step.step > 20 and step.left_out:
                time.sleep(0.5)  # who comes back needs more than no time
            if again:
                (tmp_path / "back").touch()

        how: dict[str, Any] = {
            "out": tmp_path / str(rank),
            "checkpoint_every": 5,
            "resume": again,
            "hooks": [hook],
        }
        saved(
            trained(rank, RULES["averaging"], {"probe_every": 1}, steps=40, **how),
            tmp_path / f"{rank}.pt",
        )

    started = ranks(work, 3, kept_by_0=True)
    assert processes.ended(started.children[lost]) == -signal.SIGKILL
    until(lambda: all((tmp_path / f"without it {rank}").exists() for rank in others))
    started.children[lost] = started.start(lost, functools.partial(work, lost, again=True))
    assert started.end() == [0] * 3
    found = loaded(tmp_path, 3)
    name = everyone()[lost].name
    for rank in others:
        reasons = found[rank]["left_out"].pop(name)
        assert found[rank]["left_out"] == {}
        assert reasons["no answer"] == 3
        assert 10 <= sum(reasons.values()) <= 33
    assert found[lost]["left_out"] == {}


def test_who_is_late_is_left_out(tmp_path: Path) -> None:
    """It is stopped, and goes on when the others have taken steps without it."""
    late = tmp_path / "late"

    def work(rank: int) -> None:
        def hook(step: coterie.Step) -> None:
            if rank != 2 and step.step == 5:
                until((tmp_path / "lost").exists)
            if rank == 2 and step.step == 10:
                (tmp_path / "lost").touch()
                os.kill(os.getpid(), signal.SIGSTOP)
            if rank == 2 and step.step == 12:
                (tmp_path / "on").touch()
            if rank != 2 and step.step == 20:
                (tmp_path / f"without it {rank}").touch()
                until((tmp_path / f"without it {1 - rank}").exists)
                os.kill(int(late.read_text()), signal.SIGCONT)
                until((tmp_path / "on").exists)
            if step.step > 20 and step.left_out:
                time.sleep(0.5)  # who comes back needs more than no time

        if rank == 2:
            late.write_text(str(os.getpid()))
        engine = {"timeout": 0.5, "probe_every": 1} if rank != 2 else {}
        saved(
            trained(rank, RULES["averaging"], engine, steps=40, hooks=[hook]),
            tmp_path / f"{rank}.pt",
        )

    assert ranks(work, 3).end() == [0] * 3
    found = loaded(tmp_path, 3)
    for rank in (0, 1):
        reasons = found[rank]["left_out"]["user 2"]
        assert reasons["no answer"] >= 3
        assert 10 <= sum(reasons.values()) <= 33
    assert found[2]["left_out"] == {}


def test_who_never_comes_is_told(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        (tmp_path / str(rank)).touch()
        until((tmp_path / str(1 - rank)).exists)
        with pytest.raises(
            PeerLost, match=r"rank 2 did not come within 5 s; start all 3 processes"
        ):
            trained(rank, RULES["averaging"], {"patience": 5.0})

    assert ranks(work, 2, size=3).end() == [0, 0]


def test_nobody_sees_anybodys_gradient(tmp_path: Path) -> None:
    """With masked sums each has the run of one process, but for what sums of whole numbers round."""
    pytest.importorskip("cryptography")

    def work(rank: int) -> None:
        engine = {"secure_sums": True, "sums": SumsOnly()}
        saved(trained(rank, RULES["averaging"], engine, steps=8), tmp_path / f"{rank}.pt")

    assert ranks(work).end() == [0] * 4
    runs = coterie.train_everyone(
        linear(), cross_entropy, everyone(), RULES["averaging"], **HOW | {"steps": 8}
    )
    for found, run in zip(loaded(tmp_path), runs.runs.values(), strict=True):
        assert found["left_out"] == {}
        for name, value in run.model.state_dict().items():
            torch.testing.assert_close(found["model"][name], value, rtol=1e-6, atol=1e-6)


def test_what_does_not_fit_is_said_in_every_process() -> None:
    def work(rank: int) -> None:
        model = nn.Sequential(linear(2), nn.Linear(2, 3).double()) if rank else linear()
        with pytest.raises(
            ModelError, match=r"rank 0 .*12 parameters" if rank else r"rank 1 .*17 parameters"
        ):
            trained(rank, RULES["averaging"], model=model)

    assert ranks(work, 2).end() == [0, 0]


def test_who_tells_of_no_examples_tells_nothing() -> None:
    """A number of 0, as of who has fewer than one block, is no weight."""

    def work(rank: int) -> None:
        me, other = everyone()[rank], everyone()[1 - rank].name
        caps = Caps(examples=len(me) + 1) if rank else None
        engine = Mutual(linear(), cross_entropy, me, patience=processes.PATIENCE, caps=caps)
        assert (engine.capabilities.examples[other] is None) == (rank == 0)
        engine.close()

    assert ranks(work, 2).end() == [0, 0]


def test_no_thread_is_left_in_gloo_when_all_are_done() -> None:
    """One that comes back from there while Python ends would abort the process."""

    def work(rank: int) -> None:
        before = set(threading.enumerate())
        trained(rank, RULES["averaging"], steps=2)
        assert set(threading.enumerate()) == before

    assert ranks(work).end() == [0] * 4


def test_who_has_another_secret_is_not_met(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        path = tmp_path / str(rank)
        path.write_text(f"a secret of rank {rank}, as long as it must be")
        path.chmod(0o600)
        os.environ[SECRET_FILE] = str(path)
        with pytest.raises(PeerLost, match="did not come within 2 s"):
            trained(rank, RULES["averaging"], {"patience": 2.0})

    assert ranks(work, 2).end() == [0, 0]
