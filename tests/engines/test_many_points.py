"""Several points in one exchange: the answers are those at each point by itself, and each gradient counts."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from tests.support import processes
from tests.support.model_cases import (
    BATCH,
    CASES,
    SEED,
    TAU,
    close,
    make_model,
    make_users,
    some_point,
)
from torch import Tensor
from torch.nn.functional import cross_entropy

import coterie
from coterie.engines.compression import SKETCH, Sketch, sketch_key, sketch_size
from coterie.engines.engine import Asks, MakeEngine, Question
from coterie.engines.in_process.passes import Passes
from coterie.engines.messages import Request
from coterie.engines.peer import Caps, Peer
from coterie.engines.processes.engine import serve
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.sites import LocalSites

NAN = math.nan


def question(weights: list[list[float]], x: Tensor, **more: Any) -> Question:
    points = torch.stack([x + k for k in range(len(weights))])
    return Question(points, 3, torch.tensor(weights, dtype=torch.float64), **more)


def test_several_points_are_answered_as_each_by_itself(make_engine: MakeEngine) -> None:
    users, model = make_users(CASES["mlp"]), make_model(CASES["mlp"])
    engine = make_engine(model, cross_entropy, users[0], users[1:], batch_size=BATCH, seed=SEED)
    if not engine.capabilities.many_points:
        return  # in this process: `asking` gives the operator of all points and users
    assert isinstance(engine, Asks)
    names, x = list(engine.names), some_point(model)
    weights = [[0.25] * 4, [0.5, NAN, 0.5, NAN], [NAN, 0.0, NAN, 1.0]]
    wanted = question(weights, x)
    for rows in (False, True, False):
        found = engine.ask(question(weights, x, rows=rows))()
        assert found.left_out == {}
        assert found.answered.tolist() == pytest.approx([1.0, 1.0, 1.0])
        for place, given in enumerate(weights):
            asked = {
                name: weight
                for name, weight in zip(names, given, strict=True)
                if not math.isnan(weight)
            }
            g = engine.gradients(wanted.points[place], 3, asked, rows=rows)
            if not rows:
                assert found.sums is not None
                assert g.peers is not None
                close(found.sums[place], g.peers)
                continue
            assert found.rows is not None
            assert g.rows is not None
            close(found.rows[place][[names.index(name) for name in g.names]], g.rows)
            assert bool(found.rows[place][[math.isnan(weight) for weight in given]].isnan().all())


def test_buffers_belong_to_their_points(make_engine: MakeEngine) -> None:
    case = CASES["batch norm"]
    users, model = make_users(case), make_model(case)
    engine = make_engine(model.eval(), case.loss, users[0], users[1:], batch_size=BATCH, seed=SEED)
    if not engine.capabilities.many_points:
        return
    assert isinstance(engine, Asks)
    x, before = some_point(model), {name: buffer.clone() for name, buffer in model.named_buffers()}
    alone = []
    for shift in (0.0, 0.5):
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name] + shift if buffer.is_floating_point() else before[name])
        alone.append(engine.gradients(x, 3, TAU, rows=True).rows)
    stacked = {
        name: torch.stack([b, b + 0.5 if b.is_floating_point() else b])
        for name, b in before.items()
    }
    points = torch.stack([x, x])
    found = engine.ask(Question(points, 3, torch.full((2, 4), 0.25), rows=True, buffers=stacked))()
    assert found.rows is not None
    for row, wanted in zip(found.rows, alone, strict=True):
        assert wanted is not None
        close(row, wanted)


def test_a_peer_counts_every_point(tmp_path: Any) -> None:
    user = make_users(CASES["mlp"])[1]
    model = make_model(CASES["mlp"])
    peer = Peer(user, Passes(model, cross_entropy), Caps(gradients=7), tmp_path / "log")
    points = torch.stack([some_point(model)] * 3)
    assert peer.answer(Request(points, 0, SEED, BATCH)).refused is None
    points[1] = math.inf
    reply = peer.answer(Request(points, 1, SEED, BATCH))
    assert reply.gradients is not None
    assert reply.gradients.isfinite().all(1).tolist() == [True, False, True]
    assert peer.ledger.given == 5
    assert (
        peer.answer(Request(points, 2, SEED, BATCH)).refused
        == "it has 2 gradients left to give, and was asked for 3"
    )
    again = Peer(user, Passes(model, cross_entropy), Caps(gradients=7), tmp_path / "log")
    assert again.ledger.given == 5
    assert again.answer(Request(points[:2], 2, SEED, BATCH)).gradients is not None


def test_a_lost_site_is_lost_at_all_points() -> None:
    users, model = make_users(CASES["mlp"]), make_model(CASES["mlp"])
    held = {
        user.name: Peer(user, Passes(make_model(CASES["mlp"]), cross_entropy))
        for user in users[1:4]
    }
    names = [user.name for user in users[1:]]
    engine = Remote(
        model,
        cross_entropy,
        users[0],
        sites=LocalSites(held),
        names=names,
        batch_size=BATCH,
        minimum=2,
    )
    weights = [[0.25] * 4, [0.0, NAN, NAN, 1.0]]
    found = engine.ask(question(weights, some_point(model)))()
    assert found.left_out == {names[3]: "no answer", names[0]: "fewer than 2 peers answered"}
    assert found.answered.tolist() == pytest.approx([0.75, 0.0])


def test_sketches_are_those_of_the_gradients_and_sums_only_peers_give_them() -> None:
    users, model = make_users(CASES["mlp"]), make_model(CASES["mlp"])
    shy = functools.partial(serve, sums_only=True, timeout=processes.PATIENCE)
    inside = coterie.InProcess(
        model, cross_entropy, users[0], users[1:], batch_size=BATCH, seed=SEED
    )
    x = some_point(model)
    wanted = inside.gradients(x + 1, 3, TAU, rows=True).rows
    assert wanted is not None
    with processes.torch_distributed([serve, shy, serve, serve]) as make:
        engine = make(model, cross_entropy, users[0], users[1:], batch_size=BATCH, seed=SEED)
        assert isinstance(engine, Asks)
        k = engine.capabilities.sketch
        assert k == len(x) // 2
        weights = [[0.25] * 4, [0.0, NAN, 0.0, 1.0], [0.25] * 4]
        found = engine.ask(question(weights, x, sketched=2))()
    assert found.sketches is not None
    assert found.sketches.shape == (2, 4, k)
    assert found.sketches[1].isnan().any(1).tolist() == [False, True, False, False]
    close(found.sketches[1, [0, 2, 3]], Sketch(len(x), k, sketch_key(SEED, 3))(wanted[[0, 2, 3]]))


def test_how_long_a_sketch_is() -> None:
    assert sketch_size(SKETCH, rows=True) is None
    assert sketch_size(SKETCH + 1, rows=True) == SKETCH
    assert sketch_size(100, rows=False) == 50
    assert sketch_size(10**6, rows=False) == SKETCH


def test_sketches_keep_inner_products_without_bias() -> None:
    a, b = torch.randn(2, 300, generator=torch.Generator().manual_seed(0)).double()
    found = torch.stack([Sketch(300, 64, key)(torch.stack([a, b])) for key in range(2000)])
    products = (found[:, 0] * found[:, 1]).sum(1)
    assert float(products.mean()) == pytest.approx(
        float(a @ b), abs=4 * float(products.std()) / 2000**0.5
    )
    relative = (found[:, 0] ** 2).sum(1) / (a @ a)
    assert float(relative.std()) == pytest.approx((2 / 64) ** 0.5, rel=0.2)
