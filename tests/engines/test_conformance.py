"""What every engine must do: each user's gradient is that of a plain loop, and its capabilities are true."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from tests.support.model_cases import (
    BATCH,
    CASES,
    SEED,
    TAU,
    Case,
    close,
    frozen,
    make_model,
    make_users,
    mlp,
    plain_gradient,
    some_point,
)
from torch import Tensor
from torch.nn import functional as f

import coterie
from coterie.engines import AnswersAtOwnPoints, Captures, Local, require
from coterie.engines.engine import MakeEngine
from coterie.errors import KnobError
from coterie.gradients.parameters import Parameters

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


# Gradients.


@every_case
def test_gradients_are_those_of_a_plain_loop(make_engine: MakeEngine, case: Case) -> None:
    users, model = make_users(case), make_model(case)
    twin, x = copy.deepcopy(model), some_point(model)
    engine = make_engine(model, case.loss, users[0], users[1:], batch_size=BATCH, seed=SEED)
    before = [p.detach().clone() for p in model.parameters()]
    random = torch.get_rng_state()
    for step, rows in itertools.product((0, 1, 5), (False, True)):
        wanted = [plain_gradient(twin, case.loss, user, x, step) for user in users]
        own_only = engine.gradients(x, step, {})
        twin.load_state_dict(wanted[0][2].state_dict())  # only user 0's batches move buffers
        close(own_only.own, wanted[0][0])
        assert own_only.peers is None
        assert float(own_only.own_loss) == pytest.approx(wanted[0][1], rel=1e-10)

        wanted = [plain_gradient(twin, case.loss, user, x, step) for user in users]
        g = engine.gradients(x, step, TAU, rows)
        twin.load_state_dict(wanted[0][2].state_dict())
        close(g.own, wanted[0][0])
        average, answered = g.average(TAU)
        close(
            average,
            torch.stack(
                [TAU[u.name] * w[0] for u, w in zip(users[1:], wanted[1:], strict=True)]
            ).sum(0),
        )
        assert answered == 1
        assert not g.left_out
        assert g.x is not None
        assert torch.equal(g.x, x)
        if rows:
            assert g.names == tuple(TAU)
            assert g.rows is not None
            close(g.rows, torch.stack([w[0] for w in wanted[1:]]))
        for name, buffer in twin.named_buffers():
            close(dict(model.named_buffers())[name], buffer)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), random)

    x = Parameters(model).share()  # the model's own point, as in training
    wanted = [plain_gradient(twin, case.loss, user, x, 2) for user in users]
    g = engine.gradients(x, 2, TAU)
    close(g.own, wanted[0][0])
    assert g.peers is not None
    close(
        g.peers,
        torch.stack([TAU[u.name] * w[0] for u, w in zip(users[1:], wanted[1:], strict=True)]).sum(
            0
        ),
    )


@pytest.mark.parametrize("name", ["mlp", "batch norm", "dropout", "lstm"])
def test_a_gradient_does_not_depend_on_who_else_is_asked(
    make_engine: MakeEngine, name: str
) -> None:
    case = CASES[name]
    users, model = make_users(case), make_model(case)
    engine = make_engine(model, case.loss, users[0], users[1:], batch_size=BATCH, seed=SEED)
    x, start = some_point(model), copy.deepcopy(model.state_dict())

    def row(asked: Sequence[str], step: int) -> Tensor:
        model.load_state_dict(start)
        g = engine.gradients(x, step, dict.fromkeys(asked, 1 / len(asked)), rows=True)
        assert g.names == tuple(asked)
        assert g.rows is not None
        return g.rows[list(asked).index("peer 3")]

    alone = row(["peer 3"], 4)
    for asked in (["peer 1", "peer 3"], ["peer 3", "peer 2", "peer 4"], list(TAU)):
        close(row(asked, 4), alone)
    assert not torch.allclose(row(["peer 3"], 5), alone)


def test_dropout_is_drawn_for_each_user_and_step(make_engine: MakeEngine) -> None:
    case = CASES["dropout"]
    inputs, targets = make_users(case)[0].batch(8, seed=0, step=0)
    # full batches of the same examples
    twins = [coterie.User(name, inputs, targets) for name in ("me", "a", "b")]
    model = make_model(case)
    engine = make_engine(model, case.loss, twins[0], twins[1:], batch_size=8, seed=SEED)
    found = []
    for step in (0, 1):
        g = engine.gradients(some_point(model), step, {"a": 0.5, "b": 0.5}, rows=True)
        assert g.rows is not None
        found += [g.own, *g.rows]
    assert all(not torch.allclose(a, b) for a, b in itertools.combinations(found, 2))


# Peers whose gradient cannot be used.


def spoil(user: coterie.User, value: float) -> coterie.User:
    inputs, targets = user.batch(len(user), seed=0, step=0)
    return coterie.User(user.name, torch.full_like(inputs, value), targets)


every_way = pytest.mark.parametrize(
    "name", ["mlp", "lstm", "batch norm", "dropout", "loss with item"]
)


def test_the_same_weights_in_another_order(make_engine: MakeEngine) -> None:
    users, model = make_users(CASES["mlp"]), make_model(CASES["mlp"])
    engine = make_engine(model, f.cross_entropy, users[0], users[1:], batch_size=BATCH, seed=SEED)
    x = some_point(model)
    first, second = (
        engine.gradients(x, 0, tau).peers for tau in (TAU, dict(reversed(TAU.items())))
    )
    assert first is not None
    assert second is not None
    close(first, second)


@every_way
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_peers_are_left_out(make_engine: MakeEngine, name: str, value: float) -> None:
    case = CASES[name]
    users, model = make_users(case), make_model(case)
    x = some_point(model)
    wanted = {user.name: plain_gradient(model, case.loss, user, x, 0)[0] for user in users}
    users[1], users[4] = spoil(users[1], value), spoil(users[4], value)
    engine = make_engine(model, case.loss, users[0], users[1:], batch_size=BATCH, seed=SEED)
    start = copy.deepcopy(model.state_dict())
    for rows in (False, True):
        model.load_state_dict(start)
        g = engine.gradients(x, 0, TAU, rows)
        assert g.left_out == {"peer 1": "not finite", "peer 4": "not finite"}
        average, answered = g.average(TAU)
        close(average, 0.3 * wanted["peer 2"] + 0.1 * wanted["peer 3"] + 0.6 * wanted["me"])
        assert answered == pytest.approx(0.4)
        assert g.answered == pytest.approx(0.4)
        if rows:
            assert g.names == ("peer 2", "peer 3")


@every_way
def test_all_peers_left_out_is_alone_to_the_bit(make_engine: MakeEngine, name: str) -> None:
    case = CASES[name]
    users, model = make_users(case), make_model(case)
    spoilt = [spoil(user, float("nan")) for user in users[1:]]
    engine = make_engine(model, case.loss, users[0], spoilt, batch_size=BATCH, seed=SEED)
    x = some_point(model)
    start = copy.deepcopy(model.state_dict())
    own = engine.gradients(x, 0, {}).own
    rules = (
        coterie.WeightedAveraging(0.9, TAU),
        coterie.BiasCorrection(0.9, 0.5),
        coterie.WeightedAveraging(0.9),
    )
    for rule, rows in itertools.product(rules, (False, True)):
        model.load_state_dict(start)
        g = engine.gradients(x, 0, rule.weights(engine.names), rows)
        assert sorted(g.left_out) == sorted(TAU)
        direction, state = rule(g, rule.init(x))
        assert direction.numpy().tobytes() == own.numpy().tobytes()
        assert state["weight"] == 0


def test_a_non_finite_own_gradient_moves_no_buffer(make_engine: MakeEngine) -> None:
    case = CASES["batch norm"]
    users, model = make_users(case), make_model(case)
    engine = make_engine(model, case.loss, users[0], users[1:], batch_size=BATCH, seed=SEED)
    before = copy.deepcopy(model.state_dict())
    g = engine.gradients(torch.full_like(some_point(model), float("nan")), 0, TAU)
    assert not g.own.isfinite().any()
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())


# What an engine refuses.


def test_bad_settings(make_engine: MakeEngine) -> None:
    users = make_users(CASES["mlp"])
    with pytest.raises(
        coterie.errors.KnobError, match="`batch_size` must be a whole number, at least 1, got 0"
    ):
        make_engine(mlp().double(), f.cross_entropy, users[0], users[1:], batch_size=0, seed=0)
    with pytest.raises(coterie.errors.DataError, match="users must have different names"):
        make_engine(mlp().double(), f.cross_entropy, users[0], [users[0]], batch_size=2, seed=0)
    model = frozen()[:2].double()  # type: ignore[index]  # a Sequential
    with pytest.raises(coterie.errors.ModelError, match="no trainable parameter"):
        make_engine(model, f.cross_entropy, users[0], users[1:], batch_size=2, seed=0)


# Capabilities.


@pytest.fixture(params=["mlp", "batch norm"])
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def engine(case: Case, make_engine: MakeEngine) -> coterie.Engine:
    me, *peers = make_users(case)
    return make_engine(make_model(case), case.loss, me, peers, batch_size=BATCH, seed=SEED)


def test_an_engine_that_says_rows_gives_them(engine: coterie.Engine, case: Case) -> None:
    if not engine.capabilities.rows:
        return  # that it refuses is tested below
    x = some_point(make_model(case))
    g = engine.gradients(x, 0, TAU, rows=True)
    assert g.rows is not None
    assert g.rows.shape == (len(TAU), len(x))


def test_what_an_engine_has_comes_with_its_methods_and_the_rest_is_refused(
    engine: coterie.Engine,
) -> None:
    can = engine.capabilities
    protocols: Any = {
        "rows": object,
        "own_points": AnswersAtOwnPoints,
        "local": Local,
        "capture": Captures,
    }
    for capability, protocol in protocols.items():
        has = can.not_captured is None if capability == "capture" else getattr(can, capability)
        if has:
            assert isinstance(require(engine, capability, "the test"), protocol)
        else:
            with pytest.raises(KnobError, match=r"the test needs .*, but .*; "):
                require(engine, capability, "the test")


def test_examples_that_are_known_are_those_of_the_users(engine: coterie.Engine) -> None:
    can = engine.capabilities
    sizes = {user.name: len(user) for user in make_users(CASES["mlp"])}
    assert {name: sizes[name] for name in can.examples} == dict(can.examples)
    assert can.batch_size == BATCH


@pytest.mark.parametrize("name", ["mlp", "dropout and batch norm"])
def test_the_same_bits_where_an_engine_says_so(make_engine: MakeEngine, name: str) -> None:
    case = CASES[name]
    averages, says_so = [], True
    for make in (make_engine, partial(coterie.InProcess, one_by_one=True)):
        me, *peers = make_users(case)
        model = make_model(case)
        made = make(model, case.loss, me, peers, batch_size=BATCH, seed=SEED)
        says_so = says_so and made.capabilities.same_bits
        averages.append(made.gradients(some_point(model), 4, TAU).average(TAU)[0])
    close(*averages)
    assert torch.equal(*averages) or not says_so


def test_at_points_of_their_own(engine: coterie.Engine) -> None:
    if not engine.capabilities.own_points:
        return
    users = require(engine, "own_points", "the test")
    x = users.parameters.vector()
    points = x + 0.1 * torch.arange(1 + len(engine.names), dtype=x.dtype)[:, None]
    rows, loss = users.each(points, 3)
    losses = users.losses(points, 3)
    assert rows.shape == points.shape
    assert float(losses[0]) == pytest.approx(float(loss))
    everything = torch.arange(5)
    assert users.on("peer 4", points[4], everything, 3)[0].shape == x.shape
