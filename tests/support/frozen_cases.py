"""Runs whose numbers are frozen: every rule, engine, method, model and way to train, each small.

`CASES` has them by name. What each gives is compared, bit by bit, with `tests/frozen.json` (`support.frozen`).
Names of the library may change and numbers may not: all that is known of its names stands in the first section,
and only that section may be edited when they change.
"""

from __future__ import annotations

import copy
import functools
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as f
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import Dataset

Users: TypeAlias = Sequence[Any]
"""User 0 and its peers."""
Parts: TypeAlias = dict[str, dict[str, Tensor]]
"""What a case gives: parameters, points, numbers and the rule's state, each as vectors of float64 by name."""

# ---------------------------------------------------------------------------------------------------------------
# The library's names. Edit this section, and nothing below it, when they change.

from tests.support import processes  # noqa: E402

import coterie  # noqa: E402  # this section stands by itself
from coterie import aggregators, attacks, methods  # noqa: E402
from coterie.data import from_table  # noqa: E402
from coterie.engines.flare.engine import Flare  # noqa: E402
from coterie.engines.flare.sites import LocalSites  # noqa: E402
from coterie.engines.in_process.forward_options import ForwardOptions  # noqa: E402
from coterie.engines.in_process.passes import Passes  # noqa: E402
from coterie.engines.peer import Peer  # noqa: E402
from coterie.errors import GradientError  # noqa: E402
from coterie.rules import similarity  # noqa: E402
from coterie.rules.streams import StreamAveraging  # noqa: E402
from coterie.tables.fit import fit  # noqa: E402
from coterie.tables.predict import predict  # noqa: E402
from coterie.theory.quadratic import NoisyQuadratic, Quadratic  # noqa: E402

THINGS: dict[str, Callable[..., Any]] = {
    "user": coterie.User,
    "dataset user": coterie.User.from_dataset,
    "stream": coterie.User.stream,
    "passing": ForwardOptions,
    # rules
    "alone": coterie.Alone,
    "averaging": coterie.WeightedAveraging,
    "pooled": coterie.WeightedAveraging.pooled,
    "data interpolation": methods.data_interpolation,
    "correction": coterie.BiasCorrection,
    "oracle": coterie.OracleCorrection,
    "adaptive": coterie.AdaptiveAveraging,
    "stream averaging": StreamAveraging,
    "cosine": similarity.CosineSimilarity,
    "gate": similarity.SimilarityGate,
    "erosion": similarity.WeightErosion,
    "mirror": similarity.MirrorDescent,
    "first order": similarity.FirstOrder,
    # robust aggregators
    "mean": aggregators.Mean,
    "median": aggregators.CoordinateMedian,
    "trimmed": aggregators.TrimmedMean,
    "geometric": aggregators.GeometricMedian,
    "krum": aggregators.Krum,
    "multi-krum": aggregators.MultiKrum,
    "clipping": aggregators.CentredClipping,
    "mixing": aggregators.NearestNeighbourMixing,
    "bucketing": aggregators.Bucketing,
    # attacks
    "scaled": attacks.Scaled,
    "sign flip": attacks.sign_flip,
    "inner product": attacks.inner_product,
    "little": attacks.LittleIsEnough,
    "mimic": attacks.Mimic,
    "drift": attacks.AlternatingDrift,
    "flipped": attacks.flip_labels,
    # methods
    "APFL": methods.APFL,
    "Ditto": methods.Ditto,
    "FedAvg": methods.FedAvg,
    "AFL": methods.AFL,
    "FedFomo": methods.FedFomo,
    "FedPer": methods.FedPer,
    "FedProx": methods.FedProx,
    "FedRep": methods.FedRep,
    "PFedMe": methods.PFedMe,
    "QFFL": methods.QFFL,
    "Sampled": methods.Sampled,
    "FineTuning": methods.FineTuning,
    "HypCluster": methods.HypCluster,
    "L2GD": methods.L2GD,
    "MVR": methods.MVR,
    "Mapper": methods.Mapper,
    "Mime": methods.Mime,
    "PerFedAvg": methods.PerFedAvg,
    "SAGA": methods.SAGA,
    "SVRG": methods.SVRG,
    "Scaffold": methods.Scaffold,
    "Selfish": methods.Selfish,
    "UserCentric": methods.UserCentric,
    "Waffle": methods.Waffle,
    "averaging weights": methods.averaging_weights,
}
KEYWORDS: dict[str, str] = {
    "pool": "aggregator",
    "passing": "forward_options",
    "f": "n_byzantine",
    "callbacks": "hooks",
}
"""Keywords of things and of training that have another name now: "pool" or "FedAvg.pool" → the name now."""
RENAMED: dict[str, str] = {
    "numbers_sent": "sent",
    "numbers_received": "received",
    "bytes_sent": "sent",
    "bytes_received": "received",
}
"""Keys of points, configurations, ends and states that have another name now: "sent" or "costs.sent" (the path by
the names below) → the name below."""


def keywords(thing: str, knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords by the names that they have now."""
    return {KEYWORDS.get(f"{thing}.{name}", KEYWORDS.get(name, name)): value for name, value in knobs.items()}


def make(thing: str, *values: Any, **knobs: Any) -> Any:
    """Return a thing of the library; what is positional here must stay so, or be named here."""
    return THINGS[thing](*values, **keywords(thing, knobs))


def train(model: nn.Module, loss: Any, users: Users, rule: Any, **options: Any) -> Any:
    """Return a run."""
    return coterie.train(model, loss, users[0], users[1:], rule, progress=False, **keywords("train", options))


def train_many(model: nn.Module, loss: Any, wanted: Sequence[Mapping[str, Any]], **options: Any) -> list[Any]:
    """Return runs, each wanted with `users`, `rule` and what else is its own."""
    specs = []
    for each in wanted:
        me, *peers = each["users"]
        own = {name: value for name, value in each.items() if name not in ("users", "model")}
        start = each.get("model", model)
        specs.append(coterie.RunSpec(start, loss, me, peers, **keywords("train_many", {**options, **own})))
    return coterie.train_many(specs, progress=False)


def is_method(rule: Any) -> bool:
    """Say whether this is a method, which has no optimizer."""
    return isinstance(rule, methods.Method)


def told_of(step: Any) -> list[float]:
    """Return what a callback is told in numbers, the step first."""
    return [step.step, step.own_loss, step.weight]


def in_process(*problem: Any, **settings: Any) -> Any:
    """Make an engine, as do those below."""
    return coterie.InProcess(*problem, **settings)


def one_by_one(*problem: Any, **settings: Any) -> Any:
    """Make an engine that takes users one by one."""
    return coterie.InProcess(*problem, one_by_one=True, **settings)


def flare(model: nn.Module, loss: Any, me: Any, peers: Users, **settings: Any) -> Any:
    """Make an engine whose sites are in this process."""
    sites = LocalSites({peer.name: Peer(peer, Passes(changed(model), loss)) for peer in peers})
    return Flare(model, loss, me, sites=sites, names=[peer.name for peer in peers], **settings)


def attacked(attackers: Sequence[str], attack: Any) -> Callable[..., Any]:
    """Return what makes an engine under attack."""
    return lambda *problem, **settings: attacks.Attacked(in_process(*problem, **settings), attackers, attack)


def distributed(**settings: Any) -> AbstractContextManager[Any]:
    """Return what makes an engine whose peers are in processes of their own."""
    return processes.torch_distributed(**settings)


def quadratics(own: Mapping[str, Any], peers: Sequence[Mapping[str, Any]], **more: Any) -> Any:
    """Return noisy quadratics, for the two below."""
    return NoisyQuadratic(Quadratic(**own), [Quadratic(**peer) for peer in peers], **more)


def engine_of(problem: Any, seed: int) -> Any:
    """Return the engine of noisy quadratics."""
    return problem.engine(seed=seed)


def oracle_of(problem: Any, alpha: float, **knobs: Any) -> Any:
    """Return the correction by their true bias."""
    return problem.oracle(alpha, **knobs)


def models_of(run: Any) -> dict[str, nn.Module]:
    """Return the model, and the last personal model of every user where there are any."""
    return {"model": run.model, **{f"model of {name}": model for name, model in run.models.items()}}


def points_of(run: Any) -> list[dict[str, Any]]:
    """Return the record's points."""
    return [point.to_plain() for point in run.record.points]


def state_of(run: Any) -> dict[str, Any]:
    """Return the rule's last state."""
    return dict(run.state)


def numbers_of(run: Any) -> dict[str, Any]:
    """Return what else is a number, or can be told by one."""
    configuration, end = run.record.configuration, run.record.end.to_plain()
    guard = end["guard"] or {}
    kept = ("bytes_sent", "bytes_received", "rounding")  # the rest is time
    return {
        "step": run.step,
        "best step": run.best_step,
        "test": dict(run.test),
        "choice": configuration.choice,
        "account": end.get("account", {}),
        "estimates": configuration.estimates,
        "one program": "one program" in (configuration.capture, configuration.runs[:11]),
        "tau": end["tau"],
        "costs": end["costs"],
        "left out": {name: sum(reasons.values()) for name, reasons in end["left_out"].items()},
        "guard": {
            "alone": guard.get("served") == "alone",
            "difference": guard.get("difference"),
            "error": guard.get("error"),
        },
        "traffic": {name: {key: each[key] for key in kept} for name, each in end["traffic"].items()},
    }


def stopped_run(stop: Callable[[], Any]) -> Any:
    """Return the run that a gradient ended which is not finite."""
    try:
        stop()
    except GradientError as error:
        return error.run
    raise AssertionError("all gradients were finite")


def evaluate(model: nn.Module, loss: Any, user: Any, **more: Any) -> dict[str, float]:
    """Return the loss and the metrics on a user's validation set."""
    return coterie.evaluate(model, loss, user.validation, **more)


def draws_of(user: Any, size: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Return a batch."""
    found: tuple[Tensor, Tensor] = user.batch(size, seed=seed, step=step)
    return found


def table_runs(
    table: Path, rule: Any, model: str, out: Path, task: Mapping[str, Any], **settings: Any
) -> tuple[dict[str, Any], pd.DataFrame, tuple[float, float]]:
    """Return the runs on a table, the predictions for it, and the difference to training alone with its error."""
    fitted = fit(from_table(table, **task), rule, model, out, progress=False, **settings)
    assert fitted is not None
    comparison = fitted.record.end.comparison
    one = None if comparison is None else next(iter(comparison.measures.values()))
    difference = (0.0, 0.0) if one is None else (one.difference, one.error)
    told = predict(out, pd.read_csv(table))
    probabilities = told.drop(columns="prediction")
    if len(probabilities.columns):
        told = told[["prediction"]].assign(probability=probabilities.max(axis=1))
    return {"run": fitted}, told, difference


# ---------------------------------------------------------------------------------------------------------------
# What a run gives, as vectors by name.


def parts_of(runs: Mapping[str, Any], **more: Any) -> Parts:
    """Return what runs give, by name of the run where there are several, with some numbers more."""
    found: Parts = {"parameters": {}, "points": {}, "numbers": dict(flattened(more)), "state": {}}
    for name, run in runs.items():
        before = f"{name}: " if len(runs) > 1 else ""
        for whose, model in models_of(run).items():
            found["parameters"][before + whose] = flat(model.state_dict().values())
        of_run = {"points": curves(points_of(run)), "numbers": numbers_of(run), "state": state_of(run)}
        for part, values in of_run.items():
            found[part] |= {before + path: vector for path, vector in flattened(values)}
    return found


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return tensors as one vector; every value is one of float64."""
    return torch.cat([tensor.detach().cpu().double().flatten() for tensor in tensors])


def curves(points: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return each quantity over all points, not a number where it was not recorded."""
    names = sorted({name for point in points for name in point})
    return {name: torch.tensor([float(p.get(name, np.nan)) for p in points], dtype=torch.float64) for name in names}


def flattened(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield all numbers in nested mappings and sequences, with their paths by the names that are frozen."""
    if isinstance(value, Tensor):
        yield path, flat([value])
    elif isinstance(value, bool | int | float | np.number | np.bool_):
        yield path, torch.tensor([float(value)], dtype=torch.float64)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            longer = f"{path}.{name}" if path else str(name)
            known = RENAMED.get(longer, RENAMED.get(str(name)))
            yield from flattened(inner, longer if known is None else f"{path}.{known}" if path else known)
    elif isinstance(value, list | tuple | np.ndarray) and len(value):
        if all(isinstance(inner, bool | int | float | np.number | np.bool_) for inner in value):
            yield path, torch.tensor([float(inner) for inner in value], dtype=torch.float64)
        else:
            for k, inner in enumerate(value):
                yield from flattened(inner, f"{path}.{k}")


# ---------------------------------------------------------------------------------------------------------------
# Users and models, from NumPy's generator, which is the same everywhere.

NAMES = ("me", "a", "b", "c", "d", "e", "f")
TAU = {"a": 0.5, "b": 0.2, "d": 0.3}


def normal(*shape: int, seed: int) -> Tensor:
    """Return standard normal numbers."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def labelled(n: int, seed: int, *, shift: float = 0.0, kind: str = "classes") -> tuple[Tensor, Tensor]:
    """Return examples: what decides of their targets is shifted from user to user."""
    shape = {"images": (n, 1, 5, 5), "series": (n, 4, 3)}.get(kind, (n, 5))
    inputs = normal(*shape, seed=seed)
    truth = normal(inputs[0].numel(), 3, seed=7) + shift * normal(inputs[0].numel(), 3, seed=seed + 1)
    scores = inputs.flatten(1) @ truth + 0.5 * normal(n, 3, seed=seed + 2)
    if kind == "numbers":
        return inputs.float(), scores[:, :1].float()
    if kind == "binary":
        return inputs.float(), (scores[:, :1] > 0).float()
    targets = scores.argmax(1)
    targets[:3] = torch.arange(3)  # everybody has every class
    if kind == "tokens":
        return (inputs * 2 + 5).round().long().clamp(0, 10), targets
    return inputs.float(), targets


def users(
    sizes: Sequence[int] = (20, 26, 7, 15, 21),
    *,
    kind: str = "classes",
    validation: int = 0,
    shift: float = 0.4,
    dtype: torch.dtype | None = None,
) -> list[Any]:
    """Return user 0, with a test set, and its peers, one of them smaller than a batch."""

    def some(n: int, seed: int, by: float) -> tuple[Tensor, Tensor]:
        inputs, targets = labelled(n, seed, shift=by, kind=kind)
        if dtype is None:
            return inputs, targets
        return inputs.to(dtype), targets.to(dtype) if targets.is_floating_point() else targets

    held_out = {"validation": some(validation, 91, 0.0)} if validation else {}
    me = make("user", NAMES[0], *some(sizes[0], 11, 0.0), test=some(12, 92, 0.0), **held_out)
    others = zip(NAMES[1:], sizes[1:], strict=False)
    return [me, *(make("user", name, *some(n, 20 + 10 * k, shift)) for k, (name, n) in enumerate(others))]


def spoiled(examples: tuple[Tensor, Tensor], *rows: int) -> tuple[Tensor, Tensor]:
    """Return examples with inputs that are not numbers, which batches hold now and then."""
    inputs, targets = examples
    inputs[list(rows)] = float("nan")
    return inputs, targets


def with_bad_peer(*rows: int) -> list[Any]:
    """Return users one of whom has gradients that are not finite at some steps."""
    everyone = users()
    return [everyone[0], make("user", "a", *spoiled(labelled(26, 20, shift=0.4), *(rows or (5,)))), *everyone[2:]]


class Tied(nn.Module):
    """A layer used twice, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.frozen, self.out = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.other = nn.Linear(5, 5)
        self.other.weight = self.twice.weight
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.frozen(self.twice(torch.tanh(self.twice(inputs)))))
        found: Tensor = self.out(torch.tanh(self.other(hidden)))
        return found


class Tokens(nn.Module):
    """An embedding, a norm, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.out = nn.Embedding(11, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.out(self.norm(self.table(inputs)).mean(1))
        return found


class Recurrent(nn.Module):
    """A layer whose formula nobody wrote down."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.RNNCell(3, 4), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs.new_zeros(len(inputs), 4)
        for k in range(inputs.shape[1]):
            hidden = self.cell(inputs[:, k], hidden)
        found: Tensor = self.out(hidden)
        return found


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def _cnn(*more: nn.Module) -> nn.Module:
    # No bias: before a norm its gradient would be rounding, which Adam makes as long as any.
    return nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), *more, nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "linear": (lambda: nn.Linear(5, 3), "classes"),
    "mlp": (_mlp, "classes"),
    "regression": (lambda: nn.Linear(5, 1), "numbers"),
    "binary": (lambda: nn.Linear(5, 1), "binary"),
    "tied": (Tied, "classes"),
    "conv": (lambda: _cnn(nn.GroupNorm(2, 4)), "images"),
    "batch norm": (lambda: _cnn(nn.BatchNorm2d(4)), "images"),
    "batch norm, dropout": (lambda: _cnn(nn.BatchNorm2d(4), nn.Dropout(0.3)), "images"),
    "dropout": (lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 3)), "classes"),
    "tokens": (Tokens, "tokens"),
    "recurrent": (Recurrent, "series"),
}
"""By name, how a model is made and the kind of its examples."""


def network(name: str = "mlp", seed: int = 3) -> nn.Module:
    """Return a model whose parameters do not depend on torch's generator."""
    model = MODELS[name][0]()
    with torch.no_grad():
        for k, parameter in enumerate(model.parameters()):
            centre = parameter if isinstance(norm_of(model, parameter), nn.Module) else torch.zeros(())
            scale = 0.5 if parameter.ndim > 1 else 0.1
            parameter.copy_(centre + scale * normal(*parameter.shape, seed=100 * seed + k).float())
    return model


def norm_of(model: nn.Module, parameter: Tensor) -> nn.Module | None:
    """Return the norm that a parameter is of, which begins at 1 or 0; None for other layers."""
    norms = [
        module for module in model.modules() if isinstance(module, nn.GroupNorm | nn.LayerNorm | nn.BatchNorm2d)
    ]
    return next((module for module in norms if any(parameter is p for p in module.parameters())), None)


def changed(model: nn.Module) -> nn.Module:
    """Return a copy whose trained parameters and buffers are elsewhere, as at a site before the first request."""
    there = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in (*(p for p in there.parameters() if p.requires_grad), *there.buffers()):
            tensor.zero_()
    return there


LOSSES: dict[str, Any] = {"numbers": f.mse_loss, "binary": f.binary_cross_entropy_with_logits}


def a_run(rule: Any, model: str = "mlp", everyone: Users | None = None, **options: Any) -> Any:
    """Return a run by a rule, or by a function of the users that gives one; small, and the same every time."""
    kind = MODELS[model][1]
    everyone = users(kind=kind) if everyone is None else everyone
    made = network(model)
    plain: dict[str, Any] = {"optimizer": SGD, "lr": 0.1, "steps": 8, "batch_size": 9, "evaluate_every": 3}
    options = plain | {"measure": False, "guard": "off", "seed": 5} | options
    if is_method(rule):
        options.pop("optimizer")
    options = {name: value(made) if name == "optimizer of" else value for name, value in options.items()}
    if "optimizer of" in options:
        options["optimizer"] = options.pop("optimizer of")
        options.pop("lr")
    if callable(options.get("prepare")):
        made = options.pop("prepare")(made)
    return train(made, LOSSES.get(kind, f.cross_entropy), everyone, rule, **options)


def falling(step: int) -> float:
    """Return a knob that falls with the steps."""
    return 0.9 / (1 + 0.3 * step)


# ---------------------------------------------------------------------------------------------------------------
# The cases.

CASES: dict[str, Callable[[], Parts]] = {}
"""By name, what each gives."""
DRAWS: set[str] = set()
"""The cases that depend on torch's own generator, which is not the same on every machine."""
BITS: set[str] = set()
"""The cases that are far apart where one bit is: where bits decide of an order, a tie or a draw."""


def case(name: str, *, draws: bool = False, bits: bool = False) -> Callable[[Callable[[], Any]], None]:
    """Add a case, which gives a run, runs by name, or parts."""

    def add(work: Callable[[], Any]) -> None:
        if name in CASES:
            raise ValueError(f"two cases are called {name!r}")
        CASES[name] = functools.partial(_worked, work)
        if draws:
            DRAWS.add(name)
        if bits:
            BITS.add(name)

    return add


def _worked(work: Callable[[], Any]) -> Parts:
    found = work()
    if isinstance(found, dict):
        parts: Parts = found if "parameters" in found else parts_of(found)
        return parts
    return parts_of({"run": found})


Making: TypeAlias = Callable[[Users], Any]
"""A rule for some users."""

AGGREGATORS: dict[str, Callable[[], Any]] = {
    "mean": lambda: make("mean"),
    "median": lambda: make("median"),
    "trimmed": lambda: make("trimmed", f=1),
    "geometric": lambda: make("geometric"),
    "krum": lambda: make("krum", f=1),
    "multi-krum": lambda: make("multi-krum", f=1),
    "multi-krum, two": lambda: make("multi-krum", f=1, m=2),
    "clipping": lambda: make("clipping", radius=0.3),
    "clipping once": lambda: make("clipping", radius=0.5, iterations=1),
    "mixing, trimmed": lambda: make("mixing", f=1, then=make("trimmed", f=1)),
    "mixing, krum": lambda: make("mixing", f=1, then=make("krum", f=1)),
    "bucketing, median": lambda: make("bucketing", size=2, then=make("median")),
    "bucketing, geometric": lambda: make("bucketing", size=2, then=make("geometric"), seed=3),
}
ROWS: dict[str, Making] = {
    "cosine": lambda _: make("cosine", alpha=0.6),
    "gate": lambda _: make("gate", alpha=0.7),
    "erosion": lambda _: make("erosion", penalty=0.03),
    "mirror": lambda _: make("mirror", rate=0.5),
    "first order": lambda _: make("first order", memory=0.7),
}
PLAIN: dict[str, Making] = {
    "alone": lambda _: make("alone"),
    "averaging": lambda _: make("averaging", 0.6),
    "averaging, tau": lambda _: make("averaging", 0.7, TAU),
    "averaging, falling": lambda _: make("averaging", falling),
    "averaging, all": lambda _: make("averaging", 1.0),
    "correction": lambda _: make("correction", 0.7, 0.1),
    "correction, tau": lambda _: make("correction", 0.8, 0.2, TAU),
    "correction, half from zero": lambda _: make("correction", 0.6, 0.2, correction=0.5, start="zero"),
    "correction, paper": lambda _: make("correction", 0.9, 0.1, warm_up=False),
    "correction, falling": lambda _: make("correction", falling, falling, correction=0.7),
}
OTHER: dict[str, Making] = {
    "pooled": lambda everyone: make("pooled", everyone[0], everyone[1:]),
    "data interpolation": lambda everyone: make("data interpolation", everyone[0], everyone[1:], mixing=0.4),
    "oracle": lambda _: make("oracle", alpha=0.7, bias=lambda x: 0.05 * x, tau=TAU),
    **{
        f"averaging, {name}": lambda _, pool=pool: make("averaging", 0.7, pool=pool())  # type: ignore[misc]
        for name, pool in AGGREGATORS.items()
    },
    "correction, trimmed": lambda _: make("correction", 0.8, 0.2, pool=make("trimmed", f=1)),
    "correction, geometric": lambda _: make("correction", falling, 0.2, start="zero", pool=make("geometric")),
}
AUTO: dict[str, Making] = {
    "averaging, auto": lambda _: make("averaging", "auto"),
    "averaging, auto with tau": lambda _: make("averaging", "auto", TAU),
    "averaging, auto with aggregator": lambda _: make("averaging", "auto", pool=make("median")),
    "correction, auto": lambda _: make("correction", "auto", "auto"),
    "correction, auto alpha": lambda _: make("correction", "auto", 0.2, TAU),
    "correction, auto beta": lambda _: make("correction", 0.7, "auto", warm_up=False),
}


def rules_in_process() -> None:
    """Add every rule, with all peers together and one by one."""
    for name, rule in (PLAIN | ROWS | OTHER).items():
        sizes = (20, 26, 7, 15, 21, 12, 18) if name in OTHER else (20, 26, 7, 15, 21)  # aggregators like many

        @case(f"in process: {name}", bits="bucketing" in name)
        def _(rule: Making = rule, sizes: Sequence[int] = sizes) -> Any:
            everyone = users(sizes)
            return a_run(rule(everyone), everyone=everyone, measure=True)

        @case(f"one by one: {name}", bits="bucketing" in name)
        def _(rule: Making = rule, sizes: Sequence[int] = sizes) -> Any:
            everyone = users(sizes)
            return a_run(rule(everyone), everyone=everyone, engine=one_by_one, steps=5)

    for name, rule in AUTO.items():

        @case(f"in process: {name}")
        def _(rule: Making = rule) -> Any:
            return a_run(rule(()), optimizer=Adam, lr=0.02)

        @case(f"one by one: {name}")
        def _(rule: Making = rule) -> Any:
            return a_run(rule(()), engine=one_by_one, steps=4)

    for budget in (3, 3.5, 4.5):

        @case(f"in process: adaptive, {budget}")
        def _(budget: float = budget) -> Any:
            return a_run(make("adaptive", budget=budget), model="linear", steps=16, measure=True)

    @case("in process: adaptive, held out")
    def _() -> Any:
        everyone = users((14, 26, 15, 21), validation=10, shift=1.0)
        return a_run(make("adaptive", budget=3), everyone=everyone, steps=12, optimizer=Adam, lr=0.05)

    @case("in process: adaptive, batch norm")
    def _() -> Any:
        everyone = users((14, 15, 21), kind="images")
        return a_run(make("adaptive", budget=3), "batch norm", everyone, steps=6)

    @case("in process: nothing said")
    def _() -> Any:
        return a_run(None, "regression", users((8, 20, 11), kind="numbers"), steps=6)


def fresh(name: str, shift: float) -> Any:
    """Return a user who draws fresh examples."""

    def draw(size: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
        random = np.random.default_rng([seed, step])
        inputs = torch.from_numpy(random.standard_normal((size, 5)))
        truth = normal(5, 1, seed=7) + shift
        return inputs.float(), (inputs @ truth + torch.from_numpy(random.standard_normal((size, 1)))).float()

    return make("stream", name, draw, test=labelled(12, 92, kind="numbers"))


def streams() -> None:
    """Add users with fresh samples."""
    for name, rule in {
        "stream averaging": lambda: make("stream averaging", horizon=40),
        "adaptive": lambda: make("adaptive"),
        "averaging": lambda: make("averaging", 0.5),
        "correction, auto": lambda: make("correction", "auto", "auto"),
        "first order": lambda: make("first order"),
    }.items():

        @case(f"stream: {name}")
        def _(rule: Callable[[], Any] = rule) -> Any:
            everyone = [fresh(who, shift) for who, shift in {"me": 0.0, "a": 0.02, "b": 0.1, "c": 2.0}.items()]
            return a_run(rule(), "regression", everyone, steps=30, lr=0.02, batch_size=4, measure=True)

    @case("in process: stream averaging")
    def _() -> Any:
        return a_run(make("stream averaging", horizon=30), steps=26, evaluate_every=5)

    @case("one by one: stream averaging")
    def _() -> Any:
        return a_run(make("stream averaging", horizon=30), steps=22, engine=one_by_one)


def other_engines() -> None:
    """Add quadratics, sites, and peers in processes of their own."""
    for name, rule in (PLAIN | ROWS | AUTO | {"averaging, trimmed": OTHER["averaging, trimmed"]}).items():

        @case(f"flare: {name}")
        def _(rule: Making = rule) -> Any:
            return a_run(rule(()), engine=flare, steps=6)

    for name in ("averaging, tau", "correction", "mirror"):

        @case(f"flare: {name}, batch norm", draws=True)
        def _(rule: Making = (PLAIN | ROWS)[name]) -> Any:
            return a_run(rule(()), "batch norm, dropout", engine=flare, steps=5)

    chosen = ("averaging, tau", "averaging, falling", "correction", "correction, falling", "cosine", "mirror")
    several = {name: (PLAIN | ROWS)[name] for name in chosen} | {"auto": AUTO["correction, auto"]}
    several["averaging, krum"] = OTHER["averaging, krum"]
    ways: dict[str, dict[str, Any]] = {"gather": {"gather": True}, "reduce": {}, "bf16": {"compress": "bf16"}}
    for how, settings in ways.items():

        @case(f"distributed, {how}")
        def _(settings: dict[str, Any] = settings) -> Any:
            with distributed(**settings) as engine:
                some = several if not settings.get("compress") else {name: several[name] for name in chosen[:1]}
                return {name: a_run(rule(()), engine=engine, steps=6) for name, rule in some.items()}

        @case(f"distributed, {how}: batch norm", draws=True)
        def _(settings: dict[str, Any] = settings) -> Any:
            with distributed(**settings) as engine:
                return a_run(PLAIN["correction"](()), "batch norm, dropout", engine=engine, steps=5)

    for name, rule in (PLAIN | ROWS | {"averaging, trimmed": OTHER["averaging, trimmed"]}).items():
        if "tau" in name:
            continue  # of peers with other names

        @case(f"quadratic: {name}")
        def _(rule: Making = rule) -> Any:
            return quadratic_run(lambda _: rule(()))

    @case("quadratic: oracle", bits=True)
    def _() -> Any:
        return quadratic_run(lambda problem: oracle_of(problem, 0.7, noise=0.2, seed=3))

    @case("quadratic: correction, drift")
    def _() -> Any:
        return quadratic_run(lambda _: make("correction", 0.7, 0.1), drift=0.1)


def quadratic_run(rule: Callable[[Any], Any], **more: Any) -> Any:
    """Return a run on noisy quadratics."""
    own = {"curvature": [1.0, 0.5, 2.0], "optimum": [0.0, 1.0, -1.0], "noise": 0.3}
    peers = [{"curvature": 1 + 0.2 * k, "optimum": 0.3 * k, "noise": 0.1 + 0.1 * k} for k in range(4)]
    problem = quadratics(own, peers, **more)
    model = nn.Linear(1, 3, bias=False, dtype=torch.float64)
    model.load_state_dict({"weight": torch.tensor([[-1.0], [2.0], [0.5]])})
    me = make("user", "0", torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64))
    options: dict[str, Any] = {"optimizer": SGD, "lr": 0.1, "steps": 12, "evaluate_every": 4}
    return train(model, f.mse_loss, [me], rule(problem), engine=engine_of(problem, 5), **options)


def captured_and_guarded() -> None:
    """Add steps as one program, the guard, and both."""
    for name, rule in (PLAIN | ROWS).items():

        @case(f"captured: {name}")
        def _(rule: Making = rule) -> Any:
            return a_run(rule(()), capture=True, steps=12, evaluate_every=5)

        if name == "alone":
            continue

        @case(f"guarded: {name}")
        def _(rule: Making = rule) -> Any:
            return a_run(rule(()), everyone=users(validation=30), guard="held-out", measure=True)

    options: dict[str, dict[str, Any]] = {
        "Adam, falling": {"optimizer": Adam, "scheduler": functools.partial(ExponentialLR, gamma=0.8)},
        "momentum, cycle": {
            "optimizer": functools.partial(SGD, momentum=0.9, weight_decay=0.01),
            "scheduler": functools.partial(CosineAnnealingLR, T_max=12),
        },
    }
    for name, more in options.items():

        @case(f"captured: correction, {name}")
        def _(more: dict[str, Any] = more) -> Any:
            return a_run(PLAIN["correction"](()), capture=True, steps=12, **more)

    for name, model in {"tokens": "tokens", "conv": "conv", "tied": "tied", "regression": "regression"}.items():

        @case(f"captured: correction, {name}")
        def _(model: str = model) -> Any:
            return a_run(PLAIN["correction"](()), model, capture=True)

    for capture in (False, True):

        @case(f"guarded: restarts{', captured' * capture}")
        def _(capture: bool = capture) -> Any:
            everyone = users(validation=120)
            everyone = [everyone[0], *(make("flipped", peer, 3) for peer in everyone[1:])]
            more: dict[str, Any] = {"optimizer": Adam, "lr": 0.05, "capture": capture, "guard": "auto"}
            return a_run(make("averaging", 0.99), everyone=everyone, steps=20, evaluate_every=4, **more)

        @case(f"guarded: alone is served{', captured' * capture}")
        def _(capture: bool = capture) -> Any:
            everyone = users(validation=120)
            everyone = [everyone[0], *(make("flipped", peer, 3) for peer in everyone[1:])]
            more: dict[str, Any] = {"capture": capture, "guard": "held-out", "evaluate_every": 9}
            return a_run(make("averaging", 0.99), everyone=everyone, steps=9, **more)

        @case(f"left out: correction{', captured' * capture}, Adam")
        def _(capture: bool = capture) -> Any:
            return a_run(PLAIN["correction"](()), everyone=with_bad_peer(), capture=capture, optimizer=Adam)

        @case(f"stopped: own gradient{', captured' * capture}")
        def _(capture: bool = capture) -> Any:
            everyone = [make("user", "me", *spoiled(labelled(90, 11), 55)), *users()[1:]]
            rule = PLAIN["averaging"](())
            return stopped_run(lambda: a_run(rule, everyone=everyone, capture=capture, steps=90))


def left_out() -> None:
    """Add a peer with gradients that are not finite at some steps."""
    chosen = ("averaging, tau", "correction, falling", "cosine", "gate", "erosion", "mirror", "first order")
    for name in chosen:
        rule = (PLAIN | ROWS)[name]
        for where, engine in {"in process": in_process, "flare": flare}.items():

            @case(f"left out: {name}, {where}")
            def _(rule: Making = rule, engine: Any = engine) -> Any:
                return a_run(rule(()), everyone=with_bad_peer(), engine=engine)

    for name in ("mean", "trimmed", "geometric", "krum", "mixing, trimmed", "bucketing, median"):
        # Of three rows one of which may be bad, Krum takes one of the two that are nearest: a tie.
        @case(f"left out: {name}", bits="bucketing" in name or "krum" in name)
        def _(name: str = name) -> Any:
            return a_run(make("averaging", 0.7, pool=AGGREGATORS[name]()), everyone=with_bad_peer())

    @case("left out: one by one")
    def _() -> Any:
        return a_run(PLAIN["correction"](()), everyone=with_bad_peer(), engine=one_by_one)

    for how in (True, False):

        @case(f"left out: distributed, {'gather' if how else 'reduce'}")
        def _(how: bool = how) -> Any:
            with distributed(gather=how) as engine:
                return a_run(PLAIN["correction"](()), everyone=with_bad_peer(), engine=engine)

    for name, method in {"FedAvg": {"local_steps": 2}, "Scaffold": {"local_steps": 2}, "Ditto": {}}.items():

        @case(f"left out: {name}")
        def _(name: str = name, knobs: dict[str, Any] = method) -> Any:
            return a_run(make(name, **knobs), everyone=with_bad_peer(), steps=3)

    @case("left out: averaging, auto")
    def _() -> Any:
        return a_run(AUTO["averaging, auto"](()), everyone=with_bad_peer())

    @case("left out: stream averaging")
    def _() -> Any:
        return a_run(make("stream averaging", horizon=30), everyone=with_bad_peer(), steps=24, evaluate_every=6)


def models_and_optimizers() -> None:
    """Add every kind of model, optimizer and schedule."""
    for model in MODELS:
        rules = {
            "averaging": PLAIN["averaging, tau"],
            "correction": PLAIN["correction"],
            "first order": ROWS["first order"],
        }
        for name, rule in rules.items():

            @case(f"{model}: {name}", draws="dropout" in model)
            def _(model: str = model, rule: Making = rule) -> Any:
                return a_run(rule(()), model, steps=6, measure=True)

    for model in ("batch norm, dropout", "batch norm", "dropout"):

        @case(f"{model}: guarded", draws="dropout" in model)
        def _(model: str = model) -> Any:
            everyone = users(kind=MODELS[model][1], validation=20)
            return a_run(PLAIN["averaging"](()), model, everyone, guard="held-out", optimizer=Adam, lr=0.02)

        @case(f"{model}: FedAvg", draws="dropout" in model)
        def _(model: str = model) -> Any:
            return a_run(make("FedAvg", local_steps=2), model, steps=2)

        @case(f"{model}: in evaluation mode")
        def _(model: str = model) -> Any:
            return a_run(PLAIN["correction"](()), model, prepare=lambda made: made.eval())

    for name in ("averaging", "correction, half from zero", "mirror"):

        @case(f"double: {name}")
        def _(rule: Making = (PLAIN | ROWS)[name]) -> Any:
            everyone = users(dtype=torch.float64, validation=15)
            return a_run(rule(()), everyone=everyone, prepare=lambda made: made.double(), measure=True)

    def groups(model: nn.Module) -> Any:
        first, second = model[0], model[2]  # type: ignore[index]  # a sequence of layers
        rates = [{"params": first.parameters(), "lr": 0.02}, {"params": second.parameters(), "momentum": 0.8}]
        return SGD(rates, lr=0.05, weight_decay=0.02)

    def a_part(model: nn.Module) -> Any:
        return Adam(model[2].parameters(), lr=0.05, betas=(0.8, 0.9))  # type: ignore[index]  # a sequence

    optimizers: dict[str, dict[str, Any]] = {
        "momentum": {"optimizer": functools.partial(SGD, momentum=0.9, nesterov=True)},
        "Adam": {"optimizer": Adam, "lr": 0.03},
        "Adam by default": {"optimizer": None, "lr": None},
        "AdamW, cosine": {"optimizer": AdamW, "scheduler": functools.partial(CosineAnnealingLR, T_max=8)},
        "RMSprop": {"optimizer": RMSprop, "lr": 0.01},
        "groups": {"optimizer of": groups},
        "groups, falling": {"optimizer of": groups, "scheduler": functools.partial(ExponentialLR, gamma=0.7)},
        "a part": {"optimizer of": a_part},
        "cycle": {"scheduler": functools.partial(OneCycleLR, max_lr=0.3, total_steps=9)},
        "plateau": {
            "lr": 0.9,
            "scheduler": functools.partial(ReduceLROnPlateau, patience=0, factor=0.3),
            "everyone": users(validation=15),
        },
    }
    for name, options in optimizers.items():
        for rule_name in ("averaging, tau", "correction"):

            @case(f"{name}: {rule_name}, optimizer")
            def _(options: dict[str, Any] = options, rule: Making = PLAIN[rule_name]) -> Any:
                return a_run(rule(()), **options)

    @case("autocast: averaging", bits=True)
    def _() -> Any:
        return a_run(PLAIN["averaging"](()), passing=make("passing", autocast=torch.bfloat16))

    @case("autocast: mirror, conv, channels last", bits=True)
    def _() -> Any:
        passing = make("passing", autocast=torch.bfloat16, channels_last=True)
        return a_run(ROWS["mirror"](()), "conv", passing=passing)

    @case("channels last: correction, conv")
    def _() -> Any:
        return a_run(PLAIN["correction"](()), "conv", passing=make("passing", channels_last=True))

    @case("seeds and batches: averaging")
    def _() -> Any:
        return {f"{s}, {b}": a_run(PLAIN["averaging"](()), seed=s, batch_size=b) for s in (0, -3) for b in (1, 64)}


METHODS: dict[str, Callable[[], Any]] = {
    "APFL": lambda: make("APFL", local_steps=2),
    "APFL, not learned": lambda: make("APFL", local_steps=1, mixing=0.3, learned=False),
    "Ditto": lambda: make("Ditto", penalty=0.3, together=make("FedAvg", local_steps=2), personal_steps=2),
    "Ditto, robust": lambda: make("Ditto", together=make("FedAvg", pool=make("trimmed", f=1))),
    "FedAvg": lambda: make("FedAvg", local_steps=3),
    "FedAvg, equal": lambda: make("FedAvg", local_steps=2, shares="equal"),
    "FedAvg, median": lambda: make("FedAvg", local_steps=2, pool=make("median")),
    "FedFomo": lambda: make("FedFomo", local_steps=2),
    "FedFomo, mine": lambda: make("FedFomo", local_steps=2, start="mine"),
    "FineTuning": lambda: make("FineTuning", rounds=1, together=make("FedAvg", local_steps=2)),
    "FineTuning, Scaffold": lambda: make("FineTuning", rounds=2, together=make("Scaffold", local_steps=2)),
    "HypCluster": lambda: make("HypCluster", clusters=1, local_steps=2),
    "HypCluster, three": lambda: make("HypCluster", clusters=3, local_steps=2, spread=0.3),
    "L2GD": lambda: make("L2GD", local_steps=2, penalty=0.3, probability=0.4),
    "MVR": lambda: make("MVR", local_steps=3, rate=0.2),
    "Mapper": lambda: make("Mapper", local_steps=2),
    "Mime": lambda: make("Mime", local_steps=2, momentum=0.8),
    "Mime, lite": lambda: make("Mime", local_steps=2, lite=True),
    "PerFedAvg": lambda: make("PerFedAvg", local_steps=2, inner_lr=0.05),
    "PerFedAvg, Hessian-free": lambda: make("PerFedAvg", local_steps=2, inner_lr=0.05, difference=0.01),
    "SAGA": lambda: make("SAGA", local_steps=4),
    "SAGA, biased": lambda: make("SAGA", local_steps=4, biased=True),
    "SVRG": lambda: make("SVRG", local_steps=3),
    "Scaffold": lambda: make("Scaffold", local_steps=2),
    "Scaffold, option 1": lambda: make("Scaffold", local_steps=2, option=1, server_lr=0.7),
    "Selfish": lambda: make("Selfish", local_steps=2, internal=("b",)),
    "Selfish, weighed": lambda: make("Selfish", local_steps=2, internal=("a", "d"), alpha=0.3),
    "UserCentric": lambda: make("UserCentric", local_steps=2, blocks=3),
    "UserCentric, clusters": lambda: make("UserCentric", local_steps=2, clusters=2, blocks=2),
    "Waffle": lambda: make("Waffle", rounds=3, local_steps=2),
    "AFL": lambda: make("AFL", local_steps=2, weight_lr=0.1),
    "FedPer": lambda: make("FedPer", local_steps=2),
    "FedProx": lambda: make("FedProx", local_steps=2, penalty=0.3),
    "FedRep": lambda: make("FedRep", local_steps=1, head_steps=2),
    "PFedMe": lambda: make("PFedMe", local_steps=2, inner_steps=2),
    "QFFL": lambda: make("QFFL", local_steps=2, q=1.5),
    "Sampled": lambda: make("Sampled", make("Scaffold", local_steps=2), peers=2),
}


def federated_methods() -> None:
    """Add every method."""
    for name, method in METHODS.items():

        @case(f"method: {name}", draws="three" in name)
        def _(method: Callable[[], Any] = method) -> Any:
            return a_run(method(), everyone=users(validation=10, shift=0.8), steps=3, evaluate_every=1)

    for name in ("FedAvg", "Ditto", "Scaffold, option 1", "SAGA"):

        @case(f"method, tokens: {name}")
        def _(method: Callable[[], Any] = METHODS[name]) -> Any:
            with warnings.catch_warnings():  # torch misses a step of the optimizer, which rounds do without
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                return a_run(method(), "tokens", steps=2, scheduler=functools.partial(ExponentialLR, gamma=0.5))

        @case(f"method, one by one: {name}")
        def _(method: Callable[[], Any] = METHODS[name]) -> Any:
            return a_run(method(), steps=2, engine=one_by_one)

    @case("method: averaging of means")
    def _() -> Parts:
        grains = {grain: make("averaging weights", [9, 20, 40], 1.0, 0.3, grain) for grain in ("fine", "coarse")}
        return parts_of({}, **grains)


def half_and_half(rule: Callable[[], Any], everyone: Callable[[], Users], **options: Any) -> Any:
    """Return a run that was stopped half way and taken up again."""
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"steps": 10, "checkpoint_every": 4, "evaluate_every": 2} | options
        half = settings["steps"] // 2
        settings |= {"out": Path(folder) / "run"}
        stopped = a_run(rule(), everyone=everyone(), callbacks=[lambda step: told_of(step)[0] == half], **settings)
        assert numbers_of(stopped)["step"] == half
        return a_run(rule(), everyone=everyone(), resume=True, **settings)


def resumed() -> None:
    """Add runs that were stopped half way and taken up again."""
    adam: dict[str, Any] = {"optimizer": Adam, "lr": 0.05, "scheduler": functools.partial(ExponentialLR, gamma=0.8)}
    momentum = {"optimizer": functools.partial(SGD, momentum=0.9)}
    held_out = functools.partial(users, validation=15)
    runs: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
        "alone": (lambda: make("alone"), adam),
        "averaging": (lambda: make("averaging", 0.7, TAU), momentum),
        "correction": (lambda: make("correction", 0.7, 0.1), adam),
        "correction, falling": (lambda: make("correction", falling, falling), momentum | {"measure": True}),
        "first order": (lambda: make("first order"), adam),
        "erosion": (lambda: make("erosion"), {}),
        "trimmed": (lambda: make("averaging", 0.7, pool=make("trimmed", f=1)), {}),
        "auto": (lambda: make("averaging", "auto"), {}),
        "adaptive": (lambda: make("adaptive", budget=3), momentum),
        "captured": (lambda: make("correction", 0.7, 0.1), adam | {"capture": True}),
        "guarded": (lambda: make("averaging", 0.95), adam | {"guard": "held-out"}),
        "stream averaging": (lambda: make("stream averaging", horizon=30), {"steps": 24}),
        "plateau": (
            lambda: make("averaging", 0.5),
            {"scheduler": functools.partial(ReduceLROnPlateau, patience=0)},
        ),
        **{name: (METHODS[name], {"steps": 4}) for name in ("FedAvg", "Ditto", "SAGA", "Scaffold", "FedFomo")},
        "Waffle": (METHODS["Waffle"], {"steps": 3}),
    }
    for name, (rule, options) in runs.items():

        @case(f"resumed: {name}")
        def _(rule: Callable[[], Any] = rule, options: dict[str, Any] = options) -> Any:
            return half_and_half(rule, held_out, **options)

    @case("resumed: left out")
    def _() -> Any:
        return half_and_half(lambda: make("correction", 0.7, 0.1), with_bad_peer, **adam)

    @case("resumed: batch norm, dropout", draws=True)
    def _() -> Any:
        everyone = functools.partial(users, kind="images", validation=15)
        return half_and_half(
            lambda: make("correction", 0.7, 0.1), everyone, model="batch norm, dropout", lr=0.03, **momentum
        )

    @case("resumed: flare")
    def _() -> Any:
        return half_and_half(lambda: make("mirror"), held_out, engine=flare)


def many() -> None:
    """Add many runs at once."""

    def mixed() -> list[dict[str, Any]]:
        one, other = users(validation=15), users((7, 12, 19), shift=1.0)
        short = [make("averaging", 0.5), make("correction", 0.8, 0.1), make("alone"), make("adaptive", budget=3)]
        found: list[dict[str, Any]] = [
            {"users": one, "rule": rule(one), "seed": k % 3, "lr": (0.05, 0.1)[k % 2]}
            for k, rule in enumerate(PLAIN.values())
        ]
        found += [{"users": other, "rule": rule, "seed": 4} for rule in short]
        found += [
            {"users": one, "rule": make("averaging", 0.4), "model": network(seed=9), "seed": 1},
            {"users": one, "rule": make("averaging", "auto")},
            {"users": one, "rule": make("averaging", 0.5, pool=make("median")), "seed": 2},
            {"users": one, "rule": make("first order"), "seed": 2},
            {"users": one, "rule": make("FedAvg", local_steps=2), "optimizer": SGD},
            {"users": with_bad_peer(3, 9, 15, 21), "rule": make("correction", 0.7, 0.1), "lr": 0.05},
        ]
        return found

    optimizers: dict[str, dict[str, Any]] = {
        "SGD": {"optimizer": SGD},
        "momentum, falling": {
            "optimizer": functools.partial(SGD, momentum=0.9),
            "scheduler": functools.partial(ExponentialLR, gamma=0.8),
        },
        "Adam": {"optimizer": Adam},
    }
    for name, options in optimizers.items():

        @case(f"many: {name}")
        def _(options: dict[str, Any] = options) -> Any:
            wanted = mixed()
            if options["optimizer"] is not SGD:
                wanted = [each for each in wanted if "optimizer" not in each]
            settings: dict[str, Any] = {"lr": 0.05, "steps": 7, "batch_size": 6, "evaluate_every": 3} | options
            runs = train_many(network(), f.cross_entropy, wanted, **settings)
            return {f"{k}": run for k, run in enumerate(runs)}

    for model in ("regression", "conv", "tokens", "tied", "batch norm, dropout"):

        @case(f"many: {model}", draws="dropout" in model)
        def _(model: str = model) -> Any:
            kind = MODELS[model][1]
            everyone = users(kind=kind, validation=8)
            rules = [PLAIN[name](()) for name in ("averaging, tau", "correction", "alone")]
            wanted = [{"users": everyone, "rule": rule, "seed": k} for k, rule in enumerate(rules)]
            settings: dict[str, Any] = {"lr": 0.05, "steps": 6, "batch_size": 6, "evaluate_every": 3}
            runs = train_many(network(model), LOSSES.get(kind, f.cross_entropy), wanted, **settings)
            return {f"{k}": run for k, run in enumerate(runs)}


def under_attack() -> None:
    """Add the attacks."""
    several: dict[str, Callable[[], Any]] = {
        "scaled": lambda: make("scaled", factor=-5.0),
        "sign flip": lambda: make("sign flip"),
        "inner product": lambda: make("inner product", epsilon=0.3),
        "little": lambda: make("little"),
        "little, z": lambda: make("little", z=0.7),
        "mimic": lambda: make("mimic", row=1),
        "drift": lambda: make("drift", z=1.2, period=3),
    }
    for name, attack in several.items():
        for by, rule in {"averaging": PLAIN["averaging"], "trimmed": OTHER["correction, trimmed"]}.items():

            @case(f"attacked: {name}, {by}")
            def _(attack: Callable[[], Any] = attack, rule: Making = rule) -> Any:
                return a_run(rule(()), engine=attacked(["b", "d"], attack()))

    @case("attacked: labels")
    def _() -> Any:
        me, *peers = users()
        everyone = [me, make("flipped", peers[0], 3), *peers[1:]]
        return a_run(make("averaging", 0.7, pool=make("median")), everyone=everyone)


class Jittered(Dataset[Any]):
    """Examples with noise drawn whenever they are looked at."""

    def __init__(self, n: int, seed: int) -> None:
        self.inputs, self.targets = labelled(n, seed)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index] + 0.1 * torch.rand(5), self.targets[index]


def the_rest() -> None:
    """Add draws, evaluation, data sets and tables."""

    @case("draws")
    def _() -> Parts:
        everyone = users()
        found = {
            f"{user.name}, {size}, {seed}, {step}": flat(draws_of(user, size, seed, step))
            for user in everyone
            for size, seed, step in ((4, 0, 0), (9, 5, 1), (50, -1, 10**6))
        }
        return parts_of({}, **found)

    @case("evaluate")
    def _() -> Parts:
        found = {}
        for model, (_, kind) in MODELS.items():
            me = users(kind=kind, validation=30)[0]
            loss = LOSSES.get(kind, f.cross_entropy)
            found[model] = evaluate(network(model), loss, me)
            found[f"{model}, in chunks"] = evaluate(network(model), loss, me, chunk=7)
        more = {"largest": lambda outputs, targets: float(outputs.abs().max())}
        found["a metric"] = evaluate(network(), f.cross_entropy, users(validation=9)[0], metrics=more)
        return parts_of({}, **found)

    @case("data sets", draws=True)
    def _() -> Any:
        names = {"me": (12, 3), "a": (17, 4), "b": (8, 5)}
        everyone = [make("dataset user", name, Jittered(*about)) for name, about in names.items()]
        return {
            name: a_run(rule(()), everyone=everyone) for name, rule in (PLAIN | ROWS).items() if "tau" not in name
        }

    @case("metrics and callbacks")
    def _() -> Parts:
        told: list[list[float]] = []
        more: dict[str, Any] = {"metrics": {"spread": lambda outputs, targets: float(outputs.std())}}

        def tell(step: Any) -> None:
            told.append(told_of(step))

        more["callbacks"] = [tell]
        run = a_run(PLAIN["correction"](()), everyone=users(validation=9), **more)
        return parts_of({"run": run}, told=told)

    for kind in ("classification", "regression"):
        for model in ("linear", "mlp"):

            @case(f"table: {kind}, {model}", draws=True)
            def _(kind: str = kind, model: str = model) -> Parts:
                return of_table(kind, model)


def of_table(kind: str, model: str) -> Parts:
    """Return what comes of a table with numbers, categories and gaps."""
    random = np.random.default_rng(3)
    n = 150
    numbers = random.standard_normal((n, 3))
    who = np.resize(["north", "south", "east"], n)
    y = numbers @ [1.0, -1.0, 0.5] + (who == "south") + 0.3 * random.standard_normal(n)
    frame = pd.DataFrame(numbers, columns=list("uvw")).assign(who=who, colour=np.resize(["red", "blue"], n))
    frame.loc[::11, "v"] = np.nan
    frame["y"] = y if kind == "regression" else np.where(y > 0, "yes", "no")
    task: dict[str, Any] = {"user_column": "who", "target": "y", "me": "north", "own_examples": 20, "seed": 1}
    with tempfile.TemporaryDirectory() as folder:
        frame.to_csv(Path(folder) / "table.csv", index=False)
        runs, predictions, difference = table_runs(
            Path(folder) / "table.csv",
            make("averaging", 0.6),
            model,
            Path(folder) / "run",
            task,
            seed=4,
            steps=12,
            lr=0.05,
        )
    if kind == "classification":
        predictions["prediction"] = predictions["prediction"] == "yes"
    found = {name: predictions[name].to_numpy(dtype=float) for name in predictions}
    return parts_of(runs, predictions=found, difference=difference)


for add in (
    rules_in_process,
    streams,
    other_engines,
    captured_and_guarded,
    left_out,
    models_and_optimizers,
    federated_methods,
    resumed,
    many,
    under_attack,
    the_rest,
):
    add()
