"""Losses per example, weighted and with targets that are ignored; metrics of whatever a model gives."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as f
from torch.utils import _pytree

import coterie
from coterie.errors import DataError, ModelError
from coterie.evaluation.evaluate import evaluate, example_losses
from coterie.evaluation.losses import known_per_example, on_device
from coterie.users.examples import InMemory


@pytest.mark.parametrize("weight", [None, torch.tensor([0.1, 2.0, 5.0])])
@pytest.mark.parametrize("shape", [(8,), (8, 5)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_mean_by_example_is_torchs_mean(
    weight: Tensor | None, shape: tuple[int, ...], smoothing: float
) -> None:
    torch.manual_seed(0)
    outputs, targets = torch.randn(8, 3, *shape[1:]), torch.randint(3, shape)
    loss = nn.CrossEntropyLoss(weight, label_smoothing=smoothing)
    for given in (
        targets,
        targets.masked_fill(torch.rand(shape) < 0.4, -100),
        torch.full_like(targets, -100),
    ):
        known = known_per_example(loss)
        assert known is not None
        torch.testing.assert_close(known(outputs, given), loss(outputs, given), equal_nan=True)


def test_what_targets_count_is_where_the_targets_are() -> None:
    """Those of users are on the CPU when a run begins, and the weights of classes where the model is."""
    known = known_per_example(nn.CrossEntropyLoss(torch.ones(3)))
    assert known is not None
    counts = known.counts(torch.zeros(4, dtype=torch.long, device="meta"))
    assert counts is not None
    assert counts.device.type == "meta"


@pytest.mark.parametrize("declared", [False, True])
def test_a_loss_goes_where_the_model_is_as_a_copy(declared: bool) -> None:
    weight, there = torch.ones(3), torch.device("meta")
    module = nn.CrossEntropyLoss(weight, reduction="none" if declared else "mean")
    loss: Any = coterie.per_example(module) if declared else module
    moved: Any = on_device(loss, there)
    assert type(moved) is type(loss)
    assert (moved.each if declared else moved).weight.device == there
    assert module.weight is weight
    assert on_device(moved, there) is moved
    assert on_device(loss, weight.device) is loss
    assert on_device(f.cross_entropy, there) is f.cross_entropy


@pytest.mark.cuda
@pytest.mark.parametrize("rule", [coterie.WeightedAveraging(0.5), coterie.AdaptiveAveraging()])
@pytest.mark.parametrize("held", ["cpu", "cuda"])
def test_weights_of_classes_are_used_on_a_gpu_wherever_they_are(rule: Any, held: str) -> None:
    me, *peers = users()
    weight, losses = torch.tensor([0.1, 2.0, 5.0]), list[list[float]]()
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    for device in (held, "cpu"):
        run = coterie.train(
            *(model, nn.CrossEntropyLoss(weight.to(device)), me, peers, rule),
            lr=0.01,
            steps=20,
            measure=False,
            device="cpu" if losses else "cuda",
        )
        losses.append(run.record.curve("validation_loss")[1])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.cuda
def test_weights_of_classes_are_used_on_a_gpu_by_runs_that_are_taken_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their models' outputs are scored on the host."""
    held_out = some(30)
    me, *peers = (
        coterie.User(name, *some(40 + k), validation=held_out) for k, name in enumerate("mab")
    )
    torch.manual_seed(0)
    model, loss, rule = (
        nn.Linear(4, 3),
        nn.CrossEntropyLoss(torch.tensor([0.1, 2.0, 5.0])),
        coterie.Alone(),
    )
    ends: dict[str, list[float]] = {}
    # captured steps are each run's own
    monkeypatch.setattr("coterie.training.train.captured_steps", lambda *_: (None, "off"))
    for device in ("cuda", "cpu"):
        spec = coterie.RunSpec(model, loss, me, peers, rule, lr=0.01, steps=4, device=device)
        everybody = coterie.train_everyone(
            *(model, loss, [me, *peers], coterie.WeightedAveraging(0.5)),
            lr=0.01,
            steps=4,
            device=device,
        )
        runs = [*coterie.train_many([spec, replace(spec, seed=1)]), everybody.runs["m"]]
        assert all(run.record.configuration.runs.startswith("one program") for run in runs)
        ends[device] = [run.record.curve("validation_loss")[1][-1] for run in runs]
    assert ends["cuda"] == pytest.approx(ends["cpu"], rel=1e-3)


def some(n: int = 40, ignored: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    inputs = torch.randn(n, 4, generator=generator)
    targets = inputs[:, :3].argmax(1)
    return inputs, targets.masked_fill(torch.arange(n) % 4 > 0, -100) if ignored else targets


def users(ignored: bool = False) -> list[coterie.User]:
    held = some(30, ignored)
    return [
        coterie.User(name, *some(40 + k, ignored), validation=held if not k else None)
        for k, name in enumerate(("me", "a", "b"))
    ]


def sets(user: coterie.User) -> list[InMemory]:
    return [each for each in (user.examples, user.validation) if isinstance(each, InMemory)]


def test_ignored_targets_are_ignored_everywhere() -> None:
    """The run is that of users who do not have the examples whose targets are ignored, when batches are all."""
    without = []
    for user in users(ignored=True):
        kept = [
            InMemory(p.inputs[p.targets != -100], p.targets[p.targets != -100]) for p in sets(user)
        ]
        held = (kept[1].inputs, kept[1].targets) if len(kept) > 1 else None
        without.append(coterie.User(user.name, kept[0].inputs, kept[0].targets, validation=held))
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    runs = [
        coterie.train(
            model,
            f.cross_entropy,
            me,
            peers,
            coterie.WeightedAveraging(0.5),
            steps=20,
            batch_size=99,
        )
        for me, *peers in (
            [_double(user) for user in each] for each in (users(ignored=True), without)
        )
    ]
    for ours, theirs in zip(runs[0].record.points, runs[1].record.points, strict=True):
        assert ours.validation == pytest.approx(theirs.validation, rel=1e-9)
        assert ours.own_loss is None or ours.own_loss == pytest.approx(theirs.own_loss, rel=1e-9)


def _double(user: coterie.User) -> coterie.User:
    parts = [(p.inputs.double(), p.targets) for p in sets(user)]
    return coterie.User(user.name, *parts[0], validation=parts[1] if len(parts) > 1 else None)


def test_accuracy_leaves_out_what_is_ignored() -> None:
    outputs = torch.eye(3)[torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])]
    targets = torch.tensor([0, 1, *[-100] * 6])
    data = InMemory(outputs, targets)
    model = nn.Linear(3, 3, bias=False)
    model.weight.data = torch.eye(3)
    assert evaluate(model, f.cross_entropy, data)["accuracy"] == 1
    other = InMemory(outputs, torch.tensor([0, 1, *[2] * 6]))
    assert evaluate(model, nn.CrossEntropyLoss(ignore_index=2), other)["accuracy"] == 1
    assert example_losses(model, f.cross_entropy, data)[2:].tolist() == [0] * 6


def test_a_set_and_a_batch_with_nothing_to_learn_from_are_told() -> None:
    me, peer, _ = users()
    nothing = coterie.User("b", some()[0], torch.full((40,), -100))
    with pytest.raises(DataError, match="user 'b' has a set whose targets are all -100"):
        coterie.train(nn.Linear(4, 3), f.cross_entropy, nothing, [peer], steps=2)
    seldom = coterie.User("b", some()[0], torch.tensor([0, 1, *[-100] * 38]))
    rare = coterie.User("me", some()[0], torch.tensor([0, 1, *[-100] * 38]))
    rule = coterie.WeightedAveraging(0.5)
    with pytest.warns(UserWarning, match="a batch of 'b' has nothing to learn from"):
        coterie.train(
            nn.Linear(4, 3),
            f.cross_entropy,
            me,
            [seldom],
            rule,
            steps=9,
            batch_size=2,
            measure=False,
        )
    with pytest.warns(UserWarning, match="a batch of 'me' has nothing to learn from"):
        run = coterie.train(
            nn.Linear(4, 3), f.cross_entropy, rare, [peer], rule, steps=9, batch_size=2
        )
    assert all(point.own_loss is None or point.own_loss > 0 for point in run.record.points)


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


def flat(output: Output) -> tuple[list[Any], None]:
    return [part for part in (output.logits, output.loss) if part is not None], None


_pytree.register_pytree_node(Output, flat, lambda parts, _: Output(*parts))


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Output:
        logits = self.layer(inputs)
        return Output(logits, None if labels is None else f.cross_entropy(logits, labels))


def test_metrics_get_what_the_model_gives() -> None:
    seen: list[Any] = []

    def share(output: Output, targets: Tensor) -> float:
        seen.append(type(output))
        return float((output.logits.argmax(1) == targets).double().mean())

    data = InMemory(*some(50))
    loss = lambda output, targets: f.cross_entropy(output.logits, targets)  # noqa: E731
    measures = evaluate(Wrapped(), loss, data, {"share": share}, chunk=7)
    usual = evaluate(Wrapped(), loss, data, chunk=7)
    assert seen == [Output]
    assert measures.keys() == {"loss", "share"}
    assert usual.keys() == {"loss", "accuracy"}  # a loss of one's own, over classes


def test_the_models_own_loss_serves() -> None:
    torch.manual_seed(1)
    model, rule = Wrapped(), coterie.WeightedAveraging(0.5)
    given = users()
    plain = coterie.train(
        model,
        lambda o, y: f.cross_entropy(o.logits, y),
        given[0],
        given[1:],
        rule,
        steps=15,
        batch_size=8,
    )
    inside = []
    for user in given:
        parts = [{"inputs": p.inputs, "labels": p.targets} for p in sets(user)]
        inside.append(
            coterie.User(
                user.name, parts[0], validation=(parts[1], None) if len(parts) > 1 else None
            )
        )
    own = coterie.train(
        model, coterie.model_loss, inside[0], inside[1:], rule, steps=15, batch_size=8
    )
    for ours, theirs in zip(own.record.points, plain.record.points, strict=True):
        assert ours.validation["loss"] == pytest.approx(theirs.validation["loss"], rel=1e-5)
    with pytest.raises(ModelError, match="has no `loss`"):
        coterie.model_loss(Output(torch.zeros(1)))


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(torch.tensor([1.0, 3.0, 0.2])),
        nn.CrossEntropyLoss(reduction="none"),
        coterie.per_example(lambda o, y: f.cross_entropy(o, y, reduction="none")),
        coterie.per_example(
            lambda o, y: f.cross_entropy(o, y, reduction="none") * (1.0 + y),
            weights=lambda y: 1.0 + y,
        ),
    ],
)
def test_the_default_rule_takes_weighted_losses_in_one_pass(loss: Any) -> None:
    """The same account as where nothing is known of the loss, and copies are passed one by one."""
    me, *peers = users()

    def unknown(output: Tensor, targets: Tensor) -> Tensor:
        losses: Tensor = loss(output, targets)
        return losses.mean() if losses.ndim else losses

    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    me, *peers = (_double(user) for user in (me, *peers))
    known = loss.double() if isinstance(loss, nn.Module) else loss
    engine = coterie.InProcess(model, known, me, peers)
    assert engine.capabilities.not_stacked is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast, slow = (
            coterie.train(model, each, me, peers, steps=20, batch_size=6, measure=False)
            for each in (known, unknown)
        )
    ours, theirs = fast.record.end.account, slow.record.end.account
    for kind, line in ours["leaderboard"].items():
        assert line["weight"] == pytest.approx(theirs["leaderboard"][kind]["weight"], rel=1e-5)
    assert ours["tau"] == pytest.approx(theirs["tau"], rel=1e-6)
    for a, b in zip(fast.model.parameters(), slow.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_a_loss_of_many_numbers_says_how_to_declare_it() -> None:
    me, *peers = users()
    many = lambda output, targets: f.cross_entropy(output, targets, reduction="none")  # noqa: E731
    with pytest.raises(ModelError, match="declare a loss per example by"):
        coterie.train(nn.Linear(4, 3), many, me, peers, steps=1)
