"""Bad input: a typed error that names the value and the remedy, before a step is taken or a file written."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as f
from torch.utils.data import TensorDataset

import coterie
from coterie.errors import (
    CheckpointError,
    CoterieError,
    DataError,
    GradientError,
    KnobError,
    ModelError,
)
from coterie.recording import checkpoint

INPUTS = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(8) % 4
ME, PEER = coterie.User("me", INPUTS, CLASSES), coterie.User("ward 3", INPUTS, CLASSES)


def user(name: str, inputs: Any = INPUTS, targets: Any = CLASSES, **held_out: Any) -> coterie.User:
    return coterie.User(name, inputs, targets, **held_out)


def attempt(out: Path, make: Callable[[], dict[str, Any]]) -> None:
    """Train with settings of which one is bad."""
    settings: dict[str, Any] = {
        "model": nn.Linear(3, 4),
        "loss": f.cross_entropy,
        "me": ME,
        "peers": [PEER],
        "rule": coterie.WeightedAveraging(0.5),
        "steps": 3,
        "out": out,
        "hooks": [lambda _: pytest.fail("a step was taken")],
    }
    coterie.train(**(settings | make()))


NO_NUMBER = torch.tensor([0.0, math.nan, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0])


def _compiled(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about itself
        return torch.compile(model)


CASES: dict[str, tuple[type[CoterieError], str, Callable[[], dict[str, Any]]]] = {
    "alpha": (
        KnobError,
        r"`alpha` must lie in \[0, 1\], got 1.2",
        lambda: {"rule": coterie.WeightedAveraging(1.2)},
    ),
    "beta": (
        KnobError,
        r"`beta` must lie in \[0, 1\], got -1",
        lambda: {"rule": coterie.BiasCorrection(0.5, -1)},
    ),
    "a wrapped model": (
        ModelError,
        "the model is wrapped in DataParallel; give what is inside: `model.module`",
        lambda: {"model": nn.DataParallel(nn.Linear(3, 4))},
    ),
    "compiled": (
        ModelError,
        "the model is compiled; give what it was compiled from, `model._orig_mod`",
        lambda: {"model": _compiled(nn.Linear(3, 4))},
    ),
    "a model of another type": (
        ModelError,
        r"does not take user 0's inputs of shape \(8, 3\): .*; change the inputs or the model",
        lambda: {"model": nn.Linear(3, 4).double()},
    ),
    "norm bound": (
        KnobError,
        "`norm_bound` must be at least 1, or None, got 0.5",
        lambda: {"norm_bound": 0.5},
    ),
    "negative tau": (
        KnobError,
        r"`tau\['ward 3'\]` must be finite and not negative, got -1",
        lambda: {"rule": coterie.WeightedAveraging(0.5, {"ward 3": -1})},
    ),
    "non-summing tau": (
        KnobError,
        "`tau` must sum to 1, got 0.7; divide each weight by the sum",
        lambda: {"rule": coterie.WeightedAveraging(0.5, {"ward 3": 0.7})},
    ),
    "unknown peer": (
        KnobError,
        "`tau` names an unknown peer 'ward 9'; the peers are 'ward 3'",
        lambda: {"rule": coterie.WeightedAveraging(0.5, {"ward 9": 1.0})},
    ),
    "no peers": (
        KnobError,
        r"no peers: pass at least one, or use `rule=coterie.Alone\(\)`",
        lambda: {"peers": []},
    ),
    "empty user": (
        DataError,
        "user 'ward 5' has no examples; leave it out, or give it some",
        lambda: {"peers": [user("ward 5", INPUTS[:0], CLASSES[:0])]},
    ),
    "empty dataset": (
        DataError,
        "user 'ward 5' has no examples",
        lambda: {
            "peers": [coterie.User.from_dataset("ward 5", TensorDataset(INPUTS[:0], CLASSES[:0]))]
        },
    ),
    "one class": (
        DataError,
        r"user 'me' has examples of one class only \(2\).*give it examples of another, or leave it out",
        lambda: {"me": user("me", targets=torch.full((8,), 2))},
    ),
    "one class of a peer": (
        DataError,
        "user 'ward 5' has examples of one class only",
        lambda: {"peers": [user("ward 5", targets=torch.zeros(8, dtype=torch.long))]},
    ),
    "one class of two": (
        DataError,
        r"user 'me' has examples of one class only \(1.0\)",
        lambda: {
            "me": user("me", targets=torch.ones(8, 1)),
            "peers": [user("ward 5", targets=torch.eye(2).repeat(4, 1)[:, :1])],
            "model": nn.Linear(3, 1),
            "loss": f.binary_cross_entropy_with_logits,
        },
    ),
    "NaN target": (
        DataError,
        r"a target of user 'me' is NaN \(example 1\); drop the examples without a target",
        lambda: {"me": user("me", targets=NO_NUMBER)},
    ),
    "NaN target held out": (
        DataError,
        "a target of validation set of 'me' is NaN",
        lambda: {"me": user("me", validation=(INPUTS, NO_NUMBER))},
    ),
    "fewer targets": (
        DataError,
        "8 inputs but 7 targets",
        lambda: {"me": user("me", targets=CLASSES[:7])},
    ),
    "same name": (
        DataError,
        "users must have different names",
        lambda: {"peers": [PEER, user("ward 3")]},
    ),
    "my name": (DataError, "users must have different names", lambda: {"peers": [user("me")]}),
    "another shape": (
        DataError,
        r"inputs of peer 'ward 5' \(\(2,\), torch.float32\) are not like those of 'me' \(\(3,\), torch.float32\)",
        lambda: {"peers": [user("ward 5", INPUTS[:, :2])]},
    ),
    "another dtype": (
        DataError,
        r"inputs of peer 'ward 5' .*torch.float64.*; prepare both in the same way",
        lambda: {"peers": [user("ward 5", INPUTS.double())]},
    ),
    "held out of another shape": (
        DataError,
        "the inputs of the validation set .* are not like those of 'me'",
        lambda: {"me": user("me", validation=(INPUTS[:, :2], CLASSES))},
    ),
    "held out of another kind": (
        DataError,
        "the targets of the test set .* are not like those of 'me'",
        lambda: {"me": user("me", test=(INPUTS, CLASSES.float()))},
    ),
    "class without an output": (
        ModelError,
        "user 'ward 5' has the class 4, but the model has outputs for classes 0 to 3; .* widen the last layer",
        lambda: {"peers": [user("ward 5", targets=torch.arange(8))]},
    ),
    "negative class": (
        ModelError,
        "user 'ward 5' has the class -1",
        lambda: {"peers": [user("ward 5", targets=torch.arange(8) % 3 - 1)]},
    ),
    "class without an output, held out": (
        ModelError,
        "user 'me' has the class 4",
        lambda: {"me": user("me", test=(INPUTS, torch.arange(8)))},
    ),
    "own class without an output": (
        ModelError,
        r"output \(\(8, 2\)\) does not fit the loss with targets \(8,\): .*; change the last layer, the targets or",
        lambda: {"model": nn.Linear(3, 2)},
    ),
    "inputs that do not fit": (
        ModelError,
        r"the model does not take user 0's inputs of shape \(8, 3\)",
        lambda: {"model": nn.Linear(5, 4)},
    ),
    "inputs of another dtype": (
        ModelError,
        "the model does not take user 0's inputs",
        lambda: {"model": nn.Linear(3, 4).double()},
    ),
    "output that would broadcast": (
        ModelError,
        r"output \(\(8, 1\)\) does not fit the loss with targets \(8,\)",
        lambda: {
            "model": nn.Linear(3, 1),
            "loss": f.mse_loss,
            "me": user("me", targets=INPUTS[:, 0]),
            "peers": [user("ward 5", targets=INPUTS[:, 0])],
        },
    ),
    "output not a tensor": (
        ModelError,
        r"output \(tuple\) does not fit the loss",
        lambda: {"model": nn.LSTM(3, 4)},
    ),
    "loss of many numbers": (
        ModelError,
        "the loss must return one number, the mean over the batch",
        lambda: {"loss": lambda output, target: f.cross_entropy(output, target, reduction="none")},
    ),
    "loss not a tensor": (
        ModelError,
        "the loss must return one number",
        lambda: {"loss": lambda output, target: float(f.cross_entropy(output, target))},
    ),
    "loss without a gradient": (
        ModelError,
        "the loss of the model's output has no gradient",
        lambda: {"loss": lambda output, target: (output.argmax(1) != target).float().mean()},
    ),
    "nothing to train": (ModelError, "no trainable parameter", lambda: {"model": nn.Identity()}),
    "steps": (
        KnobError,
        "`steps` must be a whole number, at least 1(, or None)?, got 0",
        lambda: {"steps": 0},
    ),
    "batch size": (
        KnobError,
        "`batch_size` must be a whole number, at least 1(, or None)?, got 0",
        lambda: {"batch_size": 0},
    ),
    "evaluate every": (
        KnobError,
        "`evaluate_every` must be a whole number, at least 1(, or None)?, got 0",
        lambda: {"evaluate_every": 0},
    ),
    "checkpoint every": (
        KnobError,
        "`checkpoint_every` must be a whole number, at least 1(, or None)?, got -2",
        lambda: {"checkpoint_every": -2},
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bad_input(
    tmp_path: Path, case: tuple[type[CoterieError], str, Callable[[], dict[str, Any]]]
) -> None:
    kind, message, make = case
    with pytest.raises(kind, match=f"(?s){message}") as caught:
        attempt(tmp_path / "run", make)
    assert type(caught.value) is kind
    assert not (tmp_path / "run").exists()


def test_good_input_is_taken(tmp_path: Path) -> None:
    """The settings around a bad value are good: without one, the first step is taken."""
    with pytest.raises(pytest.fail.Exception, match="a step was taken"):
        attempt(tmp_path / "run", dict)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_damaged_checkpoint(tmp_path: Path, damage: str) -> None:
    attempt(tmp_path, lambda: {"hooks": []})
    path = checkpoint.saved(tmp_path / "checkpoints")[-1]
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 4
    path.write_bytes(
        data[: {"truncated": len(data) // 2, "flipped": len(data), "empty": 0}[damage]]
    )
    kept = path.read_bytes()
    with pytest.warns(
        UserWarning, match=r"set aside as step-00000003\.ckpt\.damaged; going on from step-00000002"
    ):
        attempt(tmp_path, lambda: {"resume": True, "steps": 3, "hooks": []})
    assert path.with_name(path.name + ".damaged").read_bytes() == kept
    assert checkpoint.load(checkpoint.saved(tmp_path / "checkpoints")[-1])


def test_kinds_of_errors() -> None:
    """What is raised can be caught as coterie's, or as what it is in Python's terms."""
    for kind in (KnobError, DataError, ModelError):
        assert issubclass(kind, CoterieError)
        assert issubclass(kind, ValueError)
    assert issubclass(GradientError, CoterieError)
    assert issubclass(GradientError, ArithmeticError)
    assert issubclass(CheckpointError, CoterieError)


def test_a_mean_of_class_weights_is_no_misfit() -> None:
    """Losses of torch with arguments are not mistaken for misfits."""
    weights: Tensor = torch.tensor([1.0, 2.0, 3.0, 4.0])
    run = coterie.train(
        nn.Linear(3, 4),
        nn.CrossEntropyLoss(weights, label_smoothing=0.1),
        ME,
        [PEER],
        coterie.WeightedAveraging(0.5),
        steps=2,
    )
    assert run.step == 2


def test_a_device_that_is_not_there_is_named() -> None:
    users = [coterie.User(name, torch.randn(4, 2), torch.randn(4, 1)) for name in ("me", "a")]
    with pytest.raises(
        KnobError, match=r"`device` 'cuda:99' cannot be used here: .*; leave it out for the CPU"
    ):
        coterie.train(
            nn.Linear(2, 1),
            nn.functional.mse_loss,
            users[0],
            users[1:],
            coterie.Alone(),
            device="cuda:99",
        )


def test_a_peer_that_cannot_be_used_is_left_out_with_a_sentence() -> None:
    one, other = (
        user("one class", targets=torch.zeros(8, dtype=torch.long)),
        user("other columns", INPUTS[:, :2]),
    )
    problem: dict[str, Any] = {
        "model": nn.Linear(3, 4),
        "loss": f.cross_entropy,
        "me": ME,
        "steps": 2,
    }
    with pytest.warns(UserWarning, match="is left out") as told:
        run = coterie.train(
            **problem, peers=[one, PEER, other], rule=coterie.WeightedAveraging(0.5)
        )
    assert [str(each.message).partition(":")[0] for each in told] == [
        "the peer 'one class' is left out",
        "the peer 'other columns' is left out",
    ]
    assert list(run.record.configuration.peers) == ["ward 3"]
    alike = coterie.train(**problem, peers=[PEER], rule=coterie.WeightedAveraging(0.5))
    assert run.record.curve("own_loss") == alike.record.curve("own_loss")
    with pytest.raises(DataError, match="'one class' has examples of one class only"):
        coterie.train(
            **problem, peers=[one, PEER], rule=coterie.WeightedAveraging(0.5, {"one class": 1.0})
        )
    with (
        pytest.warns(UserWarning, match="left out"),
        pytest.raises(DataError, match="no peer can be used"),
    ):
        coterie.train(**problem, peers=[one, other], rule=coterie.WeightedAveraging(0.5))


def test_gradients_that_are_off_are_told(tmp_path: Path) -> None:
    with (
        torch.no_grad(),
        pytest.raises(ModelError, match=r"gradients are off: call it outside of `torch.no_grad`"),
    ):
        attempt(tmp_path / "run", dict)


def test_a_run_is_shown_in_a_line() -> None:
    run = coterie.train(nn.Linear(3, 4), f.cross_entropy, ME, [PEER], coterie.Alone(), steps=2)
    assert repr(run) == (
        "Run(record=Record(rule=Alone(), steps=2, ended), step=2, best_step=2, test={}, stopped=None, unwritten='')"
    )
