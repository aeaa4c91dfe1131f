"""The library's names. When they change this file may be edited, and no other of this package."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd
import torch
from torch import Tensor, nn

import coterie
from coterie import aggregators, attacks, methods
from coterie.data import from_table
from coterie.engines.in_process.forward_options import ForwardOptions
from coterie.engines.in_process.passes import Passes
from coterie.engines.peer import Peer
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.sites import LocalSites
from coterie.errors import GradientError
from coterie.rules import similarity
from coterie.rules.streams import StreamAveraging
from coterie.tables.fit import fit
from coterie.tables.predict import predict
from coterie.theory.quadratic import NoisyQuadratic, Quadratic

Users: TypeAlias = Sequence[Any]
"""User 0 and its peers."""
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
    "adaptive": functools.partial(coterie.AdaptiveAveraging, linear=False),
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
    return {
        KEYWORDS.get(f"{thing}.{name}", KEYWORDS.get(name, name)): value
        for name, value in knobs.items()
    }


def make(thing: str, *values: Any, **knobs: Any) -> Any:
    """Return a thing of the library; what is positional here must stay so, or be named here."""
    return THINGS[thing](*values, **keywords(thing, knobs))


def train(model: nn.Module, loss: Any, users: Users, rule: Any, **options: Any) -> Any:
    """Return a run."""
    return coterie.train(
        model, loss, users[0], users[1:], rule, progress=False, **keywords("train", options)
    )


def train_many(
    model: nn.Module, loss: Any, wanted: Sequence[Mapping[str, Any]], **options: Any
) -> list[Any]:
    """Return runs, each wanted with `users`, `rule` and what else is its own."""
    specs = []
    for each in wanted:
        me, *peers = each["users"]
        own = {name: value for name, value in each.items() if name not in ("users", "model")}
        start = each.get("model", model)
        specs.append(
            coterie.RunSpec(start, loss, me, peers, **keywords("train_many", {**options, **own}))
        )
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


def changed(model: nn.Module) -> nn.Module:
    """Return a copy whose trained parameters and buffers are elsewhere, as at a site before the first request."""
    there = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in (*(p for p in there.parameters() if p.requires_grad), *there.buffers()):
            tensor.zero_()
    return there


def flare(model: nn.Module, loss: Any, me: Any, peers: Users, **settings: Any) -> Any:
    """Make an engine whose sites are in this process."""
    sites = LocalSites({peer.name: Peer(peer, Passes(changed(model), loss)) for peer in peers})
    return Remote(model, loss, me, sites=sites, names=[peer.name for peer in peers], **settings)


def attacked(attackers: Sequence[str], attack: Any) -> Callable[..., Any]:
    """Return what makes an engine under attack."""
    return lambda *problem, **settings: attacks.Attacked(
        in_process(*problem, **settings), attackers, attack
    )


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
        "traffic": {
            name: {key: each[key] for key in kept} for name, each in end["traffic"].items()
        },
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
    batch: tuple[Tensor, Tensor] = user.batch(size, seed=seed, step=step)
    return batch


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
