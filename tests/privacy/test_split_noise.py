"""Noise that the sites of a masked sum split: the sum has what is stated, and no site gives anything else."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import coterie
from coterie.engines.in_process.passes import Passes
from coterie.engines.messages import Request
from coterie.engines.peer import Caps, Peer
from coterie.engines.peer.private_gradients import PrivateGradients
from coterie.engines.remote.engine import PrivatePeers, Remote
from coterie.engines.remote.responder import Responder
from coterie.engines.remote.sites import LocalReplies, LocalSites
from coterie.errors import KnobError
from coterie.privacy.accountant import Event, epsilon_of
from coterie.privacy.masks import Agreement, NoiseShare
from coterie.privacy.privacy import Privacy
from coterie.privacy.sums import SumsOnly

D, NAMES = 40_000, tuple("abcde")
TAU = dict(zip(NAMES, (0.3, 0.25, 0.2, 0.15, 0.1), strict=True))
ROWS = dict(zip(NAMES, (40, 60, 25, 80, 50), strict=True))
BATCH = 20
LOSS = nn.functional.mse_loss


def model() -> nn.Module:
    return nn.Linear(D - 1, 1)


def user(name: str) -> coterie.User:
    return coterie.User(
        name, torch.zeros(ROWS.get(name, 10), D - 1), torch.zeros(ROWS.get(name, 10), 1)
    )


def promise(name: str, **changed: Any) -> Privacy:
    """Return what a site promises, each another ε, clip and noise."""
    k = NAMES.index(name)
    return Privacy(
        **{"epsilon": 50.0, "delta": 1e-3, "clip": 0.5 + k, "noise": 1.0 + k / 4, "margin": 1}
        | changed
    )


def needed(name: str) -> float:
    """Return the noise that the sum must have for a site: of its multiple of what one example can change."""
    return TAU[name] * promise(name).noise * promise(name).clip / BATCH  # type: ignore[operator]


class Sites(LocalSites):
    """Sites with split noise and no signal, of whose gradients `parts` keeps what was given under the masks."""

    def __init__(
        self, folder: Path, names: tuple[str, ...] = NAMES, peers: int = 3, **changed: Any
    ) -> None:
        self.silent: set[str] = set()
        self.parts: dict[str, Tensor] = {}
        self.shares: dict[str, NoiseShare | None] = {}
        held = {
            n: Peer(
                user(n), Passes(model(), LOSS), Caps(), folder / n, privacy=promise(n, **changed)
            )
            for n in names
        }
        keys = {name: peer.identity.fingerprint for name, peer in held.items()}
        super().__init__(held, SumsOnly(peers=peers, share=0.6, keys=keys))
        for peer in held.values():
            self._note(peer)

    def _note(self, peer: Peer) -> None:
        answer = peer.answer

        def noted(
            request: Request,
            caller: str = "user 0",
            share: NoiseShare | None = None,
            *,
            masked: bool = False,
        ) -> Any:
            reply = answer(request, caller, share, masked=masked)
            if reply.gradients is not None:
                self.parts[peer.user.name], self.shares[peer.user.name] = reply.gradients[0], share
            return reply

        peer.answer = noted  # type: ignore[method-assign]

    def ask(self, names: Any, method: str, timeout: float, **arguments: Any) -> LocalReplies:
        return super().ask(
            [name for name in names if name not in self.silent], method, timeout, **arguments
        )


@pytest.fixture(autouse=True)
def _no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no example have a gradient, so that what is given is the noise."""
    monkeypatch.setattr(PrivateGradients, "_look", lambda *_: None)
    monkeypatch.setattr(
        PrivateGradients, "_clipped", lambda self, x, *_: torch.zeros_like(x, dtype=torch.float64)
    )


def engine(sites: LocalSites, **knobs: Any) -> Remote:
    how: dict[str, Any] = {"sites": sites, "names": NAMES, "batch_size": BATCH, "secure_sums": True}
    return Remote(model(), LOSS, user("me"), **how | knobs)


def step(made: Remote, k: int = 0, tau: Mapping[str, float] = TAU) -> coterie.Gradients:
    return made.gradients(torch.zeros(D), k, tau)


def spread(total: Tensor) -> float:
    return float(total.double().pow(2).mean().sqrt())


def test_the_sum_has_the_stated_noise_and_no_more_than_the_margin_adds(tmp_path: Path) -> None:
    """Sites differ in weight, clip and noise; the variance is n/(n − m) times what the neediest states."""
    sites = Sites(tmp_path)
    g = step(engine(sites))
    assert g.left_out == {}
    assert g.peers is not None
    stated = max(needed(name) for name in NAMES)
    n, m = len(NAMES), 1
    # ten standard errors
    assert spread(g.peers) == pytest.approx(stated * math.sqrt(n / (n - m)), rel=0.04)
    for name, part in sites.parts.items():
        assert TAU[name] * spread(part) == pytest.approx(stated / math.sqrt(n - m), rel=0.04)


def test_what_colluding_sites_know_leaves_the_stated_noise(tmp_path: Path) -> None:
    sites = Sites(tmp_path, margin=2)
    g = step(engine(sites))
    assert g.peers is not None
    stated, left = max(needed(name) for name in NAMES), g.peers.double()
    found = []
    for name in NAMES[:3]:  # who tells user 0 what it gave
        left = left - TAU[name] * sites.parts[name].double()
        found.append(spread(left) / stated)
    # two, not three
    assert found == pytest.approx([math.sqrt(4 / 3), 1.0, math.sqrt(2 / 3)], rel=0.04)
    told = {name: needed(name) / TAU[name] for name in NAMES}
    assert all(
        share is not None and share.of_sum >= told[name] for name, share in sites.shares.items()
    )


def test_what_is_counted_is_what_the_sum_has(tmp_path: Path) -> None:
    """The ledger counts the event that a trusted party would count who adds the stated noise to the sum."""
    sites = Sites(tmp_path)
    made = engine(sites)
    for k in range(2):
        step(made, k)
    for name in NAMES:
        peer, event = (
            sites.responders[name].peer,
            Event(BATCH / ROWS[name], 1.0 + NAMES.index(name) / 4),
        )
        assert dict(peer.ledger.spent) == {event: 2}
        assert peer.epsilon == epsilon_of({event: 2}, 1e-3)
        lines = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert [(line["sites"], line["margin"]) for line in lines if "noise" in line] == [
            (5, 1)
        ] * 2


def test_a_lost_site_costs_its_step_and_the_others_add_more(tmp_path: Path) -> None:
    sites = Sites(tmp_path, peers=4)
    made = engine(sites)
    before = step(made)
    sites.silent = {"e"}
    assert step(made, 1).answered == 0
    after = step(made, 2)
    assert set(after.left_out) == {"e"}
    assert before.peers is not None
    assert after.peers is not None
    stated = max(needed(name) for name in "abcd")
    # with user 0's own gradient, which is zero, in the place of the lost site's
    noise = after.peers.double()
    assert spread(noise) == pytest.approx(stated * math.sqrt(4 / 3), rel=0.04)
    sites.silent = {"e", "d"}
    assert [step(made, k).answered for k in (3, 4)] == [0, 0]
    assert not sites.shares.keys() - set(NAMES)
    spent = sites.responders["a"].peer.ledger.spent.total()
    step(made, 5)
    assert sites.responders["a"].peer.ledger.spent.total() == spent, (
        "with fewer than `peers` nothing is spent"
    )


def test_split_noise_needs_masked_sums_of_known_sites(tmp_path: Path) -> None:
    peer = Peer(user("a"), Passes(model(), LOSS), Caps(), tmp_path / "log", privacy=promise("a"))
    for sums, match in (
        (None, "gives its gradients on their own too, with too little noise"),
        (SumsOnly(), "user 0 could be all of them.* sees its own while it leaves `margin` out"),
        (
            SumsOnly(peers=1, share=1.0, keys={"b": ""}),
            "`margin` must be less than `peers` of a sum, 1, got 1",
        ),
    ):
        with pytest.raises(KnobError, match=match):
            Responder(peer, sums)
    with pytest.raises(KnobError, match="with too little noise"):
        PrivatePeers(model(), LOSS, user("me"), [user("a")], privacy=promise("a"), gradients=5)
    said = peer.answer(Request(torch.zeros(1, D), 0, 0, BATCH)).refused
    assert (
        said == "its noise is split over the sites of masked sums, and it gives parts of these only"
    )
    short = NoiseShare(added=1e-3, of_sum=1e-3, sites=3, margin=1)
    assert "and it needs 0.025" in str(
        peer.answer(Request(torch.zeros(1, D), 0, 0, BATCH), share=short).refused
    )
    assert peer.ledger.given == 0
    with pytest.raises(KnobError, match="`margin` must be"):
        promise("a", margin=-1)


def test_sites_agree_on_the_noise_or_take_no_part(tmp_path: Path) -> None:
    """One that adds none, or asks for a larger margin than the sum has, is told from those that split it."""
    sites = Sites(tmp_path)
    offers = {name: site.offer(BATCH) for name, site in sites.responders.items()}
    told = {"weights": TAU, "largest": 16.0, "offers": offers}
    stated = {"noise": 0.2, "margin": 1}
    for wrong, match in (
        ({}, "splits its noise over the sites of a sum, and the sum says otherwise"),
        (stated | {"margin": 0}, "has a margin of 0 sites, and it asks for 1"),
        (stated | {"margin": 5}, "margin of a sum must be"),
        (stated | {"noise": -1.0}, "noise of a sum must be"),
        (stated | {"noise": math.nan}, "noise of a sum must be"),
    ):
        assert match in sites.responders["a"].join(told | wrong)["refused"]
        told["offers"] = {**offers, "a": sites.responders["a"].offer(BATCH)}
    assert "joined" in sites.responders["a"].join(told | stated)
    plain = Peer(user("b"), Passes(model(), LOSS), Caps(), tmp_path / "plain")
    sites.responders["b"] = Responder(plain, SumsOnly(share=0.6))
    keys = {name: site.peer.identity.fingerprint for name, site in sites.responders.items()}
    for name in "acde":
        sites.responders[name] = Responder(
            sites.responders[name].peer, SumsOnly(share=0.6, keys=keys)
        )
    g = step(engine(sites))
    assert g.left_out == {"b": "adds no share of the noise that the others split"}


@pytest.mark.parametrize("largest", [16.0, 0.4])
def test_user_0_cannot_have_the_noise_of_others_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, largest: float
) -> None:
    """Where gradients are beyond the largest entry, nothing is cut: the sum has their noise, or there is none."""

    def clipped(self: PrivateGradients, x: Tensor, *_: object) -> Tensor:
        others = 0.0 if self.user.name == "a" else self.privacy.clip * BATCH
        return torch.full_like(x, others, dtype=torch.float64)

    monkeypatch.setattr(PrivateGradients, "_clipped", clipped)
    same: dict[str, Any] = {"clip": 0.5, "noise": 1.0}
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    g = step(engine(Sites(folders[0], **same), largest=largest))
    assert g.peers is not None
    stated = 0.3 * 0.5 / BATCH
    if largest == 16:
        assert float(g.peers.std()) == pytest.approx(stated * math.sqrt(5 / 4), rel=0.04)
    else:
        assert all("the sum has an entry beyond 0.4" in why for why in g.left_out.values())
    far = step(engine(Sites(folders[1], **same), largest=1e7)).left_out
    assert all(
        "the noise would be rounded away where entries may be 1e+07" in why for why in far.values()
    )


def test_user_0_cannot_have_shares_of_noise_rounded_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In half precision a number near 1 has steps of a thousandth, in which a share of less noise is lost."""
    clip, stated = 0.004, 0.3 * 0.004 / BATCH

    def clipped(self: PrivateGradients, x: Tensor, *_: object) -> Tensor:
        return torch.full_like(x, BATCH, dtype=torch.float64)

    class Rounded(Sites):
        def ask(self, names: Any, method: str, timeout: float, **arguments: Any) -> LocalReplies:
            if method == "part":
                request = arguments["request"]
                arguments["request"] = request | {"points": request["points"].astype("float16")}
            return super().ask(names, method, timeout, **arguments)

    monkeypatch.setattr(PrivateGradients, "_clipped", clipped)
    g = step(engine(Rounded(tmp_path, clip=clip, noise=1.0)))
    assert g.peers is not None
    assert float(g.peers.double().std()) == pytest.approx(stated * math.sqrt(5 / 4), rel=0.04)


def test_a_part_of_a_model_in_half_precision_keeps_its_noise() -> None:
    passes = Passes(nn.Linear(3, 1).bfloat16(), LOSS)
    held = coterie.User("a", torch.zeros(8, 3).bfloat16(), torch.zeros(8, 1).bfloat16())
    private = PrivateGradients(held, passes, Privacy(9.0, 1e-3, 1.0, 1.0), None)
    x = passes.parameters.vector()
    assert private.gradient(x, event=Event(1.0, 1.0)).dtype == torch.bfloat16
    assert private.gradient(x, event=Event(1.0, 1.0), added=0.1).dtype == torch.float32


def test_rounding_to_whole_numbers_is_far_below_the_noise() -> None:
    """Noise is rounded with what it is added to: what that changes of a sum, beside the noise of the sum."""
    agreed = Agreement(TAU, 16.0, {}, noise=max(needed(name) for name in NAMES), margin=1)
    assert len(TAU) / 2 / agreed.scale < 1e-5 * agreed.noise
