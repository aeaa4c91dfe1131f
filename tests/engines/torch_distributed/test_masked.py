"""Masked sums under torch.distributed, over real processes: they are right, or there is none."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import processes
from tests.support.masked import SLOW, Ring, drawn, tau_of, users
from tests.support.small_peers import D, model
from torch import Tensor
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

import coterie
from coterie.cli import app
from coterie.engines.peer import Caps
from coterie.engines.torch_distributed.engine import TorchDistributed, serve
from coterie.errors import KnobError, ModelError
from coterie.privacy.masked_sums import MASKED
from coterie.privacy.sums import SumsOnly

X = torch.linspace(-1, 1, D, dtype=torch.float64)
SECURE = functools.partial(serve, secure_sums=True, timeout=processes.PATIENCE)


def made(engine: Any, people: Sequence[coterie.User]) -> TorchDistributed:
    found: TorchDistributed = engine(
        model(), cross_entropy, people[0], people[1:], batch_size=4, seed=5
    )
    return found


def plain(
    people: Sequence[coterie.User], x: Tensor, step: int, weights: dict[str, float]
) -> coterie.Gradients:
    inside = coterie.InProcess(model(), cross_entropy, people[0], people[1:], batch_size=4, seed=5)
    return inside.gradients(x, step, weights)


@pytest.mark.parametrize("n", [3, 10])
def test_a_masked_sum_over_processes_is_the_plain_one(n: int) -> None:
    people, x = users(n), X.clone()
    tau = tau_of(n)
    with processes.torch_distributed([SECURE] * n, secure_sums=True) as engine:
        one = made(engine, people)
        for step in range(12 if n == 3 else 4):
            found, wanted = one.gradients(x, step, tau), plain(people, x, step, tau)
            assert found.peers is not None
            assert wanted.peers is not None
            assert found.answered == 1
            assert float((found.peers - wanted.peers).norm() / wanted.peers.norm()) < 1e-4
            x = x - 0.1 * found.peers
        assert one.traffic()["peer 1"].bytes_sent == (step + 1) * 4 * (12 + 4 + 4 * n)
        with pytest.raises(KnobError, match="`tau` must stay"):
            one.gradients(x, step, tau | {"peer 1": 0.01})
        with pytest.raises(KnobError, match="have no rows"):
            one.gradients(x, step, tau, rows=True)


def test_a_run_with_masked_sums_is_the_run_without() -> None:
    people, rule = users(4), coterie.BiasCorrection(0.7, 0.1)
    options: dict[str, Any] = {"lr": 0.1, "steps": 6, "batch_size": 4, "seed": 5, "progress": False}
    wanted = coterie.train(model(), cross_entropy, people[0], people[1:], rule, **options)
    with processes.torch_distributed([SECURE, serve, SECURE, SECURE], secure_sums=True) as engine:
        run = coterie.train(
            model(), cross_entropy, people[0], people[1:], rule, engine=engine, **options
        )
        for ours, theirs in zip(run.model.parameters(), wanted.model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
        with pytest.raises(KnobError, match="weighted sum alone"):
            coterie.train(model(), cross_entropy, people[0], people[1:], engine=engine, **options)


def test_one_that_refuses_costs_steps_and_is_left_out_for_good(tmp_path: Path) -> None:
    people, tau = users(4), tau_of(4)
    log = tmp_path / "requests.jsonl"
    capped = functools.partial(SECURE, caps=Caps(gradients=2), log=log)
    with processes.torch_distributed(
        [SECURE, capped, SECURE, SECURE], secure_sums=True, misses=2
    ) as engine:
        one = made(engine, people)
        found = [one.gradients(X, step, tau) for step in range(5)]
    refused = {name: "refused" if name == "peer 2" else MASKED for name in tau}
    assert [g.left_out for g in found] == [{}, {}, refused, refused, {"peer 2": "refused"}]
    assert [g.answered for g in found] == [1, 1, 0, 0, 0.75]
    assert found[2].peers is not None
    assert torch.equal(found[2].peers, found[2].own)
    rest = {name: weight for name, weight in tau.items() if name != "peer 2"}
    wanted = plain(people, X, 4, rest)
    assert wanted.peers is not None
    assert found[4].peers is not None
    torch.testing.assert_close(found[4].peers, wanted.peers + wanted.own / 4, rtol=0, atol=1e-6)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["sum_with"] for line in lines if "sum_with" in line} == set(tau), (
        "for people to compare"
    )


def fails(engine: Any, people: Sequence[coterie.User], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        made(engine, people)


def test_who_does_not_agree_takes_no_part() -> None:
    """Too few peers, or a key that is not the one known here: the run goes on alone, and says why."""
    people = users(3)
    pickier: list[Callable[..., object]] = [
        functools.partial(SECURE, sums_only=SumsOnly(keys={"peer 2": "0f1e-", "peer 3": "0f1e-"})),
        SECURE,
        SECURE,
    ]
    with processes.torch_distributed(pickier, secure_sums=True) as engine:
        g = made(engine, people).gradients(X, 0, tau_of(3))
    assert g.answered == 0
    assert "which is not the one known here" in g.left_out["peer 1"]
    assert "it gives sums of at least 3 peers" in g.left_out["peer 2"]


def test_peers_that_give_what_is_not_masked_do_not_count() -> None:
    people = users(4)
    with processes.torch_distributed([SECURE, serve, serve, SECURE], secure_sums=True) as engine:
        g = made(engine, people).gradients(X, 0, tau_of(4))
    for strict in ("peer 1", "peer 4"):
        assert "'peer 2' does not give masked sums only, and does not count" in g.left_out[strict]


def test_masks_are_wanted_by_both_or_there_is_no_run() -> None:
    people = users(3)
    with processes.torch_distributed([serve, SECURE, serve]) as engine:
        fails(
            engine,
            people,
            ModelError,
            "'peer 2' gives masked sums only; set `secure_sums` at user 0",
        )
    for wrong in ({"gather": True}, {"compress": "bf16"}):
        with processes.torch_distributed([SECURE] * 3, secure_sums=True, **wrong) as engine:
            fails(
                engine,
                people,
                KnobError,
                f"`{next(iter(wrong))}` must be left out with `secure_sums`",
            )


# Without processes.


@pytest.mark.parametrize(("n", "steps"), [(3, 1000), (10, 1000 if SLOW else 30)])
def test_masked_sums_over_many_steps_are_the_plain_ones(n: int, steps: int) -> None:
    ring, tau = Ring(n), tau_of(n)
    for step in range(steps):
        found = ring.step(X, step, tau)
        wanted = sum(weight * drawn(name, step) for name, weight in tau.items())
        assert isinstance(wanted, Tensor)
        assert found.peers is not None
        assert found.answered == 1
        assert float((found.peers - wanted).norm() / wanted.norm()) < 1e-4


@pytest.mark.parametrize(
    "change", [lambda body: body[-8:].add_(1), lambda body: body[:8].add_(1)], ids=["x", "head"]
)
def test_peers_that_are_told_different_things_add_up_to_noise(
    change: Callable[[Tensor], Tensor],
) -> None:
    ring = Ring(4)
    ring.step(X, 0, tau_of(4))
    told = ring.wire.request.body.clone()
    change(told)
    ring.told = {"peer 3": told}
    for step in range(3):  # after the second nobody is left
        g = ring.step(X, step, tau_of(4))
        assert g.answered == 0
        assert all("do not cancel" in reason for reason in g.left_out.values())


def test_a_peer_takes_part_in_sums_of_its_own_choice() -> None:
    ring = Ring(4, SumsOnly(peers=4))
    assert ring.step(X, 0, {"peer 1": 0.4, "peer 2": 0.3, "peer 3": 0.3}).answered == 0
    said = Ring(3).step(X, 0, {"peer 1": 0.6, "peer 2": 0.2, "peer 3": 0.2}).left_out["peer 1"]
    assert said.startswith("refused: it gives sums of at least 3 peers")


@pytest.mark.parametrize(
    ("bad", "told"), [(math.nan, "not finite"), (math.inf, "not finite"), (70.0, "beyond 16")]
)
def test_what_cannot_be_added_costs_a_step_and_nobody_is_told_whose_it_is(
    bad: float, told: str
) -> None:
    ring, tau = Ring(4), tau_of(4)
    peer = ring.parts[1].peer
    peer._gradients = lambda request, added=None: (torch.full((1, D), bad, dtype=torch.float64), 4)  # type: ignore[assignment]
    found = ring.step(X, 0, tau)
    assert found.answered == 0
    assert all(told in reason for reason in found.left_out.values())


def test_keys_are_told_by_name() -> None:
    answer = CliRunner().invoke(
        app, ["worker", "--data", "x.csv", "--name", "a", "--secure-sums", "--key", "0f1e-"]
    )
    assert (
        answer.output
        == "coterie: `--key` must be NAME=FINGERPRINT, once for each peer, got 0f1e-\n"
    )
