"""E-steps wherever the peers are: every engine gives what a plain loop over their rows gives, and no more."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.engines import ENGINES
from tests.support.intruders import private_e_steps
from torch import nn

import coterie
from coterie.engines import Asks, PrivatePeers
from coterie.engines.engine import MakeEngine, Question
from coterie.engines.in_process.passes import Passes
from coterie.engines.messages import Request
from coterie.engines.peer import Caps, Peer
from coterie.engines.peer.ledger import Ledger
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.responder import answer_message
from coterie.engines.remote.sites import LocalSites
from coterie.errors import KnobError
from coterie.mixture.answers import EStep
from coterie.mixture.families import SOFTMAX
from coterie.mixture.posterior import Priors, Rows
from coterie.mixture.scaling import Scaling
from coterie.privacy.privacy import Privacy
from coterie.privacy.sums import SumsOnly
from coterie.recording.configuration import StepSettings

ANSWERS = list(ENGINES)
LOSS = nn.functional.cross_entropy
QUIET: dict[str, Any] = {"measure": False, "progress": False}
SIZES = (30, 40, 25, 60, 33, 47)


@pytest.fixture(params=ANSWERS)
def answering(request: pytest.FixtureRequest) -> Iterator[MakeEngine]:
    """Give each engine whose peers answer E-steps."""
    with ENGINES[request.param]() as make:
        yield make


def users() -> list[coterie.User]:
    """Return user 0 and five peers of three classes, who differ a little."""
    random = torch.Generator().manual_seed(0)
    truth = torch.randn(4, 3, generator=random)

    def user(name: str, rows: int) -> coterie.User:
        inputs = torch.randn(rows, 4, generator=random) + 0.5
        own = truth + 0.4 * torch.randn(4, 3, generator=random)
        noise = torch.empty(rows, 3).exponential_(generator=random).log()
        return coterie.User(name, inputs, (inputs @ own - noise).argmax(1))

    return [user("me" if k == 0 else f"peer {k}", n) for k, n in enumerate(SIZES)]


def a_question(scaling: Scaling, told: str) -> EStep:
    random = np.random.default_rng(1)
    priors = Priors(random.normal(size=(5, 2, 3)) / 2, np.full((5, 2, 3), 0.4), np.ones(2))
    return EStep("softmax", scaling, priors, told, float(max(SIZES)))


def numbers_of(user: coterie.User) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    inputs, targets = user.take(torch.arange(len(user)), seed=0, step=0)
    return inputs.double().numpy(), np.eye(3)[targets.numpy()]


def test_rows_are_those_of_the_rows_themselves(answering: MakeEngine) -> None:
    """Each peer's numbers, of rows scaled by hand; who is not asked gives none, and nothing depends on the point."""
    me, *peers = users()
    engine = answering(nn.Linear(4, 3), LOSS, me, peers, batch_size=8, seed=0)
    assert isinstance(engine, Asks)
    assert engine.capabilities.no_e_steps == ""
    x, y = numbers_of(me)
    asked = a_question(Scaling.of(x, y, SOFTMAX, intercept=True), "gradient curvature posterior")
    weights = torch.full((1, 5), 0.2, dtype=torch.float64)
    weights[0, 3] = math.nan
    question = Question(torch.randn(1, 15), 0, weights, e_step=asked)
    answers = engine.ask(question)()
    assert answers.rows is not None
    for k, peer in enumerate(peers):
        got = answers.rows[0, k].reshape(asked.shape).numpy()
        if k == 3:
            assert np.isnan(got).all()
            continue
        inputs, targets = numbers_of(peer)
        mean, spread = x.mean(0), np.sqrt(np.square(x - x.mean(0)).mean(0))
        spread = np.maximum(spread, np.abs(x - mean).max(0) / 4)
        rows = np.column_stack([(inputs - mean) / spread, np.ones(len(inputs))])
        np.testing.assert_allclose(got, asked.answer(asked.rows(Rows(inputs, targets))), atol=1e-12)
        told = asked.read(got)
        share = len(peer) / max(SIZES)
        np.testing.assert_allclose(told.share, share)
        s = rows @ asked.priors.mean[:, 0]
        p = np.exp(s) / np.exp(s).sum(1, keepdims=True)
        gradient = rows.T @ (p - targets) / len(rows)
        np.testing.assert_allclose(told.gradient[:, 0] / share, gradient, atol=1e-12)


def test_a_fit_is_the_same_everywhere(answering: MakeEngine) -> None:
    """The model, the weights and the leaderboard of a run are those of users in this process."""
    me, *peers = users()
    torch.manual_seed(0)
    model = nn.Linear(4, 3)

    def fitted(engine: Any) -> coterie.Run:
        return coterie.train(model, LOSS, me, peers, coterie.Mixture(), engine=engine, **QUIET)

    here, there = fitted(coterie.InProcess), fitted(answering)
    assert there.record.end.account["exchanges"] == 39
    for a, b in zip(here.model.parameters(), there.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
    boards = [run.record.end.account["leaderboard"] for run in (here, there)]
    for name, line in boards[0].items():
        assert boards[1][name]["loss"] == pytest.approx(line["loss"], abs=1e-6)


def held(
    peers: list[coterie.User], caps: Caps | None = None, log: Path | None = None
) -> dict[str, Peer]:
    kept = {p.name: None if log is None else Ledger(log / p.name) for p in peers}
    return {p.name: Peer(p, Passes(nn.Linear(4, 3), LOSS), caps, kept[p.name]) for p in peers}


def over(sites: LocalSites, peers: list[coterie.User], **how: Any) -> Any:
    return partial(Remote, sites=sites, names=[p.name for p in peers], **how)


def test_masked_sums_give_the_same_to_their_rounding() -> None:
    """With masks, and with nothing but sums: the candidates that need no peer's own gradient are the same."""
    me, *peers = users()
    sites = LocalSites(held(peers), SumsOnly(posteriors=True))
    fit = partial(coterie.train, nn.Linear(4, 3), LOSS, me, rule=coterie.Mixture(), **QUIET)
    masked = fit(peers=(), engine=over(sites, peers, secure_sums=True))
    plain = fit(peers=peers)
    boards = [run.record.end.account["leaderboard"] for run in (masked, plain)]
    assert "hierarchical, chosen peers" not in boards[0]
    for kind in ("alone", "pooled", "pooled, user as a column", "hierarchical"):
        assert boards[0][kind]["loss"] == pytest.approx(boards[1][kind]["loss"], abs=1e-3)
    assert masked.record.end.account["exchanges"] == 39


def test_posteriors_are_added_under_masks_only_where_a_site_says_so() -> None:
    """Else gradient steps, which a rule must say how to take; a request that asks all the same is refused."""
    me, *peers = users()
    sites = LocalSites(held(peers), SumsOnly())
    engine = over(sites, peers, secure_sums=True)(nn.Linear(4, 3), LOSS, me)
    assert "no posteriors" in engine.capabilities.no_e_steps
    x, y = numbers_of(me)
    alike = torch.full((1, 5), 0.2, dtype=torch.float64)
    for step, told in enumerate(("gradient curvature", "posterior")):
        asked = a_question(Scaling.of(x, y, SOFTMAX, intercept=True), told)
        answers = engine.ask(Question(torch.zeros(1, 15), step, alike, e_step=asked))()
        assert answers.answered.item() == pytest.approx(1 if step == 0 else 0)
        assert all("no posteriors" in why for why in answers.left_out.values())
    with pytest.raises(KnobError, match="every peer's gradient"):
        coterie.train(nn.Linear(4, 3), LOSS, me, (), coterie.Mixture(), engine=engine, **QUIET)


def test_no_masked_e_steps_weigh_some_sites_otherwise_than_others() -> None:
    """The exploit: as many shares of 1 as sites; those that are cut make as many equations for their gradients."""
    me, *peers = users()
    sizes, n = np.array([len(peer) for peer in peers]), len(peers)
    cuts = np.minimum(1, sizes / np.sort(sizes)[:, None])
    assert np.linalg.matrix_rank(cuts) == len(set(sizes.tolist())) > 1
    sites = LocalSites(held(peers), SumsOnly())
    engine = over(sites, peers, secure_sums=True, misses=99)(nn.Linear(4, 3), LOSS, me)
    alike = torch.full((1, n), 1 / n, dtype=torch.float64)
    question, found = (
        a_question(Scaling.of(*numbers_of(me), SOFTMAX, intercept=True), "gradient"),
        [],
    )
    for step, size in enumerate([*np.sort(sizes).tolist(), 1000.0]):
        asked = replace(question, examples=float(size))
        answers = engine.ask(Question(torch.zeros(1, 15), step, alike, e_step=asked))()
        if size >= sizes.max():
            assert answers.sums is not None
            found.append(size * answers.sums)
        else:
            assert answers.answered.item() == 0
            assert any("must count all" in why for why in answers.left_out.values())
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-4, rtol=0)


def test_groups_under_masks_stand_as_a_peer_each() -> None:
    me, *peers = users()
    groups = {"north": ["peer 1", "peer 2"], "south": ["peer 3", "peer 4", "peer 5"]}
    sites = LocalSites(held(peers), SumsOnly(peers=2, posteriors=True))
    engine = over(sites, peers, secure_sums=groups)
    run = coterie.train(nn.Linear(4, 3), LOSS, me, (), coterie.Mixture(), engine=engine, **QUIET)
    plain = coterie.train(nn.Linear(4, 3), LOSS, me, peers, coterie.Mixture(), **QUIET)
    boards = [each.record.end.account["leaderboard"] for each in (run, plain)]
    # the share is in the sums: a group's rows weigh as they are, so that the pooled model is nearly
    # that of all rows; groups of two and three sites have other weights than sites
    assert boards[0]["pooled"]["loss"] == pytest.approx(boards[1]["pooled"]["loss"], abs=0.02)


def test_caps_count_an_e_step_as_what_it_tells(tmp_path: Path) -> None:
    me, *peers = users()
    sites = held(peers, Caps(gradients=1000, norm=10.0, examples=20), tmp_path)
    engine = over(LocalSites(sites), peers)
    run = coterie.train(nn.Linear(4, 3), LOSS, me, (), coterie.Mixture(), engine=engine, **QUIET)
    planned = coterie.Mixture().gradients_asked("me", [p.name for p in peers], StepSettings())
    for name, peer in sites.items():
        assert peer.ledger.given == planned == 15 + 12 * 3 * 5 + 12 * 2 * 6
        assert run.record.end.costs[name].gradients == planned
        lines = (tmp_path / name).read_text().splitlines()
        assert sum('"e_step": "posterior"' in line for line in lines) == 12
        assert sum('"e_step": "gradient"' in line for line in lines) == 27


def test_spent_caps_and_few_examples_are_refused() -> None:
    peers = users()[1:]
    asked = a_question(Scaling.none(4, 3)._replace(intercept=True), "posterior")
    request = Request(torch.zeros(1, 15), 0, 0, 32, e_step=asked)
    spent, few = (held(peers, caps)["peer 2"] for caps in (Caps(gradients=7), Caps(examples=1000)))
    assert spent.answer(request).gradients is not None
    assert spent.answer(request).refused == "it has 3 gradients left to give, and was asked for 4"
    assert "fewer than 1000" in str(few.answer(request).refused)


def test_no_number_exceeds_what_the_question_says() -> None:
    """Rows that are huge, constant, of one class: answers are in [−1, 1], the norm cap is the gradient's."""
    inputs = torch.tensor([[1e9, 0.0, -1e9, 1.0]]).repeat(20, 1)
    peer = coterie.User("p", inputs, torch.zeros(20, dtype=torch.int64))
    asked = a_question(Scaling.none(4, 3)._replace(intercept=True), "gradient posterior")
    request = Request(torch.zeros(1, 15), 0, 0, 32, e_step=asked)
    capped = Peer(peer, Passes(nn.Linear(4, 3), LOSS), Caps(norm=0.5))
    given = capped.answer(request).gradients
    assert given is not None
    assert float(given.abs().max()) <= 1
    told = asked.read(given.reshape(asked.shape).numpy())
    lengths = np.sqrt(np.square(told.gradient).sum((0, 2))) / told.share
    assert (lengths <= 0.5 + 1e-9).all()


def test_the_last_layer_of_a_network_is_asked_on_what_goes_into_it() -> None:
    """By the layer's name, at user 0's parameters: rows are the features that its trunk makes there."""
    peers = users()[1:]
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    x = nn.utils.parameters_to_vector(model.parameters()).detach()
    asked = EStep(
        "softmax",
        Scaling.none(6, 3)._replace(intercept=True),
        Priors(np.zeros((7, 1, 3)), np.ones((7, 1, 3)), np.ones(1)),
        "gradient",
        layer="2",
    )
    elsewhere = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    peer = Peer(peers[0], Passes(elsewhere, LOSS))
    given = peer.answer(Request(x[None], 0, 0, 32, e_step=asked)).gradients
    assert given is not None
    told = asked.read(given.reshape(asked.shape).numpy())
    inputs, targets = peers[0].take(torch.arange(len(peers[0])), seed=0, step=0)
    last = nn.Linear(6, 3)
    with torch.no_grad():
        features = model[1](model[0](inputs))
        last.weight.zero_()
        last.bias.zero_()
    (slope,) = torch.autograd.grad(LOSS(last(features), targets), last.weight)
    np.testing.assert_allclose(told.gradient[:6, 0], slope.T.numpy(), atol=1e-6)
    plain = Request(x[None], 0, 0, 32, e_step=replace(asked, layer="1"))
    assert peer.answer(plain).refused == "its model has no such linear layer"


JUNK: tuple[Any, ...] = (
    None,
    "text",
    -1,
    math.nan,
    [1.0],
    {},
    np.zeros(3),
    np.full((5, 2, 3), np.inf),
    np.zeros((9,) * 3),
)


@pytest.mark.parametrize(
    "field",
    ["family", "told", "layer", "examples", "mean", "variance", "noise", "scale", "intercept"],
)
def test_nonsense_for_a_question_is_refused_and_told(field: str) -> None:
    """Whoever makes the message: a site answers why, computes nothing, and counts nothing."""
    peer = held(users()[1:], Caps(gradients=100))["peer 1"]
    asked = a_question(Scaling.none(4, 3)._replace(intercept=True), "posterior")
    message = Request(torch.zeros(1, 15), 0, 0, 32, e_step=asked).message()
    assert "gradients" in answer_message(peer, "user 0", message)
    given = peer.ledger.given
    for junk in JUNK:
        wrong = {**message, "e_step": message["e_step"] | {field: junk}}
        reply = answer_message(peer, "user 0", wrong)
        assert isinstance(reply["refused"], str), (field, junk)
        assert "failed" not in reply["refused"], (field, junk)
    assert peer.ledger.given == given
    twice = {**message, "e_step": message["e_step"] | {"told": "posterior posterior"}}
    assert "refused" in answer_message(peer, "user 0", twice)


class Dying(LocalSites):
    """Sites of which one does not answer in some exchanges."""

    def __init__(self, peers: dict[str, Peer], name: str, silent: range) -> None:
        super().__init__(peers)
        self.name, self.silent = name, silent

    def ask(self, names: Any, method: str, timeout: float, **arguments: Any) -> Any:
        step = arguments.get("request", {}).get("step", -1)
        here = [n for n in names if n != self.name or step not in self.silent]
        return super().ask(here, method, timeout, **arguments)


def test_a_peer_that_dies_in_the_e_steps_counts_as_it_last_did() -> None:
    """Nearly the model of a run in which it stays, and far nearer than one in which it never was."""
    me, *peers = users()

    def fitted(silent: range) -> tuple[torch.Tensor, coterie.Run]:
        sites = Dying(held(peers), "peer 1", silent)
        engine = over(sites, peers, misses=2, probe_every=2)
        run = coterie.train(
            nn.Linear(4, 3), LOSS, me, (), coterie.Mixture(), engine=engine, **QUIET
        )
        return nn.utils.parameters_to_vector(run.model.parameters()).detach(), run

    whole, dies, never = (fitted(r) for r in (range(0), range(34, 99), range(99)))
    assert dies[1].record.end.left_out == {"peer 1": {"no answer, in 5 exchanges": 1}}
    assert (dies[0] - whole[0]).norm() < 0.1 * (never[0] - whole[0]).norm()


def test_no_e_step_of_a_private_peer_tells_of_a_row() -> None:
    """Peers that differ by one row answer alike, whatever is asked of all their rows: ε is 0 of that."""
    assert private_e_steps(8, seed=0) == 0


def test_private_peers_get_gradient_steps_and_the_record_says_so() -> None:
    me, *peers = users()
    private = partial(
        PrivatePeers, privacy=Privacy(epsilon=4.0, delta=1e-3, clip=1.0), gradients=90
    )
    run = coterie.train(
        nn.Linear(4, 3), LOSS, me, peers, coterie.Mixture(), steps=20, engine=private, **QUIET
    )
    assert run.step == 20
    said = run.record.configuration.choice["sentence"]
    assert "trained by gradient steps" in said
    assert "promises privacy" in said


def test_a_fit_that_is_begun_again_has_the_same_bits(tmp_path: Path) -> None:
    """Nothing of a fit is saved before its end: one that was killed starts again, from the same numbers."""
    me, *peers = users()
    asked = 0

    class Killed(LocalSites):
        def ask(self, *given: Any, **arguments: Any) -> Any:
            nonlocal asked
            asked += 1
            if asked == 12:
                raise KeyboardInterrupt
            return super().ask(*given, **arguments)

    sites, models = Killed(held(peers)), []
    fit = partial(coterie.train, nn.Linear(4, 3), LOSS, me, (), coterie.Mixture(), **QUIET)
    with pytest.raises(KeyboardInterrupt):
        fit(engine=over(sites, peers), out=tmp_path / "run")
    for resume, out in ((True, tmp_path / "run"), (False, tmp_path / "whole")):
        run = fit(engine=over(sites, peers), out=out, resume=resume)
        models.append(nn.utils.parameters_to_vector(run.model.parameters()))
    assert torch.equal(*models)
