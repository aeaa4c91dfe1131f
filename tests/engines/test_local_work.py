"""Steps that peers take themselves: the same on every engine, within the caps; wrong requests are refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines.test_runs import RULES, trained
from tests.support.model_cases import BATCH, CASES, SEED, close, make_model, make_users, some_point
from torch import Tensor
from torch.nn.functional import cross_entropy

import coterie
from coterie.engines import InProcess
from coterie.engines.engine import Asks, LocalWork, MakeEngine, Question
from coterie.engines.messages import MAX_LOCAL_STEPS, Request
from coterie.engines.peer import Caps, Peer
from coterie.engines.remote.responder import answer_message
from coterie.errors import KnobError

NAN = math.nan


def question(points: Tensor, weights: list[list[float]], work: LocalWork, **more: Any) -> Question:
    return Question(points, 3, torch.tensor(weights, dtype=torch.float64), work=work, **more)


def by_hand(engine: Any, name: str, x: Tensor, work: LocalWork, place: int = 0) -> Tensor:
    """The sum of what a peer's steps follow, a gradient at a time."""
    total = torch.zeros_like(x)
    for step in range(3, 3 + work.count):
        g = engine.gradients(x, step, {name: 1.0}).peers
        direction = g + (0 if work.add is None else work.add[place]) + work.decay * x
        total, x = total + direction, x - work.lr * direction
    return total


def test_peers_take_steps_of_their_own(make_engine: MakeEngine) -> None:
    users, model = make_users(CASES["mlp"]), make_model(CASES["mlp"])
    engine = make_engine(model, cross_entropy, users[0], users[1:], batch_size=BATCH, seed=SEED)
    assert isinstance(engine, Asks)
    names, x = list(engine.names), some_point(model)
    weights = [0.5, NAN, 0.25, 0.25]
    work = LocalWork(3, 0.05)
    for rows in (False, True):
        found = engine.ask(question(x[None], [weights], work, rows=rows))()
        each = {
            k: by_hand(engine, names[k], x, work)
            for k, w in enumerate(weights)
            if not math.isnan(w)
        }
        assert found.answered.tolist() == pytest.approx([1.0])
        if not rows:
            assert found.sums is not None
            close(found.sums[0], torch.stack([weights[k] * row for k, row in each.items()]).sum(0))
            continue
        assert found.rows is not None
        for k, row in each.items():
            close(found.rows[0, k], row)
        assert bool(found.rows[0, 1].isnan().all())


def test_each_from_a_point_of_its_own_with_what_is_added(make_engine: MakeEngine) -> None:
    """Then without, on the same wire."""
    users, model = make_users(CASES["mlp"]), make_model(CASES["mlp"])
    engine: Any = make_engine(
        model, cross_entropy, users[0], users[1:], batch_size=BATCH, seed=SEED
    )
    x = some_point(model)
    points, add = (
        torch.stack([x, x + 0.1, x - 0.1]),
        torch.stack([0.01 * x, -0.02 * x, torch.ones_like(x) / 50]),
    )
    weights = [[1.0, NAN, NAN, NAN], [NAN, NAN, 1.0, NAN], [NAN, NAN, NAN, 1.0]]
    for work in (LocalWork(2, 0.1, add, decay=0.3), LocalWork(2, 0.1)):
        found = engine.ask(question(points, weights, work, rows=True))()
        for place, peer in enumerate((0, 2, 3)):
            close(
                found.rows[place, peer],
                by_hand(engine, engine.names[peer], points[place], work, place),
            )
    here: Any = InProcess(model, cross_entropy, users[0], users[1:], batch_size=BATCH, seed=SEED)
    asked = x, 3, dict.fromkeys(engine.names, 0.25)
    close(engine.gradients(*asked).peers, here.gradients(*asked).peers)


@pytest.mark.parametrize("name", ["mlp", "dropout and batch norm"])
def test_runs_with_fewer_exchanges_are_the_same_everywhere(
    make_engine: MakeEngine, name: str
) -> None:
    how: dict[str, Any] = {"exchange_every": 3, "local_steps": 2, "steps": 7}
    wanted = trained(coterie.InProcess, CASES[name], RULES["bias correction"], **how)
    found = trained(make_engine, CASES[name], RULES["bias correction"], **how)
    for key, value in wanted.model.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(found.model.state_dict()[key], value, rtol=1e-8, atol=1e-10)
    assert found.record.end is not None
    traffic = found.record.end.traffic
    assert not traffic or traffic["peer 2"].messages == 3


def peer_of(caps: Caps | None = None, log: Path | None = None) -> tuple[Peer, Request]:
    users, model = make_users(CASES["mlp"]), make_model(CASES["mlp"])
    engine = InProcess(model, cross_entropy, users[0], users[1:], batch_size=BATCH, seed=SEED)
    request = Request(some_point(model)[None], 0, SEED, BATCH, work=LocalWork(3, 0.1))
    return engine.peer(users[1].name, caps, log), request


def test_every_step_of_its_own_counts_and_is_clipped(tmp_path: Path) -> None:
    peer, request = peer_of(Caps(gradients=7, norm=0.01), tmp_path / "log.jsonl")
    reply = peer.answer(request)
    assert reply.gradients is not None
    assert 0.01 < float(reply.gradients.norm()) <= 0.03 + 1e-9  # three of .01
    assert peer.left == 4
    assert json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])["gradients"] == 3
    assert peer.answer(request).gradients is not None
    assert peer.answer(request).refused == "it has 1 gradients left to give, and was asked for 3"


@pytest.mark.parametrize(
    ("work", "why"),
    [
        (LocalWork(0, 0.1), f"it takes 1 to {MAX_LOCAL_STEPS} steps"),
        (LocalWork(MAX_LOCAL_STEPS + 1, 0.1), f"it takes 1 to {MAX_LOCAL_STEPS} steps"),
        (LocalWork(2, math.inf), "step size and decay must be finite"),
        (LocalWork(2, 0.1, decay=-1.0), "step size and decay must be finite"),
        (
            LocalWork(2, 0.1, torch.zeros(1, 3)),
            "what is added must be finite numbers like the points",
        ),
    ],
)
def test_wrong_work_is_refused(work: LocalWork, why: str) -> None:
    peer, request = peer_of()
    assert why in str(peer.answer(replace(request, work=work)).refused)


@pytest.mark.parametrize(
    "work",
    [
        {"count": 2.0, "lr": 0.1, "decay": 0.0},
        {"count": 2},
        "five",
        {"count": 2, "lr": 0.1, "decay": 0.0, "add": [1]},
    ],
)
def test_a_site_refuses_work_that_is_none(work: Any) -> None:
    peer, request = peer_of()
    assert "gradients" in answer_message(peer, "user 0", request.message())
    refused = answer_message(peer, "user 0", request.message() | {"work": work})["refused"]
    assert "steps of its own" in refused or "what is added" in refused


def test_an_engine_whose_peers_take_no_steps_says_so() -> None:
    class Plain(coterie.InProcess):
        @property
        def capabilities(self) -> Any:
            return replace(super().capabilities, local_work=False)

    with pytest.raises(KnobError, match="`local_steps` needs peers that take steps of their own"):
        trained(Plain, CASES["mlp"], RULES["averaging"], local_steps=2)
