"""A peer: the gradient of its batch, its caps, its log, and what it refuses; also as a site of NVFLARE."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.small_peers import LOSS, model, peer_of
from torch import nn

import coterie
from coterie.engines.in_process.passes import Passes
from coterie.engines.messages import Request, to_array
from coterie.engines.peer import Peer
from coterie.engines.peer.peer import Caps, clipped
from coterie.engines.remote.responder import answer_message
from coterie.errors import KnobError
from coterie.gradients.parameters import frozen_digest

Users = Callable[..., list[coterie.User]]


@pytest.fixture
def peer(make_users: Users) -> coterie.User:
    return make_users()[1]


POINT = np.linspace(-1, 1, 12)
REQUEST = {"points": POINT[None], "step": 2, "seed": 5, "batch_size": 4}


def test_a_site_gives_the_gradient_of_its_batch(peer: coterie.User) -> None:
    answer = answer_message(peer_of(peer), "server", REQUEST)
    weight = torch.from_numpy(POINT[:9].reshape(3, 3)).requires_grad_()
    bias = torch.from_numpy(POINT[9:]).requires_grad_()
    inputs, targets = peer.batch(4, seed=5, step=2)
    expected = torch.autograd.grad(LOSS(inputs @ weight.T + bias, targets), [weight, bias])
    np.testing.assert_allclose(
        answer["gradients"][0], torch.cat([g.flatten() for g in expected]), rtol=1e-12
    )
    assert (answer["site"], answer["step"]) == ("peer 1", 2)


def test_batches_are_those_of_the_user_in_any_order_of_steps(peer: coterie.User) -> None:
    site, x = peer_of(peer), torch.from_numpy(POINT)
    for seed, size, step in [
        (5, 4, 0),
        (5, 4, 1),
        (5, 4, 500),
        (5, 4, 3),
        (5, 99, 4),
        (6, 4, 5),
        (5, 4, 6),
    ]:
        inputs, targets = peer.batch(size, seed=seed, step=step)
        wanted = Passes(model(), LOSS).single(x, inputs, targets)[0]
        gradients = site.answer(Request(x[None], step, seed, size)).gradients
        assert gradients is not None
        assert torch.equal(gradients[0], wanted)


def test_caps_are_kept_and_every_request_is_logged(peer: coterie.User, tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    request = REQUEST | {"batch_size": len(peer)}  # all its rows, whoever draws them
    free = answer_message(peer_of(peer), "server", request)["gradients"]
    most = float(np.linalg.norm(free)) / 3
    capped = peer_of(peer, Caps(gradients=2, norm=most, examples=4), log)
    np.testing.assert_allclose(answer_message(capped, "server", request)["gradients"], free / 3)
    assert answer_message(capped, "server", request | {"batch_size": 3}) == {
        "refused": "it gives no gradient of fewer than 4 examples"
    }
    assert "gradients" in answer_message(capped, "server", request)
    assert capped.left == 0
    again = peer_of(peer, Caps(gradients=2), log)  # started anew
    assert answer_message(again, "server", request) == {
        "refused": "it has given all the gradients it gives, 2"
    }
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [("norm" in line, "refused" in line) for line in lines] == [
        (True, False),
        (False, True),
        (True, False),
        (False, True),
    ]
    assert lines[0]["examples"] == len(peer)
    assert lines[0]["norm"] == pytest.approx(3 * most)


@pytest.mark.parametrize(
    "request_",
    [
        {"points": POINT[None, :5]},
        {"points": POINT[None].astype(int)},
        {"points": [list(POINT)]},
        {"points": POINT},
        {"points": np.zeros((0, 12))},
        {"points": np.zeros((17, 12))},
        {"points": np.full((1, 12), np.nan)},
        {"step": -1},
        {"step": 1.5},
        {"batch_size": 0},
        {"seed": "0"},
        {"buffers": {"running": np.zeros((1, 3))}},
        {"frozen": "another model"},
    ],
    ids=str,
)
def test_a_strange_request_is_refused(request_: dict[str, Any], peer: coterie.User) -> None:
    assert set(answer_message(peer_of(peer), "server", REQUEST | request_)) == {"refused"}
    assert set(answer_message(peer_of(peer), "server", list(request_))) == {"refused"}


def test_an_error_at_a_site_stays_there(peer: coterie.User, tmp_path: Path) -> None:
    def secret(output: Any, target: Any) -> Any:
        raise ValueError("patient 7 is ill")

    log = tmp_path / "requests.jsonl"
    answer = answer_message(Peer(peer, Passes(model(), secret), log=log), "server", REQUEST)
    assert answer == {"refused": "it failed with ValueError"}
    assert "patient 7" in log.read_text()


def test_a_gradient_that_is_not_finite_is_refused_and_not_counted(
    peer: coterie.User, tmp_path: Path
) -> None:
    log = tmp_path / "requests.jsonl"
    site = Peer(
        peer,
        Passes(model(), lambda output, target: LOSS(output, target) * math.inf),
        Caps(norm=1.0),
        log,
    )
    assert site.answer(Request(torch.from_numpy(POINT)[None], 2, 5, 4)).refused == "not finite"
    assert site.ledger.given == 0
    assert json.loads(log.read_text())["refused"] == "not finite"


def test_a_longer_gradient_is_clipped_and_its_norm_told() -> None:
    shorter, norm = clipped(torch.tensor([3.0, 4.0]), 1.0)
    torch.testing.assert_close(shorter, torch.tensor([0.6, 0.8]))
    assert norm == 5.0


def test_a_model_of_which_nothing_is_frozen_has_the_digest_of_any_other() -> None:
    models = [nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1).requires_grad_(requires_grad=False)]
    first, second, frozen = map(frozen_digest, models)
    assert first == second != frozen


def test_what_numpy_lacks_travels_as_float32() -> None:
    array = to_array(torch.ones(2, dtype=torch.bfloat16))
    assert (array.dtype, array.tolist()) == (np.float32, [1, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipping_holds_where_squares_overflow(dtype: torch.dtype) -> None:
    large = torch.tensor([3.0, 4.0], dtype=dtype) * (torch.finfo(dtype).max / 8)
    shorter, norm = clipped(large, 1.0)
    torch.testing.assert_close(shorter, torch.tensor([0.6, 0.8], dtype=dtype))
    assert norm == pytest.approx(5 * (torch.finfo(dtype).max / 8))
    assert (
        clipped(torch.tensor([1.0, math.nan]), 1.0)[1]
        != clipped(torch.tensor([1.0, math.nan]), 1.0)[1]
    )


def test_a_line_of_the_log_is_short_whatever_was_asked(peer: coterie.User, tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    answer_message(peer_of(peer, Caps(), log), "s" * 10**6, REQUEST | {"step": "7" * 10**6})
    assert len(log.read_text()) < 1000


@pytest.mark.parametrize(
    "caps", [{"gradients": -1}, {"norm": 0.0}, {"norm": math.nan}, {"examples": 0}]
)
def test_caps_are_checked(caps: dict[str, Any]) -> None:
    with pytest.raises(KnobError):
        Caps(**caps)
