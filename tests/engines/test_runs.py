"""Runs on every engine: every rule makes the same run, and what an engine cannot give is refused early."""

from __future__ import annotations

import copy
import dataclasses
import functools
from dataclasses import astuple
from typing import Any

import pytest
import torch
from tests.support.engines import ENGINES
from tests.support.model_cases import (
    BATCH,
    CASES,
    SEED,
    TAU,
    Case,
    make_model,
    make_users,
)
from torch.nn import functional as f

import coterie
from coterie.engines import Capabilities
from coterie.engines.engine import MakeEngine
from coterie.errors import KnobError
from coterie.rules.streams import StreamAveraging

# Runs.


Rule = coterie.Rule | coterie.AdaptiveAveraging

RULES: dict[str, Rule] = {
    "alone": coterie.Alone(),
    "averaging": coterie.WeightedAveraging(0.6, TAU),
    "averaging some": coterie.WeightedAveraging(
        lambda t: 0.9 / (1 + t), {"peer 4": 0.5, "peer 2": 0.5}
    ),
    "bias correction": coterie.BiasCorrection(0.8, 0.1, TAU),
    "half correction": coterie.BiasCorrection(
        0.8, 0.1, correction=0.5, start="zero", warm_up=False
    ),
    "oracle": coterie.OracleCorrection(0.7, bias=lambda x: 0.1 * x),
    "stream": StreamAveraging(horizon=12),
    "adaptive": coterie.AdaptiveAveraging(),
    "adaptive, single": coterie.AdaptiveAveraging(single=True),
}


def trained(engine: MakeEngine, case: Case, rule: Rule, **settings: Any) -> coterie.Run:
    me, *peers = make_users(case)
    held_out = coterie.User(
        "me", *me.batch(20, seed=0, step=0), validation=me.batch(9, seed=1, step=0)
    )
    model = make_model(case)
    keywords: dict[str, Any] = {
        "steps": 12,
        "batch_size": BATCH,
        "seed": SEED,
        "lr": 0.05,
        "engine": engine,
        "measure": False,
    }
    keywords |= settings
    return coterie.train(model, case.loss, held_out, peers, rule, **keywords)


@functools.cache
def in_process(name: str, rule: str) -> coterie.Run:
    return trained(coterie.InProcess, CASES[name], RULES[rule])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["mlp", "dropout and batch norm"])
@pytest.mark.parametrize("make_engine", list(ENGINES)[1:], indirect=True)
def test_every_rule_makes_the_same_run(make_engine: MakeEngine, name: str, rule: str) -> None:
    wanted = in_process(name, rule)
    found = trained(make_engine, CASES[name], RULES[rule])
    assert (found.step, found.record.end.left_out) == (12, {})
    for key, value in wanted.model.state_dict().items():
        if (
            value.is_floating_point()
        ):  # how many batches moved a buffer depends on how copies are passed
            torch.testing.assert_close(found.model.state_dict()[key], value, rtol=1e-8, atol=1e-10)
    for point, other in zip(found.record.points, wanted.record.points, strict=True):
        assert point.to_plain() == pytest.approx(other.to_plain(), rel=1e-8)


@pytest.mark.parametrize("make_engine", list(ENGINES)[1:], indirect=True)
def test_a_sample_of_the_peers_is_the_same_everywhere(make_engine: MakeEngine) -> None:
    """Drawn from (seed, step): the same peers are asked, and weigh the same, wherever they are."""
    wanted, found = (
        trained(engine, CASES["mlp"], RULES["averaging"], sample=2)
        for engine in (coterie.InProcess, make_engine)
    )
    for key, value in wanted.model.state_dict().items():
        torch.testing.assert_close(found.model.state_dict()[key], value, rtol=1e-8, atol=1e-10)
    gave, asked = ({k: v.gradients for k, v in r.record.end.costs.items()} for r in (found, wanted))
    assert gave == asked
    assert sum(asked[name] for name in TAU if name in asked) == 12 * 2


def test_constants_are_measured_on_every_engine(make_engine: MakeEngine) -> None:
    """User 0's examples are dealt out in every case; of peers elsewhere the batches of steps are asked for."""
    wanted, found = (
        trained(
            engine, CASES["mlp"], coterie.WeightedAveraging("auto"), measure=True
        ).record.configuration
        for engine in (coterie.InProcess, make_engine)
    )
    for name in ("noise", "smoothness", "gradient"):
        assert found.estimates[name] == pytest.approx(wanted.estimates[name], rel=1e-6)
    assert set(found.estimates["peers"]) == set(TAU)
    for name, peer in found.estimates["peers"].items():
        assert peer["noise"][0] == pytest.approx(
            wanted.estimates["peers"][name]["noise"][0], rel=0.5
        )
    assert 0 < found.choice["alpha"] < 1
    plain = trained(
        make_engine, CASES["mlp"], RULES["averaging"], steps=1, measure=True
    ).record.configuration
    assert set(plain.estimates["peers"]) == set(TAU)


def test_a_model_of_ones_own_is_not_touched(make_engine: MakeEngine) -> None:
    before = copy.deepcopy(make_model(CASES["batch norm"]).state_dict())
    run = trained(make_engine, CASES["batch norm"], RULES["averaging"])
    assert int(run.model[1].num_batches_tracked) == run.best_step  # type: ignore[index]  # a BatchNorm1d
    assert all(
        torch.equal(v, before[k]) for k, v in make_model(CASES["batch norm"]).state_dict().items()
    )


class SumsOnly(coterie.InProcess):
    """An engine that gives the peers' weighted sum alone, and notes that it was closed."""

    closed = 0

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(super().capabilities, rows=False)

    def close(self) -> None:
        SumsOnly.closed += 1


def test_a_rule_that_needs_rows_fails_early(tmp_path: Any) -> None:
    with pytest.raises(
        KnobError, match="`StreamAveraging` needs every peer's gradient, but this engine gives"
    ):
        trained(SumsOnly, CASES["mlp"], StreamAveraging(9), out=tmp_path / "run")
    assert SumsOnly.closed == 1
    with pytest.raises(KnobError, match="needs every peer's gradient to choose its knobs"):
        trained(SumsOnly, CASES["mlp"], coterie.WeightedAveraging("auto"), out=tmp_path / "run")
    assert SumsOnly.closed == 2
    assert not (tmp_path / "run").exists()
    trained(SumsOnly, CASES["mlp"], coterie.WeightedAveraging(0.5))
    assert SumsOnly.closed == 3


class Elsewhere(SumsOnly):
    """The same with users elsewhere."""

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(super().capabilities, local=False, own_points=False)


def test_measuring_elsewhere_needs_rows() -> None:
    rule = coterie.WeightedAveraging(0.5)
    assert not trained(Elsewhere, CASES["mlp"], rule, measure=None).record.configuration.estimates
    with pytest.raises(
        KnobError,
        match="`measure` needs every peer's gradient, but this engine gives their weighted",
    ):
        trained(Elsewhere, CASES["mlp"], rule, measure=True)


def test_an_engine_that_is_passed_in_stays_open() -> None:
    users, model = make_users(CASES["mlp"]), make_model(CASES["mlp"])
    engine, before = SumsOnly(model, f.cross_entropy, users[0], users[1:]), SumsOnly.closed
    coterie.train(
        model,
        f.cross_entropy,
        users[0],
        users[1:],
        coterie.WeightedAveraging(0.5),
        engine=engine,
        steps=2,
    )
    assert SumsOnly.closed == before


def test_costs_are_for_everybody_or_nobody(make_engine: MakeEngine) -> None:
    costs = trained(make_engine, CASES["mlp"], RULES["averaging"]).record.end.traffic
    assert not costs or set(costs) == {"me", *TAU}
    for name in costs:
        assert min(astuple(costs[name])) >= 0
        assert costs[name].bytes_sent > 0
        assert costs[name].bytes_received > 0
        assert costs[name].seconds_computing > 0
