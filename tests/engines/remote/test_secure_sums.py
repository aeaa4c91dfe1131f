"""Masked sums over sites in this process: they are right, or there is none; and what a curious lead gets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import fuzz, masked
from tests.support.intruders import (
    CAPS,
    at,
    inconsistent_views,
    leaky,
    logistic,
    masked_oracles,
    told_to,
    transcript,
)
from tests.support.masked import SLOW, fixed_keys, tau_of, users
from tests.support.small_peers import LOSS, model
from torch import Tensor

import coterie
from coterie.engines.in_process.passes import Passes
from coterie.engines.messages import Request
from coterie.engines.peer import Caps, Peer
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.masked import MASKED
from coterie.engines.remote.responder import Responder
from coterie.engines.remote.sites import LocalReplies, LocalSites
from coterie.errors import CoterieError, KnobError, MaskError
from coterie.privacy.keys import Giving, Identity
from coterie.privacy.masks import Agreement, Masks, digest_of, total
from coterie.privacy.privacy import Privacy
from coterie.privacy.sums import SumsOnly
from coterie.rules.streams import StreamAveraging

X = torch.linspace(-1, 1, 12, dtype=torch.float64)


def peer_of(user: coterie.User, caps: Caps | None = None) -> Peer:
    return Peer(user, Passes(model(), LOSS), caps)


class Sites(LocalSites):
    """Sites for which user 0's words, and whose answers, can be changed by (site, method) on the way."""

    def __init__(self, peers: Sequence[coterie.User], sums: SumsOnly | None = None) -> None:
        super().__init__({user.name: peer_of(user) for user in peers}, sums or SumsOnly())
        self.told: Callable[[str, str, Any], Any] = lambda name, method, arguments: arguments
        self.answered: Callable[[str, str, Any], Any] = lambda name, method, answer: answer
        self.asked: list[tuple[str, tuple[str, ...]]] = []

    def ask(
        self, names: Sequence[str], method: str, timeout: float, **arguments: Any
    ) -> LocalReplies:
        self.asked.append((method, tuple(names)))
        answers: dict[str, Any] = {}
        for name in names:
            found: Mapping[str, Any] = (
                super().ask([name], method, timeout, **self.told(name, method, arguments)).wait()
            )
            answer = self.answered(name, method, found.get(name))
            if answer is not None:
                answers[name] = answer
        return LocalReplies(answers)


def engine(people: Sequence[coterie.User], sites: Any, **knobs: Any) -> Remote:
    names = [user.name for user in people[1:]]
    return Remote(
        model(),
        LOSS,
        people[0],
        sites=sites,
        names=names,
        batch_size=4,
        seed=5,
        secure_sums=True,
        **knobs,
    )


def plain_rows(people: Sequence[coterie.User], x: Tensor, step: int) -> tuple[Tensor, Tensor]:
    inside = coterie.InProcess(model(), LOSS, people[0], people[1:], batch_size=4, seed=5)
    tau = dict.fromkeys([user.name for user in people[1:]], 1 / (len(people) - 1))
    found = inside.gradients(x, step, tau, rows=True)
    assert found.rows is not None
    return found.own, found.rows


@pytest.mark.parametrize(("n", "steps"), [(3, 10), (10, 3)])
def test_a_masked_sum_is_the_plain_one(n: int, steps: int) -> None:
    people = users(n)
    made, x = engine(people, Sites(people[1:])), X.clone()
    inside = coterie.InProcess(model(), LOSS, people[0], people[1:], batch_size=4, seed=5)
    tau = tau_of(n)
    for step in range(steps):
        found, plain = made.gradients(x, step, tau), inside.gradients(x, step, tau)
        assert found.peers is not None
        assert plain.peers is not None
        assert found.answered == 1
        assert torch.equal(found.own, plain.own)
        assert float((found.peers - plain.peers).norm() / plain.peers.norm()) < 1e-4
        x = x - 0.1 * found.peers
    assert made.traffic()["peer 1"].bytes_sent == steps * 4 * (12 + 4)


def test_time_spent_waiting_for_masked_parts_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    people, seconds = users(3), [0.0]
    monkeypatch.setattr("coterie.engines.remote.engine.time.perf_counter", lambda: seconds[0])

    class Late(LocalReplies):
        def wait(self) -> Mapping[str, Any]:
            seconds[0] += 2.0
            return super().wait()

    class LateSites(Sites):
        def ask(
            self, names: Sequence[str], method: str, timeout: float, **arguments: Any
        ) -> LocalReplies:
            answers = super().ask(names, method, timeout, **arguments)
            return Late(answers.wait()) if method == "part" else answers

    made = engine(people, LateSites(people[1:]))
    for step in range(3):
        made.gradients(X, step, tau_of(3))
    assert made.traffic()[people[0].name].seconds_waiting == 6.0


def test_a_run_with_masked_sums_is_the_run_without() -> None:
    people, rule = users(3), coterie.BiasCorrection(0.7, 0.1)
    options: dict[str, Any] = {
        "lr": 0.1,
        "steps": 15,
        "batch_size": 4,
        "seed": 5,
        "progress": False,
    }

    def secure(*args: Any, **knobs: Any) -> Remote:
        names = [user.name for user in people[1:]]
        return Remote(*args, sites=Sites(people[1:]), names=names, secure_sums=True, **knobs)

    run = coterie.train(model(), LOSS, people[0], [], rule, engine=secure, **options)
    plain = coterie.train(model(), LOSS, people[0], people[1:], rule, **options)
    for ours, theirs in zip(run.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    for needs_rows in (coterie.AdaptiveAveraging(), StreamAveraging(15)):
        with pytest.raises(KnobError, match="weighted sum alone"):
            coterie.train(model(), LOSS, people[0], [], needs_rows, engine=secure, **options)


@pytest.mark.parametrize(("n", "steps"), [(3, 1000 if SLOW else 300), (10, 1000 if SLOW else 30)])
def test_masked_sums_over_many_steps_are_the_plain_ones(n: int, steps: int) -> None:
    people, tau = users(n), tau_of(n)
    sites = LocalSites({user.name: masked.peer_of(user) for user in people[1:]}, SumsOnly())
    made = engine(people, sites)
    for step in range(steps):
        found = made.gradients(X, step, tau)
        wanted = sum(weight * masked.drawn(name, step) for name, weight in tau.items())
        assert isinstance(wanted, Tensor)
        assert found.peers is not None
        assert found.answered == 1
        assert float((found.peers - wanted).norm() / wanted.norm()) < 1e-4


def test_one_that_is_lost_costs_a_step_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    people = users(4)
    sites = Sites(people[1:])
    made = engine(people, sites)
    assert made.gradients(X, 0, tau_of(4)).left_out == {}
    sites.answered = lambda name, method, answer: None if name == "peer 2" else answer
    alone = made.gradients(X, 1, tau_of(4))
    assert alone.left_out == {
        name: "no answer" if name == "peer 2" else MASKED for name in tau_of(4)
    }
    assert alone.answered == 0
    assert alone.peers is not None
    assert torch.equal(alone.peers, alone.own)
    sites.answered = lambda name, method, answer: answer  # it is back, too late for this job
    g = made.gradients(X, 2, tau_of(4))
    own, rows = plain_rows(people, X, 2)
    assert g.peers is not None
    assert (g.left_out, g.answered) == ({"peer 2": "no answer"}, 0.75)
    torch.testing.assert_close(g.peers, (rows[0] + rows[2] + rows[3] + own) / 4, rtol=0, atol=1e-6)
    assert [names for method, names in sites.asked if method == "offer"] == [
        tuple(tau_of(4)),
        ("peer 1", "peer 3", "peer 4"),
    ]
    sites.answered = lambda name, method, answer: None if name == "peer 3" else answer
    for step in (3, 4):
        g = made.gradients(X, step, tau_of(4))
        assert g.answered == 0
    assert g.left_out["peer 1"].startswith("refused: it gives sums of at least 3 peers")


@pytest.mark.parametrize("largest", [0.4, 9.9, 1e12])
def test_a_site_takes_no_part_where_its_entries_would_spoil_a_sum_or_be_rounded_away(
    largest: float, tmp_path: Path
) -> None:
    """The lead chose `largest`, and found each site's share of healthy patients by bisection on refusals."""
    shares = (0.2, 0.7)
    seen = [transcript(share, [at(0.0)], tmp_path / f"{share}", largest) for share in shares]
    assert seen[0] == seen[1]
    assert all(reply == {"refused": True} for reply in seen[0][:3])


def test_nothing_but_the_sum_tells_of_a_site(tmp_path: Path) -> None:
    """Bisection on a bias, numbers that overflow, rows that raise: two sites with other rows answer alike."""
    attack = [at(bias) for bias in np.linspace(-3, 3, 18)] + [
        at(0.0, 1e9),
        at(0.0, 3e38),
        at(1e38),
        at(-3e38),
    ]
    seen = [transcript(share, attack, tmp_path / f"{share}") for share in (0.2, 0.7)]
    assert seen[0] == seen[1]
    assert all(reply.keys() == {"joined"} for reply in seen[0][:3])
    assert seen[0][-1]["left"] == 1000 - len(attack), "what is not finite counts too"
    logs = [(tmp_path / f"{share}" / "peer 1").read_text() for share in (0.2, 0.7)]
    assert all("not finite" in log for log in logs), "the site itself is told"

    peer = Peer(leaky(0.2, "peer 1"), Passes(logistic(), lambda *_: 1 / 0), CAPS)  # type: ignore[arg-type]
    reply = peer.answer(Request(torch.zeros(1, 8), 0, 0, 100), masked=True)
    assert (reply.refused, reply.seconds) == (None, 0.0)
    assert reply.gradients is not None
    assert bool(reply.gradients.isnan().all())


@pytest.mark.parametrize(
    ("bad", "told"), [(math.nan, "not finite"), (math.inf, "not finite"), (70.0, "beyond 16")]
)
def test_what_cannot_be_added_costs_a_step(bad: float, told: str) -> None:
    people = users(4)
    sites = Sites(people[1:])
    made, peer = engine(people, sites, misses=2), sites.responders["peer 1"].peer
    fine = peer._gradients
    spoiled = lambda request, added=None: (torch.full((1, 12), bad, dtype=torch.float64), 4)  # noqa: E731
    for step, given in enumerate([spoiled, fine, spoiled, spoiled, fine]):
        peer._gradients = given  # type: ignore[method-assign]
        g = made.gradients(X, step, tau_of(4))
        assert g.peers is not None
        if step == 1:
            _, rows = plain_rows(people, X, step)
            assert (g.left_out, g.answered) == ({}, 1)
            torch.testing.assert_close(g.peers, rows.mean(0), rtol=0, atol=1e-6)
        else:  # after two in a row there are no more sums
            assert g.answered == 0
            assert all(told in reason for reason in g.left_out.values())
            assert torch.equal(g.peers, g.own)
    assert [method for method, _ in sites.asked].count("part") == 4


@pytest.mark.parametrize(
    "change",
    [
        {"points": X.numpy()[None] + 1e-9},
        {"step": 1},
        {"seed": 6},
        {"batch_size": 5},
        {"round": 9},
        {"more": 1},
    ],
    ids=str,
)
def test_a_lead_who_asks_sites_different_things_gets_noise(change: dict[str, Any]) -> None:
    people = users(3)
    sites, parts = Sites(people[1:]), []

    def told(name: str, method: str, arguments: Any) -> Any:
        return (
            {"request": arguments["request"] | change}
            if (name, method) == ("peer 2", "part")
            else arguments
        )

    def answered(name: str, method: str, answer: Any) -> Any:
        if method == "part":
            parts.append(answer["part"])
            answer |= {"step": 0, "round": 1}  # so that user 0 would not see it by that
        return answer

    sites.told, sites.answered = told, answered
    made = engine(people, sites)
    g = made.gradients(X, 0, tau_of(3))
    assert g.answered == 0
    assert set(g.left_out.values()) == {
        "the masks do not cancel: the sites were not asked the same, or a gradient was not finite"
    }
    assert len({*(parts[0] + parts[1] + parts[2])[-4:].tolist(), 0}) == 5


class CuriousLead:
    """A lead with a program of its own, who asks sites what it likes."""

    def __init__(self, n: int = 4, sums: SumsOnly | None = None) -> None:
        self.sites = {user.name: Responder(peer_of(user), sums) for user in users(n)[1:]}

    def agreement(
        self, weights: Mapping[str, float] | None = None, **changed: Any
    ) -> dict[str, Any]:
        weights = weights or tau_of(len(self.sites))
        return {
            "weights": weights,
            "largest": 16.0,
            "offers": {name: self.sites[name].offer() for name in weights},
        } | changed

    def joined(self, **weights: float) -> list[str]:
        """Return what sites say to an agreement with these weights: "" where they join."""
        told = self.agreement({name.replace("_", " "): weight for name, weight in weights.items()})
        return [str(self.sites[name].join(told).get("refused", "")) for name in told["weights"]]


def request(**changed: Any) -> dict[str, Any]:
    asked = {
        "points": X.numpy()[None],
        "step": 0,
        "seed": 5,
        "batch_size": 4,
        "buffers": {},
        "frozen": None,
    }
    return asked | {"round": 1} | changed


def test_a_site_says_which_sums_it_takes_part_in() -> None:
    lead = CuriousLead()
    for weights, reason in {
        (0.5, 0.5): "it gives sums of at least 3",
        (0.6, 0.2, 0.2): "it gives sums of at least 3",
        (0.4, 0.3, 0.3): "it weighs as much as each other site",
        (0.3, 0.3, 0.3 + 1e-9): "it weighs as much as each other site",
    }.items():
        named = {f"peer_{k}": weight for k, weight in enumerate(weights, 1)}
        assert all(said.startswith(reason) for said in lead.joined(**named))
    tau = {"peer_1": 0.3, "peer_2": 0.3, "peer_3": 0.3}
    assert lead.joined(**tau) == ["", "", ""]
    stays = "in a job the sites of a sum and their weights stay: sites may be lost, not join"
    for other in (tau | {"peer_4": 0.3}, dict.fromkeys(tau, 0.2)):
        assert lead.joined(**other)[:3] == [stays] * 3
    told = lead.agreement(
        {name.replace("_", " "): weight for name, weight in tau.items()}, largest=17.0
    )
    assert lead.sites["peer 1"].join(told) == {
        "refused": "in a job the largest entry of a sum stays"
    }
    assert lead.joined(**tau) == ["", "", ""]
    lead.sites["peer 2"] = Responder(peer_of(users(4)[2]))  # one that takes its place
    assert lead.joined(**tau)[0] == "in a job a site keeps the key that it is known by"


def test_no_mask_is_used_twice_and_no_key_is_joined_twice() -> None:
    lead = CuriousLead()
    site, told = lead.sites["peer 1"], lead.agreement()
    assert site.part(request()) == {"refused": "it has joined no sum"}
    assert "joined" in site.join(told)
    assert "part" in site.part(request())
    work = {"count": 1, "lr": 0.1, "decay": 0.0, "add": np.full((1, 12), 15.9)}
    said = site.part(request(round=2, work=work))
    assert said == {"refused": "it adds gradients under masks, not steps of its own"}
    for again in (
        request(),
        request(step=1),
        request(round=0),
        request(round=True),
        request(round=2.0),
    ):
        assert site.part(again) == {"refused": "the number of a round must be larger than the last"}
    assert site.join(told) == {"refused": "it has not offered this key"}
    assert site.part(request(round=2)) == {"refused": "it has joined no sum"}


def test_with_sums_only_no_gradient_is_given_on_its_own() -> None:
    lead = CuriousLead(sums=SumsOnly())
    assert lead.sites["peer 1"].ready()["sums_of"] == 3
    assert set(lead.sites["peer 1"].gradients(request())) == {"refused"}
    assert "gradients" in CuriousLead().sites["peer 1"].gradients(request())


def sites_with(*sums: SumsOnly | None) -> dict[str, Responder]:
    people = users(len(sums))[1:]
    return {
        user.name: Responder(peer_of(user), each) for user, each in zip(people, sums, strict=True)
    }


def test_what_sites_give_on_their_own_can_be_taken_off_a_sum() -> None:
    """Why sites that give rows too do not count: here none minds, and user 0 has the gradient of the first."""
    sites = sites_with(None, None, None)
    told, asked = told_to(sites), request()
    assert all("joined" in site.join(told) for site in sites.values())
    added = 3 * total([site.part(asked)["part"] for site in sites.values()], Agreement.read(told))
    rest = sum(sites[name].gradients(asked)["gradients"][0] for name in ("peer 2", "peer 3"))
    np.testing.assert_allclose(added - rest, plain_rows(users(3), X, 0)[1][0], atol=1e-6)


def test_sites_that_give_gradients_on_their_own_do_not_count() -> None:
    said = "it gives sums of at least 3 peers only, none of which has more than 0.5 of the weight"
    sites = sites_with(SumsOnly(), None, SumsOnly())
    told = told_to(sites)
    replies = {name: site.join(told) for name, site in sites.items()}
    wanted = {"refused": f"{said}; 'peer 2' does not give masked sums only, and does not count"}
    assert [replies["peer 1"], replies["peer 3"]] == [wanted, wanted]
    assert "joined" in replies["peer 2"], "who gives rows too has nothing to hide"
    told["offers"]["peer 2"] |= {"giving": "MASKED"}  # as user 0 would have it
    assert sites["peer 1"].join(told) == {
        "refused": "the key of 'peer 2' is not signed by that site"
    }
    four = sites_with(SumsOnly(), None, SumsOnly(), SumsOnly())
    told = told_to(four)
    assert all("joined" in site.join(told) for site in four.values())
    four = sites_with(SumsOnly(), None, SumsOnly(), SumsOnly())
    told = told_to(four) | {"weights": tau_of(4) | {"peer 1": 0.6, "peer 2": 0.6}}
    assert said in four["peer 1"].join(told)["refused"], "more than half of what counts"


def test_where_keys_are_known_sites_that_know_none_do_not_count() -> None:
    """User 0 could be all others to such a site, in another job, and take its gradient off the sum of this one."""
    sites = sites_with(SumsOnly(), SumsOnly(), SumsOnly())
    known = {name: site.peer.identity.fingerprint for name, site in sites.items()}
    for name in ("peer 1", "peer 2"):
        sites[name] = Responder(sites[name].peer, SumsOnly(keys=known))
    told = told_to(sites)
    refused = [str(site.join(told).get("refused", "")) for site in sites.values()]
    assert all(
        said.endswith("'peer 3' does not know the others' keys, and does not count")
        for said in refused[:2]
    )
    assert refused[2] == ""
    sites["peer 3"] = Responder(sites["peer 3"].peer, SumsOnly(keys=known))
    told = told_to(sites)
    assert all("joined" in site.join(told) for site in sites.values())


def test_a_lead_in_the_middle_is_found_by_fingerprints_alone() -> None:
    """It gives each site keys of its own making in the place of the others': what comparing them is for."""

    def seen(sums: SumsOnly) -> Any:
        victim = Responder(peer_of(users(3)[1]), sums)
        mine = {name: Identity(name).offer(Giving.KNOWN_KEYS) for name in ("peer 2", "peer 3")}
        offers = {"peer 1": victim.offer()} | {
            name: offer.message() for name, (_, offer) in mine.items()
        }
        told = {"weights": tau_of(3), "largest": 16.0, "offers": offers}
        return victim.join(told), victim, mine, told

    others = {f"peer {k}": Identity(f"peer {k}").fingerprint for k in (2, 3)}
    assert "which is not the one known here" in seen(SumsOnly(keys=others))[0]["refused"]
    assert (
        "which is not the one known here"
        in seen(SumsOnly(keys={"peer 2": others["peer 2"]}))[0]["refused"]
    )
    said, victim, mine, told = seen(SumsOnly())
    assert "joined" in said, "this is what is not prevented where nobody compares"
    agreed, asked = Agreement.read(told), request()
    parts = [
        Masks(n, key, agreed).masked(np.zeros((1, 12)), digest_of(asked))
        for n, (key, _) in mine.items()
    ]
    found = 3 * total([victim.part(asked)["part"], *parts], agreed)
    row = plain_rows(users(3), X, 0)[1][0]
    np.testing.assert_allclose(found, row, atol=1e-6)


def test_a_site_is_known_by_the_same_key_in_every_job(tmp_path: Any) -> None:
    def site() -> Responder:
        return Responder(
            Peer(users(3)[1], Passes(model(), LOSS), Caps(examples=4), tmp_path / "requests.jsonl")
        )

    first, second = site(), site()
    assert first.peer.identity.fingerprint == second.peer.identity.fingerprint
    assert first.offer()["key"] != second.offer()["key"]
    lead = CuriousLead(3)
    lead.sites["peer 1"] = first
    assert "joined" in first.join(lead.agreement())
    log = (tmp_path / "requests.jsonl").read_text()
    assert all(each.peer.identity.fingerprint in log for each in lead.sites.values()), (
        "for people to compare"
    )


def test_weights_stay_as_they_are() -> None:
    people = users(4)
    made = engine(people, Sites(people[1:]))
    made.gradients(X, 0, tau_of(4))
    with pytest.raises(KnobError, match="`tau` must stay"):
        made.gradients(X, 1, tau_of(3))


@pytest.mark.parametrize(
    "knobs", [{"timeout": 0.0}, {"misses": 0}, {"minimum": 0}, {"largest": math.inf}]
)
def test_knobs_are_checked(knobs: dict[str, Any]) -> None:
    with pytest.raises(CoterieError, match=f"`{next(iter(knobs))}` must be"):
        engine(users(3), Sites([]), **knobs)


def test_nonsense_is_refused_or_a_typed_error() -> None:
    for found in (
        fuzz.messages_of_masked_sums(1200 if SLOW else 100),
        fuzz.replies_of_masked_sums(15),
    ):
        assert set(found) <= {"answered", "typed"}
        assert found["typed"] > found["answered"] / 10


def test_what_is_not_an_agreement_is_a_typed_error() -> None:
    fine = CuriousLead().agreement()
    assert Agreement.read(fine).largest == 16
    wrongs: tuple[dict[str, Any], ...] = (
        {"weights": {}},
        {"weights": {"peer 1": 1.0}},
        {"weights": tau_of(4) | {"peer 1": -1.0}},
        {"weights": tau_of(4) | {"peer 1": math.nan}},
        {"largest": 0.0},
        {"offers": {}},
        {"offers": dict.fromkeys(tau_of(4), fine["offers"]["peer 1"])},
    )
    for wrong in wrongs:
        with pytest.raises(MaskError):
            Agreement.read(fine | wrong)


def test_private_sites_add_their_noise_under_the_masks(tmp_path: Any) -> None:
    people = users(3)
    privacy = Privacy(epsilon=50.0, delta=1e-3, clip=1.0, noise=1.0)
    peers = {
        user.name: Peer(user, Passes(model(), LOSS), Caps(), tmp_path / user.name, privacy=privacy)
        for user in people[1:]
    }
    made = engine(people, LocalSites(peers, SumsOnly()))
    sums = [made.gradients(X, 0, tau_of(3)) for _ in range(2)]
    assert [g.left_out for g in sums] == [{}, {}]
    assert sums[0].peers is not None
    assert sums[1].peers is not None
    assert float((sums[0].peers - sums[1].peers).norm()) > 1e-3
    assert all(peer.ledger.spent.total() == 2 for peer in peers.values())


def test_points_in_half_precision_are_refused() -> None:
    lead = CuriousLead()
    site = lead.sites["peer 1"]
    site.join(lead.agreement())
    said = site.part(request(points=np.zeros((1, 12), np.int16)))  # zeros of bfloat16
    assert said == {"refused": "a masked sum is of floating-point numbers, not rounded to 16 bits"}


def test_random_questions_tell_no_two_sites_apart() -> None:
    assert masked_oracles(10, seed=1) == 0


def test_sites_that_are_asked_inconsistently_tell_nothing_together() -> None:
    """Other points, steps, keys or agreements for one, parts left out, two rounds of one: noise."""
    assert inconsistent_views(40, seed=1) == 0


def test_unequal_weights_would_tell_sites_apart(tmp_path: Path) -> None:
    """At parameters of zero a gradient is a count of a block: from Σ τ_k c_k with other τ each c_k can be told."""
    counts, rows = (7, 31, 18), 50
    people = {f"peer {k}": leaky(n / rows, f"peer {k}", rows) for k, n in enumerate(counts, 1)}
    sites = {
        name: Responder(Peer(user, Passes(logistic(), LOSS)), SumsOnly())
        for name, user in people.items()
    }
    uneven = {"peer 1": 0.41, "peer 2": 0.3237, "peer 3": 0.2663}
    reason = "it weighs as much as each other site of a sum, and this sum has unequal weights"
    told = told_to(sites)
    said = [site.join(told | {"weights": uneven}) for site in sites.values()]
    assert said == [{"refused": reason}] * 3
    asked = Request(torch.zeros(1, 8), 0, 0, rows)
    answers = [site.peer.answer(asked).gradients for site in sites.values()]
    shares = [float(answer[0, 7]) for answer in answers if answer is not None]

    def solutions(tau: Mapping[str, float]) -> list[tuple[int, ...]]:
        """Return the counts that the sum allows, to the rounding."""
        agreed = Agreement.read(told_to(sites) | {"weights": tau})
        summed = float(np.dot(shares, list(tau.values())))
        allowed = itertools.product(range(rows + 1), repeat=3)
        values = {c: np.dot([n / rows - 0.5 for n in c], list(tau.values())) for c in allowed}
        return [c for c, value in values.items() if abs(value - summed) < 10 / agreed.scale]

    assert solutions(uneven) == [counts], "what a site refuses would tell all three"
    assert len(solutions(tau_of(3))) > 1000


def test_no_kink_of_a_sum_tells_where_one_site_is_cut(tmp_path: Path) -> None:
    """Parts were cut to the norm of [caps], and the sum of many points had a kink at each site's mean."""
    means, norm = (1.25, 4.0, 6.5), 2.0
    people = [
        coterie.User(f"peer {k}", torch.ones(50, 1), torch.full((50, 1), mean))
        for k, mean in enumerate(means, 1)
    ]
    loss = torch.nn.functional.mse_loss
    peers = [
        Peer(u, Passes(torch.nn.Linear(1, 1, bias=False), loss), Caps(norm=norm, examples=50))
        for u in people
    ]
    sites = {peer.user.name: Responder(peer, SumsOnly()) for peer in peers}
    told = told_to(sites)
    assert all("joined" in site.join(told) for site in sites.values())
    agreed, points, sums = Agreement.read(told), np.arange(-2.0, 10.0, 0.125), []
    for number, point in enumerate(points, 1):
        asked = request(points=np.array([[point]], np.float32), batch_size=50, round=number)
        sums.append(total([site.part(asked)["part"] for site in sites.values()], agreed)[0])
    assert np.abs(np.diff(sums, 2)).max() < 1e-4, "a straight line, where a kink was of .17"


def test_what_masks_do_not_prevent(tmp_path: Path) -> None:
    """Where a site's gradient is past all numbers, user 0 learns that one is, not whose."""
    for shares in ((0.2, 0.7), (0.7, 0.2)):
        seen = [
            transcript(share, [at(0.0, 3e38)], tmp_path / f"{shares}{share}") for share in shares
        ]
        assert seen[0] == seen[1]
    _, masks = fixed_keys(3)
    spoiled = [
        each.masked(np.array([np.inf if k == 1 else 0.0]), b"") for k, each in enumerate(masks)
    ]
    with pytest.raises(MaskError, match="was not finite"):
        total(spoiled, fixed_keys(3)[0])


def sums_of_shares(
    ill: Mapping[int, int], folder: Path, steps: int, examples: int = 50
) -> list[float]:
    """Return masked sums at parameters of zero, where a gradient is one half less the share that is ill."""
    folder.mkdir(exist_ok=True)
    sites: dict[str, Responder] = {}
    for rows, n in ill.items():
        ids = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))
        user = coterie.User(f"peer {len(sites) + 1}", torch.zeros(rows, 3), (ids < n).long())
        peer = Peer(user, Passes(logistic(), LOSS), Caps(examples=examples), folder / str(rows))
        sites[user.name] = Responder(peer, SumsOnly())
    told, found = told_to(sites), []
    assert all("joined" in site.join(told) for site in sites.values())
    for step in range(steps):
        how = {"step": step, "round": step, "batch_size": examples}
        asked = request(points=np.zeros((1, 8), np.float32), **how)
        parts = [site.part(asked)["part"] for site in sites.values()]
        found.append(float(total(parts, Agreement.read(told))[6]))
    return found


def test_what_sums_at_one_point_tell_of_blocks(tmp_path: Path) -> None:
    """Of sites with one block and one with two, sums at two steps differ by the blocks of the latter alone."""
    ill = {62: 20, 70: 40, 120: 55}
    sums = sums_of_shares(ill, tmp_path / "two", 12)
    assert len({round(each, 4) for each in sums}) == 2
    patients = 3 * np.ptp(sums) * 60  # in blocks of 60
    assert patients == pytest.approx(round(patients), abs=1e-3)
    assert patients > 0.5, "so many more has one block than the other, of a site that is known"
    alike = sums_of_shares(ill, tmp_path / "one", 12, examples=61)
    assert np.ptp(alike) < 1e-5, "where `examples` is more than half of the rows there is one block"


def test_what_a_sum_of_means_tells_of_counts(tmp_path: Path) -> None:
    """Where sites' batches have different numbers of rows, which user 0 knows, counts add up in one way only."""
    ill = {53: 17, 59: 30, 61: 44}
    summed = np.mean(sums_of_shares(ill, tmp_path, 40))
    counts = itertools.product(*(range(rows + 1) for rows in ill))
    tried = {c: sum(0.5 - n / rows for n, rows in zip(c, ill, strict=True)) / 3 for c in counts}
    best = min(tried, key=lambda c: abs(abs(tried[c]) - abs(summed)))
    assert best == tuple(ill.values())
