"""Strangers and curious leads under torch.distributed: forged notes, nonsense, sums that are none."""

from __future__ import annotations

import functools
import json
import math
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import fuzz, processes
from tests.support.masked import SLOW
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # it is there
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

import coterie
from coterie.cli import app
from coterie.engines.torch_distributed.engine import serve
from coterie.engines.torch_distributed.group import Group
from coterie.engines.torch_distributed.place import Place, stay_on_loopback
from coterie.engines.torch_distributed.request import Ask
from coterie.engines.torch_distributed.seal import VARIABLE, Seal
from coterie.errors import KnobError, PeerLost
from coterie.privacy.sums import SumsOnly

PEERS = ("a", "b", "c")


def users() -> list[coterie.User]:
    generator = torch.Generator().manual_seed(0)
    return [
        coterie.User(name, torch.randn(12, 3, generator=generator), torch.arange(12) % 2)
        for name in ("me", *PEERS)
    ]


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


# Nonsense gives typed errors only.


@pytest.mark.parametrize("secret", [None, b"a secret of 16 bytes"])
def test_frames_to_a_worker(secret: bytes | None) -> None:
    found = fuzz.frames_to_a_worker(250, secret=secret)
    assert set(found) <= {"answered", "typed"}
    assert found["typed"] > 30
    assert (found["answered"] > 60) == (secret is None), "what has no tag is no message of user 0's"


def test_frames_and_agreements_to_a_masked_worker() -> None:
    found = fuzz.frames_to_a_masked_worker(800 if SLOW else 120)
    assert set(found) == {"answered", "typed"}, found


@pytest.mark.parametrize(
    "send", [fuzz.messages_to_a_site, fuzz.replies_to_user_0, fuzz.notes_of_strangers]
)
def test_messages_to_sites_replies_and_notes(send: Any) -> None:
    found = send(150)
    assert set(found) == {"answered", "typed"}, found


def test_notes_of_strangers_are_refused_by_a_secret() -> None:
    assert set(fuzz.notes_of_strangers(100, secret=b"a secret of 16 bytes")) == {"typed"}


# A secret that all processes share.


def test_a_note_is_its_own_and_nobody_elses() -> None:
    store = HashStore()
    ours, theirs, later = (
        Group(store, 0, 2, 0.1, secret, k) for secret, k in ((b"x", 0), (b"y", 0), (b"x", 1))
    )
    ours.leave_note("go", {"refused": None})
    assert ours.read_note("go", "user 0", refused=str | None) == {"refused": None}
    for stranger in (theirs, later):
        with pytest.raises(PeerLost, match="no tag of this cluster's secret"):
            stranger.read_note("go", "user 0")
    store.set("run", store.get("go").decode())  # a note in the place of another
    with pytest.raises(PeerLost, match="no tag"):
        ours.read_note("run", "user 0")
    assert "secret" not in repr(ours)


def test_a_request_is_taken_from_user_0_once() -> None:
    secret = b"a secret of 16 bytes"
    with fuzz.worker(secret) as worker:
        request, seal = worker.wire.request, Seal(secret, fuzz.RUN["nonce"])
        request.ask(Ask.NOTHING)
        request.tag.copy_(seal.tag(request.body))
        assert worker.answer(told_to_end=False)
        with pytest.raises(PeerLost, match="not user 0's"):  # the same again
            worker.answer(told_to_end=False)
        request.tag.copy_(Seal(b"another secret, 16", "0").tag(request.body))
        with pytest.raises(PeerLost, match="not user 0's"):
            worker.answer(told_to_end=False)


def gradients(engine: Any, weights: dict[str, float], **settings: Any) -> coterie.Gradients:
    me, *peers = users()
    made = engine(linear(), cross_entropy, me, peers, batch_size=6, seed=0)
    found: coterie.Gradients = made.gradients(torch.linspace(-1, 1, 8), 0, weights, **settings)
    return found


EVEN = dict.fromkeys(PEERS, 1 / 3)


def test_a_run_with_a_secret_is_the_run_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = gradients(functools.partial(coterie.InProcess, one_by_one=True), EVEN)
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef")
    path.chmod(0o600)
    monkeypatch.setenv(VARIABLE, str(path))
    with processes.torch_distributed(gather=True) as engine:
        found = gradients(engine, EVEN)
    assert found.peers is not None
    assert wanted.peers is not None
    assert torch.equal(found.peers, wanted.peers)
    path.chmod(0o640)
    with (
        pytest.raises(KnobError, match="others may read the secret"),
        processes.torch_distributed() as engine,
    ):
        gradients(engine, EVEN)


def test_a_process_without_the_secret_does_not_take_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef")
    path.chmod(0o600)

    def stranger(*arguments: Any) -> None:
        del os.environ[VARIABLE]
        serve(*arguments, timeout=2)

    monkeypatch.setenv(VARIABLE, str(path))
    honest = functools.partial(serve, timeout=3)
    with (
        processes.torch_distributed([honest, stranger, honest], timeout=3.0) as engine,
        pytest.raises(PeerLost, match=r"'hello/2' of rank 2 is not one|did not come within"),
    ):
        gradients(engine, EVEN)


# Where it listens.


def test_the_store_listens_at_the_address_given_and_at_no_other() -> None:
    """127.0.0.2 is this machine too: whoever listens at all addresses answers there."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def keep() -> None:
        store = Place("127.0.0.1", port, 0, 1).keep(timedelta(seconds=5), all_come=True)
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5)
        store.set("a", "b")

    assert processes.ended(processes.forked(keep)) == 0
    with pytest.raises(KnobError, match="must be an address of user 0's machine"):
        Place("192.0.2.1", port, 0, 1).keep(timedelta(seconds=1), all_come=True)


def test_gloo_stays_on_this_machine_where_the_store_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    stay_on_loopback()
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")  # what somebody has set stays
    stay_on_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


# Sums that are none.

NAN = math.nan
SUMS = {
    "one peer": ([1, 0, 0, 0], False),
    "one peer, the others not asked": ([1, NAN, NAN, NAN], False),
    "one peer and crumbs": ([1, 1e-9, 1e-9, 1e-9], False),
    "two peers and crumbs": ([0.5, 0.5, 1e-9, 1e-9], False),
    "one with more than half": ([0.52, 0.16, 0.16, 0.16], False),
    "weights that cancel": ([1, 1, -1, 0.5], False),
    "an infinite weight": ([math.inf, 1, 1, 1], False),
    "no weight": ([0, 0, 0, 0], False),
    "weights that overflow": ([1e308, 1e308, 1e308, 1e308], False),
    "all alike": ([0.25] * 4, True),
    "three of four": ([NAN, 1, 1, 1], True),
    "half for one": ([0.5, 0.3, 0.2, 0], True),
}


@pytest.mark.parametrize("what", SUMS)
def test_which_weights_make_a_sum(what: str) -> None:
    weights, allowed = SUMS[what]
    assert SumsOnly().allowed(torch.tensor([weights], dtype=torch.float64)).tolist() == [allowed]


def test_weights_are_brought_to_the_nearest_sum_that_peers_take_part_in() -> None:
    sums, generator = SumsOnly(), torch.Generator().manual_seed(0)
    weights = torch.rand(150, 5, generator=generator, dtype=torch.float64) ** 8
    weights[torch.rand(150, 5, generator=generator) < 0.2] = NAN
    enough = (~weights.isnan()).sum(1) >= 3
    found = sums.nearest(weights)
    assert sums.allowed(found)[enough].all()
    assert torch.equal(found.isnan(), weights.isnan())
    torch.testing.assert_close(found.nansum(1), weights.nansum(1))
    fine = sums.allowed(weights)
    assert 5 < int(fine.sum()) < 145
    assert torch.equal(found[fine].nan_to_num(-1), weights[fine].nan_to_num(-1))
    assert torch.equal(found[~enough].nan_to_num(-1), weights[~enough].nan_to_num(-1))


def test_a_sum_of_one_peer_is_refused_by_that_peer(tmp_path: Path) -> None:
    """The exploit: with τ = {a: 1} the sum is a's gradient."""
    log = tmp_path / "log"
    serving: list[Callable[..., object]] = [
        functools.partial(serve, sums_only=True, log=log),
        serve,
        serve,
    ]
    with processes.torch_distributed(serving) as engine:
        me, *peers = users()
        made = engine(linear(), cross_entropy, me, peers, batch_size=6, seed=0)
        x = torch.linspace(-1, 1, 8)
        for weights in ({"a": 1.0}, {"a": 0.98, "b": 0.01, "c": 0.01}, {"a": 0.5, "b": 0.5}):
            g = made.gradients(x, 0, weights)
            assert g.left_out == {"a": "refused"}, "and what comes has nothing of a's"
        assert made.gradients(x, 0, EVEN).left_out == {}
    refused = [json.loads(line).get("refused") for line in log.read_text().splitlines()]
    assert refused == [f"it gives {SumsOnly()}"] * 3 + [None]


def test_fewer_peers_than_a_sum_must_have_are_told_before_the_run() -> None:
    serving: list[Callable[..., object]] = [
        functools.partial(serve, sums_only=SumsOnly(peers=4)),
        serve,
        serve,
    ]
    with (
        processes.torch_distributed(serving) as engine,
        pytest.raises(
            KnobError, match=r"rank 1 \('a'\) gives sums of 4 peers or more, and there are 3"
        ),
    ):
        gradients(engine, EVEN)
    wrongs: list[dict[str, Any]] = [{"peers": 0}, {"share": 0.0}, {"share": 1.5}]
    for wrong in wrongs:
        with pytest.raises(KnobError):
            SumsOnly(**wrong)


@pytest.mark.parametrize("limits", [["--max-share", "2"], ["--min-peers", "0"]], ids=" ".join)
def test_a_worker_checks_its_limits_before_it_joins(limits: list[str], tmp_path: Path) -> None:
    worker = ["worker", "--data", str(tmp_path / "a.csv"), "--name", "a", "--sums-only", *limits]
    answer = CliRunner().invoke(app, worker)
    assert answer.exit_code == 2
    assert limits[0].removeprefix("--max-") in answer.output


@pytest.mark.parametrize(
    ("limits", "without"),
    [
        (["--min-peers", "5"], "--sums-only"),
        (["--max-share", "0.3"], "--sums-only"),
        (["--key", "b=0f1e-"], "--secure-sums"),
        (["--sums-only", "--key", "b=0f1e-"], "--secure-sums"),
    ],
    ids=str,
)
def test_a_worker_does_not_take_limits_that_would_not_hold(
    limits: list[str], without: str, tmp_path: Path
) -> None:
    """Whoever names a least number of peers, or keys, believes that no gradient is given on its own."""
    answer = CliRunner().invoke(
        app, ["worker", "--data", str(tmp_path / "a.csv"), "--name", "a", *limits]
    )
    assert answer.exit_code == 2
    assert f"`{limits[-2]}` has no effect without `{without}`; leave it out" in " ".join(
        answer.output.split()
    )
