"""How batches pass through a model: low precision, layout and compilation leave the objective as it is."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import coterie
from coterie import ForwardOptions
from coterie.errors import KnobError
from coterie.gradients.parameters import Parameters


def images(name: str, seed: int) -> coterie.User:
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(12, 3, 8, 8, generator=random)
    held_out = (torch.randn(30, 3, 8, 8, generator=random), torch.arange(30) % 4)
    return coterie.User(name, inputs, torch.arange(12) % 4, validation=held_out, test=held_out)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4))


EVERYONE = [images("me", 0), images("a", 1), images("b", 2)]


def gradients(forward_options: ForwardOptions, *, rows: bool) -> coterie.Gradients:
    model = network()
    engine = coterie.InProcess(
        model, cross_entropy, EVERYONE[0], EVERYONE[1:], forward_options=forward_options
    )
    x = Parameters(model).share()
    engine.passes.parameters = Parameters(model)
    return engine.gradients(x, 0, {"a": 0.25, "b": 0.75}, rows)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize(
    ("forward_options", "error"),
    [(ForwardOptions(channels_last=True), 1e-5), (ForwardOptions(autocast=torch.bfloat16), 2e-2)],
    ids=["channels last", "bfloat16"],
)
def test_gradients_are_those_of_full_precision_up_to_rounding(
    forward_options: ForwardOptions, error: float, rows: bool
) -> None:
    plain, other = gradients(ForwardOptions(), rows=rows), gradients(forward_options, rows=rows)
    for ours, theirs in ((other.own, plain.own), (other.average()[0], plain.average()[0])):
        assert ours.dtype == torch.float32
        assert 0 <= float((ours - theirs).norm() / theirs.norm()) <= error
    assert (
        float((other.own - plain.own).norm() / plain.own.norm()) > 1e-4
        or forward_options.autocast is None
    )


class Spy(nn.Module):
    """A layer that notes in what precision and layout it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 8)
        self.seen: set[tuple[bool, bool, bool]] = set()

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output."""
        last = inputs.is_contiguous(memory_format=torch.channels_last)
        hidden = self.layer(inputs)
        self.seen.add((torch.is_grad_enabled(), hidden.dtype == torch.bfloat16, last))
        out: Tensor = hidden.flatten(1)
        return out


def test_training_passes_so_and_evaluation_in_full_precision() -> None:
    options: dict[str, Any] = {"steps": 3, "guard": "held-out", "measure": False, "lr": 0.01}
    forward_options = ForwardOptions(autocast=torch.bfloat16, channels_last=True)
    model = Spy()
    seen: set[tuple[bool, bool, bool]] = set()

    def note(step: coterie.Step) -> None:
        if step.step == 1:
            step.model.seen = seen  # type: ignore[assignment]  # after the probe, which passes in full precision

    coterie.train(
        model,
        cross_entropy,
        EVERYONE[0],
        EVERYONE[1:],
        coterie.BiasCorrection(0.5, 0.1),
        forward_options=forward_options,
        hooks=[note],
        **options,
    )
    assert seen == {(True, True, True), (False, False, False)}


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # torch's own
def test_a_compiled_model_trains_to_the_same_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch, "compile", partial(torch.compile, backend="aot_eager")
    )  # spares half a minute of C++
    everyone = [
        coterie.User(u.name, u.examples.inputs[:, 0, 0], u.examples.targets)  # type: ignore[attr-defined]
        for u in EVERYONE
    ]
    options: dict[str, Any] = {
        "rule": coterie.WeightedAveraging(0.5),
        "steps": 4,
        "lr": 0.1,
        "measure": False,
    }
    model = nn.Linear(8, 4)
    plain, compiled = (
        coterie.train(
            model,
            cross_entropy,
            everyone[0],
            everyone[1:],
            forward_options=ForwardOptions(compile=flag),
            **options,
        )
        for flag in (False, True)
    )
    torch.testing.assert_close(compiled.model.weight, plain.model.weight)
    assert compiled.record.configuration.engine["compile"] == "True"


def test_what_cannot_be_had_is_told() -> None:
    with pytest.raises(KnobError, match=r"`autocast` must be None or torch.bfloat16"):
        ForwardOptions(autocast=torch.float16)
    engine = coterie.InProcess(network(), cross_entropy, EVERYONE[0], EVERYONE[1:])
    with pytest.raises(KnobError, match="`forward_options` is for users in this process"):
        coterie.train(
            network(),
            cross_entropy,
            EVERYONE[0],
            EVERYONE[1:],
            forward_options=ForwardOptions(channels_last=True),
            engine=engine,
        )
