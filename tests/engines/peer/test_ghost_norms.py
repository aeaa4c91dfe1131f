"""Clipped sums by layer against a plain loop over examples, and which models are taken."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coterie import User
from coterie.engines.in_process.passes import Passes
from coterie.engines.peer.ghost_norms import MARGIN, clipped_sum_by_layer, takes
from coterie.engines.peer.private_gradients import COMPARED, PrivateGradients
from coterie.privacy import Privacy
from coterie.privacy.accountant import Event

N = 7
CLASSES = nn.functional.cross_entropy
Case = tuple[Callable[[], nn.Module], tuple[int, ...]]
CASES: dict[str, Case] = {
    "layers": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)),
        (6,),
    ),
    "images": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.Sequential(nn.Conv2d(4, 6, 2, groups=2, dilation=2), nn.AvgPool2d(2)),
            nn.Flatten(),
            nn.Linear(6, 3),
        ),
        (2, 8, 8),
    ),
    "large images": (
        lambda: nn.Sequential(nn.Conv2d(1, 9, 5), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)),
        (1, 8, 8),
    ),
    "many channels": (
        lambda: nn.Sequential(nn.Conv2d(8, 16, 3, groups=2), nn.Flatten(), nn.Linear(64, 3)),
        (8, 4, 4),
    ),
    "sequences": (
        lambda: nn.Sequential(
            nn.Linear(4, 20), nn.GELU(), nn.Linear(20, 5), nn.Flatten(), nn.Linear(30, 3)
        ),
        (6, 4),
    ),
}


def batch(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(-1, 1, N).view(-1, *[1] * len(shape))
    return torch.randn(N, *shape, generator=generator) * scale, torch.arange(N) % 3


@pytest.mark.parametrize("name", CASES)
def test_the_sum_is_a_plain_loops(name: str) -> None:
    torch.manual_seed(0)
    make, shape = CASES[name]
    passes, (inputs, targets) = Passes(make(), CLASSES), batch(shape)
    assert takes(passes)
    x = passes.parameters.vector() * 1.1
    rows = torch.stack([passes.single(x, inputs[[k]], targets[[k]])[0] for k in range(N)]).double()
    norms = rows.norm(dim=1) * (1 + MARGIN)
    clip = float(norms.median())
    expected = (rows * (clip / norms.clamp(min=clip))[:, None]).sum(0)
    total, holds = clipped_sum_by_layer(passes, x, inputs, targets, clip)
    assert bool(holds.all())
    torch.testing.assert_close(total.double(), expected, rtol=1e-4, atol=1e-5)
    assert shape == inputs.shape[1:]
    for k in range(N):
        one, _ = clipped_sum_by_layer(passes, x, inputs[[k]], targets[[k]], clip)
        assert float(one.double().norm()) <= clip, "no example adds more"
    inputs[2] = math.inf
    assert (~clipped_sum_by_layer(passes, x, inputs, targets, clip)[1]).nonzero().tolist() == [[2]]


def cancelling() -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model, sequences that hardly change, and weights by which their terms cancel to a ten-thousandth."""
    model = nn.Sequential(
        nn.Linear(32, 32, bias=False), nn.Flatten(), nn.Linear(128, 1, bias=False)
    )
    last = torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None] * torch.randn(32)
    return model, torch.randn(1, 1, 32) + 1e-4 * torch.randn(N, 4, 32), 1e7 * last


def half() -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model in half precision, in which a norm has three digits."""
    model = nn.Sequential(
        nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 1, bias=False)
    ).bfloat16()
    return model, torch.randn(N, 16).bfloat16(), torch.randn(16)


@pytest.mark.parametrize("case", [cancelling, half])
def test_no_example_adds_more_wherever_the_point_is(
    case: Callable[[], tuple[nn.Module, Tensor, Tensor]],
) -> None:
    """User 0 chooses the point: also one at which the model's precision has too few digits for a norm."""
    torch.manual_seed(0)
    model, inputs, last = case()
    usual = torch.randn(COMPARED, *inputs.shape[1:]).to(inputs)
    user = User("a", torch.cat([usual, inputs]), torch.randn(COMPARED + N, 1).to(inputs))
    private = PrivateGradients(
        user, Passes(model, nn.functional.mse_loss), Privacy(1.0, 1e-3, 0.1, 1.0), None
    )
    x = private.passes.parameters.vector().clone()
    x[-last.numel() :] = last.flatten()
    ones = torch.split(torch.arange(len(user)), 1)
    each = torch.stack([private._clipped(x, one, None, 0, 0) for one in ones]).double()
    assert float(each.norm(dim=1).max()) <= 0.1001
    assert float(each[COMPARED:].norm(dim=1).min()) >= 0.0998
    total = private.gradient(x, event=Event(1.0, 1.0), added=0.0).double() * len(user)
    assert float((total - each.sum(0)).norm()) <= (2e-3 if x.dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("nested", [lambda x: (x,), lambda x: {"input": x}])
def test_inputs_by_name_are_passed_one_by_one(nested: Callable[[Tensor], Any]) -> None:
    inputs, targets = batch((6,))
    made = []
    for given in (inputs, nested(inputs)):
        torch.manual_seed(0)
        passes = Passes(nn.Sequential(nn.Linear(6, 3)), CLASSES)
        made.append(
            PrivateGradients(User("a", given, targets), passes, Privacy(1.0, 1e-3, 1.0, 1.0), None)
        )
    assert [private._by_layer for private in made] == [True, False]
    x = made[0].passes.parameters.vector()
    sums = [private._clipped(x, torch.arange(N), None, 0, 0).double() for private in made]
    torch.testing.assert_close(*sums, rtol=1e-5, atol=1e-5)


class Own(nn.Module):
    """A model of one's own: what it does is not shown by its class."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        mixed: Tensor = self.linear(inputs - inputs.mean(0))
        return mixed


SHARED = nn.Linear(6, 6)


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (Own(), CLASSES),
        (nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)), CLASSES),
        (nn.Sequential(nn.BatchNorm1d(6).eval(), nn.Linear(6, 3)), CLASSES),
        (nn.Sequential(nn.Linear(6, 3), nn.ReLU(inplace=True)), CLASSES),
        (nn.Sequential(nn.Flatten(0), nn.Linear(6, 3)), CLASSES),
        (nn.Sequential(SHARED, nn.Tanh(), SHARED), CLASSES),
        (nn.Linear(6, 3), lambda output, y: 2 * CLASSES(output, y)),
        (
            nn.Sequential(nn.Linear(6, 6).requires_grad_(requires_grad=False), nn.Linear(6, 3)),
            CLASSES,
        ),
    ],
)
def test_only_what_cannot_mix_is_taken(model: nn.Module, loss: Callable[..., Tensor]) -> None:
    assert not takes(Passes(model, loss))


HOOKS = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")


@pytest.mark.parametrize("place", [f"register_{hook}" for hook in HOOKS])
def test_a_model_that_somebody_hooked_is_not_taken(place: str) -> None:
    """A hook may let examples meet, or change what a layer does."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    handle = getattr(model[1], place)(lambda *_: None)
    assert not takes(Passes(model, CLASSES))
    handle.remove()
    assert takes(Passes(model, CLASSES))
