"""Strangers and curious leads among processes: altered notes, nonsense, sums that are none."""

from __future__ import annotations

import functools
import json
import math
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import fuzz, processes
from torch import nn
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

import coterie
from coterie.cli import app
from coterie.engines.processes import processes as links
from coterie.engines.processes.engine import serve
from coterie.engines.processes.processes import MOST_STRANGERS, Processes
from coterie.engines.processes.rendezvous import SECRET_FILE, Address, Rendezvous
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


@pytest.mark.parametrize(
    "send",
    [
        fuzz.questions_to_a_worker,
        fuzz.messages_to_a_site,
        fuzz.replies_to_user_0,
        fuzz.notes_of_strangers,
    ],
)
def test_nonsense_is_a_typed_error_or_harmless(send: Any) -> None:
    found = send(150)
    assert set(found) == {"answered", "typed"}, found


# A secret that all processes share.


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
    monkeypatch.setenv(SECRET_FILE, str(path))
    with processes.torch_distributed() as engine:
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
        del os.environ[SECRET_FILE]
        serve(*arguments, timeout=2)

    monkeypatch.setenv(SECRET_FILE, str(path))
    honest = functools.partial(serve, timeout=3)
    with (
        processes.torch_distributed([honest, stranger, honest], timeout=3.0) as engine,
        pytest.raises(PeerLost, match=r"rank 2.* did not come within"),
    ):
        gradients(engine, EVEN)


@pytest.mark.parametrize("me", ["all", "one"])
def test_without_a_secret_nobody_meets_but_on_this_machine(me: str, tmp_path: Path) -> None:
    """The exploit: a stranger on the network is taken for a member, and asks for gradients."""
    (tmp_path / "a.csv").write_text("who,x,y\none,1,2\ntwo,3,4\n")
    there = {"MASTER_ADDR": "192.0.2.7", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "2"}
    command = ["train", "--engine", "torch", "--me", me, "--data", str(tmp_path / "a.csv")]
    command += ["--user-column", "who", "--target", "y", "--out", str(tmp_path / "out")]
    answer = CliRunner().invoke(app, command, env=there)
    assert answer.exit_code == 2
    assert "processes that meet at 192.0.2.7 need a secret" in " ".join(answer.output.split())
    assert "COTERIE_SECRET_FILE" in answer.output


def test_a_note_that_leads_elsewhere_is_not_followed_without_a_secret() -> None:
    """The exploit: whoever reaches the store overwrites where a process listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        at = Address("127.0.0.1", free.getsockname()[1], 0, 2)
    ended = processes.ended(processes.forked(functools.partial(_follows, at)))
    assert ended == 0


def _follows(at: Address) -> None:
    rendezvous = Rendezvous(5.0, at)
    assert rendezvous.where(0) == rendezvous.listening
    store: Any = rendezvous._store
    for note in ('["192.0.2.7", 80]', '["127.0.0.1", -1]', "3", "[]", "\xff", "[" * 10_000):
        store.set("1", note)
        assert rendezvous.where(1) is None
    store.set("1", '["127.0.0.1", 80]')
    assert rendezvous.where(1) == ("127.0.0.1", 80)
    rendezvous.secret = b"a secret of 16 bytes"  # whoever is there must prove it
    store.set("1", '["192.0.2.7", 80]')
    assert rendezvous.where(1) == ("192.0.2.7", 80)


@pytest.mark.parametrize("with_secret", [False, True])
def test_an_altered_note_costs_time_and_ends_nobody(
    with_secret: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exploit: one altered note ended two ranks. What leads to a stranger is tried again."""
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef")
    path.chmod(0o600)
    if with_secret:
        monkeypatch.setenv(SECRET_FILE, str(path))

    def work(rank: int) -> None:
        rendezvous = Rendezvous(processes.PATIENCE)
        if rank == 0:  # it comes late: first the others find what a stranger has left
            with socket.create_server(("127.0.0.1", 0)) as stranger:
                stranger.settimeout(processes.PATIENCE)
                _spoil(rendezvous, json.dumps(stranger.getsockname()[:2]))
                connection, _ = stranger.accept()
                connection.sendall(b"x" * 1000)
                connection.close()
            _spoil(rendezvous, "[[[")
        with Processes(rendezvous) as others:
            assert set(others.exchange("who", {"me": rank}, me=int)) == {0, 1, 2} - {rank}
            (tmp_path / f"met {rank}").touch()
            end = time.monotonic() + processes.PATIENCE
            while len([*tmp_path.glob("met *")]) < 3 and time.monotonic() < end:
                time.sleep(0.02)

    works = [functools.partial(work, rank) for rank in range(3)]
    assert processes.Started(works).end() == [0, 0, 0]


def _spoil(rendezvous: Rendezvous, note: str) -> None:
    """Leave a note of a stranger in the place of this process's own."""
    rendezvous.where(0)
    store: Any = rendezvous._store
    store.set("0", note)


def test_idle_strangers_lock_nobody_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The exploit: more connections that say nothing than may wait, before the others come."""
    monkeypatch.setattr(links, "GREETING", 10 * processes.PATIENCE)

    def until(there: Callable[[], object]) -> None:
        end = time.monotonic() + processes.PATIENCE
        while not there() and time.monotonic() < end:
            time.sleep(0.01)

    def work(rank: int) -> None:
        rendezvous, idle = Rendezvous(processes.PATIENCE), []
        until((tmp_path / "idle").exists if rank else lambda: True)
        with Processes(rendezvous) as others:
            if rank == 0:
                until(lambda: rendezvous.listener)
                at = rendezvous.where(0)
                assert at is not None
                idle = [socket.create_connection(at) for _ in range(2 * MOST_STRANGERS)]
                idle[0].settimeout(processes.PATIENCE)
                while idle[0].recv(4096):  # the oldest is cut: no more than so many wait
                    pass
                (tmp_path / "idle").touch()
            assert set(others.exchange("who", {"me": rank}, me=int)) == {1 - rank}
            for connection in idle:
                connection.close()
            time.sleep(0.2)

    assert processes.Started([functools.partial(work, rank) for rank in range(2)]).end() == [0, 0]


# Where it listens.


def test_it_listens_at_the_address_given_and_at_no_other() -> None:
    """127.0.0.2 is this machine too: whoever listens at all addresses answers there."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def keep() -> None:
        rendezvous = Rendezvous(5.0, Address("127.0.0.1", port, 0, 2))
        listening = rendezvous.where(0)
        assert listening is not None
        for at in (port, listening[1]):
            with socket.create_connection(("127.0.0.1", at), timeout=5):
                pass
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.2", at), timeout=5)

    assert processes.ended(processes.forked(keep)) == 0


def test_an_address_that_is_not_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef")
    path.chmod(0o600)
    monkeypatch.setenv(SECRET_FILE, str(path))
    with pytest.raises(KnobError, match="must be an address of user 0's machine"):
        Rendezvous(1.0, Address("192.0.2.1", 29500, 0, 2))


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
