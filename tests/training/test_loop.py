"""What ends a run early: Ctrl-C, and a gradient of user 0 that is not finite."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.small_runs import network, same, state_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import coterie
from coterie.choosing.measuring import before_training
from coterie.errors import GradientError
from coterie.learners.spec import RunSpec
from coterie.recording import checkpoint

Users = Callable[..., list[coterie.User]]


def test_ctrl_c_saves_stops_and_resumes_to_the_same_bits(make_users: Users, tmp_path: Path) -> None:
    users = make_users()
    handler = signal.getsignal(signal.SIGINT)

    def trained(out: Path, interrupt: int | None = None, **keywords: Any) -> coterie.Run:
        def press(step: coterie.Step) -> None:
            if step.step == interrupt:
                signal.raise_signal(signal.SIGINT)

        return coterie.train(
            *(network(), cross_entropy, users[0], users[1:], coterie.BiasCorrection(0.5, 0.1)),
            steps=20,
            evaluate_every=3,
            batch_size=4,
            hooks=[press],
            out=out,
            **keywords,
        )

    whole = trained(tmp_path / "whole")
    stopped = trained(tmp_path / "stopped", interrupt=7)
    assert (stopped.stopped, stopped.step, stopped.test) == ("Ctrl-C", 7, {})
    assert "stopped by Ctrl-C at step 7 of 20" in stopped.summary()
    assert coterie.Record.load(tmp_path / "stopped" / "record.jsonl").end.stopped == "Ctrl-C"
    assert signal.getsignal(signal.SIGINT) is handler
    resumed = trained(tmp_path / "stopped", resume=True)
    assert resumed.stopped is None
    assert same(resumed.model.state_dict(), whole.model.state_dict())
    assert resumed.record.points == whole.record.points
    assert resumed.test == whole.test
    assert same({"c": resumed.state["c"]}, {"c": whole.state["c"]})


def test_a_second_ctrl_c_stops_at_once(make_users: Users) -> None:
    users, done = make_users(), list[int]()
    handler = signal.getsignal(signal.SIGINT)

    def press(step: coterie.Step) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append(step.step)

    with pytest.raises(KeyboardInterrupt):
        coterie.train(
            *(network(), cross_entropy, users[0], users[1:], coterie.Alone()),
            steps=9,
            hooks=[press],
        )
    assert not done
    assert signal.getsignal(signal.SIGINT) is handler


SCRIPT = """
    import sys, torch, coterie
    torch.set_num_threads(1)
    users = [coterie.User(name, torch.eye(3).repeat(4, 1), torch.arange(12) % 3) for name in ("me", "a")]
    def tell(step):
        if step.step == 3:
            print("going", flush=True)
    run = coterie.train(torch.nn.Linear(3, 3), torch.nn.functional.cross_entropy, users[0], users[1:],
                        coterie.WeightedAveraging(0.5), steps=10**7, evaluate_every=10**6, hooks=[tell],
                        checkpoint_every=10**6, out=sys.argv[1])
    print(run.stopped, run.step)
"""


def test_ctrl_c_in_a_process_of_its_own(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "going\n"
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=600)[0].split()
    assert process.returncode == 0
    assert told[0] == "Ctrl-C"
    steps = int(told[1])
    assert 3 <= steps < 10**7
    assert (
        checkpoint.load(checkpoint.saved(tmp_path / "checkpoints")[-1])["learner"]["step"] == steps
    )


def test_a_thread_can_train(make_users: Users) -> None:
    import threading

    users, runs = make_users(), list[coterie.Run]()

    def work() -> None:
        runs.append(
            coterie.train(
                *(network(), cross_entropy, users[0], users[1:], coterie.Alone()), steps=3
            )
        )

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert runs[0].step == 3


def explosive(at: int) -> Any:
    """Return a loss that is NaN from the at-th training pass on."""

    class Explosive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            if outputs.requires_grad and len(outputs) == 12:  # user 0's full batch, in training
                self.calls += 1
            factor = math.nan if self.calls > at else 1.0
            return cross_entropy(outputs, targets) * factor

    return Explosive()


@pytest.mark.parametrize("saved", [True, False])
def test_a_non_finite_own_gradient_ends_the_run_with_the_last_good_state(
    make_users: Users, tmp_path: Path, saved: bool
) -> None:
    users, good = make_users(), list[dict[str, Tensor]]()
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()
    probing = explosive(10**9)
    engine = coterie.InProcess(model, probing, users[0], users[1:])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before_training(engine, RunSpec(model, probing, users[0], users[1:], optimizer=optimizer))
    with pytest.raises(GradientError, match="own gradient is not finite at step 5") as caught:
        coterie.train(
            *(
                model,
                explosive(probing.calls + 5),
                users[0],
                users[1:],
                coterie.BiasCorrection(0.5, 0.1),
            ),
            steps=20,
            checkpoint_every=100,
            guard="off",  # whose shadow would count too
            hooks=[lambda step: good.append(state_of(step.model))],
            out=tmp_path if saved else None,
        )
    assert len(good) == 5
    run = caught.value.run
    assert (run.step, run.stopped, run.test) == (5, "a non-finite gradient", {})
    assert isinstance(caught.value, ArithmeticError)
    if saved:
        (path,) = checkpoint.saved(tmp_path / "checkpoints")
        assert str(path) in str(caught.value)
        held = checkpoint.load(path)["learner"]
        assert held["step"] == 5
        assert same(held["model"], good[-1])
    else:
        assert "in this error's `run`" in str(caught.value)


def test_examples_with_infinities_are_named(make_users: Users) -> None:
    users = make_users()
    inputs, targets = users[0].batch(12, seed=0, step=0)
    bad = coterie.User("ward 3", inputs.clone().fill_(math.inf), targets)
    with pytest.raises(
        GradientError, match=r"at step 0 .* lower `lr`, or look for extreme values .* 'ward 3'"
    ):
        coterie.train(*(network(), cross_entropy, bad, users[1:], coterie.Alone()), steps=3)
