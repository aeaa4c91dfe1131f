"""Rules that measure, and methods, with sites: what they ask is planned for, counted, and not asked for twice."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from tests.support.members import (
    NAMES,
    Job,
    change,
    patients,
    set_up,
    with_known_draws,
    without_certificates,
)
from tests.support.waiting import ENOUGH
from typer.testing import CliRunner

import coterie
from coterie.cli import app
from coterie.engines.remote.sites import LocalReplies, LocalSites
from coterie.errors import KnobError, PeerLost
from coterie.federation import kits
from coterie.federation import lead as leading
from coterie.federation.lead import BEGUN_ANEW, NEWS, RUN, lead, planned_gradients, rule_of
from coterie.federation.manifest import Kit, fingerprint
from coterie.federation.participants import (
    lead_participant,
    peer_of,
    responder_of,
    site_participant,
)
from coterie.federation.relay import relay
from coterie.federation.settings import (
    Data,
    LeadSettings,
    Model,
    Training,
    lead_settings,
    site_settings,
)
from coterie.methods import FedAvg
from coterie.privacy.accountant import Event, epsilon_of
from coterie.recording import Configuration, Point, Record, UserSummary
from coterie.rules import RULES
from coterie.tables.fit import fit
from coterie.tables.models import load_model

SITES = ("basel", "bern")
STEPS = 30
AUTO = {
    "averaging": ["--rule", "wga", "--alpha", "auto"],
    "correction": ["--rule", "bc", "--alpha", "auto", "--beta", "auto"],
}


STEPWISE = ("--steps", str(STEPS), "--batch-size", "16")


def consortium(
    place: Path, *options: str, more: str = "", how: Sequence[str] = STEPWISE, **caps: str
) -> Path:
    """A consortium by the command line, whose sites have accepted; without the cost of certificates."""
    place.mkdir(exist_ok=True, parents=True)
    patients(60, 0).to_csv(place / "mine.csv", index=False)
    words = [
        "federate",
        "init",
        str(place / "trial"),
        "--data",
        str(place / "mine.csv"),
        "--target",
        "ill",
    ]
    words += ["--server", "localhost", *(word for site in SITES for word in ("--site", site))]
    words += [*how, *options]
    with mock.patch.object(kits, "provision", without_certificates):
        answer = CliRunner().invoke(app, words)
    assert answer.exit_code == 0, answer.output
    for seed, site in enumerate(SITES, 1):
        kit = place / "trial" / "sites" / site
        kits.accept(kit, fingerprint(kit))
        patients(80, seed).to_csv(kit / "data.csv", index=False)
        change(place / "trial", [site], **caps)
        with_known_draws(kit, seed)
        with (kit / "coterie.toml").open("a") as file:
            file.write(more)
    return place / "trial"


def sites_of(folder: Path) -> LocalSites:
    return LocalSites({site: peer_of(folder / "sites" / site) for site in SITES})


def given(folder: Path, site: str) -> int:
    """How many gradients a site has given, by its own log."""
    lines = (folder / "sites" / site / "requests.jsonl").read_text().splitlines()
    return sum(json.loads(line).get("gradients", 0) for line in lines)


class LostAfter:
    """Sites that cannot be reached any more after so many questions for gradients."""

    def __init__(self, sites: LocalSites, after: int) -> None:
        self.sites, self.after = sites, after

    def ask(
        self, names: Sequence[str], method: str, timeout: float, **arguments: Any
    ) -> LocalReplies:
        self.after -= method == "gradients"
        if self.after < 0:
            raise PeerLost("the server does not answer")
        return self.sites.ask(names, method, timeout, **arguments)


@pytest.mark.parametrize("rule", AUTO)
def test_knobs_are_measured_with_sites_and_what_is_asked_is_planned_for(
    rule: str, tmp_path: Path
) -> None:
    folder = consortium(tmp_path, *AUTO[rule])
    planned = planned_gradients(lead_settings(folder))
    assert planned == Kit.load(folder / "sites" / "bern").gradients == 2 * 8 + STEPS, (
        "eight batches at two points"
    )
    lead(folder, sites_of(folder))
    record = coterie.Record.load(folder / RUN / "record.jsonl")
    choice = record.configuration.choice
    assert set(record.configuration.estimates["peers"]) == set(SITES)
    assert 0 <= choice["alpha"] <= 1
    assert choice["sentence"] in (folder / RUN / "summary.txt").read_text()
    for site in SITES:
        assert given(folder, site) == 2 * 8 + (STEPS if choice["tau"].get(site) else 0)
    lead(folder, LocalSites({}))  # it has ended: nobody is asked
    assert coterie.Record.load(folder / RUN / "record.jsonl").configuration.choice == choice


@pytest.mark.parametrize("after", [1, 12])
def test_a_resumed_job_does_not_measure_again(after: int, tmp_path: Path) -> None:
    folder = consortium(tmp_path, *AUTO["correction"])
    with pytest.raises(PeerLost, match=f"The state after {after} steps? is saved"):
        lead(folder, LostAfter(sites_of(folder), 2 * 8 + after))
    before = coterie.Record.load(folder / RUN / "record.jsonl").configuration
    assert before.choice["tau"]
    lead(folder, sites_of(folder))
    record = coterie.Record.load(folder / RUN / "record.jsonl")
    assert (record.configuration.choice, record.configuration.estimates) == (
        before.choice,
        before.estimates,
    )
    assert record.end.step == STEPS
    assert {given(folder, site) for site in before.choice["tau"]} == {2 * 8 + STEPS}
    assert (folder / RUN / NEWS).read_text().count(f"going on from step {after}\n") == 1


def test_a_run_that_was_killed_before_a_step_was_saved_says_that_it_begins_anew(
    tmp_path: Path,
) -> None:
    """What sites have given counts, and is asked for again."""
    folder = consortium(tmp_path, *AUTO["correction"])
    with pytest.raises(PeerLost):
        lead(folder, LostAfter(sites_of(folder), 2 * 8 + 3))
    shutil.rmtree(folder / RUN / "checkpoints")  # as after SIGKILL
    lead(folder, sites_of(folder))
    assert (folder / RUN / NEWS).read_text().count(f"{BEGUN_ANEW}\n") == 1
    record = coterie.Record.load(folder / RUN / "record.jsonl")
    assert record.end.step == STEPS
    assert {given(folder, site) for site in record.configuration.choice["tau"]} == {
        2 * 8 + STEPS + 3
    }


def test_a_site_that_misses_a_question_was_not_measured_and_has_no_weight(tmp_path: Path) -> None:
    class BernIsLateOnce(LocalSites):
        asked = 0

        def ask(
            self, names: Sequence[str], method: str, timeout: float, **arguments: Any
        ) -> LocalReplies:
            self.asked += method == "gradients"
            late = method == "gradients" and self.asked == 5
            return super().ask(
                [name for name in names if not late or name != "bern"], method, timeout, **arguments
            )

    folder = consortium(tmp_path, *AUTO["correction"])
    lead(folder, BernIsLateOnce({site: peer_of(folder / "sites" / site) for site in SITES}))
    record = coterie.Record.load(folder / RUN / "record.jsonl")
    assert record.configuration.choice["left_out"] == {"bern": "no answer"}
    assert set(record.configuration.choice["tau"]) == {"basel"}
    assert given(folder, "bern") < 2 * 8


def test_more_batches_are_measured_for_longer_averaging_and_are_planned_for(tmp_path: Path) -> None:
    """A twentieth of 600 steps is 30 batches: eight groups of three, of which one is asked for at both points."""
    folder = consortium(tmp_path, *AUTO["averaging"], "--steps", "600")
    assert planned_gradients(lead_settings(folder)) == 8 * 3 + 8 + 600
    with pytest.raises(PeerLost, match="after 1 step is"):
        lead(folder, LostAfter(sites_of(folder), 8 * 3 + 8 + 1))


def test_adaptive_averaging_with_few_exchanges_asks_no_more_than_is_planned_for(
    tmp_path: Path,
) -> None:
    """Beside the two exchanges in 100 steps it asks everybody wherever it judges."""
    folder = consortium(tmp_path, "--rule", "adaptive", "--steps", "100", "--exchange-every", "50")
    planned = planned_gradients(lead_settings(folder))
    lead(folder, sites_of(folder))
    for site in SITES:
        assert 2 * 5 < given(folder, site) <= planned


@pytest.mark.parametrize("cap", [2 * 8 + STEPS, 2 * 8 + STEPS - 1])
def test_a_cap_that_leaves_no_room_for_measuring_is_told_before_the_first_question(
    cap: int, tmp_path: Path
) -> None:
    folder = consortium(tmp_path, *AUTO["correction"], gradients=str(cap))
    if cap < 2 * 8 + STEPS:
        with pytest.raises(
            KnobError, match=f"basel gives {cap} more gradients, and this run may ask for {cap + 1}"
        ):
            lead(folder, sites_of(folder))
        assert not (folder / "sites" / "basel" / "requests.jsonl").exists()
    else:
        lead(folder, sites_of(folder))
        assert coterie.Record.load(folder / RUN / "record.jsonl").end.left_out == {}


def test_private_sites_count_what_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    promise = "\n[privacy]\nepsilon = 100.0\ndelta = 1e-3\nclip = 1.0\nnoise = 2.0\n"
    folder = consortium(tmp_path, *AUTO["averaging"], more=promise, norm="inf")
    sites = sites_of(folder)
    lead(folder, sites)
    for site in SITES:  # noise is secret: whether the guard leaves out some steps is chance
        assert 2 * 8 <= given(folder, site) <= 2 * 8 + STEPS
        spent = {Event(16 / 80, 2.0): given(folder, site)}
        peer = sites.responders[site].peer
        assert peer.ledger.spent == spent
        assert peer.epsilon == epsilon_of(spent, 1e-3)
    less = promise.replace("100.0", "1.0")
    tight = consortium(tmp_path / "tight", *AUTO["averaging"], more=less, norm="inf")
    with pytest.raises(
        KnobError,
        match=rf"basel gives \d+ more gradients, and this run may ask for {2 * 8 + STEPS}",
    ):
        lead(tight, sites_of(tight))


def test_groups_of_masked_sums_are_measured_as_one_peer_each(tmp_path: Path) -> None:
    folder = consortium(tmp_path, *AUTO["correction"], more="\n[sums]\npeers = 2\nshare = 0.5\n")
    text = (folder / "coterie.toml").read_text()
    (folder / "coterie.toml").write_text(
        text.replace("secure_sums = false", 'secure_sums = {"swiss" = ["basel", "bern"]}')
    )
    sites = LocalSites({})
    sites.responders = {site: responder_of(folder / "sites" / site) for site in SITES}
    lead(folder, sites)
    assert set(
        coterie.Record.load(folder / RUN / "record.jsonl").configuration.estimates["peers"]
    ) == {"swiss"}


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (
            Training(rule="wga", alpha="auto", secure_sums=True),
            'gradient to choose a knob that is "auto", and `secure',
        ),
        (
            Training(rule="bc", beta="auto", secure_sums=True),
            'gradient to choose a knob that is "auto", and `secure',
        ),
        (
            Training(rule="first-peer"),
            "'first-peer' does not say how many gradients it asks of each site",
        ),
    ],
)
def test_what_cannot_be_had_is_refused(
    training: Training, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FirstPeer:
        """A chooser of one's own, which does not say what it asks."""

        def choose(self, spec: object, engine: object, progress: bool | None = None) -> Any:
            raise NotImplementedError

        def rule_from(self, account: Mapping[str, Any]) -> Any:
            raise NotImplementedError

    monkeypatch.setattr(RULES, "_entries", dict(RULES._entries))
    RULES.register("first-peer", FirstPeer)
    with pytest.raises(KnobError, match=message):
        rule_of(LeadSettings("me", SITES, Data(), Model(), training))


@pytest.mark.parametrize("text", ['"automatic"', "1.5", "true"])
def test_knobs_in_the_settings_are_numbers_or_auto(text: str, tmp_path: Path) -> None:
    (tmp_path / "coterie.toml").write_text(
        f'me = "me"\nsites = ["a"]\n[training]\nrule = "wga"\nalpha = {text}\n'
    )
    with pytest.raises(KnobError, match=r'`alpha` must lie in \[0, 1\], or be "auto"'):
        lead_settings(tmp_path)
    (tmp_path / "coterie.toml").write_text(
        'me = "me"\nsites = ["a"]\n[training]\nrule = "wga"\nalpha = "auto"\n'
    )
    assert rule_of(lead_settings(tmp_path)) == coterie.WeightedAveraging("auto")


def test_everyone_measures_where_everyone_trains(tmp_path: Path) -> None:
    set_up(
        tmp_path / "trial",
        Training(rule="bc", alpha="auto", beta="auto", steps=STEPS, batch_size=16),
    )
    relay(tmp_path / "trial", Job(tmp_path / "trial"), patience=ENOUGH, pause=0.05)
    assert Kit.load(tmp_path / "trial" / "sites" / "bern").gradients == 2 * (2 * 8 + STEPS), (
        "for each of two"
    )
    for name in NAMES:
        others = [
            coterie.Record.load(tmp_path / "trial" / "sites" / n / RUN / "record.jsonl")
            for n in NAMES
            if n != name
        ]
        heard = sum(name in record.configuration.choice["tau"] for record in others)
        assert given(tmp_path / "trial", name) == 2 * 2 * 8 + heard * STEPS


METHODS_AT_SITES = {  # by their options, and what each site is asked for in a round of 30
    "fedavg": (["--rule", "fedavg", "--knob", "local_steps=3"], 3),
    "scaffold": (["--rule", "scaffold", "--knob", "local_steps=2", "--knob", "option=1"], 2 + 1),
    "per-fedavg": (
        ["--rule", "per-fedavg", "--knob", "local_steps=2", "--knob", "inner_lr=0.1"],
        2 * 2,
    ),
    "mime": (["--rule", "mime", "--knob", "local_steps=2"], 2 * 2 + 1),
}


@pytest.mark.parametrize("method", METHODS_AT_SITES)
def test_methods_run_with_sites_and_what_they_ask_is_planned_for(
    method: str, tmp_path: Path
) -> None:
    options, asked = METHODS_AT_SITES[method]
    folder = consortium(tmp_path, *options, gradients=str(STEPS * asked))
    assert (
        planned_gradients(lead_settings(folder))
        == Kit.load(folder / "sites" / "bern").gradients
        == STEPS * asked
    )
    lead(folder, sites_of(folder))
    record = coterie.Record.load(folder / RUN / "record.jsonl")
    assert (record.end.step, record.end.left_out) == (STEPS, {})
    assert record.configuration.optimizer == "SGD(lr=0.1)"
    line = next(
        line for line in (folder / "coterie.toml").read_text().splitlines() if "lr =" in line
    )
    assert line.startswith("# lr =   # Step size."), "for user 0 to see and change"
    assert "for a method 0.1" in line
    assert {given(folder, site) for site in SITES} == {STEPS * asked}
    decision = record.end.guard
    assert decision is not None, "a model was trained alone beside it"
    told = (
        "gets the model trained without peers"
        if decision.served == "alone"
        else "one trained alone: "
    )
    assert told in (folder / RUN / "summary.txt").read_text().splitlines()[0]


def test_a_method_with_sites_has_the_model_of_one_process(tmp_path: Path) -> None:
    """With batches of all rows it does not matter who draws them."""
    whole = ["--batch-size", "80", "--lr", "0.3", "--seed", "3"]
    folder = consortium(
        tmp_path, "--rule", "fedavg", "--knob", "local_steps=3", *whole, norm="inf", examples="1"
    )
    lead(folder, sites_of(folder))
    _, task = lead_participant(folder, lead_settings(folder))
    assert task is not None
    peers = [
        site_participant(folder / "sites" / s, site_settings(folder / "sites" / s)).user
        for s in SITES
    ]
    fit(
        replace(task, peers=tuple(peers)),
        FedAvg(3),
        "linear",
        tmp_path / "here",
        steps=STEPS,
        batch_size=80,
        lr=0.3,
        seed=3,
    )
    places = folder / RUN, tmp_path / "here"
    found, wanted = (torch.load(place / "model.pt", weights_only=True) for place in places)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    # of the method, whichever model is served
    found, wanted = (coterie.Record.load(place) for place in places)
    assert found.curve("validation_loss")[1] == pytest.approx(
        wanted.curve("validation_loss")[1], rel=1e-4
    )


def test_a_fine_tuned_model_asks_nobody_while_it_is_tuned(tmp_path: Path) -> None:
    folder = consortium(tmp_path, "--rule", "fedavg-tuned")
    assert planned_gradients(lead_settings(folder)) == 5 * round(0.3 * STEPS)
    lead(folder, sites_of(folder))
    assert given(folder, "bern") == 5 * round(0.3 * STEPS)


def test_a_resumed_method_asks_for_no_round_twice(tmp_path: Path) -> None:
    folder = consortium(tmp_path, "--rule", "fedavg", "--knob", "local_steps=3")
    with pytest.raises(PeerLost, match="The state after 7 steps is saved"):
        lead(folder, LostAfter(sites_of(folder), 7))
    lead(folder, sites_of(folder))
    assert given(folder, "basel") == 3 * STEPS


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (
            Training(rule="hyp-cluster"),
            "'hyp-cluster' cannot be used with sites: this method needs all users in one",
        ),
        (Training(rule="afl"), "'afl' cannot be used with sites"),
        (Training(rule="fedper"), "'fedper' cannot be used with sites"),
        (Training(rule="user-centric"), "'user-centric' cannot be used with sites"),
        (
            Training(rule="fedavg", secure_sums=True),
            "'fedavg' lets sites take steps of their own, which `secure_sums`",
        ),
        (
            Training(rule="fedavg", secure_sums={"g": SITES}),
            "steps of their own, which `secure_sums` does not mask",
        ),
        (
            Training(rule="fedavg", local_steps=5),
            "'fedavg' has rounds of its own: leave `exchange_every` and",
        ),
        (Training(rule="fedavg", alpha=0.5), "'fedavg' takes no `alpha`"),
        (
            Training(rule="fed"),
            "unknown rule 'fed'; the rules are alone, .*, and the methods fedavg, ",
        ),
    ],
)
def test_methods_that_sites_cannot_serve_are_refused(training: Training, message: str) -> None:
    with pytest.raises(KnobError, match=message):
        rule_of(LeadSettings("me", SITES, Data(), Model(), training))


def test_everyone_may_train_by_a_method(tmp_path: Path) -> None:
    set_up(
        tmp_path / "trial",
        Training(rule="fedavg", knobs={"local_steps": 3}, steps=STEPS, batch_size=16),
    )
    relay(tmp_path / "trial", Job(tmp_path / "trial"), patience=ENOUGH, pause=0.05)
    assert {given(tmp_path / "trial", name) for name in NAMES} == {2 * 3 * STEPS}
    assert Kit.load(tmp_path / "trial" / "sites" / "bern").gradients == 2 * 3 * STEPS


def test_a_knob_that_no_settings_can_hold_is_refused(tmp_path: Path) -> None:
    words = [
        "federate",
        "init",
        str(tmp_path),
        "--data",
        "a.csv",
        "--target",
        "ill",
        "--server",
        "localhost",
    ]
    answer = CliRunner().invoke(
        app, [*words, "--site", "a", "--rule", "selfish", "--knob", "alpha=none"]
    )
    assert answer.exit_code == 2
    assert "`--knob alpha` cannot be written to the settings" in answer.output


E_STEPS = 15 + 12 * 15 + 12 * 2
"""As how many gradients a fit with two sites counts.

Those of the pooled model, at one point; those of own and peers' rows together, at five for each of
three strengths; and posteriors under one prior.
"""


def in_closed_form(place: Path, *options: str, more: str = "") -> Path:
    """Return a consortium where nothing says how steps are taken."""
    return consortium(place, *options, more=more, how=())


def test_linear_models_are_found_in_closed_form_where_nothing_says_how_steps_are_taken(
    tmp_path: Path,
) -> None:
    """What sites agree to is what they are asked; the model is that of users in this process."""
    folder = in_closed_form(tmp_path)
    kit = Kit.load(folder / "sites" / "bern")
    assert planned_gradients(lead_settings(folder)) == kit.gradients == E_STEPS
    assert kit.asked == f"{E_STEPS} gradients, in E-steps, each of which is of all your rows"
    said = CliRunner().invoke(app, ["federate", "check", str(folder / "sites" / "bern")]).output
    assert f"plans to ask for at most {kit.asked}" in said
    lead(folder, sites_of(folder))
    record = coterie.Record.load(folder / RUN / "record.jsonl")
    assert record.end.account["exchanges"] == 39
    assert record.configuration.me.validation == 0
    for site in SITES:
        assert given(folder, site) == E_STEPS
        lines = (folder / "sites" / site / "requests.jsonl").read_text().splitlines()
        asked = [json.loads(line).get("e_step") for line in lines if "gradients" in line]
        assert asked == ["gradient"] * (15 + 12) + ["posterior"] * 12
    settings = lead_settings(folder)
    _, task = lead_participant(folder, settings)
    assert task is not None
    users = tuple(peer_of(folder / "sites" / site).user for site in SITES)
    here = fit(
        replace(task, peers=users), coterie.Mixture(), "linear", tmp_path / "here", progress=False
    )
    assert here is not None
    boards = [each.end.account["leaderboard"] for each in (record, here.record)]
    for name, line in boards[0].items():
        assert line["loss"] == pytest.approx(boards[1][name]["loss"], abs=1e-6)


def test_a_fit_that_a_lost_server_ended_starts_again_to_the_same_bits(tmp_path: Path) -> None:
    folders = [in_closed_form(tmp_path / name) for name in ("lost", "whole")]
    with pytest.raises(PeerLost):
        lead(folders[0], LostAfter(sites_of(folders[0]), 32))
    for folder in folders:
        lead(folder, sites_of(folder))
    assert given(folders[0], "bern") == 15 + 12 * 15 + 5 * 2 + E_STEPS
    boards = [
        coterie.Record.load(folder / RUN / "record.jsonl").end.account["leaderboard"]
        for folder in folders
    ]
    assert boards[0] == boards[1]  # to the bit: numbers are written with all their digits


def test_a_site_that_answers_no_e_steps_is_told_before_the_first_question(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    promise = "\n[privacy]\nepsilon = 100.0\ndelta = 1e-3\nclip = 1.0\nnoise = 2.0\n"
    folder = consortium(tmp_path, more=promise, how=(), norm="inf")
    with pytest.raises(
        KnobError, match=r'basel answers no E-steps, it promises.*rule = "adaptive"'
    ):
        lead(folder, sites_of(folder))
    assert not any((folder / "sites" / site / "requests.jsonl").exists() for site in SITES)


@pytest.mark.parametrize("posteriors", ["true", "false"])
def test_masked_sites_add_posteriors_where_they_say_so(posteriors: str, tmp_path: Path) -> None:
    sums = f"\n[sums]\npeers = 2\nposteriors = {posteriors}\n"
    folder = in_closed_form(tmp_path, "--rule", "mixture", "--secure-sums", more=sums)
    sites = LocalSites({})
    sites.responders = {site: responder_of(folder / "sites" / site) for site in SITES}
    if posteriors == "false":
        with pytest.raises(KnobError, match="basel answers no E-steps, it adds gradients"):
            lead(folder, sites)
        return
    lead(folder, sites)
    plain = in_closed_form(tmp_path / "plain")
    lead(plain, sites_of(plain))
    boards = [
        coterie.Record.load(each / RUN / "record.jsonl").end.account["leaderboard"]
        for each in (folder, plain)
    ]
    for name, line in boards[0].items():
        assert line["loss"] == pytest.approx(boards[1][name]["loss"], abs=2e-4)  # dither is random


@pytest.mark.parametrize("options", [("--steps", "50"), ("--model", "mlp"), ("--lr", "0.1")])
def test_who_says_how_steps_are_taken_gets_gradient_steps(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    assert lead_settings(in_closed_form(tmp_path, *options)).training.rule == "adaptive"


def test_trees_grow_with_sites_as_with_users_in_this_process(tmp_path: Path) -> None:
    """What sites agree to is what they are asked: E-steps, and the histograms of each level."""
    how = "--rule", "mixture", "--knob", "trees=True"
    folder = consortium(tmp_path, *how, how=(), examples="1", norm="inf")  # no bins are merged
    planned = E_STEPS + 200 * 10
    assert Kit.load(folder / "sites" / "bern").gradients == planned
    lead(folder, sites_of(folder))
    record = coterie.Record.load(folder / RUN / "record.jsonl")
    assert record.end.account["exchanges"] == 39 + 200
    assert {given(folder, site) for site in SITES} == {planned}
    settings = lead_settings(folder)
    _, task = lead_participant(folder, settings)
    assert task is not None
    users = tuple(peer_of(folder / "sites" / site).user for site in SITES)
    rule, out = coterie.Mixture(trees=True), tmp_path / "here"
    here = fit(replace(task, peers=users), rule, "linear", out, progress=False)
    assert here is not None
    boards = [each.end.account["leaderboard"] for each in (record, here.record)]
    assert boards[0].keys() == boards[1].keys()
    for name, line in boards[0].items():
        assert line["loss"] == pytest.approx(boards[1][name]["loss"], abs=1e-5)
    saved = load_model(folder / RUN)
    inputs = task.me.take(torch.arange(len(task.me)), seed=0, step=0)[0]
    torch.testing.assert_close(saved(inputs), here.model(inputs), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("seconds", "wanted", "how"),
    [
        (0.001, 1, {}),
        (0.02, 2, {}),
        (0.1, 8, {}),
        (0.1, 4, {"rule": "wga"}),
        (0.1, 1, {"rule": "bc"}),  # whose bias would be that of an old point
        (0.1, 1, {"rarest": 1}),
        (0.1, 3, {"exchange_every": 3}),
        (0.1, 1, {"steps": 90}),
    ],
)
def test_a_network_asks_as_rarely_as_its_sites_answer_late(
    seconds: float,
    wanted: int,
    how: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = 0.0

    class Late:
        def ask(self, names: Sequence[str], method: str, timeout: float, **_: Any) -> LocalReplies:
            nonlocal clock
            clock += seconds
            return LocalReplies({name: {} for name in names})

    monkeypatch.setattr(leading, "time", SimpleNamespace(monotonic=lambda: clock))
    training = Training(**{"steps": 1000, **how})
    settings = LeadSettings("me", ("a", "b"), Data(), Model("mlp"), training)
    told = leading.paced(settings, Late(), tmp_path)
    assert told.training == replace(training, exchange_every=wanted)
    linear = replace(settings, model=Model("linear"))
    assert leading.paced(linear, Late(), tmp_path) == linear
    # one that goes on does so as it began
    me = UserSummary(name="me", examples=9)
    begun = Configuration(rule="", me=me, peers={}, exchange_every=7)
    Record(begun, tmp_path / leading.RECORD).add(Point(step=0))
    if not how:
        assert leading.paced(settings, Late(), tmp_path).training.exchange_every == 7
