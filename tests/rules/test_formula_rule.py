"""A rule of one's own on `FormulaRule`: in `train`, captured, in `train_many`, with memory and with functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as f

import coterie
from coterie.rules import FormulaRule, Knob
from coterie.rules.formula import combined, corrected_step, followed
from coterie.rules.rule import knob_names

Users = Callable[..., list[coterie.User]]


@dataclass(frozen=True)
class Clipped(FormulaRule):
    """Average with a clipped difference; a running mean of it is kept."""

    alpha: Knob
    limit: Knob = 0.05
    name: str = "clipped"
    tau: Mapping[str, float] | None = None

    memory = ("mean",)

    def direction(
        self, own: Tensor, peers: Tensor, state: Mapping[str, Any], knobs: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        gap = torch.minimum(
            torch.maximum(peers - own, own * 0 - knobs["limit"]), own * 0 + knobs["limit"]
        )
        return own + knobs["alpha"] * gap, {"mean": torch.lerp(state["mean"], gap, 0.5)}


def falling(step: int) -> float:
    return 1 / (step + 2)


def trained(users: list[coterie.User], rule: coterie.Rule, **options: Any) -> coterie.Run:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "steps": 8,
        "batch_size": 4,
        "lr": 0.1,
        "guard": "off",
        "measure": False,
    }
    return coterie.train(
        nn.Linear(3, 3).double(), f.cross_entropy, users[0], users[1:], rule, **settings | options
    )


def test_knobs_are_the_fields_annotated_so() -> None:
    assert knob_names(Clipped(0.5)) == ["alpha", "limit"]
    assert knob_names(coterie.BiasCorrection(0.5, 0.1)) == ["alpha", "beta"]
    assert Clipped(falling).next_knobs({"step": 2, "weight": 0.0}) == (
        {"alpha": 0.25, "limit": 0.05},
        {"step": 3, "weight": 0.25},
    )


def test_annotations_may_be_evaluated() -> None:
    made: Any = dataclass(frozen=True)(
        type(
            "Made",
            (Clipped,),
            {"__annotations__": {"more": Knob, "less": float}, "more": 0.5, "less": 0.5},
        )
    )
    assert knob_names(made(0.1)) == ["alpha", "limit", "more"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("alpha", [0.6, falling])
def test_captured_steps_are_the_same(make_users: Users, alpha: Knob) -> None:
    users = make_users()
    eager, captured = (trained(users, Clipped(alpha), capture=capture) for capture in (False, True))
    assert captured.record.configuration.capture == "one program"
    torch.testing.assert_close(
        captured.model.state_dict(), eager.model.state_dict(), rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(captured.state["mean"], eager.state["mean"], rtol=1e-12, atol=1e-12)
    assert (
        captured.state["weight"] == eager.state["weight"] == (0.6 if alpha == 0.6 else falling(7))
    )


def test_nobody_answers_is_the_own_gradient_to_the_bit() -> None:
    rule, own = Clipped(0.5), torch.tensor([-0.0, 1.5])
    direction, state = rule(coterie.Gradients(own, peers=own + 1, answered=0.0), rule.init(own))
    assert direction is own
    assert (state["step"], state["weight"]) == (1, 0.0)
    assert not state["mean"].any()


def test_the_formula_takes_rows() -> None:
    """Rows with columns of knobs are what each row is by itself."""
    generator = torch.Generator().manual_seed(0)
    own, peers, c = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    alpha, beta = torch.rand(2, 4, 1, generator=generator, dtype=torch.float64)
    stacked = corrected_step(own, peers, c, alpha=alpha, beta=beta, correction=0.5)
    for row in range(4):
        a, b = float(alpha[row]), float(beta[row])
        direction, following = corrected_step(
            own[row], peers[row], c[row], alpha=a, beta=b, correction=0.5
        )
        assert torch.equal(stacked[0][row], direction)
        assert torch.equal(stacked[1][row], following)
        expected = (1 - a) * own[row] + a * (peers[row] - 0.5 * c[row])
        torch.testing.assert_close(combined(own[row], peers[row], a, c[row], 0.5), expected)
        expected = (1 - b) * c[row] + b * (peers[row] - own[row])
        torch.testing.assert_close(followed(c[row], own[row], peers[row], b), expected)


def test_a_rule_that_is_no_dataclass_is_told_so() -> None:
    class Plain(FormulaRule):
        def direction(self, own: Tensor, peers: Tensor, state: Any, knobs: Any) -> Any:
            return own, {}

    rule = Plain()
    with pytest.raises(
        coterie.errors.KnobError,
        match=r"the rule Plain is no dataclass; write `@dataclass\(frozen=True\)`",
    ):
        rule(coterie.Gradients(own=torch.ones(2), peers=torch.ones(2)), rule.init(torch.zeros(2)))


def test_a_direction_of_another_shape_is_told_with_the_rule(make_users: Users) -> None:
    @dataclass(frozen=True)
    class Short(FormulaRule):
        def direction(self, own: Tensor, peers: Tensor, state: Any, knobs: Any) -> Any:
            return own[:2], {}

    with pytest.raises(
        coterie.errors.UserCodeError, match=r"`Short` raised .* of shape \(2,\), not \("
    ):
        trained(make_users(), Short())
