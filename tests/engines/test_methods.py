"""Methods on every engine: user 0's model is the one that it has with all users in its process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from tests.support.engines import ENGINES
from tests.support.model_cases import BATCH, CASES, SEED, make_model, make_users
from torch import Tensor

import coterie
from coterie.engines.engine import Answers, Capabilities, MakeEngine, Question
from coterie.engines.in_process.passes import Passes
from coterie.engines.messages import MAX_POINTS
from coterie.engines.peer import Peer
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.sites import LocalReplies, LocalSites
from coterie.errors import KnobError
from coterie.gradients.gradients import Gradients
from coterie.methods import (
    APFL,
    L2GD,
    AffPCL,
    AuxMom,
    AuxMVR,
    Ditto,
    FedALA,
    FedAMP,
    FedAvg,
    FedFomo,
    FedProx,
    FineTuning,
    HypCluster,
    Mapper,
    Method,
    Mime,
    PerFedAvg,
    PFedMe,
    Sampled,
    Scaffold,
)
from coterie.methods.elsewhere import ClientsElsewhere, gradients_asked
from coterie.recording.costs import Costs, Traffic

METHODS: dict[str, tuple[Method, int]] = {  # and how many messages each peer sends in two rounds
    "FedAvg": (FedAvg(3), 2),
    "FedProx": (FedProx(3, penalty=0.5), 2),
    "fine-tuning": (FineTuning(1, FedAvg(3)), 1),
    "Per-FedAvg": (PerFedAvg(1, inner_lr=0.05, difference=0.01), 2 * 4),
    "Ditto": (Ditto(0.5, FedAvg(2), personal_steps=2), 2),
    "SCAFFOLD": (Scaffold(3), 2),
    "SCAFFOLD I": (Scaffold(2, option=1), 4),
    "Mime": (Mime(2), 2 * 5),
    "APFL": (APFL(2), 8),
    "L2GD": (L2GD(2), 4),
    "FedFomo": (FedFomo(), 2),
    "pFedMe": (PFedMe(2, inner_steps=3), 2 * 6),
    "AffPCL": (AffPCL(2), 2 * 2),
    "FedALA": (FedALA(3), 2 * 2),
    "FedAMP": (FedAMP(3), 2),
    "AuxMom": (AuxMom(2), 2 * 3),
    "AuxMVR": (AuxMVR(2), 2 * 4),
}


def trained(
    engine: MakeEngine, method: Method, case: str = "mlp", guard: Any = "off"
) -> coterie.Run:
    me, *peers = make_users(CASES[case])
    me = coterie.User("me", *me.batch(20, seed=0, step=0), validation=me.batch(9, seed=1, step=0))
    how: dict[str, Any] = {
        "steps": 2,
        "batch_size": BATCH,
        "seed": SEED,
        "lr": 0.05,
        "engine": engine,
    }
    return coterie.train(
        make_model(CASES[case]), CASES[case].loss, me, peers, method, guard=guard, **how
    )


def agree(found: coterie.Run, wanted: coterie.Run, what: str) -> None:
    for key, value in wanted.model.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(
                found.model.state_dict()[key],
                value,
                rtol=1e-8,
                atol=1e-10,
                msg=lambda m: f"{what}: {m}",
            )


# the others have nothing else to send
OVER_PROCESSES = ("FedAvg", "fine-tuning", "SCAFFOLD", "Mime")
ELSEWHERE = [name for name in ENGINES if not name.startswith("in process")]


@pytest.mark.parametrize("where", ELSEWHERE)
def test_every_method_makes_the_same_model(where: str) -> None:
    with ENGINES[where]() as make_engine:
        for name in OVER_PROCESSES if "processes" in where else METHODS:
            method, messages = METHODS[name]
            found = trained(make_engine, method)
            agree(found, trained(coterie.InProcess, method), name)
            assert found.record.end.traffic["peer 2"].messages == messages, name
            asked = gradients_asked(
                method, "me", list(found.record.configuration.peers), rounds=2, seed=SEED
            )
            assert found.record.end.costs["peer 2"].gradients == asked["peer 2"], name
        sampled, one = Sampled(FedAvg(2), peers=2), FedAvg(1)
        agree(
            trained(make_engine, sampled),
            trained(coterie.InProcess, sampled),
            "a sample of the peers",
        )
        agree(
            trained(make_engine, one, "batch norm"),
            trained(coterie.InProcess, one, "batch norm"),
            "batch norm",
        )
        watched, free = (
            trained(make_engine, FedAvg(3), guard=guard) for guard in ("held-out", "off")
        )
        assert watched.alone is not None, "trained by user 0, wherever its peers are"
        assert watched.record.end.costs["me"].gradients == 2 * free.record.end.costs["me"].gradients
        assert watched.record.end.costs["peer 2"] == free.record.end.costs["peer 2"]
        with pytest.raises(KnobError, match="this method needs all users in one process"):
            trained(make_engine, HypCluster(clusters=2))


def test_what_a_sample_of_the_peers_is_asked_is_foreseen() -> None:
    """Who is drawn depends on the seed."""
    me, *peers = make_users(CASES["mlp"])
    method, names = Sampled(FedAvg(2), peers=1), [peer.name for peer in peers]
    how: dict[str, Any] = {"steps": 7, "batch_size": BATCH, "seed": SEED, "lr": 0.05}
    run = coterie.train(make_model(CASES["mlp"]), CASES["mlp"].loss, me, peers, method, **how)
    asked = gradients_asked(method, "me", names, rounds=7, seed=SEED)
    assert asked == {name: run.record.end.costs[name].gradients for name in names}
    assert sum(asked.values()) == 2 * 7
    assert len(set(asked.values())) > 1


class ByFormula:
    """Sites who are asked one by one and answer by a formula."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.counts = tuple(names), dict.fromkeys(names, 0)
        self.capabilities = Capabilities(local_work=True, examples=dict.fromkeys(["me", *names], 1))

    def gradients(
        self, x: Tensor, step: int, weights: Mapping[str, float], rows: bool = False
    ) -> Gradients:
        return Gradients(own=x, own_loss=0.0)

    def ask(self, question: Question) -> Callable[[], Answers]:
        given = {}
        for place, peer in (~question.weights.isnan()).nonzero().tolist():
            self.counts[self.names[peer]] += 1 if question.work is None else question.work.count
            given[place, peer] = question.points[place] - (1 + peer)
        return lambda: Answers.of(question, given, self.names)

    def describe(self) -> dict[str, Any]:
        return {}

    def traffic(self) -> Mapping[str, Traffic]:
        return {}

    def close(self) -> None:
        return None


@pytest.mark.parametrize("sites", [3, MAX_POINTS + 4])
def test_a_rehearsal_foresees_what_every_site_counts(sites: int) -> None:
    """The sites of a whole play count for themselves what they are asked."""
    names = [f"site {k}" for k in range(sites)]
    me = coterie.User(
        "me",
        torch.zeros(1, 1),
        torch.zeros(1, 1),
        validation=(torch.zeros(1, 1), torch.zeros(1, 1)),
    )
    methods: list[Method] = [method for method, _ in METHODS.values()]
    for method in [*methods, Sampled(PFedMe(1, inner_steps=2), peers=2), Sampled(L2GD(2), peers=2)]:
        engine = ByFormula(names)
        own = coterie.InProcess(torch.nn.Linear(1, 1), torch.nn.functional.mse_loss, me, seed=SEED)
        users = ClientsElsewhere(engine, me, Costs(dict.fromkeys(["me", *names], 1)), own)
        state = method.init(users, torch.ones(2))
        for _ in range(5):
            state = method.round(users, state, lr=0.1)
        assert gradients_asked(method, "me", names, rounds=5, seed=SEED) == engine.counts, method


def test_a_rehearsal_asks_nobody_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 100 sites and 1,000 rounds of pFedMe it would take minutes."""
    monkeypatch.setattr(Answers, "over", None)
    names = [f"site {k}" for k in range(100)]
    assert gradients_asked(PFedMe(1, inner_steps=5), "me", names, rounds=20) == dict.fromkeys(
        names, 100
    )


def test_a_method_that_peers_elsewhere_cannot_serve_asks_nobody() -> None:
    """`Mapper` begins its round with gradients, and needs everybody's losses then."""
    asked: list[str] = []

    class Watched(LocalSites):
        def ask(
            self, names: Sequence[str], method: str, timeout: float, **arguments: Any
        ) -> LocalReplies:
            asked.append(method)
            return super().ask(names, method, timeout, **arguments)

    me, *peers = make_users(CASES["mlp"])
    model, loss = make_model(CASES["mlp"]), CASES["mlp"].loss
    sites = Watched({peer.name: Peer(peer, Passes(model, loss)) for peer in peers})
    engine = functools.partial(Remote, sites=sites, names=[peer.name for peer in peers])
    with pytest.raises(KnobError, match="needs all users in one process, as peers elsewhere give"):
        coterie.train(model, loss, me, (), Mapper(2), steps=2, engine=engine)
    assert set(asked) == {"ready"}
