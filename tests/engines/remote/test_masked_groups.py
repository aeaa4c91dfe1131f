"""What adaptive averaging may use: masked means of groups, noisy rows, sketches of them; and what is refused."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import fuzz
from torch import Tensor, nn

import coterie
from coterie.engines.engine import Question
from coterie.engines.in_process.passes import Passes
from coterie.engines.peer import Caps, Peer
from coterie.engines.processes.partial_sums import PartialSums
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.sites import LocalSites
from coterie.errors import KnobError
from coterie.federation.lead import rule_of
from coterie.federation.settings import Data, LeadSettings, Model, Training
from coterie.privacy.privacy import Privacy
from coterie.privacy.sums import SumsOnly

LOSS = nn.functional.mse_loss
GOOD, WRONG = ("a", "b", "c", "d"), ("e", "f", "g")
GROUPS = {"good": GOOD, "wrong": WRONG}
D = 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(D - 1, 1)


def user(name: str, n: int = 40) -> coterie.User:
    """Return a user whose targets are the sum of its inputs, or for those who are wrong its negative."""
    random = torch.Generator().manual_seed(sum(name.encode()))

    def examples(n: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(n, D - 1, generator=random)
        sign = -1.0 if name in WRONG else 1.0
        return inputs, sign * inputs.sum(1, keepdim=True) + torch.randn(n, 1, generator=random)

    if name != "me":
        return coterie.User(name, *examples(n))
    return coterie.User(name, *examples(12), validation=examples(12), test=examples(50))


def sites(privacy: Privacy | None = None, folder: Path | None = None) -> LocalSites:
    held = {
        name: Peer(
            user(name),
            Passes(model(), LOSS),
            None if privacy is None else Caps(),
            log,
            privacy=privacy,
        )
        for name in GOOD + WRONG
        for log in (None if folder is None else folder / name,)
    }
    return LocalSites(held, SumsOnly())


def grouped(*args: Any, carrying: LocalSites | None = None, **knobs: Any) -> Remote:
    how: dict[str, Any] = {
        "sites": carrying or sites(),
        "names": GOOD + WRONG,
        "secure_sums": GROUPS,
    }
    return Remote(*args, **how | knobs)


def test_a_group_gives_the_mean_of_its_sites_at_several_points() -> None:
    made = grouped(model(), LOSS, user("me"), batch_size=8, seed=2)
    inside = coterie.InProcess(
        model(), LOSS, user("me"), [user(n) for n in GOOD + WRONG], batch_size=8, seed=2
    )
    points = torch.randn(3, D, generator=torch.Generator().manual_seed(1))
    asked = torch.tensor([[0.5, 0.5], [0.2, 0.8], [1.0, math.nan]], dtype=torch.float64)
    found = made.ask(Question(points, 5, asked, rows=True))().rows
    assert found is not None
    for k, point in enumerate(points):
        rows = inside.gradients(point, 5, dict.fromkeys(GOOD + WRONG, 1 / 7), rows=True).rows
        assert rows is not None
        torch.testing.assert_close(found[k, 0], rows[:4].mean(0), rtol=0, atol=1e-6)
        if k < 2:
            torch.testing.assert_close(found[k, 1], rows[4:].mean(0), rtol=0, atol=1e-6)
    assert bool(found[2, 1].isnan().all())
    assert made.capabilities.examples == {"me": 12, "good": 160, "wrong": 120}


def test_adaptive_averaging_weighs_groups_under_masks() -> None:
    options: dict[str, Any] = {
        "steps": 30,
        "lr": 0.05,
        "batch_size": 8,
        "progress": False,
        "engine": grouped,
    }
    run = coterie.train(model(), LOSS, user("me"), [], coterie.AdaptiveAveraging(), **options)
    tau = run.record.end.account["tau"]
    assert tau.get("good", 0) > 0.8
    assert tau.get("wrong", 0) < 0.1


def test_a_site_that_is_lost_is_lost_to_its_group_alone() -> None:
    carrying = sites()
    made = grouped(model(), LOSS, user("me"), carrying=carrying, batch_size=8, seed=2)
    x, tau = torch.zeros(D), {"good": 0.5, "wrong": 0.5}
    assert made.gradients(x, 0, tau).left_out == {}
    gone = carrying.responders.pop("b")
    g = made.gradients(x, 1, tau)
    assert set(g.left_out) == {"good"}
    assert g.answered == 0.5
    carrying.responders["b"] = gone
    g = made.gradients(x, 2, tau, rows=True)
    assert g.left_out == {}
    inside = coterie.InProcess(
        model(), LOSS, user("me"), [user(n) for n in "acd"], batch_size=8, seed=2
    )
    rest = inside.gradients(x, 2, dict.fromkeys("acd", 1 / 3), rows=True).rows
    assert g.rows is not None
    assert rest is not None
    torch.testing.assert_close(g.rows[0], rest.mean(0), rtol=0, atol=1e-6)


def test_what_groups_cannot_have_is_refused() -> None:
    for wrong, match in (
        ({"one": ("a", "b", "c"), "two": ("c", "d", "e")}, "'c' in more"),
        ({"one": ("a", "b", "x")}, "unknown site 'x'"),
        ({"one": ("a", "b"), "other": ("c",)}, "at least two sites in a group, got 1 in 'other'"),
    ):
        with pytest.raises(KnobError, match=match):
            grouped(model(), LOSS, user("me"), secure_sums=wrong)
    with pytest.raises(KnobError, match="`compress` must be None with `secure_sums`"):
        grouped(model(), LOSS, user("me"), compress="bf16")
    made = grouped(
        model(), LOSS, user("me"), secure_sums={"few": ("a", "b"), "wrong": WRONG}, batch_size=8
    )
    left_out = made.gradients(torch.zeros(D), 0, {"few": 0.5, "wrong": 0.5}).left_out
    assert "it gives sums of at least 3 peers" in left_out["few"]
    with pytest.raises(KnobError, match="`local_steps` needs peers that take steps of their own"):
        coterie.train(
            model(),
            LOSS,
            user("me"),
            [],
            coterie.BiasCorrection(0.5, 0.1),
            engine=grouped,
            local_steps=2,
        )


def test_without_groups_adaptive_averaging_is_refused_with_the_reason() -> None:
    secure = functools.partial(grouped, secure_sums=True)
    with pytest.raises(KnobError, match="weighted sum alone"):
        coterie.train(model(), LOSS, user("me"), [], engine=secure)
    training = Training(secure_sums=True)
    settings = LeadSettings("me", GOOD, Data(), Model(), training)
    with pytest.raises(KnobError, match="or name groups of sites in `secure_sums`"):
        rule_of(settings)
    rule = rule_of(LeadSettings("me", GOOD + WRONG, Data(), Model(), Training(secure_sums=GROUPS)))
    assert isinstance(rule, coterie.AdaptiveAveraging)


def test_validation_at_user_0_guards_a_masked_sum() -> None:
    """Where only a sum can be had, user 0's own examples decide whether it serves."""

    def served(group: str) -> str:
        secure = functools.partial(grouped, secure_sums=True, names=GROUPS[group])
        options: dict[str, Any] = {
            "steps": 40,
            "lr": 0.05,
            "batch_size": 8,
            "progress": False,
            "engine": secure,
        }
        run = coterie.train(
            model(), LOSS, user("me"), [], coterie.WeightedAveraging(0.9), **options
        )
        assert run.record.end.guard is not None
        return run.record.end.guard.served

    assert served("good") == "collaborative"
    assert served("wrong") == "alone"


def test_adaptive_averaging_takes_groups_of_private_sites(tmp_path: Path) -> None:
    """(Their rows it takes in `test_private_peers.py`.)"""
    promise = Privacy(epsilon=50.0, delta=1e-3, clip=5.0, noise=0.5)
    options: dict[str, Any] = {"steps": 6, "lr": 0.05, "batch_size": 8, "progress": False}
    carrying = sites(promise, tmp_path)
    masked = functools.partial(grouped, carrying=carrying)
    assert coterie.train(model(), LOSS, user("me"), [], engine=masked, **options).step == 6
    peer = carrying.responders["a"].peer
    assert peer.epsilon is not None
    assert 0 < peer.epsilon < math.inf
    assert peer.ledger.spent.total() == peer.ledger.given, "every gradient had its noise"


def test_a_sketch_of_a_private_peer_is_of_what_has_the_noise(tmp_path: Path) -> None:
    """Twice the same request: the same sketch without a promise, another with one; and nothing more is spent."""

    def sketches(privacy: Privacy | None) -> tuple[list[Any], Peer]:
        engine = coterie.InProcess(nn.Linear(3, 2), nn.functional.cross_entropy, fuzz.user())
        peer = engine.peer("a", None, tmp_path / "log", privacy)
        sums, shown = PartialSums(peer, None, lambda name, content: None), list[Any]()
        request = {"points": np.zeros((1, 8), np.float32), "step": 3, "seed": 0}
        request |= {"batch_size": 4, "buffers": {}, "frozen": None}
        how = {"request": request, "weights": np.full((1, 3), 1 / 3), "columns": ["a", "b", "c"]}
        for number in range(2):
            sums.asked("user 0", shown.append, number=number, sketched=1, sketch=4, **how)
        return [torch.from_numpy(reply["sketches"]) for reply in shown], peer

    plain, _ = sketches(None)
    assert torch.equal(*plain)
    (tmp_path / "log").unlink()
    (tmp_path / "log.count").unlink(missing_ok=True)
    noisy, peer = sketches(Privacy(epsilon=50.0, delta=1e-3, clip=1.0, noise=1.0))
    assert not torch.equal(*noisy)
    assert peer.ledger.spent.total() == 2
