"""Steps taken as one program: the same as one by one, whatever happens in between."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LinearLR, ReduceLROnPlateau

import coterie
from coterie.errors import GradientError
from coterie.learners.captured import Captured, StackBlock
from coterie.learners.learner import RuleLearner
from coterie.learners.spec import RunSpec
from coterie.methods import FedAvg
from coterie.recording.costs import Costs
from coterie.rules import BiasCorrection, Rule, WeightedAveraging
from coterie.training.run import Run, Step
from coterie.users.sampling import MAX_STEPS_AHEAD

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
STEPS = 2 * MAX_STEPS_AHEAD + 30
AnyRule: TypeAlias = Rule | coterie.AdaptiveAveraging


def users(n_validation: int = 0, examples: int = 40) -> list[coterie.User]:
    """Return user 0 and three peers, of different sizes, two of them smaller than a batch."""
    random = torch.Generator().manual_seed(1)

    def some(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(n, 4, generator=random)
        return inputs, inputs[:, :3].argmax(1)

    validation = some(n_validation) if n_validation else None
    sizes = {"me": examples, "a": 47, "b": 9, "c": 13}
    return [
        coterie.User(k, *some(n), validation=validation if k == "me" else None)
        for k, n in sizes.items()
    ]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def train(
    rule: Rule | coterie.AdaptiveAveraging,
    everyone: list[coterie.User],
    *,
    capture: bool,
    **options: Any,
) -> Run:
    options = (
        dict[str, Any](optimizer=SGD, lr=0.05, steps=STEPS, guard="off", measure=False) | options
    )
    return coterie.train(
        network(),
        cross_entropy,
        everyone[0],
        everyone[1:],
        rule,
        batch_size=16,
        capture=capture,
        **options,
    )


def parameters(run: Run) -> torch.Tensor:
    return torch.cat([p.detach().flatten().cpu() for p in run.model.parameters()])


def assert_same(one_by_one: Run, captured: Run, device: str) -> None:
    """On a CPU to the bit; on a GPU optimizers that count steps there round otherwise.

    Captured, adaptive averaging passes over peers of no weight too, which may group its points
    otherwise.
    """
    adaptive = one_by_one.record.configuration.rule.startswith("AdaptiveAveraging")
    error = (1e-5 if adaptive else 0.0) if device == "cpu" else 1e-4
    torch.testing.assert_close(parameters(captured), parameters(one_by_one), atol=error, rtol=error)
    assert captured.step == one_by_one.step
    assert captured.record.configuration.capture != one_by_one.record.configuration.capture == "off"
    assert captured.record.end.tau == pytest.approx(one_by_one.record.end.tau, abs=error)
    for key in ("costs", "left_out", "best_step"):
        assert getattr(captured.record.end, key) == getattr(one_by_one.record.end, key), key
    assert {k: v for k, v in captured.state.items() if not isinstance(v, torch.Tensor)} == {
        k: v for k, v in one_by_one.state.items() if not isinstance(v, torch.Tensor)
    }
    for ours, theirs in zip(captured.record.points, one_by_one.record.points, strict=True):
        assert ours.to_plain() == pytest.approx(theirs.to_plain(), rel=10 * error, abs=error)


RULES: dict[str, AnyRule] = {
    "alone": coterie.Alone(),
    "average": WeightedAveraging(0.4, {"a": 0.75, "c": 0.25}),
    "a function of the step": WeightedAveraging(lambda step: 1 / (1 + step)),
    "corrected": BiasCorrection(0.6, 0.02),
    "as in the paper": BiasCorrection(0.6, 0.02, start="zero", warm_up=False, correction=0.5),
    "both functions": BiasCorrection(lambda step: 1 / (2 + step), lambda step: 1 / (1 + step)),
    "adaptive": coterie.AdaptiveAveraging(),
    "adaptive, three step sizes": coterie.AdaptiveAveraging(rates=(0.5, 1.0, 2.0)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_rule_steps_as_one_by_one(rule: AnyRule, device: str) -> None:
    one_by_one, captured = (
        train(rule, users(), capture=flag, device=device, evaluate_every=50)
        for flag in (False, True)
    )
    assert_same(one_by_one, captured, device)


OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "momentum": (partial(SGD, momentum=0.9, weight_decay=0.1), None),
    "Adam": (Adam, None),
    "AdamW, falling": (
        AdamW,
        partial(LinearLR, start_factor=1.0, end_factor=0.0, total_iters=STEPS),
    ),
    "NAdam, falling": (NAdam, partial(ExponentialLR, gamma=0.99)),
    "RMSprop": (RMSprop, None),
    "plain, falling": (SGD, partial(CosineAnnealingLR, T_max=STEPS)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("optimizer", "scheduler"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_optimizer_and_schedule_steps_as_one_by_one(
    optimizer: Any, scheduler: Any, device: str
) -> None:
    options = {"optimizer": optimizer, "scheduler": scheduler, "lr": 0.01, "device": device}
    one_by_one, captured = (
        train(RULES["corrected"], users(), capture=flag, **options) for flag in (False, True)
    )
    assert_same(one_by_one, captured, device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_schedule_that_waits_for_the_validation_loss_is_followed(device: str) -> None:
    options = {
        "scheduler": partial(ReduceLROnPlateau, patience=0, factor=0.5),
        "device": device,
        "lr": 1.0,
    }
    one_by_one, captured = (
        train(RULES["average"], users(20), capture=flag, **options) for flag in (False, True)
    )
    assert_same(one_by_one, captured, device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_guard_s_shadow_is_in_the_program_and_restarts_it(device: str) -> None:
    everyone = users(150)
    for peer in everyone[1:]:
        peer.examples.targets.add_(1).remainder_(3)  # type: ignore[attr-defined]  # in memory
    options = {"guard": "held-out", "evaluate_every": 10, "device": device, "optimizer": Adam}
    one_by_one, captured = (
        train(WeightedAveraging(0.99), everyone, capture=flag, **options) for flag in (False, True)
    )
    assert one_by_one.record.curve("guard_restarts")[1][-1] > 0
    assert_same(one_by_one, captured, device)


@pytest.mark.parametrize("optimizer", ["AdamW, falling"])
@pytest.mark.parametrize("device", DEVICES)
def test_adaptive_averaging_steps_as_one_by_one_with_every_schedule(
    optimizer: str, device: str
) -> None:
    made, scheduler = OPTIMIZERS[optimizer]
    one_by_one, captured = (
        train(
            RULES["adaptive"],
            users(),
            capture=flag,
            optimizer=made,
            scheduler=scheduler,
            device=device,
        )
        for flag in (False, True)
    )
    assert_same(one_by_one, captured, device)


@pytest.mark.parametrize("rule", ["corrected", "adaptive"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_bad_peer_is_left_out_and_counted_as_one_by_one(device: str, rule: str) -> None:
    everyone = users()
    everyone[1].examples.inputs[5] = math.nan  # type: ignore[attr-defined]  # drawn now and then
    options = {"scheduler": partial(ExponentialLR, gamma=0.99), "optimizer": Adam, "device": device}
    one_by_one, captured = (
        train(RULES[rule], everyone, capture=flag, **options) for flag in (False, True)
    )
    assert 0 < one_by_one.record.end.left_out["a"]["not finite"] < STEPS
    assert_same(one_by_one, captured, device)


def test_an_own_gradient_that_is_not_finite_ends_the_run_at_the_same_step() -> None:
    everyone = users(examples=400)
    everyone[0].examples.inputs[5] = math.inf  # type: ignore[attr-defined]
    ends = []
    for capture in (False, True):
        with pytest.raises(GradientError, match="own gradient is not finite") as raised:
            train(RULES["average"], everyone, capture=capture)
        ends.append(raised.value.run)
    assert ends[0].step == ends[1].step > 1
    assert torch.equal(parameters(ends[0]), parameters(ends[1]))


def test_adaptive_averaging_resumes_from_the_middle_of_a_block(tmp_path: Path) -> None:
    def stop(step: Step) -> bool:
        return step.step == 100

    options = dict[str, Any](optimizer=Adam, checkpoint_every=33, capture=True)
    whole = train(RULES["adaptive"], users(), out=tmp_path / "whole", **options)
    train(RULES["adaptive"], users(), out=tmp_path / "parts", hooks=[stop], **options)
    resumed = train(RULES["adaptive"], users(), out=tmp_path / "parts", resume=True, **options)
    assert torch.equal(parameters(whole), parameters(resumed))
    assert whole.record.end.costs == resumed.record.end.costs


def test_a_run_resumes_from_the_middle_of_a_block(tmp_path: Path) -> None:
    rule, options = RULES["corrected"], dict[str, Any](optimizer=Adam, checkpoint_every=33)
    whole = train(rule, users(), capture=True, out=tmp_path / "whole", **options)
    train(rule, users(), capture=True, out=tmp_path / "parts", **options | {"steps": 70})
    resumed = train(rule, users(), capture=True, out=tmp_path / "parts", resume=True, **options)
    assert torch.equal(parameters(whole), parameters(resumed))
    assert torch.equal(whole.state["c"], resumed.state["c"])
    longer = options | {"steps": STEPS + 5, "capture": False}
    other = train(rule, users(), out=tmp_path / "parts", resume=True, **longer)
    assert torch.equal(parameters(other), parameters(train(rule, users(), **longer)))


def test_hooks_are_called_after_every_step_with_what_they_would_see() -> None:
    def watched(*, capture: bool) -> list[tuple[int, float, float, float]]:
        seen: list[tuple[int, float, float, float]] = []

        def watch(step: Step) -> None:
            first = float(next(step.model.parameters()).detach().sum())
            seen.append((step.step, step.own_loss, step.weight, first))

        train(RULES["a function of the step"], users(), capture=capture, hooks=[watch])
        return seen

    assert watched(capture=True) == watched(capture=False)
    assert len(watched(capture=True)) == STEPS


def test_the_host_looks_once_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    me, *peers = users()
    model = network()
    engine = coterie.InProcess(model, cross_entropy, me, peers, batch_size=16)
    spec = RunSpec(model, cross_entropy, me, peers, optimizer=SGD(model.parameters(), lr=0.1))
    costs = Costs({user.name: 16 for user in (me, *peers)})
    learner = RuleLearner(spec, WeightedAveraging(0.5), engine, costs)
    learner.take_step()
    block, looks = learner.block(), list[str]()
    assert isinstance(block, StackBlock)
    captured = Captured(block)

    def look(name: str) -> None:
        before = getattr(torch.Tensor, name)

        def looking(tensor: torch.Tensor) -> Any:
            looks.append(name)
            return before(tensor)

        monkeypatch.setattr(torch.Tensor, name, looking)

    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "numpy", "cpu", "nonzero"):
        look(name)
    assert len(captured.advance(1000) or []) == MAX_STEPS_AHEAD
    monkeypatch.undo()
    assert looks == ["item", "cpu", "tolist"]  # the last on the host


class Odd(nn.Module):
    """A model whose examples influence each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the output."""
        out: torch.Tensor = self.layer(inputs - inputs.mean(0))
        return out


@pytest.mark.parametrize(
    ("model", "options", "why"),
    [
        (Odd(), {}, "depends on the others"),
        (nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), {}, "random numbers"),
        (nn.Linear(4, 3), {"optimizer": Adagrad}, "Adagrad is not known"),
        (
            nn.Linear(4, 3),
            {"rule": WeightedAveraging(0.4, aggregator=coterie.aggregators.Mean())},
            "an aggregator looks",
        ),
        (nn.Linear(4, 3), {"rule": FedAvg(2), "lr": 0.1}, "steps of its own kind"),
    ],
)
def test_what_cannot_be_captured_is_told_once_and_trained_all_the_same(
    model: nn.Module, options: dict[str, Any], why: str
) -> None:
    me, *peers = users()
    options = dict[str, Any](rule=WeightedAveraging(0.5), steps=5, measure=False) | options
    with pytest.warns(UserWarning, match=why) as told:
        run = coterie.train(model, cross_entropy, me, peers, capture=True, **options)
    assert len(told) == 1
    assert run.step == 5
    assert run.record.configuration.capture.startswith("off: ")


def test_a_capture_that_fails_on_the_way_is_told_by_the_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, where a graph is captured after a few steps: the rest goes on one by one, to the same bits."""

    def fails(captured: Captured, n: int) -> bool:
        if captured.tables[0].at < 20:
            return take(captured, n)
        captured.failed = "operation not permitted when stream is capturing"
        return False

    take = Captured._take
    one_by_one = train(RULES["average"], users(), capture=False, evaluate_every=10)
    monkeypatch.setattr(Captured, "_take", fails)
    run = train(RULES["average"], users(), capture=True, evaluate_every=10)
    assert run.record.end.not_captured == "operation not permitted when stream is capturing"
    assert not one_by_one.record.end.not_captured
    assert_same(one_by_one, run, "cpu")


ROWS: dict[str, Rule] = {
    "similarity": coterie.rules.similarity.CosineSimilarity(0.5),
    "gate": coterie.rules.similarity.SimilarityGate(0.5),
    "erosion": coterie.rules.similarity.WeightErosion(),
    "mirror": coterie.rules.similarity.MirrorDescent(),
    "first order": coterie.rules.similarity.FirstOrder(),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", ROWS.values(), ids=ROWS)
def test_rules_that_need_every_gradient_step_as_one_by_one(rule: Rule, device: str) -> None:
    one_by_one, captured = (
        train(rule, users(), capture=flag, device=device) for flag in (False, True)
    )
    assert_same(one_by_one, captured, device)
