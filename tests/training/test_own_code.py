"""Code of one's own that raises: the error says whose it is, and what was computed is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.small_runs import network, same, state_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import coterie
from coterie.errors import GradientError, KnobError, UserCodeError
from coterie.gradients.gradients import cut
from coterie.recording import checkpoint
from coterie.training.run import Stopped

Users = Callable[..., list[coterie.User]]


def after(calls: int, function: Callable[..., Any] = cross_entropy) -> Callable[..., Any]:
    """Return a function that works so many times, and then fails."""
    made = 0

    def call(*arguments: Any) -> Any:
        nonlocal made
        made += 1
        if made > calls:
            raise ZeroDivisionError("of your own")
        return function(*arguments)

    return call


class Noted(coterie.Hook):
    """Remember how a run ended."""

    def __init__(self) -> None:
        self.ended: list[coterie.Run] = []

    def on_end(self, run: coterie.Run) -> None:
        self.ended.append(run)


class Failing(nn.Module):
    """Fail from one step on, and in no evaluation."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.within, self.fine = network(), after(at, lambda: None)

    def forward(self, inputs: Tensor) -> Any:
        if self.training and len(inputs) == 12 and torch.is_grad_enabled():
            self.fine()
        return self.within(inputs)


CASES: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "hook": (
        "the hook after.<locals>.call raised ZeroDivisionError",
        lambda: {"hooks": [after(4, lambda _: None)]},
    ),
    "metric": ("the metric 'odd' raised", lambda: {"metrics": {"odd": after(3, lambda *_: 1.0)}}),
    "scheduler": (
        "the scheduler raised",
        lambda: {"scheduler": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=5)},
    ),
    "model": ("the model or the loss raised", lambda: {"model": Failing(12)}),
}


@pytest.mark.parametrize("rule", [coterie.WeightedAveraging(0.5), coterie.AdaptiveAveraging()])
def test_a_scheduler_is_blamed_that_runs_ahead_of_captured_steps(
    make_users: Users, rule: Any
) -> None:
    users = make_users()
    with pytest.raises(UserCodeError, match="the scheduler raised ValueError: Tried to step"):
        coterie.train(
            *(network(), cross_entropy, users[0], users[1:], rule),
            **CASES["scheduler"][1](),
            steps=100,
            capture=True,
            measure=False,
            guard="off",
        )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_error_says_whose_it_is_and_the_run_goes_on_where_it_was(
    make_users: Users, tmp_path: Path, case: tuple[str, Callable[[], dict[str, Any]]]
) -> None:
    words, make = case
    users, noted = make_users(), Noted()
    settings: dict[str, Any] = {
        "model": network(),
        "steps": 20,
        "evaluate_every": 2,
        "out": tmp_path / "run",
    }
    settings |= {"checkpoint_every": 1, "measure": False} | make()
    settings["hooks"] = [*settings.get("hooks", ()), noted]
    problem: dict[str, Any] = {
        "loss": cross_entropy,
        "me": users[0],
        "peers": users[1:],
        "rule": coterie.WeightedAveraging(0.5),
    }
    with pytest.raises(UserCodeError, match=words) as caught:
        coterie.train(**problem, **settings)
    run = caught.value.run
    assert isinstance(caught.value.__cause__, ZeroDivisionError | ValueError)
    assert run.stopped is Stopped.USER_CODE
    assert [each.stopped for each in noted.ended] == [Stopped.USER_CODE]
    assert coterie.Record.load(tmp_path / "run" / "record.jsonl").end.stopped == Stopped.USER_CODE
    assert 0 < run.step < 20
    assert str(checkpoint.saved(tmp_path / "run" / "checkpoints")[-1]) in str(caught.value)
    if "scheduler" in settings or "metrics" in settings or "model" in make():
        return
    resumed = coterie.train(**problem, **settings | {"hooks": (), "resume": True})
    whole = coterie.train(**problem, **settings | {"hooks": (), "out": None})
    assert same(state_of(resumed.model), state_of(whole.model))
    assert resumed.record.curve("validation_loss") == whole.record.curve("validation_loss")


def test_a_step_that_was_taken_by_half_is_not_saved(make_users: Users, tmp_path: Path) -> None:
    users, states = make_users(), list[dict[str, Tensor]]()

    class Half(torch.optim.SGD):
        """Moves the first parameter, and fails."""

        def step(self, closure: Any = None) -> Any:
            if len(states) < 5:
                return super().step(closure)
            next(p for group in self.param_groups for p in group["params"]).data += 1
            raise ZeroDivisionError("of your own")

    with pytest.raises(UserCodeError, match="the optimizer raised ZeroDivisionError") as caught:
        coterie.train(
            *(network(), cross_entropy, users[0], users[1:], coterie.WeightedAveraging(0.5)),
            optimizer=lambda parameters: Half(parameters, lr=0.1),
            steps=9,
            checkpoint_every=2,
            guard="off",
            hooks=[lambda step: states.append(state_of(step.model))],
            out=tmp_path,
        )
    last = checkpoint.saved(tmp_path / "checkpoints")[-1]
    assert str(last) in str(caught.value)
    held = checkpoint.load(last)["learner"]
    assert held["step"] == 4
    assert same(held["model"], states[3])


def test_a_metric_that_fails_at_the_end_leaves_the_run(make_users: Users) -> None:
    users = make_users()
    users[0].test = users[0].examples
    metrics = {"odd": lambda outputs, _: 1.0 if len(outputs) != len(users[0]) else 1 / 0}
    with pytest.raises(UserCodeError, match="the metric 'odd' raised") as caught:
        coterie.train(
            network(), cross_entropy, users[0], users[1:], coterie.Alone(), steps=3, metrics=metrics
        )
    assert caught.value.run.step == 3


def test_hooks_after_one_that_raises_are_told_too(make_users: Users) -> None:
    users, noted = make_users(), Noted()

    class Bad(coterie.Hook):
        def on_end(self, run: coterie.Run) -> None:
            raise OSError("no network")

    with pytest.raises(UserCodeError, match=r"the hook .*Bad raised OSError: no network") as caught:
        coterie.train(
            *(network(), cross_entropy, users[0], users[1:], coterie.Alone()),
            steps=3,
            hooks=[Bad(), noted],
        )
    assert [each.step for each in noted.ended] == [3] == [caught.value.run.step]


def test_epochs_are_passes_over_the_own_examples(make_users: Users) -> None:
    users = make_users()
    problem: Any = (network(), cross_entropy, users[0], users[1:], coterie.Alone())
    assert coterie.train(*problem, epochs=3, batch_size=5).step == 3 * 3  # 12 examples
    assert coterie.train(*problem, epochs=2).step == 2


def test_a_step_is_as_long_as_the_norm_allows(make_users: Users) -> None:
    """Plain SGD moves by lr times the direction: by lr · norm where that is cut, and as without where it is not."""
    users, start = make_users(), network()
    before = nn.utils.parameters_to_vector(start.parameters())
    moved: list[Tensor] = []

    def note(step: coterie.Step) -> None:
        moved.append(nn.utils.parameters_to_vector(step.model.parameters()) - before)

    spec = coterie.RunSpec(
        start, cross_entropy, users[0], users[1:], coterie.WeightedAveraging(0.5), hooks=[note]
    )
    spec = replace(spec, optimizer=torch.optim.SGD, lr=0.5, steps=1)
    specs = [replace(spec, clip_norm=norm) for norm in (None, 1e-3, 1e3)]
    for each in specs:
        coterie.train(**{field: getattr(each, field) for field in vars(each)})
    free, short, wide = moved
    torch.testing.assert_close(short.norm(), before.new_tensor(0.5 * 1e-3))
    torch.testing.assert_close(short / short.norm(), free / free.norm())
    assert torch.equal(free, wide)
    moved.clear()
    coterie.train_many(specs)
    torch.testing.assert_close(torch.stack(moved), torch.stack([free, short, wide]))


def test_vectors_are_cut_without_overflow() -> None:
    rows = torch.tensor([[3e30, 4e30], [0.0, 0.0], [0.3, 0.4]])
    torch.testing.assert_close(cut(rows, 1.0), torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.3, 0.4]]))
    assert cut(torch.tensor([torch.nan, 1.0]), 1.0).isnan().any()


def test_steps_and_epochs_are_not_both_given(make_users: Users) -> None:
    users = make_users()
    with pytest.raises(KnobError, match=r"`steps` .* and `epochs` .* were both given"):
        coterie.train(network(), cross_entropy, users[0], users[1:], steps=5, epochs=2)


def test_of_many_runs_those_go_on_whose_code_does_not_raise(make_users: Users) -> None:
    users = make_users()
    base = coterie.RunSpec(
        network(), cross_entropy, users[0], users[1:], coterie.WeightedAveraging(0.5), steps=6
    )
    bad = [
        replace(base, hooks=[after(2, lambda _: None)]),
        replace(base, metrics={"odd": after(2, lambda *_: 1.0)}),
    ]
    whole = coterie.train_many([base, base])
    with pytest.raises(UserCodeError, match="raised ZeroDivisionError: of your own") as caught:
        coterie.train_many([base, *bad, base])
    first, hooked, measured, last = caught.value.run
    assert [run.stopped for run in caught.value.run] == [
        None,
        Stopped.USER_CODE,
        Stopped.USER_CODE,
        None,
    ]
    assert (hooked.step, measured.step) == (3, 2)
    torch.testing.assert_close(state_of(first.model), state_of(whole[0].model))
    torch.testing.assert_close(state_of(last.model), state_of(whole[1].model))


@dataclass(frozen=True)
class Dividing(coterie.FormulaRule):
    """Divide by zero at one step."""

    alpha: coterie.Knob = 0.5
    divisor: coterie.Knob = 1.0

    def direction(
        self, own: Tensor, peers: Tensor, state: Mapping[str, Tensor], knobs: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return own + knobs["alpha"] * (peers - own) / knobs["divisor"], {}


ZERO_AT_5 = Dividing(0.5, divisor=lambda step: 0.0 if step == 5 else 1.0)


@pytest.mark.parametrize("capture", [None, True])
def test_a_rule_whose_direction_is_not_finite_is_named_at_its_step(
    make_users: Users, tmp_path: Path, capture: bool | None
) -> None:
    users = make_users()
    how: dict[str, Any] = {
        "steps": 20,
        "guard": "off",
        "out": tmp_path,
        "checkpoint_every": 100,
        "capture": capture,
    }
    words = "the rule `Dividing` made a direction that is not finite of finite gradients at step 5; the state"
    with pytest.raises(GradientError, match=words) as caught:
        coterie.train(network(), cross_entropy, users[0], users[1:], ZERO_AT_5, **how)
    assert (caught.value.run.step, caught.value.run.stopped) == (5, Stopped.NOT_FINITE)
    assert "own gradient" not in str(caught.value)
    held = checkpoint.load(checkpoint.saved(tmp_path / "checkpoints")[-1])["learner"]
    assert held["step"] == held["rule"]["step"] == 5
    assert all(bool(part.isfinite().all()) for part in held["model"].values())


def test_with_a_guard_the_run_goes_on_and_the_rule_is_told_of(make_users: Users) -> None:
    users = make_users()
    with pytest.warns(
        UserWarning, match=r"the rule `Dividing` made .* at step 5; the run goes on from the model"
    ):
        run = coterie.train(
            network(), cross_entropy, users[0], users[1:], ZERO_AT_5, steps=20, guard="held-out"
        )
    assert run.step == 20
    assert run.record.points[-1].guard is not None
    assert run.record.points[-1].guard.restarts >= 1
    assert all(bool(p.isfinite().all()) for p in run.model.parameters())
