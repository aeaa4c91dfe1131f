"""What every engine must do: each user's gradient is that of a plain loop, and its capabilities are true."""

from __future__ import annotations

import ast
import copy
import itertools
import json
import threading
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.engines import SITES, MakeSites
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
from tests.support.waiting import ENOUGH, until
from torch import Tensor, nn
from torch.nn import functional as f

import coterie
from coterie.engines import AnswersAtOwnPoints, Captures, Local, require
from coterie.engines.engine import MakeEngine
from coterie.engines.in_process.passes import Passes
from coterie.engines.peer import Caps, Peer
from coterie.engines.peer.ledger import Ledger
from coterie.engines.remote.engine import Remote
from coterie.errors import KnobError
from coterie.gradients.parameters import Parameters
from coterie.privacy.sums import SumsOnly

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


# What a site promises holds whatever carries the messages.

every_sites = pytest.mark.parametrize("make_sites", SITES.values(), ids=SITES)
LATE = {name: make for name, make in SITES.items() if name != "here"}  # where it is one thread
D = 21


def held(n: int = 4, **settings: Any) -> tuple[coterie.User, dict[str, Peer]]:
    """Return user 0 and peers of a linear model."""
    random = torch.Generator().manual_seed(0)
    people = [
        coterie.User(name, torch.randn(20, 6, generator=random).double(), torch.arange(20) % 3)
        for name in ["me", *(f"peer {k}" for k in range(1, n + 1))]
    ]
    return people[0], {
        one.name: Peer(one, Passes(linear(), f.cross_entropy), **settings) for one in people[1:]
    }


def linear() -> nn.Module:
    return nn.Linear(6, 3).double()


def remote(me: coterie.User, sites: Any, names: Iterable[str], **how: Any) -> Remote:
    how = {"batch_size": 5, "probe_every": 1, "timeout": ENOUGH} | how
    return Remote(linear(), f.cross_entropy, me, sites=sites, names=list(names), **how)


X = torch.linspace(-1, 1, D, dtype=torch.float64)
EVEN = {f"peer {k}": 0.25 for k in range(1, 5)}


@every_sites
def test_caps_and_ledgers_hold(make_sites: MakeSites, tmp_path: Path) -> None:
    me, peers = held(caps=Caps(gradients=3, norm=0.1), log=Ledger(tmp_path / "log"))
    with make_sites(peers, None) as sites:
        engine = remote(me, sites, peers)
        found = [engine.gradients(X, step, EVEN, rows=True) for step in range(2)]
    assert found[0].rows is not None
    assert float(found[0].rows.norm(dim=1).max()) < 0.1001
    # they share a ledger, and so its count
    assert [len(g.left_out) for g in found] == [1, 4]
    assert set(found[1].left_out.values()) == {
        "refused: it has given all the gradients it gives, 3"
    }
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert sum("refused" not in line for line in lines) == Ledger(tmp_path / "log").given == 3


@every_sites
def test_no_message_is_parsed_as_python(
    make_sites: MakeSites, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPython's parser fails in one thread where another comes in between: `np.load` lost 6 of 10⁵ arrays."""

    def mixed_up(*_: Any, **__: Any) -> None:
        raise SystemError("AST constructor recursion depth mismatch")

    me, peers = held()
    with make_sites(peers, None) as sites:
        engine = remote(me, sites, peers)
        monkeypatch.setattr(ast, "parse", mixed_up)
        found = engine.gradients(X, 0, EVEN)
        monkeypatch.undo()
    assert (found.answered, found.left_out) == (1, {})


@every_sites
def test_masked_sums_are_the_plain_ones_and_nothing_else_is_given(make_sites: MakeSites) -> None:
    me, peers = held()
    plain, _ = held()
    with make_sites(peers, SumsOnly()) as sites:
        engine = remote(me, sites, peers, secure_sums=True)
        found = [engine.gradients(X, step, EVEN) for step in range(3)]
        assert remote(me, sites, peers).gradients(X, 9, EVEN).answered == 0
    users = [peer.user for peer in peers.values()]
    inside = coterie.InProcess(linear(), f.cross_entropy, plain, users, batch_size=5)
    for step, g in enumerate(found):
        wanted = inside.gradients(X, step, EVEN).peers
        torch.testing.assert_close(g.peers, wanted, rtol=0, atol=1e-6)
        assert (g.answered, g.left_out) == (1, {})


@every_sites
def test_a_lost_site_is_left_out_and_asked_again_once_it_is_back(make_sites: MakeSites) -> None:
    me, peers = held()
    with make_sites(peers, None) as sites:
        engine = remote(me, sites, peers, misses=2)
        whole = engine.gradients(X, 0, EVEN)
        sites.lose("peer 3")
        lost = [engine.gradients(X, step, EVEN) for step in range(1, 5)]
        sites.bring("peer 3")
        steps = itertools.count(5)
        until(lambda: engine.gradients(X, next(steps), EVEN).answered == 1, "it is asked again")
        back = engine.gradients(X, 0, EVEN)
    assert {tuple(g.left_out.items()) for g in lost} == {
        (("peer 3", "no answer"),),
        (("peer 3", "not waited for"),),
    }
    assert [g.answered for g in lost] == [0.75] * 4
    assert torch.equal(back.peers, whole.peers)  # type: ignore[arg-type]  # there are peers
    rest = {name: weight for name, weight in EVEN.items() if name != "peer 3"}
    users = [peer.user for peer in peers.values()]
    wanted = coterie.InProcess(linear(), f.cross_entropy, me, users, batch_size=5).gradients(
        X, 1, rest
    )
    assert wanted.peers is not None
    close(lost[0].peers, wanted.peers + wanted.own / 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("make_sites", LATE.values(), ids=LATE)
def test_who_is_late_is_left_out_of_the_step_alone(make_sites: MakeSites) -> None:
    me, peers = held()
    honest, goes_on = peers["peer 2"].answer, threading.Event()

    def late(*request: Any, **how: Any) -> Any:
        goes_on.wait(ENOUGH)
        return honest(*request, **how)

    with make_sites(peers, None) as sites:
        peers["peer 2"].answer = late  # type: ignore[method-assign]
        for timeout in (1.0, 10.0, 60.0):  # where the machine is busy the others may be late too
            engine = remote(me, sites, peers, timeout=timeout)
            g = engine.gradients(X, 0, EVEN)
            assert g.left_out["peer 2"] == "no answer"
            if len(g.left_out) == 1:
                break
        assert g.left_out == {"peer 2": "no answer"}
        goes_on.set()
        engine, steps = remote(me, sites, peers), itertools.count(1)
        until(lambda: not engine.gradients(X, next(steps), EVEN).left_out, "it is asked again")
        assert engine.gradients(X, next(steps), EVEN).left_out == {}


@every_sites
@pytest.mark.parametrize("rule", [coterie.BiasCorrection(0.5, 0.1), coterie.AdaptiveAveraging()])
def test_a_run_over_sites_resumes_to_the_same_bits(
    make_sites: MakeSites, rule: Any, tmp_path: Path
) -> None:
    """User 0 stops half-way, and goes on with sites that are other processes by then."""

    def train(out: Path, stop: int | None) -> coterie.Run:
        me, peers = held()
        with make_sites(peers, None) as sites:
            engine: Any = partial(_remote, sites=sites, names=list(peers))
            torch.manual_seed(0)
            how: dict[str, Any] = {"steps": 12, "batch_size": 5, "lr": 0.1, "checkpoint_every": 4}

            def hook(step: coterie.Step) -> bool:
                return stop is not None and step.step == stop

            how |= {"progress": False, "trackers": (), "resume": True, "hooks": [hook]}
            return coterie.train(
                linear(), f.cross_entropy, me, [], rule, engine=engine, out=out, **how
            )

    whole = train(tmp_path / "whole", None)
    assert train(tmp_path / "cut", 6).step == 6
    again = train(tmp_path / "cut", None)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value)


def _remote(model: nn.Module, loss: Any, me: coterie.User, peers: Any, **how: Any) -> Remote:
    return Remote(model, loss, me, peers, timeout=ENOUGH, **how)
