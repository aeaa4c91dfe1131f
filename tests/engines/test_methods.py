"""Methods on every engine: user 0's model is the one that it has with all users in its process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.engines import ENGINES
from tests.support.model_cases import BATCH, CASES, SEED, make_model, make_users

import coterie
from coterie.engines.engine import MakeEngine
from coterie.errors import KnobError
from coterie.methods import (
    APFL,
    L2GD,
    Ditto,
    FedAvg,
    FedFomo,
    FedProx,
    FineTuning,
    HypCluster,
    Method,
    Mime,
    PerFedAvg,
    Sampled,
    Scaffold,
)

METHODS: dict[str, tuple[Method, int]] = {  # and how many messages each peer sends in two rounds
    "FedAvg": (FedAvg(3), 2),
    "FedProx": (FedProx(3, penalty=0.5), 2),
    "fine-tuning": (FineTuning(1, FedAvg(3)), 1),
    "Per-FedAvg": (PerFedAvg(1, inner_lr=0.05, difference=0.01), 2 * 5),
    "Ditto": (Ditto(0.5, FedAvg(2), personal_steps=2), 2),
    "SCAFFOLD": (Scaffold(3), 2),
    "SCAFFOLD I": (Scaffold(2, option=1), 4),
    "Mime": (Mime(2), 2 * 5),
    "APFL": (APFL(2), 8),
    "L2GD": (L2GD(2), 4),
    "FedFomo": (FedFomo(), 2),
}


def trained(engine: MakeEngine, method: Method, case: str = "mlp") -> coterie.Run:
    me, *peers = make_users(CASES[case])
    me = coterie.User("me", *me.batch(20, seed=0, step=0), validation=me.batch(9, seed=1, step=0))
    how: dict[str, Any] = {"steps": 2, "batch_size": BATCH, "seed": SEED, "lr": 0.05, "engine": engine}
    return coterie.train(make_model(CASES[case]), CASES[case].loss, me, peers, method, **how)


def agree(found: coterie.Run, wanted: coterie.Run, what: str) -> None:
    for key, value in wanted.model.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(
                found.model.state_dict()[key], value, rtol=1e-8, atol=1e-10, msg=lambda m: f"{what}: {m}"
            )


OVER_PROCESSES = ("FedAvg", "fine-tuning", "SCAFFOLD", "Mime")  # the others have nothing else to send
ELSEWHERE = [name for name in ENGINES if not name.startswith("in process")]


@pytest.mark.parametrize("where", ELSEWHERE)
def test_every_method_makes_the_same_model(where: str) -> None:
    with ENGINES[where]() as make_engine:
        for name in OVER_PROCESSES if where == "torch.distributed" else METHODS:
            method, messages = METHODS[name]
            found = trained(make_engine, method)
            agree(found, trained(coterie.InProcess, method), name)
            assert found.record.end.traffic["peer 2"].messages == messages, name
        sampled, one = Sampled(FedAvg(2), peers=2), FedAvg(1)
        agree(trained(make_engine, sampled), trained(coterie.InProcess, sampled), "a sample of the peers")
        agree(trained(make_engine, one, "batch norm"), trained(coterie.InProcess, one, "batch norm"), "batch norm")
        with pytest.raises(KnobError, match="this method needs every user's gradient at a point of its own"):
            trained(make_engine, HypCluster(clusters=2))
