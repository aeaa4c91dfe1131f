"""Peers in other organisations: what becomes of those that are late, gone, back, wrong, or unwilling.

The sites answer in this process; `test_consortium.py` has them in processes of their own, over
NVFLARE.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.intruders import memory_of_a_crowd
from tests.support.small_peers import LOSS, model, peer_of

import coterie
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.sites import LocalReplies, LocalSites
from coterie.errors import CoterieError, PeerLost
from coterie.recording import checkpoint

TAU = {"peer 1": 0.5, "peer 2": 0.3, "peer 3": 0.2}
Users = Callable[..., list[coterie.User]]


class Sites(LocalSites):
    """Sites whose answers can be changed by (site, step) on the way; None is no answer."""

    def __init__(
        self, users: Sequence[coterie.User], change: Callable[[str, int, Any], Any] | None = None
    ) -> None:
        super().__init__({user.name: peer_of(user) for user in users})
        self.change = change or (lambda name, step, answer: answer)
        self.asked: list[tuple[str, tuple[str, ...]]] = []
        self.silent: set[str] = set()

    def ask(
        self, names: Sequence[str], method: str, timeout: float, **arguments: Any
    ) -> LocalReplies:
        self.asked.append((method, tuple(names)))
        answers: Mapping[str, Any] = super().ask(names, method, timeout, **arguments).wait()
        if method == "gradients":
            answers = {
                name: self.change(name, arguments["request"]["step"], answer)
                for name, answer in answers.items()
            }
        return LocalReplies(
            {n: a for n, a in answers.items() if a is not None and n not in self.silent}
        )


def engine(users: Sequence[coterie.User], sites: Sites, **knobs: Any) -> Remote:
    names = [user.name for user in users[1:]]
    return Remote(model(), LOSS, users[0], sites=sites, names=names, batch_size=4, seed=5, **knobs)


def both(
    make_users: Users, change: Callable[[str, int, Any], Any], **knobs: Any
) -> tuple[Any, Any]:
    """Return step 0 with the answers changed, and step 0 in process with peer 1 left out."""
    users = make_users()
    x = torch.nn.utils.parameters_to_vector(model().parameters()).detach()
    found = engine(users, Sites(users[1:], change), **knobs).gradients(x, 0, TAU)
    inside = coterie.InProcess(model(), LOSS, users[0], users[1:], batch_size=4, seed=5)
    rows = inside.gradients(x, 0, TAU, rows=True)
    assert rows.rows is not None
    expected = 0.5 * rows.own + 0.3 * rows.rows[1] + 0.2 * rows.rows[2]
    return found, expected


def spoiled(**changes: Any) -> Callable[[str, int, Any], Any]:
    """Change fields of what peer 1 answers."""
    return lambda name, step, answer: answer | changes if name == "peer 1" else answer


def answers(value: Any) -> Callable[[str, int, Any], Any]:
    return lambda name, step, answer: value if name == "peer 1" else answer


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (answers(None), "no answer"),
        (answers("hello"), "not an array"),
        (answers(np.zeros(12)), "not an array"),
        (answers({}), "not an array"),
        (answers({"refused": "no"}), "refused: no"),
        (spoiled(gradients=[[0.0] * 12]), "not an array"),
        (spoiled(gradients=np.full((1, 12), math.nan)), "not finite"),
        (spoiled(gradients=np.full((1, 12), -math.inf, np.float32)), "not finite"),
        (spoiled(gradients=np.zeros((1, 11))), "shape (1, 11) instead of (1, 12)"),
        (spoiled(gradients=np.zeros(12)), "shape (12,) instead of (1, 12)"),
        (spoiled(gradients=np.zeros((1, 12), np.int64)), "not of floating-point numbers"),
        (spoiled(gradients=np.zeros((1, 12), np.complex128)), "not of floating-point numbers"),
        (spoiled(gradients=np.array([[None] * 12])), "not of floating-point numbers"),
        (
            spoiled(gradients=np.broadcast_to(np.float64(0), 2**27)),
            "shape (134217728,) instead of (1, 12)",
        ),  # a gigabyte, if it were written out
        (spoiled(step=-1), "of another step"),
        (spoiled(step=1), "of another step"),
        (spoiled(step=np.zeros(2)), "of another step"),
        (spoiled(step=0.0), "of another step"),
        (spoiled(site=np.zeros(2)), "from another sender"),
        (spoiled(site="peer 2"), "from another sender"),
    ],
)
def test_a_bad_message_changes_a_counter_only(
    change: Callable[[str, int, Any], Any], reason: str, make_users: Users
) -> None:
    g, expected = both(make_users, change)
    assert g.left_out == {"peer 1": reason}
    assert g.answered == pytest.approx(0.5)
    torch.testing.assert_close(g.peers, expected)


def test_the_site_cannot_claim_more_time_than_it_was_given(make_users: Users) -> None:
    for claimed in (math.nan, -1.0, 1e9, "long", True):
        users = make_users()
        made = engine(users, Sites(users[1:], spoiled(seconds=claimed)))
        made.gradients(torch.zeros(12, dtype=torch.float64), 0, TAU)
        assert made.traffic()["peer 1"].seconds_computing == 0
        assert 0 < made.traffic()["peer 2"].seconds_computing < made.timeout


@pytest.mark.parametrize("told", [1e200, math.inf, math.nan, -1.0, "much"])
def test_no_noise_that_a_site_tells_ends_a_run(told: Any, make_users: Users) -> None:
    users = make_users()
    made = engine(users, Sites(users[1:], spoiled(noise=told)))
    made.gradients(torch.zeros(12, dtype=torch.float64), 0, TAU)
    assert made.capabilities.noise["peer 1"] == 0
    assert not any(made.capabilities.noise.values())


def test_traffic_is_what_was_sent(make_users: Users) -> None:
    users = make_users()
    made = engine(users, Sites(users[1:], answers(None)))
    for step in range(2):
        made.gradients(torch.zeros(12, dtype=torch.float64), step, TAU)
    traffic = made.traffic()
    assert (traffic["me"].bytes_sent, traffic["me"].bytes_received) == (
        2 * 3 * 12 * 8,
        2 * 2 * 12 * 8,
    )
    assert (traffic["peer 1"].bytes_sent, traffic["peer 1"].bytes_received) == (0, 2 * 12 * 8)
    assert (traffic["peer 2"].bytes_sent, traffic["peer 2"].bytes_received) == (
        2 * 12 * 8,
        2 * 12 * 8,
    )


def test_sites_tell_how_many_examples_they_have_before_the_first_step(make_users: Users) -> None:
    """So that a rule that weighs by it takes the same first step as in process."""
    users = make_users()
    sites = Sites(users[1:])
    sites.silent = {"peer 2"}
    told = engine(users, sites).capabilities.examples
    assert told == {user.name: len(user) for user in users if user.name != "peer 2"}


def test_a_site_that_is_lost_costs_one_timeout_in_all(
    make_users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for less long than it may take at first; one that has been slow is given its time."""
    users, given = make_users(), list[float]()

    class Timed(Sites):
        def ask(
            self, names: Sequence[str], method: str, timeout: float, **arguments: Any
        ) -> LocalReplies:
            given.append(timeout)
            return super().ask(names, method, timeout, **arguments)

    sites = Timed(users[1:])
    made = engine(users, sites, misses=3, timeout=9000.0)
    given.clear()
    x = torch.zeros(12, dtype=torch.float64)
    for step in range(5):
        sites.silent = {"peer 2"} if step >= 2 else set()
        made.gradients(x, step, TAU)
    assert given == [9000.0, 3000.0, 3000.0, 3000.0, 3000.0]
    made._liveness.took = dict.fromkeys(
        made._liveness.took, 2000.0
    )  # as of a site with a large table
    made.gradients(x, 5, TAU)
    assert given[-1] == 8000.0


def test_a_silent_site_is_dropped_and_taken_back(
    make_users: Users, caplog: pytest.LogCaptureFixture
) -> None:
    users = make_users()
    sites = Sites(users[1:])
    made = engine(users, sites, misses=3, probe_every=4)
    sites.asked.clear()  # how many examples they have
    x = torch.zeros(12, dtype=torch.float64)
    left_out = []
    for step in range(20):
        sites.silent = {"peer 2"} if 2 <= step < 12 else set()
        left_out.append(made.gradients(x, step, TAU).left_out.get("peer 2"))
    gone = left_out.count("no answer")
    assert gone == 3, "it may cost its timeout three times, no more"
    assert left_out[:5] == [None, None, "no answer", "no answer", "no answer"]
    back = left_out.index(None, 5)
    assert 12 < back <= 12 + 4 + 1
    assert set(left_out[5:back]) == {"not waited for"}
    assert set(left_out[back:]) == {None}
    probes = [names for method, names in sites.asked if method == "ready"]
    assert set(probes) == {("peer 2",)}
    assert len(probes) <= 1 + (back - 5) // 4
    assert [r.getMessage() for r in caplog.records] == [
        "step 4: peer 2 gave nothing 3 times, not waited for",
        f"step {back}: peer 2 is back",
    ]


def test_a_site_that_only_says_it_is_back_is_waited_for_ever_more_rarely(make_users: Users) -> None:
    users = make_users()
    sites = Sites(
        users[1:], lambda name, step, answer: None if name == "peer 1" and step != 70 else answer
    )
    made = engine(users, sites, misses=2, probe_every=1)
    x = torch.zeros(12, dtype=torch.float64)
    left_out = [made.gradients(x, step, TAU).left_out.get("peer 1") for step in range(70)]
    waited = [step for step, reason in enumerate(left_out) if reason == "no answer"]
    # pauses of 1, 2, 4, 8, 16 steps, and one for the question
    assert waited == [0, 1, 3, 6, 11, 20, 37]
    assert made.gradients(x, 70, TAU).left_out == {}
    assert [made.gradients(x, step, TAU).left_out.get("peer 1") for step in range(71, 75)] == [
        *["no answer"] * 2,
        "not waited for",
        "no answer",  # it has given a gradient since: the pause is one step again
    ]


@pytest.mark.parametrize(
    "reply", [{"willing": np.ones(2)}, {"willing": False}, {}, "yes", {"willing": 1}], ids=str
)
def test_only_a_willing_site_is_taken_back(reply: Any, make_users: Users) -> None:
    users = make_users()

    class Odd(Sites):
        def ask(
            self, names: Sequence[str], method: str, timeout: float, **arguments: Any
        ) -> LocalReplies:
            found = super().ask(names, method, timeout, **arguments)
            return LocalReplies(dict.fromkeys(names, reply)) if method == "ready" else found

    made = engine(users, Odd(users[1:], answers(None)), misses=1, probe_every=1)
    for step in range(9):
        made.gradients(torch.zeros(12, dtype=torch.float64), step, TAU)
    assert made.dropped == ("peer 1",)
    assert made.gradients(torch.zeros(12, dtype=torch.float64), 9, TAU).left_out == {
        "peer 1": "not waited for"
    }


def test_misses_must_follow_each_other(make_users: Users) -> None:
    users = make_users()
    sites = Sites(
        users[1:], lambda name, step, answer: None if name == "peer 1" and step % 3 else answer
    )
    made = engine(users, sites, misses=3)
    for step in range(12):
        made.gradients(torch.zeros(12, dtype=torch.float64), step, TAU)
    assert made.dropped == ()


def test_a_site_with_bad_messages_is_asked_on(make_users: Users) -> None:
    """It costs no waiting, and may recover."""
    users = make_users()
    made = engine(users, Sites(users[1:], spoiled(step=-1)), misses=1)
    for step in range(5):
        assert made.gradients(torch.zeros(12, dtype=torch.float64), step, TAU).left_out == {
            "peer 1": "of another step"
        }


def test_below_the_minimum_a_step_is_alone(
    make_users: Users, caplog: pytest.LogCaptureFixture
) -> None:
    users = make_users()
    sites = Sites(users[1:])
    made = engine(users, sites, minimum=2, misses=9)
    x = torch.zeros(12, dtype=torch.float64)
    for step, silent in enumerate([(), ("peer 1",), ("peer 1", "peer 2"), ()]):
        sites.silent = set(silent)
        for rows in (False, True):
            g = made.gradients(x, step, TAU, rows)
            if step == 2:
                assert g.left_out["peer 3"] == "fewer than 2 peers answered"
                assert g.answered == 0
                assert torch.equal(g.average(TAU)[0], g.own)
            else:
                assert len(g.left_out) == len(silent)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["step 2: going on alone", "step 3: no longer alone"]


def test_with_every_site_gone_the_run_is_alone_to_the_bit(make_users: Users) -> None:
    users = make_users()
    options: dict[str, Any] = {
        "lr": 0.1,
        "steps": 15,
        "batch_size": 4,
        "seed": 5,
        "progress": False,
    }

    def flare(*args: Any, **knobs: Any) -> Remote:
        return Remote(*args, sites=LocalSites({}), names=list(TAU), **knobs)

    rule = coterie.BiasCorrection(0.7, 0.1)
    run = coterie.train(model(), LOSS, users[0], [], rule, engine=flare, **options)
    alone = coterie.train(model(), LOSS, users[0], [], coterie.Alone(), **options)
    for ours, theirs in zip(run.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert run.record.end.left_out["peer 3"] == {"no answer": 3, "not waited for": 12}


def test_a_job_that_was_ended_leaves_a_checkpoint_to_go_on_from(
    make_users: Users, tmp_path: Path
) -> None:
    users = make_users()
    rule = coterie.WeightedAveraging(0.5)
    options: dict[str, Any] = {
        "lr": 0.1,
        "steps": 20,
        "batch_size": 4,
        "seed": 5,
        "progress": False,
    }

    class Ended(Sites):
        def ask(
            self, names: Sequence[str], method: str, timeout: float, **arguments: Any
        ) -> LocalReplies:
            if arguments.get("request", {}).get("step") == 7:
                raise PeerLost("NVFLARE has ended the job")
            return super().ask(names, method, timeout, **arguments)

    def flare(kind: type[Sites]) -> Callable[..., Remote]:
        return lambda *args, **knobs: Remote(*args, sites=kind(users[1:]), names=list(TAU), **knobs)

    whole = coterie.train(model(), LOSS, users[0], [], rule, engine=flare(Sites), **options)
    options |= {"out": tmp_path / "run"}
    with pytest.raises(PeerLost, match="after 7 steps is saved in"):
        coterie.train(model(), LOSS, users[0], [], rule, engine=flare(Ended), **options)
    resumed = coterie.train(
        model(), LOSS, users[0], [], rule, engine=flare(Sites), resume=True, **options
    )
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"timeout": 0.0}, "`timeout` must be a finite number above 0"),
        ({"misses": 0}, "`misses` must be a whole number, at least 1"),
        ({"minimum": 0}, "`minimum` must be a whole number, at least 1"),
        ({"probe_every": 0}, "`probe_every` must be a whole number, at least 1"),
        ({"names": ["me"]}, "must have different names"),
        ({"names": ["a", "a"]}, "must have different names"),
        (
            {"peers": [coterie.User("a", [[1.0], [2.0]], [0, 1])]},
            "the peers' examples are at their sites",
        ),
    ],
)
def test_knobs_are_checked(knobs: dict[str, Any], message: str, make_users: Users) -> None:
    users = make_users()
    options: dict[str, Any] = {"sites": Sites([]), "names": list(TAU)} | knobs
    with pytest.raises(CoterieError, match=message):
        Remote(model(), LOSS, users[0], **options)


@pytest.mark.parametrize("odd", [0.0, 0.3])
def test_user_0_holds_no_more_than_an_answer_of_each_site(odd: float) -> None:
    """Also where sites send long words, numbers or arrays in the place of gradients."""
    held, grew = memory_of_a_crowd(30, 20, 20_000, odd)
    assert held < (1.5 if odd == 0 else 10)
    assert grew < 1.3


def test_what_peers_have_given_is_saved_every_ten_seconds(
    make_users: Users, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked again it would count again; user 0's own process computes it again for nothing."""
    users, now = make_users(), [0.0]
    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def saved_at(engine: Any, peers: list[coterie.User], out: Path) -> list[int]:
        steps = list[int]()

        def hook(step: coterie.Step) -> None:
            now[0] += 3
            steps.extend(map(checkpoint.step_of, checkpoint.saved(out / "checkpoints")[-1:]))

        how: dict[str, Any] = {"steps": 20, "checkpoint_every": 19, "out": out, "hooks": [hook]}
        coterie.train(
            *(model(), LOSS, users[0], peers, coterie.BiasCorrection(0.5, 0.1)),
            engine=engine,
            lr=0.1,
            **how,
        )
        return sorted(set(steps))

    def elsewhere(*given: Any, **how: Any) -> Remote:
        names = [user.name for user in users[1:]]
        return Remote(*given, sites=Sites(users[1:]), names=names, **how)

    assert saved_at(elsewhere, [], tmp_path / "elsewhere") == [5, 9, 13, 17, 19]
    assert saved_at(coterie.InProcess, users[1:], tmp_path / "here") == [19]
