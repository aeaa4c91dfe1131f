"""Masked sums under torch.distributed, over real processes: they are right, or there is none."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import processes
from tests.support.masked import tau_of, users
from tests.support.small_peers import D, model
from torch import Tensor
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

import coterie
from coterie.cli import app
from coterie.engines.peer import Caps
from coterie.engines.processes.engine import TorchDistributed, serve
from coterie.engines.remote.masked import MASKED
from coterie.errors import KnobError, ModelError
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
        assert one.traffic()["peer 1"].bytes_sent == (step + 1) * 4 * (12 + 4)
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
    said = "refused: it has given all the gradients it gives, 2"
    refused = {name: said if name == "peer 2" else MASKED for name in tau}
    assert [g.left_out for g in found] == [{}, {}, refused, refused, {"peer 2": said}]
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
    with processes.torch_distributed([SECURE] * 3, secure_sums=True, compress="bf16") as engine:
        fails(engine, people, KnobError, "`compress` must be None with `secure_sums`")


def test_keys_are_told_by_name() -> None:
    answer = CliRunner().invoke(
        app, ["worker", "--data", "x.csv", "--name", "a", "--secure-sums", "--key", "0f1e-"]
    )
    assert (
        answer.output
        == "coterie: `--key` must be NAME=FINGERPRINT, once for each peer, got 0f1e-\n"
    )
