"""Bad inputs of the Python interface: each must give a `CoterieError` before a step is taken or a file written."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as f
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

import coterie
from coterie import User, aggregators, methods
from coterie.rules.similarity import MirrorDescent, WeightErosion

Attempt = Callable[[Path], object]
"""What must be refused; whatever it writes lies in the folder."""

INPUTS = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(8) % 4
ME, PEER = (
    User("me", INPUTS, CLASSES, validation=(INPUTS, CLASSES)),
    User("ward 3", INPUTS, CLASSES),
)
MODEL = nn.Linear(3, 4)
NAN = math.nan


class Unread(Dataset[Any]):
    """A data set that cannot be read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        raise OSError("the disk is gone")


class Unshown:
    """A value that cannot even be shown."""

    def __repr__(self) -> str:
        raise ValueError("no")


def failing(*_: Any) -> Any:
    """Raise, as code of one's own may."""
    raise ZeroDivisionError("of your own")


def holes(tensor: Tensor, value: float = NAN) -> Tensor:
    """Return a tensor with one number that is none."""
    other = tensor.clone().float()
    other.view(-1)[1] = value
    return other


def stream(draw: Callable[..., Any]) -> User:
    return User.stream("me", draw)


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4))


SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)
NOT_A_COUNT: list[Any] = [0, -1, 1.9, 2.0, NAN, math.inf, "3", True, [3], 1j]
NOT_A_SIZE: list[Any] = [0, -1.0, NAN, math.inf, "0.1", True, [0.1]]

TRAIN: dict[str, list[Any]] = {
    "model": [
        None,
        "linear",
        nn.Linear,
        3,
        lambda x: x,
        nn.Identity(),
        lazy(),
        nn.Linear(3, 4, device="meta"),
        nn.Linear(3, 4, dtype=torch.complex64),
        nn.Linear(5, 4),
        nn.Linear(3, 2),
        nn.Linear(3, 4).double(),
        [nn.Linear(3, 4)],
        nn.LSTM(3, 4),
    ],
    "loss": [
        None,
        "mse",
        nn.CrossEntropyLoss,
        3,
        nn.CrossEntropyLoss(reduction="sum"),
        functools.partial(f.cross_entropy, reduction="sum"),
        failing,
        lambda o, t: 3.0,
        lambda o, t: None,
        lambda o: o.mean(),
    ],
    "me": [
        None,
        "me",
        (INPUTS, CLASSES),
        [ME],
        TensorDataset(INPUTS, CLASSES),
        DataLoader(TensorDataset(INPUTS)),
    ],
    "peers": [
        None,
        PEER,
        "ward",
        3,
        {"ward": PEER},
        [None],
        [(INPUTS, CLASSES)],
        [PEER, PEER],
        [ME],
        [],
    ],
    "rule": [
        "no such rule",
        coterie.WeightedAveraging,
        0.5,
        [coterie.Alone()],
        lambda g, s: (g.own, s),
        methods.FedAvg,
    ],
    "optimizer": [
        "adam",
        3,
        [SGD],
        (SGD, SGD),
        nn.Linear,
        torch.optim.Optimizer,
        lambda p: None,
        failing,
        torch.optim.SGD(nn.Linear(3, 4).parameters(), lr=0.1),
        torch.optim.LBFGS,
        torch.optim.Adam([INPUTS.clone()]),
    ],
    "lr": [*NOT_A_SIZE, "fast", 1j],
    "clip_norm": [*NOT_A_SIZE, "small"],
    "scheduler": [
        "cosine",
        3,
        StepLR,
        StepLR(SGD, 1),
        lambda o: None,
        failing,
        [StepLR],
        lambda: None,
    ],
    "steps": [*NOT_A_COUNT, None],
    "epochs": NOT_A_COUNT,
    "batch_size": [*NOT_A_COUNT, None, 2.7],
    "seed": [2**63, 0.5, NAN, "0", None, True],
    "device": ["gpu", "cuda:99", 3.5, ["cpu"], ""],
    "metrics": [
        [f.mse_loss],
        f.mse_loss,
        "accuracy",
        {"a": None},
        {3: f.mse_loss},
        {"": f.mse_loss},
        {"step": f.mse_loss},
        {"loss": f.mse_loss},
        {"a": failing},
        {"a": lambda o, t: None},
        {"a": lambda o: 1},
    ],
    "evaluate_every": NOT_A_COUNT,
    "hooks": [print, coterie.Hook(), "hook", [coterie.Hook], [3], [None], 3],
    "out": [3, "", ["run"], b"\0", "\0"],
    "trackers": ["tensorboard", ["unknown"], [3], 3],
    "checkpoint_every": NOT_A_COUNT,
    "resume": ["yes", 1, None],
    "progress": ["yes", 1],
    "guard": ["on", None, True, 3, ["off"]],
    "measure": ["yes", 1],
    "capture": ["x", 1, 0.0],
    "forward_options": [None, "bf16", torch.bfloat16, {}],
    "engine": [None, "torch", 3, lambda *_, **__: None, [coterie.InProcess]],
}
"""For each argument of `train`, values that it must refuse."""

USERS: dict[str, Callable[[], User]] = {
    "no name": lambda: User("", INPUTS, CLASSES),
    "None as a name": lambda: User(None, INPUTS, CLASSES),  # type: ignore[arg-type]
    "half a character in a name": lambda: User("\ud800", INPUTS, CLASSES),
    "a line break in a name": lambda: User("a\nb", INPUTS, CLASSES),
    "sparse inputs": lambda: User("a", INPUTS.to_sparse(), CLASSES),
    "sparse targets": lambda: User("a", INPUTS, CLASSES.to_sparse()),
    "inputs without numbers": lambda: User("a", torch.empty(8, 3, device="meta"), CLASSES),
    "None for inputs": lambda: User("a", None, CLASSES),  # type: ignore[arg-type]
    "a text": lambda: User("a", "inputs", CLASSES),
    "texts": lambda: User("a", [["x"]] * 8, CLASSES),
    "objects": lambda: User("a", [[object()]] * 8, CLASSES),
    "ragged": lambda: User("a", [[1.0], [1.0, 2.0]], [0, 1]),
    "one number": lambda: User("a", 1.0, 1.0),  # type: ignore[arg-type]
    "fewer targets": lambda: User("a", INPUTS, CLASSES[:7]),
    "nobody's examples": lambda: User("a", INPUTS[:0], CLASSES[:0]),
    "a target that is none": lambda: User("a", INPUTS, holes(CLASSES)),
    "validation not a pair": lambda: User("a", INPUTS, CLASSES, validation=INPUTS),  # type: ignore[arg-type]
    "validation of three": lambda: User("a", INPUTS, CLASSES, validation=(INPUTS, CLASSES, 3)),  # type: ignore[arg-type]
    "validation a number": lambda: User("a", INPUTS, CLASSES, validation=0.2),  # type: ignore[arg-type]
    "test a text": lambda: User("a", INPUTS, CLASSES, test="test"),  # type: ignore[arg-type]
    "a loader": lambda: User.from_dataset("a", DataLoader(TensorDataset(INPUTS, CLASSES))),  # type: ignore[arg-type]
    "a loader for inputs": lambda: User("a", DataLoader(TensorDataset(INPUTS, CLASSES))),  # type: ignore[arg-type]
    "a data set for inputs": lambda: User("a", TensorDataset(INPUTS, CLASSES)),  # type: ignore[arg-type]
    "a loader to validate by": lambda: User("a", INPUTS, CLASSES, validation=DataLoader(Unread())),  # type: ignore[arg-type]
    "None for a data set": lambda: User.from_dataset("a", None),  # type: ignore[arg-type]
    "a list for a data set": lambda: User.from_dataset("a", [1, 2, 3]),  # type: ignore[arg-type]
    "a stream that is none": lambda: User.stream("a", 3),  # type: ignore[arg-type]
    "a stream of a class's name": lambda: User.stream("a", "draw"),  # type: ignore[arg-type]
}
"""Users that cannot be made."""

OWN: dict[str, Callable[[], dict[str, Any]]] = {
    "NaN validation inputs": lambda: {
        "me": User("me", INPUTS, CLASSES, validation=(holes(INPUTS), CLASSES))
    },
    "NaN test inputs": lambda: {"me": User("me", INPUTS, CLASSES, test=(holes(INPUTS), CLASSES))},
    "one class": lambda: {"me": User("me", INPUTS, CLASSES * 0)},
    "class too many": lambda: {"me": User("me", INPUTS, CLASSES + 1)},
    "another shape": lambda: {"peers": [User("a", INPUTS[:, :2], CLASSES)]},
    "another dtype": lambda: {"peers": [User("a", INPUTS.double(), CLASSES)]},
    "unread": lambda: {"me": User.from_dataset("me", Unread())},
    "an unread peer": lambda: {"peers": [User.from_dataset("a", Unread())]},
    "unread validation": lambda: {"me": User("me", INPUTS, CLASSES, validation=Unread())},
    "a stream that raises": lambda: {"me": stream(failing)},
    "a stream of the wrong size": lambda: {
        "me": stream(lambda size, seed, step: (INPUTS[:2], CLASSES[:2]))
    },
    "a stream of one part": lambda: {"me": stream(lambda size, seed, step: INPUTS[:size])},
    "a stream of nothing": lambda: {"me": stream(lambda size, seed, step: None)},
    "a stream of unequal parts": lambda: {
        "me": stream(lambda size, seed, step: (INPUTS[:size], CLASSES[:2]))
    },
    "a stream of two arguments": lambda: {"me": stream(lambda size, seed: None)},
    "a stream in epochs": lambda: {"me": stream(failing), "epochs": 2},
    "steps and epochs": lambda: {"steps": 7, "epochs": 2},
    "resume without a folder": lambda: {"resume": True, "out": None},
    "an optimizer and lr": lambda: {"model": MODEL, "optimizer": SGD, "lr": 0.1},
    "a method with an optimizer": lambda: {"rule": methods.FedAvg(), "optimizer": torch.optim.Adam},
    "a method with a norm": lambda: {"rule": methods.FedAvg(), "clip_norm": 1.0},
    "a method with a norm bound": lambda: {"rule": methods.FedAvg(), "norm_bound": 2.0},
    "tuning that never begins": lambda: {"rule": methods.FineTuning(3), "steps": 3},
    "tuning of a sample that never begins": lambda: {
        "rule": methods.Sampled(methods.FineTuning(9), 1),
        "steps": 3,
    },
    "trackers without a folder": lambda: {"trackers": ["mlflow"], "out": None},
    "a guard without validation": lambda: {"me": User("me", INPUTS, CLASSES), "guard": "held-out"},
    "a value that cannot be shown": lambda: {"steps": Unshown()},
    "an unknown peer": lambda: {"rule": coterie.WeightedAveraging(0.5, {"nobody": 1.0})},
    "too few peers": lambda: {
        "rule": coterie.WeightedAveraging(0.5, aggregator=aggregators.TrimmedMean(3))
    },
}
"""Settings of `train` that do not go together, and examples that nothing can be learned from."""

KNOBS: dict[str, Callable[[], object]] = {
    "alpha 1.2": lambda: coterie.WeightedAveraging(1.2),
    "alpha NaN": lambda: coterie.WeightedAveraging(NAN),
    "alpha a text": lambda: coterie.WeightedAveraging("half"),  # type: ignore[arg-type]
    "alpha None": lambda: coterie.WeightedAveraging(None),  # type: ignore[arg-type]
    "beta -1": lambda: coterie.BiasCorrection(0.5, -1),
    "start": lambda: coterie.BiasCorrection(0.5, 0.1, start="last"),  # type: ignore[arg-type]
    "tau a list": lambda: coterie.WeightedAveraging(0.5, [0.5]),  # type: ignore[arg-type]
    "tau of texts": lambda: coterie.WeightedAveraging(0.5, {"a": "half"}),  # type: ignore[dict-item]
    "tau NaN": lambda: coterie.WeightedAveraging(0.5, {"a": NAN}),
    "tau beyond 1": lambda: coterie.WeightedAveraging(0.5, {"a": 2.0}),
    "aggregator a text": lambda: coterie.WeightedAveraging(0.5, aggregator="median"),  # type: ignore[arg-type]
    "aggregator a class": lambda: coterie.WeightedAveraging(0.5, aggregator=aggregators.Mean),  # type: ignore[arg-type]
    "rates": lambda: coterie.AdaptiveAveraging(rates=(-1.0,)),
    "rates a text": lambda: coterie.AdaptiveAveraging(rates="much"),  # type: ignore[arg-type]
    "trimmed": lambda: aggregators.TrimmedMean(1.5),  # type: ignore[arg-type]
    "radius a text": lambda: aggregators.CentredClipping("1"),  # type: ignore[arg-type]
    "tolerance": lambda: aggregators.GeometricMedian(2.0),
    "local steps 2.5": lambda: methods.FedAvg(2.5),  # type: ignore[arg-type]
    "local steps a text": lambda: methods.Scaffold("3"),  # type: ignore[arg-type]
    "shares": lambda: methods.FedAvg(shares="half"),  # type: ignore[arg-type]
    "rounds": lambda: methods.FineTuning(0),
    "a rule for a method": lambda: methods.Ditto(together=coterie.Alone()),  # type: ignore[arg-type]
    "a class for a method": lambda: methods.Sampled(methods.FedAvg, 2),  # type: ignore[arg-type]
    "probability a text": lambda: methods.L2GD(probability="often"),  # type: ignore[arg-type]
    "momentum": lambda: methods.Mime(3, momentum=1.0),
    "rate a text": lambda: methods.MVR(3, rate="slow"),  # type: ignore[arg-type]
    "option": lambda: methods.Scaffold(3, option=3),  # type: ignore[arg-type]
    "clusters": lambda: methods.HypCluster(clusters=0),
    "penalty": lambda: WeightErosion(-1.0),
    "penalty a text": lambda: WeightErosion("much"),  # type: ignore[arg-type]
    "descent": lambda: MirrorDescent(NAN),
    "autocast": lambda: coterie.ForwardOptions(autocast="bf16"),  # type: ignore[arg-type]
    "compile": lambda: coterie.ForwardOptions(compile="yes"),  # type: ignore[arg-type]
    "engine's batch": lambda: coterie.InProcess(MODEL, f.cross_entropy, ME, [PEER], batch_size=2.7),  # type: ignore[arg-type]
    "engine's seed": lambda: coterie.InProcess(MODEL, f.cross_entropy, ME, [PEER], seed=0.5),  # type: ignore[arg-type]
    "engine's user": lambda: coterie.InProcess(MODEL, f.cross_entropy, None, [PEER]),  # type: ignore[arg-type]
    "engine's peers": lambda: coterie.InProcess(MODEL, f.cross_entropy, ME, PEER),  # type: ignore[arg-type]
    "runs None": lambda: coterie.train_many(None),  # type: ignore[arg-type]
    "runs of one": lambda: coterie.train_many(coterie.RunSpec(MODEL, f.cross_entropy, ME, [PEER])),  # type: ignore[arg-type]
    "runs of texts": lambda: coterie.train_many(["run"]),  # type: ignore[list-item]
    "runs of a class": lambda: coterie.train_many(
        [coterie.RunSpec(MODEL, f.cross_entropy, ME, [PEER], rule=coterie.WeightedAveraging)]
    ),
}
"""What is refused where it is made."""


def train(folder: Path, /, **changed: Any) -> object:
    """Train with good settings, apart from what is changed; a step that is taken is told."""
    settings: dict[str, Any] = {"model": MODEL, "loss": f.cross_entropy, "me": ME, "peers": [PEER]}
    settings |= {"rule": coterie.WeightedAveraging(0.5), "out": folder / "run", "hooks": [_stepped]}
    if "epochs" not in changed:
        settings["steps"] = 3
    return coterie.train(**(settings | changed))


def _stepped(step: coterie.Step) -> None:
    raise AssertionError("a step was taken")


def _made(make: Callable[[], object], _: Path) -> object:
    return make()


def _trained(make: Callable[[], dict[str, Any]], folder: Path) -> object:
    return train(folder, **make())


def _all() -> Iterator[tuple[str, Attempt]]:
    for name, values in TRAIN.items():
        for place, value in enumerate(values):
            yield f"{name} {place}: {_short(value)}", functools.partial(train, **{name: value})
    for name, make in USERS.items():
        yield f"user: {name}", functools.partial(_made, make)
    for name, make_settings in OWN.items():
        yield f"train: {name}", functools.partial(_trained, make_settings)
    for name, make_knob in KNOBS.items():
        yield f"knob: {name}", functools.partial(_made, make_knob)
    yield "out: a file", _into_a_file


def _short(value: object) -> str:
    text = (
        type(value).__name__
        if isinstance(value, nn.Module | Tensor | np.ndarray | User)
        else repr(value)
    )
    return text.partition(" at 0x")[0].partition("\n")[0][:40]


def _into_a_file(folder: Path) -> object:
    (folder / "run").touch()
    return train(folder)


BAD_INPUTS: dict[str, Attempt] = dict(_all())
"""All of them by name."""
