"""The other ways to weigh peers, each against its formula written out in plain numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import coterie
from coterie import Gradients
from coterie.errors import KnobError
from coterie.rules import weights_in
from coterie.rules.similarity import (
    OWN,
    CosineSimilarity,
    FirstOrder,
    MirrorDescent,
    SimilarityGate,
    WeightErosion,
)

RULES: list[Any] = [
    CosineSimilarity(0.6),
    SimilarityGate(0.6),
    WeightErosion(0.002),
    MirrorDescent(0.5),
    FirstOrder(0.5),
]
NAMES = ("a", "b", "c")


def gradients(seed: int, n: int = 3, **more: Any) -> Gradients:
    generator = torch.Generator().manual_seed(seed)
    own, *rows = torch.randn(1 + n, 4, generator=generator, dtype=torch.float64)
    return Gradients(own, rows=torch.stack(rows), names=NAMES[:n], **more)


def listed(g: Gradients) -> tuple[list[float], dict[str, list[float]]]:
    assert g.rows is not None
    return g.own.tolist(), dict(zip(g.names, g.rows.tolist(), strict=True))


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def mixed(weights: dict[str, float], rows: dict[str, list[float]]) -> list[float]:
    return [sum(weights[name] * rows[name][i] for name in weights) for i in range(4)]


def two_steps(rule: Any) -> tuple[list[float], dict[str, float], Gradients, Gradients]:
    """Return the second direction and its weights, and the gradients of both steps."""
    first, second = gradients(1), gradients(4)
    _, state = rule(first, rule.init(first.own))
    direction, state = rule(second, state)
    assert state["step"] == 2
    return direction.tolist(), weights_in(state), first, second


def test_cosine_similarity() -> None:
    direction, tau, _, g = two_steps(CosineSimilarity(0.6))
    own, rows = listed(g)
    cosines = {
        k: max(0.0, dot(own, r) / math.sqrt(dot(own, own) * dot(r, r))) for k, r in rows.items()
    }
    expected = {k: c / sum(cosines.values()) for k, c in cosines.items()}
    assert tau == pytest.approx(expected)
    assert direction == pytest.approx(
        mixed({k: 0.6 * t for k, t in expected.items()} | {"": 0.4}, rows | {"": own})
    )


def test_similarity_gate() -> None:
    direction, tau, _, g = two_steps(SimilarityGate(0.6))
    own, rows = listed(g)
    through = [r for r in rows.values() if dot(own, r) >= 0]
    assert 0 < len(through) < 3
    assert sum(tau.values()) == pytest.approx(len(through) / 3)
    expected = [o + 0.2 * sum(r[i] - o for r in through) for i, o in enumerate(own)]
    assert direction == pytest.approx(expected)


def test_weight_erosion() -> None:
    direction, omega, first, second = two_steps(WeightErosion(0.05))
    expected = dict.fromkeys(NAMES, 1.0)
    for g in (first, second):
        own, rows = listed(g)
        for k, r in rows.items():
            far = math.dist(r, own) / math.sqrt(dot(own, own))
            expected[k] = max(0.0, expected[k] - 0.05 * far)
    assert omega == pytest.approx(expected)
    own, rows = listed(second)
    total = 1 + sum(expected.values())
    assert direction == pytest.approx(
        [v / total for v in mixed(expected | {"": 1.0}, rows | {"": own})]
    )


def test_mirror_descent() -> None:
    direction, weights, first, second = two_steps(MirrorDescent(0.5))
    own_before, rows_before = listed(first)
    own, rows = listed(second)
    before = {OWN: own_before} | rows_before
    scale = max(math.sqrt(dot(r, r)) for r in before.values()) * math.sqrt(dot(own, own))
    raised = {k: math.exp(0.5 * dot(own, r) / scale) for k, r in before.items()}
    expected = {k: w / sum(raised.values()) for k, w in raised.items()}
    assert weights == pytest.approx(expected)
    assert direction == pytest.approx(mixed(expected, {OWN: own} | rows))


def test_first_order() -> None:
    direction, weights, first, second = two_steps(FirstOrder(0.5))
    own_before, rows_before = listed(first)
    own, rows = listed(second)
    worth = {
        k: max(0.0, dot(own, r) / math.sqrt(dot(r, r)))
        for k, r in ({OWN: own_before} | rows_before).items()
    }
    expected = {k: 0.5 * 0.25 + 0.5 * w / sum(worth.values()) for k, w in worth.items()}
    assert weights == pytest.approx(expected)
    assert direction == pytest.approx(mixed(expected, {OWN: own} | rows))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_scale_and_order_do_not_matter(rule: Any) -> None:
    """Gradients a thousand times larger give a direction as much larger; peers in another order, the same."""
    states = [rule.init(torch.zeros(4))] * 3
    for seed in range(5):
        g = gradients(seed)
        assert g.rows is not None
        turned = Gradients(g.own, rows=g.rows.flip(0), names=g.names[::-1])
        scaled = Gradients(1000 * g.own, rows=1000 * g.rows, names=g.names)
        directions = []
        for i, each in enumerate((g, turned, scaled)):
            direction, states[i] = rule(each, states[i])
            directions.append(direction)
        torch.testing.assert_close(directions[1], directions[0])
        torch.testing.assert_close(directions[2] / 1000, directions[0])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_with_every_peer_gone_it_is_alone(rule: Any) -> None:
    g = gradients(0)
    state = rule(g, rule.init(g.own))[1]
    gone = Gradients(g.own, rows=torch.empty(0, 4, dtype=torch.float64), names=(), answered=0.0)
    direction, state = rule(gone, state)
    torch.testing.assert_close(direction, g.own, rtol=1e-15, atol=0)
    assert state["weight"] == 0.0


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_training_by_it_prefers_users_alike(rule: Any, tmp_path: Any) -> None:
    truth = torch.tensor([1.0, -2.0, 0.5])

    def user(name: str, n: int, weights: Tensor) -> coterie.User:
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        inputs = torch.randn(n, 3, generator=generator)
        return coterie.User(
            name, inputs, (inputs @ weights + 0.5 * torch.randn(n, generator=generator))[:, None]
        )

    me, peers = user("me", 200, truth), [user("alike", 200, truth), user("contrary", 200, -truth)]
    settings: dict[str, Any] = {
        "optimizer": torch.optim.SGD,
        "lr": 0.02,
        "steps": 60,
        "progress": False,
    }
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    whole = coterie.train(model, mse_loss, me, peers, rule, **settings)
    assert weights_in(whole.state)["alike"] > weights_in(whole.state)["contrary"]
    stopping: Any = [lambda step: step.step == 30]
    coterie.train(model, mse_loss, me, peers, rule, out=tmp_path, hooks=stopping, **settings)
    resumed = coterie.train(model, mse_loss, me, peers, rule, out=tmp_path, resume=True, **settings)
    assert torch.equal(resumed.state["tau"], whole.state["tau"])
    assert all(
        torch.equal(a, b)
        for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_who_does_not_answer_is_known_again(rule: Any) -> None:
    """Peers that answer in another order, or not at all in a step, are told apart by name."""
    state, other = rule.init(torch.zeros(4)), rule.init(torch.zeros(4))
    for step in range(6):
        g = gradients(step)
        assert g.rows is not None
        kept = [0, 2] if step in (0, 3) else [0, 1, 2]
        names, left_out = (
            tuple(NAMES[k] for k in kept),
            {NAMES[k]: "no answer" for k in {0, 1, 2} - {*kept}},
        )
        some = Gradients(
            g.own, rows=g.rows[kept], names=names, left_out=left_out, answered=len(kept) / 3
        )
        back = Gradients(
            g.own,
            rows=g.rows[kept[::-1]],
            names=names[::-1],
            left_out=left_out,
            answered=len(kept) / 3,
        )
        direction, state = rule(some, state)
        mirrored, other = rule(back, other)
        torch.testing.assert_close(mirrored, direction)
        assert weights_in(state) == pytest.approx(weights_in(other))
        assert set(weights_in(state)) - {OWN} == set(NAMES)
        if step == 3 and isinstance(rule, CosineSimilarity | SimilarityGate):
            assert weights_in(state)["b"] == 0
    if isinstance(rule, WeightErosion) and g.rows is not None:
        before, after = state, rule(Gradients(g.own, rows=g.rows[:2], names=NAMES[:2]), state)[1]
        assert weights_in(after)["c"] == weights_in(before)["c"] > weights_in(after)["a"]


def test_first_order_where_nobody_helps() -> None:
    """Weights stay as they were where user 0's loss falls along nobody's last gradient."""
    rule, g = FirstOrder(0.5), gradients(0)
    state = rule(gradients(1), rule(g, rule.init(g.own))[1])[1]
    assert g.rows is not None
    ahead = rule(Gradients(g.own, rows=g.own.expand(3, -1), names=NAMES), state)[1]
    back = rule(Gradients(-g.own, rows=g.rows, names=NAMES), ahead)[1]
    assert torch.equal(back["tau"], ahead["tau"])


def own_mean(output: Tensor, targets: Tensor) -> Tensor:
    """A loss that vmap does not take."""
    return ((output - targets) ** 2).mean() * math.exp(0 * float(output.detach().mean().item()))


def test_rows_by_layer_are_captured_where_vmap_fails() -> None:
    me, *peers = (
        coterie.User(name, torch.randn(9, 3), torch.randn(9, 1)) for name in ("me", *NAMES)
    )
    rule, settings = (
        SimilarityGate(0.5),
        {"steps": 3, "capture": True, "progress": False, "measure": False},
    )
    run = coterie.train(nn.Linear(3, 1), own_mean, me, peers, rule, **settings)  # type: ignore[arg-type]
    assert not run.record.configuration.capture.startswith("off")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_step_asks_the_host_for_nothing(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    g, again = gradients(0), gradients(1)
    state = rule(g, rule.init(g.own))[1]

    def refused(*_: Any) -> Any:
        raise AssertionError("the host waits for the device")

    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "numpy", "cpu", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, refused)
    rule(again, state)
    monkeypatch.undo()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_captured_steps_are_the_same(rule: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    me, *peers = (
        coterie.User(
            name, torch.randn(40, 3, generator=generator), torch.randn(40, 1, generator=generator)
        )
        for name in ("me", *NAMES)
    )
    settings: dict[str, Any] = {
        "optimizer": torch.optim.SGD,
        "lr": 0.02,
        "steps": 100,
        "progress": False,
    }
    runs = []
    for capture in (False, True):
        torch.manual_seed(0)
        runs.append(
            coterie.train(nn.Linear(3, 1), mse_loss, me, peers, rule, capture=capture, **settings)
        )
    one_by_one, captured = runs
    assert captured.record.configuration.capture != "off"
    assert not captured.record.configuration.capture.startswith("off")
    assert torch.equal(captured.model.weight, one_by_one.model.weight)  # type: ignore[arg-type]
    assert weights_in(captured.state) == weights_in(one_by_one.state)
    assert captured.record.end.tau == one_by_one.record.end.tau
    assert [p.weight for p in captured.record.points] == [
        p.weight for p in one_by_one.record.points
    ]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: CosineSimilarity(1.5), r"`alpha` must lie in \[0, 1\], got 1.5"),
        (lambda: SimilarityGate(-0.1), "`alpha`"),
        (lambda: WeightErosion(-1.0), "`penalty` must not be negative, got -1.0"),
        (lambda: MirrorDescent(0.0), "`rate` must be a finite number above 0, got 0.0"),
        (lambda: FirstOrder(1.0), r"`memory` must lie in \[0, 1\), got 1.0"),
        (lambda: CosineSimilarity(0.5)(Gradients(torch.zeros(2)), {}), "every peer's gradient"),
    ],
)
def test_wrong_knobs_are_named(wrong: Any, message: str) -> None:
    with pytest.raises(KnobError, match=message):
        wrong()
