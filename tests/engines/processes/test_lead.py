"""Processes of which one trains: the same bits as in process, what travels, and who is lost."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo  # what an optimizer's first step would import in every child
import torch.utils.tensorboard.writer
from tests.support import processes
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import coterie
from coterie.engines.peer import Caps
from coterie.engines.processes.engine import TorchDistributed, serve
from coterie.engines.processes.rendezvous import Address, Rendezvous
from coterie.errors import DataError, KnobError, ModelError, PeerLost
from coterie.rules.streams import StreamAveraging

PEERS = ("peer 1", "peer 2", "peer 3")
SHY = functools.partial(serve, sums_only=True)
TAU = dict(zip(PEERS, (0.5, 0.2, 0.3), strict=True))


def users(dtype: torch.dtype = torch.float32) -> list[coterie.User]:
    generator = torch.Generator().manual_seed(0)

    def examples(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, 6, generator=generator).to(dtype), torch.arange(size) % 3

    me = coterie.User("me", *examples(15), validation=examples(12), test=examples(9))
    return [
        me,
        *(
            coterie.User(name, *examples(size))
            for name, size in zip(PEERS, (20, 7, 11), strict=True)
        ),
    ]


def plain(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batch_dependent(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
    )


def trained(engine: Any, model: nn.Module, rule: coterie.Rule, **settings: Any) -> coterie.Run:
    me, *peers = users()  # an engine elsewhere takes the peers' names alone
    keywords = {
        "steps": 25,
        "batch_size": 6,
        "lr": 0.05,
        "evaluate_every": 5,
        "engine": engine,
    } | settings
    return coterie.train(model, cross_entropy, me, peers, rule, **keywords)


def bits(run: coterie.Run) -> list[bytes]:
    states = [run.model.state_dict(), {k: v for k, v in run.state.items() if isinstance(v, Tensor)}]
    return [value.numpy().tobytes() for state in states for value in state.values()]


# The same bits.

RULES: list[coterie.Rule] = [
    coterie.WeightedAveraging(0.6, TAU),
    coterie.BiasCorrection(0.8, 0.1, TAU),
    StreamAveraging(horizon=25),
]
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)


@every_rule
@pytest.mark.parametrize("make", [plain, batch_dependent])
def test_runs_are_those_in_process_to_the_bit(
    make: Callable[[], nn.Module], rule: coterie.Rule
) -> None:
    wanted = trained(functools.partial(coterie.InProcess, one_by_one=True), make(), rule)
    with processes.torch_distributed() as engine:
        found = trained(engine, make(), rule)
    assert bits(found) == bits(wanted)
    assert found.record.points == wanted.record.points
    assert found.test == wanted.test


def test_models_taken_one_by_one_anyway_have_the_same_bits() -> None:
    wanted = trained(coterie.InProcess, batch_dependent(), RULES[0])
    with processes.torch_distributed() as engine:
        assert bits(trained(engine, batch_dependent(), RULES[0])) == bits(wanted)


@pytest.mark.parametrize("make", [plain, batch_dependent])
def test_sums_that_are_passed_on_are_the_same_but_for_rounding(
    make: Callable[[], nn.Module],
) -> None:
    wanted = trained(functools.partial(coterie.InProcess, one_by_one=True), make(), RULES[1])
    serving: list[Callable[..., object]] = [SHY, serve, SHY]
    with processes.torch_distributed(serving) as engine:
        found = trained(engine, make(), RULES[1])
    for key, value in wanted.model.state_dict().items():
        torch.testing.assert_close(found.model.state_dict()[key], value, rtol=1e-4, atol=1e-5)


def test_knobs_are_measured_over_the_processes() -> None:
    with processes.torch_distributed() as engine:
        run = trained(engine, plain(), coterie.WeightedAveraging("auto"))
    assert 0 <= run.record.configuration.choice["alpha"] <= 1
    assert run.step == 25


# What travels.


def asked(engine: Any, model: nn.Module, step: int = 0, rows: bool = False) -> coterie.Gradients:
    me, *peers = users()
    made = engine(model, cross_entropy, me, peers, batch_size=6, seed=0)
    x = torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
    g: coterie.Gradients = made.gradients(x, step, TAU, rows)
    return g


def test_bytes_are_counted() -> None:
    d, n = sum(p.numel() for p in plain().parameters()), len(PEERS)
    with processes.torch_distributed() as engine:
        run = trained(engine, plain(), RULES[0])
    costs = run.record.end.traffic
    for name in PEERS:
        assert (costs[name].bytes_sent, costs[name].bytes_received) == (25 * 4 * d, 25 * 4 * d)
        assert costs[name].messages == 25
    assert costs["me"].bytes_received == costs["me"].bytes_sent == 25 * 4 * d * n
    assert run.record.configuration.peers == {"peer 1": 20, "peer 2": 7, "peer 3": 11}


@pytest.mark.parametrize(("compress", "unit"), [("bf16", 2**-8), ("fp16", 2**-11)])
def test_compression_halves_the_bytes_and_shows_its_error(compress: str, unit: float) -> None:
    exact = asked(coterie.InProcess, plain())
    with processes.torch_distributed(compress=compress) as engine:
        me, *peers = users()
        made = engine(plain(), cross_entropy, me, peers, batch_size=6, seed=0)
        x = torch.cat([p.detach().flatten() for p in plain().parameters()])
        g, costs = made.gradients(x, 0, TAU), made.traffic()
    assert torch.equal(g.own, exact.own)
    assert g.peers is not None
    assert exact.peers is not None
    error = float((g.peers - exact.peers).norm() / exact.peers.norm())
    assert 0 < error < 20 * unit  # x is rounded too
    rounded = x.to({"bf16": torch.bfloat16, "fp16": torch.float16}[compress]).float()
    assert costs["me"].rounding == pytest.approx(float((rounded - x).norm() / x.norm()))
    for name in PEERS:
        assert 0.1 * unit < costs[name].rounding <= unit
        assert costs[name].bytes_sent == 2 * len(x)


def test_what_is_too_large_for_compression_is_left_out() -> None:
    me, *peers = users()
    inputs, targets = peers[1].batch(7, seed=0, step=0)
    peers[1] = coterie.User("peer 2", 1e6 * inputs, targets)
    with processes.torch_distributed(compress="fp16") as engine:
        made = engine(nn.Linear(6, 3), cross_entropy, me, peers, batch_size=6, seed=0)
        g = made.gradients(torch.linspace(-1, 1, 21), 0, TAU)
    assert g.left_out == {"peer 2": "not finite"}
    assert g.answered == pytest.approx(0.8)
    assert g.peers is not None
    assert bool(g.peers.isfinite().all())


def test_frozen_parameters_and_buffers_are_user_0s() -> None:
    def make(seed: int) -> nn.Module:
        model = batch_dependent(seed)
        model[0].requires_grad_(requires_grad=False)  # type: ignore[index]  # a Linear
        nn.init.uniform_(model[1].running_mean, generator=torch.Generator().manual_seed(seed))  # type: ignore[index]
        return model.eval()  # the running mean, then, is used

    def other(model: nn.Module, *rest: Any) -> None:
        serve(make(5), *rest, timeout=processes.PATIENCE)

    wanted = asked(functools.partial(coterie.InProcess, one_by_one=True), make(1))
    with processes.torch_distributed(serving=[other] * 3) as engine:
        found = asked(engine, make(1))
    assert wanted.peers is not None
    assert found.peers is not None
    assert torch.equal(found.peers, wanted.peers)


def test_a_peer_keeps_its_caps(tmp_path: Path) -> None:
    """It clips, refuses beyond its number of gradients, and logs both; the run goes on without it."""
    log = tmp_path / "requests.jsonl"
    capped = functools.partial(
        serve, caps=Caps(gradients=10, norm=0.01), log=log, timeout=processes.PATIENCE
    )
    with processes.torch_distributed([serve, capped, serve]) as engine:
        me, *peers = users()
        made = engine(plain(), cross_entropy, me, peers, batch_size=6, seed=0)
        x = torch.cat([p.detach().flatten() for p in plain().parameters()])
        g = made.gradients(x, 0, TAU, rows=True)
        assert g.rows is not None
        assert float(g.rows[1].norm()) == pytest.approx(0.01)
        assert float(g.rows[0].norm()) > 0.01
        left_out = [made.gradients(x, step, TAU).left_out for step in range(1, 12)]
    assert left_out[:9] == [{}] * 9
    assert all("all the gradients it gives, 10" in one["peer 2"] for one in left_out[9:])
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line.get("refused") for line in lines] == [None] * 10 + [
        "it has given all the gradients it gives, 10"
    ] * 2


# Who fits.


def test_a_peer_that_gives_sums_only(tmp_path: Path) -> None:
    serving: list[Callable[..., object]] = [serve, functools.partial(serve, sums_only=True), serve]
    with processes.torch_distributed(serving) as engine:
        with pytest.raises(KnobError, match="`StreamAveraging` needs every peer's gradient"):
            trained(engine, plain(), RULES[2], out=tmp_path / "run")
        assert not (tmp_path / "run").exists()
        assert trained(engine, plain(), RULES[0]).step == 25


def test_models_and_names_must_fit() -> None:
    me, *peers = users()
    larger = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    misfits: list[tuple[Callable[..., object], type[Exception], str]] = [
        (
            lambda model, *rest: serve(larger, *rest),
            ModelError,
            r"rank 2 \('peer 2'\) has a model of 93 parameters .* user 0 one of 83",
        ),
        (lambda model, loss, user: serve(model, loss, users()[1]), DataError, "different names"),
        (lambda model, loss, user: serve(model, loss, users()[0]), DataError, "different names"),
        (
            lambda model, *rest: serve(nn.Linear(5, 3), *rest),
            ModelError,
            "cannot take part: the model does not take",
        ),
    ]
    for misfit, error, match in misfits:
        with (
            processes.torch_distributed([serve, misfit, serve]) as engine,
            pytest.raises(error, match=match),
        ):
            engine(plain(), cross_entropy, me, peers, batch_size=6, seed=0)


def test_what_is_said_where_nothing_was_started() -> None:
    with pytest.raises(
        KnobError, match="environment variable MASTER_ADDR; start the processes with torchrun"
    ):
        Rendezvous()
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "1"}
    with mock.patch.dict(os.environ, alone):
        with pytest.raises(KnobError, match="user 0 would have no peers"):
            Rendezvous()
        with pytest.raises(
            KnobError, match="`timeout` must be a positive number of seconds, got 0"
        ):
            Rendezvous(0, Address("127.0.0.1", 1, 1, 2))
    with (
        processes.torch_distributed(compress="zip") as engine,
        pytest.raises(KnobError, match='`compress` must be "bf16", "fp16" or None'),
    ):
        asked(engine, plain())


# Who is lost.


def test_idle_peers_stay() -> None:
    def answered(timeout: float) -> float:
        """Return who answers after twice the time that peers wait for a word of user 0."""
        idle = functools.partial(serve, timeout=timeout)
        with processes.torch_distributed([idle] * 3, timeout=10 * timeout) as engine:
            me, *peers = users()
            made = engine(plain(), cross_entropy, me, peers, batch_size=6, seed=0)
            x = torch.cat([p.detach().flatten() for p in plain().parameters()])
            end = time.monotonic() + 2 * timeout
            while time.monotonic() < end:
                made.gradients(x, 0, {})
                time.sleep(0.1)
            return float(made.gradients(x, 0, TAU).answered)

    try:
        found = answered(2.0)
    except PeerLost:
        found = 0.0
    if found < 1:  # a busy machine may need longer for anything
        found = answered(40.0)
    assert found == 1


def test_a_peer_whose_model_fails_is_left_out_and_the_kind_of_its_error_told() -> None:
    class Fails(nn.Sequential):
        calls = 0

        def forward(self, inputs: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 12:
                raise RuntimeError("out of luck")
            out: Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
            return out

    def failing(model: nn.Module, *rest: Any) -> None:
        serve(Fails(*plain()), *rest)  # type: ignore[misc]  # a Sequential

    with processes.torch_distributed([serve, serve, failing]) as engine:
        run = trained(engine, plain(), RULES[0])
    assert run.step == 25
    assert set(run.record.end.left_out) == {"peer 3"}
    reasons = run.record.end.left_out["peer 3"]
    assert "refused: it failed with RuntimeError" in reasons
    assert "out of luck" not in str(reasons), "the text may tell of an example"


class Cluster:
    """Four ranks, each in a process: user 0 trains, the others serve; user 0 tells its steps."""

    def __init__(
        self,
        out: Path,
        model: Callable[[], nn.Module],
        timeout: float = processes.PATIENCE,
        **settings: Any,
    ) -> None:
        self.out, self.model, self.timeout, self.settings = out, model, timeout, settings
        self.read, self.write = os.pipe()
        self.works: list[Callable[[], object]] = [self.train]
        self.works += [
            functools.partial(serve, model(), cross_entropy, peer, timeout=timeout)
            for peer in users()[1:]
        ]
        self.started = processes.Started(self.works)
        self.children = self.started.children

    def train(self) -> None:
        engine = functools.partial(TorchDistributed, timeout=self.timeout, probe_every=1)

        def tell(step: coterie.Step) -> None:
            os.write(self.write, bytes([step.step]))
            time.sleep(0.01)

        settings = {"out": self.out, "resume": True, "checkpoint_every": 4, "hooks": [tell]}
        try:
            rule = coterie.BiasCorrection(0.8, 0.1)
            run = trained(engine, self.model(), rule, **settings | self.settings)
        except PeerLost as error:
            (self.out / "error").write_text(str(error), encoding="utf-8")
            raise
        digest = [value.hex() for value in bits(run)] + [
            json.dumps([point.to_plain() for point in run.record.points]),
            json.dumps(run.test),
        ]
        (self.out / "digest").write_text(json.dumps(digest), encoding="utf-8")
        (self.out / "left out").write_text(json.dumps(run.record.end.left_out), encoding="utf-8")

    def reach(self, step: int) -> None:
        while os.read(self.read, 1)[0] < step:
            pass

    def again(self, rank: int) -> None:
        """Start a rank anew that was killed."""
        assert processes.ended(self.children[rank]) == -signal.SIGKILL
        self.children[rank] = self.started.start(rank, self.works[rank])

    def end(self, patience: float = processes.PATIENCE) -> list[int]:
        """Wait for all, and return how each ended."""
        os.close(self.write)
        found = self.started.end(patience)
        os.close(self.read)
        return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Give the digest of a run that nothing happens to."""
    out = tmp_path_factory.mktemp("whole") / "run"
    out.mkdir()
    assert Cluster(out, batch_dependent).end() == [0, 0, 0, 0]
    return (out / "digest").read_text(encoding="utf-8")


def test_user_0_is_killed_and_comes_back_to_the_same_bits(tmp_path: Path, whole: str) -> None:
    """The peers wait for it."""
    cluster = Cluster(tmp_path, batch_dependent)
    cluster.reach(7)
    os.kill(cluster.children[0], signal.SIGKILL)
    cluster.again(0)
    assert cluster.end() == [0, 0, 0, 0]
    assert (tmp_path / "digest").read_text(encoding="utf-8") == whole


def test_user_0_is_told_to_end_and_all_resume_to_the_same_bits(tmp_path: Path, whole: str) -> None:
    """It saves; the peers are told, or else give up after their patience, as where it is stopped."""
    cluster = Cluster(tmp_path, batch_dependent)
    cluster.reach(5)
    os.kill(cluster.children[0], signal.SIGTERM)
    assert cluster.end()[0] == 1
    said = (tmp_path / "error").read_text(encoding="utf-8")
    assert "this process was told to end" in said
    assert "start everybody again and resume" in said
    assert Cluster(tmp_path, batch_dependent).end() == [0, 0, 0, 0]
    assert (tmp_path / "digest").read_text(encoding="utf-8") == whole


def test_peers_end_where_user_0_does_not_come_back(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, plain, timeout=20.0)
    cluster.reach(5)
    os.kill(cluster.children[0], signal.SIGKILL)
    assert cluster.end() == [-signal.SIGKILL, 1, 1, 1]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_peer_is_left_out_and_asked_again_once_it_is_back(
    tmp_path: Path, how: signal.Signals
) -> None:
    """One that is killed and started again, and one that is stopped and goes on."""
    reached, gone, half, on = (tmp_path / name for name in ("reached", "gone", "half", "on"))

    def wait_for(path: Path) -> None:
        end = time.monotonic() + processes.PATIENCE
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.01)

    def hook(step: coterie.Step) -> None:
        if step.step == 20:
            reached.touch()
            wait_for(gone)
        if step.step == 30:
            half.touch()
            wait_for(on)
        if step.step > 30 and step.left_out:  # as long as it may take until it is back
            time.sleep(0.5)

    cluster = Cluster(tmp_path, plain, steps=60, hooks=[hook], resume=False)
    wait_for(reached)
    os.kill(cluster.children[2], how)
    gone.touch()
    if how is signal.SIGKILL:
        wait_for(half)
        cluster.again(2)
    else:
        time.sleep(0.2)
        os.kill(cluster.children[2], signal.SIGCONT)
    on.touch()
    assert cluster.end() == [0, 0, 0, 0]
    left_out = json.loads((tmp_path / "left out").read_text(encoding="utf-8"))
    assert set(left_out) <= {"peer 2"}
    if how is signal.SIGKILL:
        assert 9 <= sum(left_out["peer 2"].values()) < 40
