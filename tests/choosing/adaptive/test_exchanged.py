"""Adaptive averaging with peers elsewhere: one exchange a step, sketches, sums only, late attackers, lost peers."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # what an optimizer's first step would import in every child
from tests.support import processes
from tests.support.engines import ENGINES
from tests.support.linear_users import TRUTH, D, user
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import coterie
from coterie import User
from coterie.engines.in_process.passes import Passes
from coterie.engines.messages import Reply, Request
from coterie.engines.peer import Caps, Peer
from coterie.engines.peer.ledger import Ledger
from coterie.engines.processes.engine import TorchDistributed, serve
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.sites import LocalReplies, LocalSites
from coterie.gradients.parameters import Parameters
from coterie.methods import FedAvg
from coterie.privacy.sums import SumsOnly

STEPS = 60
shy = functools.partial(serve, sums_only=True, timeout=processes.PATIENCE)


def users(own: int = 12, *, late: int = 0) -> tuple[User, list[User]]:
    peers = [user(f"alike {k}", 40, TRUTH) for k in range(3)]
    peers += [user(f"late {k}", 40, TRUTH) for k in range(late)] or [user("contrary", 60, -TRUTH)]
    return user("me", own, TRUTH), peers


def train(me: User, peers: Sequence[User], **changed: Any) -> coterie.Run:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "rule": coterie.AdaptiveAveraging(linear=False),
        "lr": 0.1,
        "steps": STEPS,
        "batch_size": 10,
        "measure": False,
        "progress": False,
    }
    return coterie.train(nn.Linear(D, 1), mse_loss, me, peers, **(settings | changed))


def distance(run: coterie.Run) -> float:
    return float((Parameters(run.model).vector()[:D] - TRUTH).norm())


def late_weights(run: coterie.Run) -> dict[str, float]:
    """Return the peers' weights of the last third of the trunk, small ones set to zero, whatever is served."""
    by_peer = run.record.end.account["weights"]
    kappa = torch.tensor(list(by_peer.values()))
    kappa = kappa[:, -max(1, kappa.shape[1] // 3) :]
    tau = (kappa / kappa.sum(0)).mean(1)
    tau[tau < 0.25 / len(tau)] = 0.0
    return dict(zip(by_peer, (tau / tau.sum()).tolist(), strict=True))


def variation(one: coterie.Run, other: coterie.Run) -> float:
    """Return the total variation between the peers' weights."""
    a, b = late_weights(one), late_weights(other)
    return sum(abs(a[name] - b[name]) for name in a) / 2


@pytest.mark.parametrize("where", ["processes", "here"])
def test_a_step_is_one_exchange_and_the_run_is_that_in_process(where: str) -> None:
    me, peers = users()
    with ENGINES[where]() as engine:
        run = train(me, peers, engine=engine)
    elsewhere, inside = run.record.end, train(me, peers).record.end
    assert elsewhere.account["tau"] == pytest.approx(inside.account["tau"], abs=1e-4)
    for name, line in inside.account["leaderboard"].items():
        assert elsewhere.account["leaderboard"][name] == pytest.approx(line, abs=1e-4)
    assert all(elsewhere.traffic[name].messages == STEPS for name in elsewhere.account["tau"])
    cost = elsewhere.account["cost"]
    assert cost["rows"] == inside.account["cost"]["rows"] == 15 * 4
    assert cost["messages"] == sum(each.messages for each in elsewhere.traffic.values())
    assert (
        cost["bytes"] == elsewhere.traffic["me"].bytes_sent + elsewhere.traffic["me"].bytes_received
    )


def test_peers_that_give_sums_only_are_weighed_by_sketches() -> None:
    me, peers = users()
    with processes.torch_distributed([shy] * 4) as engine:
        run = train(me, peers, engine=engine)
    account = run.record.end.account
    assert account["weights"]["contrary"][-1] < 0.05
    assert account["cost"]["sketches"] == 15 * 4
    assert distance(run) < distance(train(me, peers, rule=coterie.Alone()))
    shown, cost = 15 * 4 * ((D + 1) // 2), run.record.end.costs["alike 0"]
    assert cost.numbers_sent == cost.gradients * (D + 1) + shown


def test_sketches_find_the_same_weights_on_digits() -> None:
    task = coterie.data.digits_by_writer(me=3, own_examples=30)
    peers = [*task.peers[:3], coterie.attacks.flip_labels(task.peers[4], 10)]
    torch.manual_seed(0)
    # 2,410 numbers
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    options: dict[str, Any] = {"lr": 0.01, "steps": 40, "measure": False, "progress": False}
    with processes.torch_distributed([shy] * 4) as engine:
        run = coterie.train(model, cross_entropy, task.me, peers, engine=engine, **options)
    assert run.record.end.account["cost"]["sketches"] == 20 * 4
    inside = coterie.train(model, cross_entropy, task.me, peers, **options)
    assert variation(run, inside) < 0.05
    assert late_weights(run)[peers[3].name] < 0.05


def turning(model: nn.Module, loss: Any, one: User) -> None:
    """Serve, and from the second half on send −10 times the gradient."""
    honest = Peer.answer

    def answer(peer: Peer, request: Request, *told: Any, **more: Any) -> Reply:
        reply = honest(peer, request, *told, **more)
        if reply.gradients is None or request.step < STEPS // 2:
            return reply
        return Reply(-10 * reply.gradients)

    Peer.answer = answer  # type: ignore[assignment,method-assign]  # in a fork
    shy(model, loss, one)


def test_an_attacker_who_behaves_while_it_is_judged_is_survived_by_sums() -> None:
    me, peers = users(8, late=2)
    with processes.torch_distributed([shy, shy, shy, turning, turning]) as engine:
        run = train(me, peers, engine=engine)
        fixed = train(me, peers, engine=engine, rule=coterie.WeightedAveraging(0.9))
    assert distance(run) < distance(train(me, peers, rule=coterie.Alone())) < distance(fixed)


class Absent(LocalSites):
    """Sites of which one, or as many as are told, are silent in some steps."""

    def __init__(
        self,
        peers: Sequence[User],
        silent: Callable[[int], bool],
        who: Sequence[str] = ("alike 1",),
    ) -> None:
        super().__init__(
            {peer.name: Peer(peer, Passes(nn.Linear(D, 1), mse_loss)) for peer in peers}
        )
        self.silent, self.who = silent, who

    def ask(
        self, names: Sequence[str], method: str, timeout: float, **arguments: Any
    ) -> LocalReplies:
        silent = method == "gradients" and self.silent(arguments["request"]["step"])
        there = [name for name in names if name not in self.who or not silent]
        return super().ask(there, method, timeout, **arguments)

    def given(self) -> dict[str, int]:
        """How many gradients each site has given, as it counts them."""
        return {name: one.peer.ledger.given for name, one in self.responders.items()}


@pytest.mark.parametrize(
    "silent", [lambda step: step % 3 == 0, lambda step: step >= 10], ids=["now and then", "gone"]
)
def test_a_site_that_is_late_or_lost_is_judged_by_what_it_answered(
    silent: Callable[[int], bool],
) -> None:
    me, peers = users(8)
    names = [peer.name for peer in peers]

    def flare(*given: Any, **options: Any) -> Remote:
        return Remote(*given[:3], sites=Absent(peers, silent), names=names, misses=STEPS, **options)

    run = train(me, peers, engine=flare)
    account = run.record.end.account
    assert run.record.end.left_out["alike 1"]["no answer"] >= 20
    assert account["weights"]["contrary"][-1] < 0.05
    assert account["weights"]["alike 1"][-1] > 0
    assert distance(run) < distance(train(me, peers, rule=coterie.Alone()))


@pytest.mark.parametrize(
    "rule", [coterie.AdaptiveAveraging(), coterie.WeightedAveraging(0.5), FedAvg(2)]
)
@pytest.mark.parametrize("misses", [2, STEPS], ids=["not waited for", "asked in vain"])
def test_a_silent_site_is_counted_with_what_it_gave(rule: Any, misses: int) -> None:
    """By the site's own ledger, whether it is asked in vain or, after two misses, not at all."""
    me, peers = users()
    sites = Absent(peers, lambda step: step % 7 > 3)

    def flare(*given: Any, **options: Any) -> Remote:
        return Remote(
            *given[:3],
            sites=sites,
            names=list(sites.responders),
            misses=misses,
            probe_every=4,
            **options,
        )

    costs = train(me, [], engine=flare, rule=rule).record.end.costs
    assert {name: costs[name].gradients for name in sites.given()} == sites.given()
    assert 0 < sites.given()["alike 1"] < sites.given()["alike 0"]


def test_sites_that_come_when_peers_have_been_judged_are_not_asked_for_nothing() -> None:
    """Nobody can be followed any more and Alone is served: a gradient would be of no use."""
    me, peers = users()
    sites = Absent(peers, lambda step: step < STEPS // 2, [peer.name for peer in peers])

    def flare(*given: Any, **options: Any) -> Remote:
        return Remote(
            *given[:3], sites=sites, names=list(sites.responders), misses=STEPS, **options
        )

    end = train(me, [], engine=flare).record.end
    assert "branch" not in end.account["leaderboard"]
    assert end.account["tau"] == {}
    assert set(sites.given().values()) == {0}
    assert end.account["cost"]["runs"] == 5 / 2, "four trunks and pooled, for half of the steps"


def test_user_0_is_killed_twice_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """In the trunk and in the branch; the peers, who pass on sums, wait until it is back."""
    me, peers = users()
    peers = peers[2:]
    how: dict[str, Any] = {"sums_only": SumsOnly(2, 0.9), "timeout": processes.PATIENCE}
    works = [functools.partial(serve, nn.Linear(D, 1), mse_loss, one, **how) for one in peers]

    def lead(out: Path, die_at: int | None) -> None:
        def die(step: coterie.Step) -> None:
            if step.step == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

        engine = functools.partial(TorchDistributed, timeout=processes.PATIENCE)
        saving: dict[str, Any] = {"out": out, "resume": True, "checkpoint_every": 10}
        run = train(me, [], engine=engine, hooks=[die], **saving)
        told = {key: value for key, value in run.record.end.account.items() if key != "cost"}
        (out / "digest").write_text(
            f"{Parameters(run.model).vector().tolist()} {told}", encoding="utf-8"
        )

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert processes.Started([functools.partial(lead, whole, None), *works]).end() == [0] * 3
    started = processes.Started([functools.partial(lead, cut, 13), *works])
    for next_at in (44, None):
        assert processes.ended(started.children[0]) == -signal.SIGKILL
        started.children[0] = started.start(0, functools.partial(lead, cut, next_at))
    assert started.end() == [0] * 3
    assert (cut / "digest").read_text(encoding="utf-8") == (whole / "digest").read_text(
        encoding="utf-8"
    )


def test_pooled_weighs_sites_by_what_they_say_they_have() -> None:
    me, peers = (
        user("me", 12, TRUTH),
        [user("small", 35, TRUTH), user("large", 170, TRUTH), user("silent", 60, TRUTH)],
    )
    held = {
        one.name: Peer(one, Passes(nn.Linear(D, 1), mse_loss), Caps(examples=10))
        for one in peers[:2]
    }

    def flare(*given: Any, **options: Any) -> Remote:
        return Remote(
            *given[:3],
            sites=LocalSites(held),
            names=[one.name for one in peers],
            misses=1,
            **options,
        )

    made: list[Any] = []

    class Watched(coterie.AdaptiveAveraging):
        def learner(self, *given: Any, **options: Any) -> Any:
            made.append(super().learner(*given, **options))
            return made[-1]

    train(me, [], engine=flare, rule=Watched(), hooks=[lambda step: step.step == 5])
    assert made[-1].peer_weights.by_size.tolist() == pytest.approx(
        [30 / 300, 170 / 300, 100 / 300]
    )  # whole tens; else the mean
    train(me, [], engine=flare, rule=Watched())
    assert made[-1].peer_weights.by_size.tolist() == pytest.approx(
        [30 / 200, 170 / 200, 0.0]
    )  # who never answered is out


def test_costs_are_the_gradients_that_peers_were_asked_for() -> None:
    me, peers = users()
    held = {one.name: Peer(one, Passes(nn.Linear(D, 1), mse_loss)) for one in peers}

    def flare(*given: Any, **options: Any) -> Remote:
        return Remote(*given[:3], sites=LocalSites(held), names=list(held), **options)

    costs = train(me, [], engine=flare).record.end.costs
    assert all(peer.ledger.given == costs[name].gradients for name, peer in held.items())
    assert costs["contrary"].gradients < costs["alike 0"].gradients <= STEPS * 3


@pytest.mark.parametrize(
    "given", [{"sums_only": True}, {"caps": Caps(gradients=50)}], ids=["sums only", "caps"]
)
@pytest.mark.parametrize("rule", [coterie.AdaptiveAveraging(), coterie.WeightedAveraging(0.5)])
def test_processes_that_refuse_cost_what_their_ledgers_say(
    given: Any, rule: Any, tmp_path: Path
) -> None:
    """Sums of two peers are refused at some points of a step, and all is refused beyond a cap."""
    me, peers = users()
    logs = {one.name: tmp_path / f"{rank}.jsonl" for rank, one in enumerate(peers[1:])}
    serving = [
        functools.partial(serve, log=log, timeout=processes.PATIENCE, **given)
        for log in logs.values()
    ]
    with processes.torch_distributed(serving) as engine:
        end = train(me, peers[1:], engine=engine, rule=rule).record.end
    counted = {name: end.costs[name].gradients for name in logs}
    assert counted == {name: Ledger(log).given for name, log in logs.items()}
    refuses = isinstance(rule, coterie.AdaptiveAveraging) or "caps" in given
    assert ("refused" in str(end.left_out)) is refuses


def test_a_loud_peer_is_not_counted_where_it_is_not_asked() -> None:
    """Nobody follows it: it is judged at four trunks fifteen times, and pooled asks it once."""
    me, peers = users()
    inputs, targets = peers[1].examples.take(torch.arange(40))
    peers[1] = User("loud", 1000 * inputs, targets)
    held = {one.name: Peer(one, Passes(nn.Linear(D, 1), mse_loss)) for one in peers}

    def flare(*given: Any, **options: Any) -> Remote:
        return Remote(*given[:3], sites=LocalSites(held), names=list(held), **options)

    costs = train(me, [], engine=flare).record.end.costs
    assert {name: costs[name].gradients for name in held} == {
        name: one.ledger.given for name, one in held.items()
    }
    assert costs["loud"].gradients == 15 * 4 + 1


def test_of_three_sites_the_wrong_one_is_not_listened_to(tmp_path: Path) -> None:
    task = coterie.data.digits_by_writer(me=3, own_examples=30)
    peers = [*task.peers[:2], coterie.attacks.flip_labels(task.peers[4], 10)]
    make = functools.partial(nn.Sequential, nn.Flatten(), nn.Linear(64, 10))
    caps = Caps(gradients=1000, norm=10.0, examples=16)  # those that sites have at first
    held = {}
    for one in peers:  # a capped site draws by a secret, which must not be left to chance here
        log = tmp_path / f"{one.name}.jsonl"
        secret = log.with_name(f"{log.name}.secret")
        secret.touch(0o600)
        secret.write_text(f"the secret of {one.name} in a test")
        held[one.name] = Peer(one, Passes(make(), cross_entropy), caps, log)

    def flare(*given: Any, **options: Any) -> Remote:
        return Remote(*given[:3], sites=LocalSites(held), names=list(held), **options)

    torch.manual_seed(0)
    options: dict[str, Any] = {"lr": 0.01, "steps": 40, "measure": False, "progress": False}
    run = coterie.train(make(), cross_entropy, task.me, [], engine=flare, **options)
    weights = late_weights(run)
    assert weights[peers[2].name] < 0.05 < min(weights[peer.name] for peer in peers[:2])
