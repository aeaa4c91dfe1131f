"""Trees with peers elsewhere: as in one process over every engine, and no more than caps, masks and sums allow."""

from __future__ import annotations

import dataclasses
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.engines import ENGINES
from torch import nn

import coterie
from coterie.choosing.e_steps import ESteps
from coterie.engines.engine import MakeEngine
from coterie.engines.in_process.passes import Passes
from coterie.engines.messages import Request
from coterie.engines.peer import Caps, Peer
from coterie.engines.peer.ledger import Ledger
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.responder import answer_message
from coterie.engines.remote.sites import LocalReplies, LocalSites
from coterie.errors import DataError, UserCodeError
from coterie.mixture.families import Array
from coterie.mixture.posterior import Rows
from coterie.privacy.masks import HEADROOM
from coterie.privacy.sums import SumsOnly
from coterie.recording.configuration import StepSettings
from coterie.trees.boosting import Bins, Level, Splits, Tree
from coterie.trees.histograms import ROUNDING, Histograms, merged

LOSS = nn.functional.cross_entropy
TREES = coterie.Mixture(trees="only")
QUIET: dict[str, Any] = {"measure": False, "progress": False}


def users(sizes: tuple[int, ...] = (40, 60, 50, 70), seed: int = 0) -> list[coterie.User]:
    """Return users whose class is the sign of a product of two columns; two columns are alike."""
    random = torch.Generator().manual_seed(seed)
    made = []
    for k, n in enumerate(sizes):
        x = torch.randn(n, 4, generator=random)
        x[:, 3] = x[:, 2]
        y = (x[:, 0] * x[:, 1] + 0.3 * torch.randn(n, generator=random) > 0).long()
        made.append(coterie.User("me" if k == 0 else f"peer {k}", x, y))
    return made


def held(
    peers: list[coterie.User], caps: Caps | None = None, log: Path | None = None
) -> dict[str, Peer]:
    kept = {p.name: None if log is None else Ledger(log / p.name) for p in peers}
    return {p.name: Peer(p, Passes(nn.Linear(4, 2), LOSS), caps, kept[p.name]) for p in peers}


def over(sites: LocalSites, peers: list[coterie.User], **how: Any) -> Any:
    return partial(Remote, sites=sites, names=[p.name for p in peers], **how)


def run_of(
    engine: Any = coterie.InProcess, peers: Any = (), rule: Any = TREES, **how: Any
) -> coterie.Run:
    return coterie.train(
        nn.Linear(4, 2), LOSS, users()[0], peers, rule, engine=engine, **QUIET, **how
    )


def outputs(run: coterie.Run) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = run.model(
            torch.randn(300, 4, generator=torch.Generator().manual_seed(9))
        )
    return found


@pytest.fixture(params=[name for name in ENGINES if not name.startswith("in process")])
def make(request: pytest.FixtureRequest) -> Iterator[MakeEngine]:
    """Give each engine whose peers are elsewhere."""
    with ENGINES[request.param]() as engine:
        yield engine


def test_trees_are_those_of_one_process_to_the_bit(make: MakeEngine) -> None:
    """Two columns are alike, so that the order of sums would show; in one outputs only rise."""
    me, *peers = users()
    rule = dataclasses.replace(TREES, monotonic_cst={1: 1})
    here, there = (
        coterie.train(nn.Linear(4, 2), LOSS, me, peers, rule, engine=engine, **QUIET)
        for engine in (coterie.InProcess, make)
    )
    assert torch.equal(outputs(here), outputs(there))
    account = there.record.end.account
    assert account["leaderboard"]["trees"]["weight"] > 0.05
    assert account["exchanges"] == 200


class Listening(LocalSites):
    """Sites whose answers a test sees, and may change, by (name, exchange, answer)."""

    def __init__(self, peers: dict[str, Peer], change: Callable[[str, int, Any], Any]) -> None:
        super().__init__(peers)
        self.change = change

    def ask(self, names: Any, method: str, timeout: float, **arguments: Any) -> Any:
        replies = super().ask(names, method, timeout, **arguments)
        if method != "gradients":
            return replies
        step, given = arguments["request"]["step"], replies.wait()
        return LocalReplies({name: self.change(name, step, given[name]) for name in given})


def test_a_run_that_dies_in_mid_tree_is_resumed_to_the_same_bits(tmp_path: Path) -> None:
    """The sites go on from what they hold; of these one is started again in mid-tree too."""
    peers = users()[1:]
    whole = run_of(over(LocalSites(held(peers)), peers), rule=coterie.Mixture(trees=True))
    asked: list[int] = []

    def change(name: str, step: int, reply: Any) -> Any:
        asked.append(step)
        if len(asked) == 3 * 100:
            raise ConnectionError("the line is cut")
        if len(asked) == 3 * 250 + 1:
            sites.responders["peer 1"].peer = held(peers)["peer 1"]
        return reply

    sites = Listening(held(peers), change)
    how: dict[str, Any] = {"out": tmp_path, "trackers": (), "rule": coterie.Mixture(trees=True)}
    with pytest.raises(UserCodeError, match="the line is cut"):
        run_of(over(sites, peers), **how)
    again = run_of(over(sites, peers), resume=True, **how)
    assert torch.equal(outputs(whole), outputs(again))
    assert again.record.end.account["exchanges"] == 39 + 200


LIES: dict[str, tuple[Callable[[Array], Any], str]] = {
    "nan": (lambda sums: sums * math.nan, "not finite"),
    "first bin": (
        lambda sums: np.where(np.arange(len(sums))[:, None, None, None], sums, 0.1),
        "add up",
    ),
    "curvature": (lambda sums: sums * [1, -1, 1], "negative curvature"),
    "rows": (lambda sums: sums * [0, 0, -1], "negative number of rows"),
    "huge": (lambda sums: sums * 1e6, "more rows than a peer says"),
    "slopes": (lambda sums: sums * [3, 1, 1], "so few rows"),
    "children": (lambda sums: sums * (1 if sums.shape[2] == 1 else 3), "more rows than its root"),
}


@pytest.mark.parametrize("lie", LIES)
def test_histograms_that_cannot_be_are_left_out_and_told(lie: str) -> None:
    """What is learned is nearly what it is without the liar, and the record says why."""
    peers = users()[1:]
    bins = int(Bins.of(users()[0].examples.inputs.double().numpy()).starts[-1])  # type: ignore[attr-defined]

    def change(name: str, step: int, reply: Any) -> Any:
        if name != "peer 2":
            return reply
        sums = reply["gradients"].reshape(bins, 10, -1, 3)
        return reply | {"gradients": LIES[lie][0](sums).reshape(1, -1)}

    run = run_of(over(Listening(held(peers), change), peers))
    (why,) = run.record.end.left_out["peer 2"]
    assert LIES[lie][1] in why
    levels = 150 if lie == "children" else 200
    assert f"in {levels} exchanges" in why
    if lie != "children":
        fewer = [p for p in peers if p.name != "peer 2"]
        torch.testing.assert_close(outputs(run), outputs(run_of(peers=fewer)), atol=1e-5, rtol=0)


def test_a_peer_that_is_lost_in_mid_tree_and_comes_back_is_told() -> None:
    peers = users()[1:]
    lost = range(31, 62)

    def change(name: str, step: int, reply: Any) -> Any:
        return None if name == "peer 1" and step in lost else reply

    run = run_of(over(Listening(held(peers), change), peers, misses=2, probe_every=5))
    assert run.record.end.account["exchanges"] == 200
    assert "peer 1" in run.record.end.left_out
    away, here = outputs(run), outputs(run_of(peers=peers))
    without = outputs(run_of(peers=peers[1:]))
    assert (away - here).norm() < (without - here).norm()


def test_masked_sums_give_the_same_bits() -> None:
    """Masks are drawn anew and round, but by less than half a grain; no honest sum is left out for it."""
    peers = users()[1:]
    sites = LocalSites(held(peers), SumsOnly(peers=2, posteriors=True))
    masked, plain = run_of(over(sites, peers, secure_sums=True)), run_of(peers=peers)
    assert masked.record.end.account["exchanges"] == 200
    assert not masked.record.end.left_out
    assert torch.equal(outputs(masked), outputs(plain))


def test_sums_of_many_rows_through_coarse_masks_are_not_refused() -> None:
    """Where a grain is finer than what masks round, at most by a unit for each peer."""
    assert ROUNDING == HEADROOM / 2**31
    random, peers = np.random.default_rng(0), 40
    asked = dataclasses.replace(a_question(), level=Level((), ()), examples=20_000.0)
    x, y = random.normal(size=(20_000, 4)), np.eye(2)[random.integers(0, 2, 20_000)]
    told = peers * asked.answer(asked.rows(Rows(x, y)))
    worst = peers**2 * ROUNDING * random.choice([-1, 1], told.shape)
    sums = asked.checked(told + worst, peers=peers)
    assert np.abs(sums - told * asked._units).max() < 1e-4 * np.abs(sums).max()
    with pytest.raises(DataError, match="add up"):
        asked.checked(told + 1e-3 * np.sign(worst), peers=peers)


def test_caps_count_levels_and_merge_bins_of_few_rows(tmp_path: Path) -> None:
    peers = users()[1:]
    sites = held(peers, Caps(gradients=2000, examples=20), tmp_path)
    seen: list[Array] = []

    def change(name: str, step: int, reply: Any) -> Any:
        seen.append(reply["gradients"])
        return reply

    run = run_of(over(Listening(sites, change), peers))
    planned = TREES.gradients_asked("me", [p.name for p in peers], StepSettings())
    for name, peer in sites.items():
        assert peer.ledger.given == planned == 2000
        assert run.record.end.costs[name].gradients == planned
        lines = (tmp_path / name).read_text().splitlines()
        assert sum('"e_step": "histograms"' in line for line in lines) == 200
    for numbers in seen:
        rows = numbers.reshape(-1, 3)[:, 2] * 2 * 60  # 70 rows are told as 60, three blocks of 20
        assert ((rows < 0.01) | (rows > 19.99)).all()
    spent = over(LocalSites(held(peers, Caps(gradients=7))), peers)
    refused = run_of(spent)
    assert "in 200 exchanges" in next(iter(refused.record.end.left_out["peer 1"]))
    assert torch.isfinite(outputs(refused)).all()


def a_question(columns: int = 4) -> Histograms:
    one = Splits(
        np.zeros((3, 1), dtype=int), np.ones((3, 1), dtype=int), np.zeros((3, 1), dtype=bool)
    )
    level = Level((Tree((one,), np.zeros((3, 2))),), (one,))
    bins = Bins(tuple(np.array([-0.5, 0.5]) for _ in range(columns)))
    return Histograms("softmax", bins, np.zeros(2), 1.0, 3, level, 70.0)


def test_a_question_goes_over_the_wire_as_it_is() -> None:
    asked, peer = a_question(), held(users()[1:])["peer 1"]
    request = Request(torch.zeros(1, 10), 0, 0, 32, e_step=asked)
    sent = answer_message(peer, "user 0", request.message())["gradients"]
    other = held(users()[1:])["peer 1"].answer(request).gradients
    assert other is not None
    np.testing.assert_array_equal(sent, other.numpy())
    sums = asked.checked(sent)
    assert sums.shape == asked.shape == (18, 3, 2, 3)
    assert asked.rows_in(sums) == pytest.approx([60.0] * 3)


def test_what_histograms_do_not_prevent() -> None:
    """Of two questions, whose edges differ, the difference is one row's: bins of few rows do not help."""
    peer = held(users()[1:], Caps(examples=20))["peer 1"]
    x, y = peer.user.take(torch.arange(60), seed=0, step=0)
    at = x[:, 0].double().sort()
    told = []
    for edge in ((at.values[24] + at.values[25]) / 2, (at.values[25] + at.values[26]) / 2):
        bins = Bins((np.array([float(edge)]),))
        asked = Histograms("squared", bins, np.zeros(1), 1.0, 1, Level((), ()), 60.0)
        rows = asked.rows(Rows(x[:, :1].double().numpy(), y[:, None].double().numpy()))
        told.append(asked.checked(asked.answer(rows, fewest=20)))
    slope, _, count = (told[1] - told[0])[0, 0, 0]
    assert count == pytest.approx(1, abs=1e-6)
    assert (slope < 0) == bool(y[at.indices[25]])


JUNK: tuple[Any, ...] = (
    None,
    "text",
    -1,
    10**9,
    math.nan,
    [1.0],
    {},
    np.zeros(3),
    np.full((1, 3, 1, 3), 9),
    np.full((1, 3, 1, 3), -9),
    np.full((1, 3, 2), np.inf),
    np.zeros((9,) * 3),
    np.zeros((1, 3, 1, 3), dtype=complex),
)


@pytest.mark.parametrize("field", sorted(a_question().message()))
def test_nonsense_for_a_question_is_refused_and_told(field: str) -> None:
    """Whoever makes the message: a site answers why, computes nothing, and counts nothing."""
    peer = held(users()[1:], Caps(gradients=100))["peer 1"]
    message = Request(torch.zeros(1, 10), 0, 0, 32, e_step=a_question()).message()
    for junk in JUNK:
        wrong = {**message, "e_step": message["e_step"] | {field: junk}}
        reply = answer_message(peer, "user 0", wrong)
        if field == "shift" and isinstance(junk, np.ndarray) and junk.ndim == 1:
            continue  # three outputs, refused below as another size
        assert isinstance(reply.get("refused"), str), (field, junk)
        assert "failed" not in reply["refused"], (field, junk)
    assert peer.ledger.given == 0
    other = Request(torch.zeros(1, 10), 0, 0, 32, e_step=a_question(5)).message()
    assert answer_message(peer, "user 0", other)["refused"] == "its linear layer has another size"


def test_merged_bins_have_the_cap_and_the_same_sums() -> None:
    x, y = (each.double().numpy() for each in users()[1].take(torch.arange(60), seed=0, step=0))
    asked = dataclasses.replace(a_question(), level=Level((), ()), ensembles=1)
    plain = asked.rows(Rows(x, np.eye(2)[y.astype(int)])).answer(asked.level)
    few = merged(plain, asked.bins, 25)
    counts = few[..., -1]
    assert ((counts == 0) | (counts >= 25)).all()
    assert few.sum(0) == pytest.approx(plain.sum(0))
    assert not merged(plain, asked.bins, 61).any()
    with pytest.raises(DataError, match="add up"):
        asked.checked(plain[::-1] / asked._units)


DIES = """
import os, signal, sys
from pathlib import Path
from tests.trees import test_elsewhere as here

asked = []

def change(name, step, reply):
    asked.append(step)
    if len(asked) == 3 * 100:  # of 39 exchanges and 200, in the 16th tree
        os.kill(os.getpid(), signal.SIGKILL)
    return reply

peers = here.users()[1:]
sites = here.Listening(here.held(peers), change)
rule = here.coterie.Mixture(trees=True)
here.run_of(here.over(sites, peers), rule=rule, out=Path(sys.argv[1]), trackers=())
"""


def test_a_process_that_is_killed_in_mid_tree_is_resumed_to_the_same_bits(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DIES, str(tmp_path)]
    killed = subprocess.run(command, cwd=Path(__file__).parents[2], check=False, timeout=600)
    assert killed.returncode == -signal.SIGKILL
    peers, rule = users()[1:], coterie.Mixture(trees=True)
    settings: dict[str, Any] = {"out": tmp_path, "trackers": (), "resume": True}
    again = run_of(over(LocalSites(held(peers)), peers), rule=rule, **settings)
    whole = run_of(over(LocalSites(held(peers)), peers), rule=rule)
    assert torch.equal(outputs(whole), outputs(again))


def test_a_run_that_dies_in_mid_tree_is_resumed_over_every_engine(
    make: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sites, or the processes of its peers, live on and hold the trees that were grown."""
    me, *peers = users()
    how: dict[str, Any] = {**QUIET, "out": tmp_path, "trackers": (), "engine": make}
    exchange, asked = ESteps.exchange, list[int]()

    def dying(self: ESteps, *about: Any, **more: Any) -> Any:
        asked.append(1)
        if len(asked) == 100:
            raise ConnectionError("the line is cut")
        return exchange(self, *about, **more)

    monkeypatch.setattr(ESteps, "exchange", dying)
    cut = pytest.raises(UserCodeError, match="the line is cut")
    found = []
    for expected, resumed in ((cut, False), (nullcontext(), True)):
        with expected:
            run = coterie.train(nn.Linear(4, 2), LOSS, me, peers, TREES, resume=resumed, **how)
            found.append(outputs(run))
    here = coterie.train(nn.Linear(4, 2), LOSS, me, peers, TREES, **QUIET)
    assert len(asked) == 100 + 200
    assert torch.equal(found[0], outputs(here))
