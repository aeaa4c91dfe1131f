"""What NVFLARE makes at the server and at a site where everyone trains, with NVFLARE itself left out."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import intruders

import coterie
from coterie.engines.in_process.passes import Passes
from coterie.engines.messages import to_bytes
from coterie.engines.peer import Caps, Peer
from coterie.engines.peer.ledger import Ledger
from coterie.engines.remote.responder import Responder
from coterie.engines.remote.sites import LocalReplies
from coterie.errors import CoterieError, KnobError, PeerLost
from coterie.federation import supervision
from coterie.federation.lead import REFUSED, RUN, SUMMARY
from coterie.federation.member import REFUSAL, KnownKeys, MemberRun, SealedSites
from coterie.federation.relay import MEMBERS
from coterie.federation.watching import LOG, MemberWatch, NewLines, Screen
from coterie.privacy.calls import Calls
from coterie.privacy.keys import Identity
from coterie.recording import files

needs_nvflare = pytest.mark.skipif(
    importlib.util.find_spec("nvflare") is None,
    reason="NVFLARE is not installed: the extra `flare`",
)


def peer(**knobs: Any) -> Peer:
    user = coterie.User("a", torch.eye(2), torch.ones(2, 1))
    return Peer(user, Passes(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss), **knobs)


REQUEST = {"points": np.zeros((1, 3), np.float32), "step": 0, "seed": 0, "batch_size": 2}


class Relayed:
    """Sites of which a server passes on the calls, as it likes."""

    def __init__(self, members: Mapping[str, MemberRun]) -> None:
        self.members, self.seen, self.replies = members, list[Any](), list[Any]()
        self.answered: Callable[[Any], Any] = lambda reply: reply

    def ask(
        self, names: Sequence[str], method: str, timeout: float, **arguments: Any
    ) -> LocalReplies:
        assert method == "call"
        self.seen.append(arguments["call"])
        found = {name: self.members[name].answer(arguments["call"]) for name in names}
        self.replies += found.values()
        return LocalReplies({name: self.answered(reply) for name, reply in found.items()})


def member(name: str, folder: Path, keys: Mapping[str, str] | None = None) -> MemberRun:
    """Return a site that is in no job yet."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    one = object.__new__(MemberRun)
    names = ("a", "b", "c")
    log = folder / name / "requests.jsonl"
    user = coterie.User(name, torch.eye(2), torch.ones(2, 1))
    passes = Passes(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss)
    one.settings = SimpleNamespace(sites=[n for n in names if n != name])  # type: ignore[assignment]
    one.responder, one.calls, one._lock = (
        Responder(Peer(user, passes, Caps(gradients=4), log)),
        None,
        Lock(),
    )
    one._known, one._strangers = KnownKeys(folder / name, keys or {}), not keys
    return one


def in_a_job(members: Mapping[str, MemberRun], job: str = "job 1") -> None:
    offers = {name: one.key(job) for name, one in members.items()}
    for one in members.values():
        one.meet(offers)


def test_what_is_no_reply_is_told_once(
    members: dict[str, MemberRun], caplog: pytest.LogCaptureFixture
) -> None:
    """A site that was started anew was told of 60 times in 10 s, in everybody's news."""
    in_a_job(members)
    carried, calls = Relayed(members), members["b"].calls
    assert calls is not None
    members["a"].calls = None
    sites = SealedSites(carried, calls)
    for _ in range(5):
        assert sites.ask(["a"], "ready", 1.0).wait() == {}
    told = [each.getMessage() for each in caplog.records]
    assert told == ["a: what came as its reply is left out: it is not sealed"]


def asked(members: Mapping[str, MemberRun], carried: Relayed, by: str = "b", of: str = "a") -> Any:
    calls = members[by].calls
    assert calls is not None
    return SealedSites(carried, calls).ask([of], "gradients", 1.0, request=REQUEST).wait().get(of)


@pytest.fixture
def members(tmp_path: Path) -> dict[str, MemberRun]:
    return {name: member(name, tmp_path) for name in "abc"}


def test_sites_ask_each_other_by_calls_that_the_server_cannot_read(
    members: dict[str, MemberRun],
) -> None:
    in_a_job(members)
    carried = Relayed(members)
    reply = asked(members, carried)
    assert reply["gradients"].tolist() == [[-1.0, -1.0, -2.0]]
    for message in (*carried.seen, *carried.replies):
        assert b"points" not in message["sealed"].tobytes()
        assert b"gradients" not in repr(message).encode() + message["sealed"].tobytes()


def test_a_server_that_pretends_to_be_a_site_gets_nothing(
    members: dict[str, MemberRun], tmp_path: Path
) -> None:
    """It sent calls in a site's name, without any key, and read the gradients: 4 of 4 were answered."""
    refused = {"refused": "it answers the sites that it names only, by calls that they have sealed"}
    letter = to_bytes({"method": "gradients", "arguments": {"request": REQUEST}})
    plain = np.frombuffer(letter, np.uint8)
    in_a_job(members)
    for call in (
        {"by": "b", "number": 1, "sealed": plain},
        {"by": "b", "number": 1, "request": REQUEST},
        {"by": "server", "number": 1, "sealed": plain},
        REQUEST,
        None,
    ):
        assert members["a"].answer(call) == refused
    forged = Calls(Identity("b"), "job 1")  # with a key of the server's own making
    for one in (
        members["a"],
        member("a", tmp_path),
    ):  # in this job, and in the next: the first key counts
        one.key("job 1") if one.calls is None else None
        offers = {"b": forged.offer, "a": one.calls and one.calls.offer}
        assert one.meet(offers) == {"met": []}
        forged.meet(offers)
        number, sealed = forged.call("a", plain.tobytes())
        call = {"by": "b", "number": number, "sealed": np.frombuffer(sealed, np.uint8)}
        assert one.answer(call) == refused
    assert "is not the one known here" in (tmp_path / "a" / "requests.jsonl").read_text()
    assert members["a"].responder.peer.ledger.given == 0
    known = {name: one.responder.peer.identity.fingerprint for name, one in members.items()}
    strict = member("a", tmp_path / "new", {"c": known["c"]})
    strict.key("job 1")
    offers = {name: one.calls.offer for name, one in members.items() if one.calls}
    assert strict.meet(offers) == {"met": ["c"]}, "with [keys] nobody else is met"


def test_a_server_that_repeats_alters_or_moves_a_call_gets_nothing(
    members: dict[str, MemberRun],
) -> None:
    in_a_job(members)
    carried = Relayed(members)
    assert "gradients" in asked(members, carried)
    (call,), a = carried.seen, members["a"]
    flipped = call["sealed"].copy()
    flipped[20] ^= 1
    for other in (
        {},
        {"sealed": flipped},
        {"number": 2},
        {"by": "c"},
        {"sealed": call["sealed"][:-1]},
        {"number": 2**100},
    ):
        assert set(a.answer(call | other)) == {"refused"}
    assert set(members["c"].answer(call)) == {"refused"}
    assert a.responder.peer.ledger.given == 1
    offers = {name: one.calls.offer for name, one in members.items() if one.calls}
    a.key("job 2")
    assert a.meet(offers) == {"met": []}, "a key is for one job"
    in_a_job(members, "job 1")  # another one of the same name
    assert set(a.answer(call)) == {"refused"}


def test_no_call_that_was_altered_moved_or_made_up_is_believed() -> None:
    assert intruders.sealed_calls(20, seed=0) == 0


def test_a_server_that_drops_repeats_swaps_and_alters_costs_answers_only() -> None:
    """Every reply that is taken is that of its call, and no call is answered twice."""
    assert intruders.relayed(300, seed=0) == 0


def test_a_server_that_alters_or_changes_round_replies_is_not_believed(
    members: dict[str, MemberRun],
) -> None:
    in_a_job(members)
    carried = Relayed(members)
    assert "gradients" in asked(members, carried)
    for answered in (
        lambda reply: carried.replies[0],  # of another call
        lambda reply: {"gradients": np.ones((1, 3)), "site": "a", "step": 0},
        lambda reply: {"sealed": reply["sealed"][::-1].copy()},
        lambda reply: carried.seen[-1],  # the call itself
        lambda reply: None,
    ):
        carried.answered = answered
        assert asked(members, carried) is None


@needs_nvflare
def test_a_site_answers_sealed_calls_only_and_trains_for_the_server_only(
    members: dict[str, MemberRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All who ask share what it gives at most; masked sums, whose agreements are with one, are not to be had."""
    from coterie.federation import jobs

    site = jobs.MemberSite()
    site.run = members["a"]
    site.run.state = lambda: {"step": 3}  # type: ignore[method-assign]
    site.run.check = site.run.train = lambda sites: {"came": True}  # type: ignore[method-assign]

    def by(caller: str) -> None:
        asked = SimpleNamespace(caller=caller, server=SimpleNamespace(name="server"))
        monkeypatch.setattr(jobs, "collab", asked)

    refused = {"refused": REFUSAL}
    for caller in ("server", "b", "c", "d", "B", "b.x", "", "a"):
        by(caller)
        assert site.answer("call", {"call": REQUEST}) == refused
        for method in ("gradients", "offer", "join", "part", "answer", "_answer"):
            assert site.answer(method, {"request": REQUEST}) == refused
    for caller in ("b", "c", "d"):
        by(caller)
        for method in ("ready", "check", "train", "state", "key", "meet"):
            assert site.answer(method, {}) == refused
    by("server")
    assert site.answer("ready", {}) == {}
    assert site.answer("check", {}) == site.answer("train", {}) == {"came": True}
    assert site.answer("state", {}) == {"step": 3}
    assert site.answer("key", {"job": "job"})["site"] == "a"
    in_a_job(members)
    carried = Relayed(members)
    replies = [asked(members, carried, caller) for caller in ("b", "c", "b", "c", "b")]
    assert ["gradients" in reply for reply in replies] == [True] * 4 + [False]
    assert replies[-1] == {"refused": "it has given all the gradients it gives, 4"}


@needs_nvflare
def test_a_site_whose_data_cannot_be_read_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from coterie.federation import jobs

    place = SimpleNamespace(get_root_dir=lambda: str(tmp_path / "nvflare"))
    asked = SimpleNamespace(caller="server", server=SimpleNamespace(name="server"), workspace=place)
    monkeypatch.setattr(jobs, "collab", asked)
    site = jobs.MemberSite()
    site.start()
    assert site.answer("state", {}) == {"failed": "data that cannot be read"}
    assert site.answer("train", {}) == site.answer("check", {}) == {}


@needs_nvflare
@pytest.mark.parametrize("server_answers", [True, False])
def test_a_site_finds_out_whether_another_is_late_or_the_server_gone(
    server_answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coterie.federation import jobs

    asked: dict[str, Any] = {}

    def group(**options: Any) -> Any:
        asked.update(options)
        return SimpleNamespace(asked=lambda letter: answers)

    def here() -> bool:
        if not server_answers:
            raise TimeoutError
        return True

    class Queue(list[tuple[str, Any]]):
        limit = 2  # were asked

    fake = SimpleNamespace(
        clients=[SimpleNamespace(name=name) for name in "bc"],
        get_clients=lambda names: group,
        server=lambda timeout: SimpleNamespace(here=here),
        is_aborted=False,
    )
    answers = Queue([("b", to_bytes(1))])
    monkeypatch.setattr(jobs, "collab", fake)
    replies = jobs.CollabSites(relayed=True).ask(["b", "c", "not there"], "ready", 3.0)
    assert asked == {"blocking": False, "timeout": 3.0}
    if server_answers:
        assert replies.wait() == {"b": 1}
    else:
        with pytest.raises(PeerLost, match="the server does not answer: TimeoutError"):
            replies.wait()
    # at the server, nobody else need be found
    jobs.CollabSites().ask(["b"], "ready", 3.0).wait()


def test_what_rounding_loses_is_each_callers_own() -> None:
    exact, one, other = torch.tensor([[1.001, 0.3, -2.003]]), peer(), peer()
    apart = [other.rounded(exact, torch.bfloat16, "b") for _ in range(4)]
    mixed = []
    for _ in range(4):
        mixed.append(one.rounded(exact, torch.bfloat16, "b"))
        one.rounded(100 * exact, torch.bfloat16, "c")
    assert all(torch.equal(a, b) for a, b in zip(apart, mixed, strict=True))


class Server:
    """A server whose jobs do what the test says, one after the other."""

    def __init__(self, out: Path, jobs: list[Callable[[Path], None]], here: list[str]) -> None:
        self.out, self.jobs, self.here, self.submitted = out, jobs, here, 0

    @contextmanager
    def session(self, kit: Path, wait: float) -> Iterator[Any]:
        yield self

    def get_system_info(self) -> Any:
        return SimpleNamespace(
            client_info=[
                SimpleNamespace(name=name, last_connect_time=time.time()) for name in self.here
            ]
        )

    def submit_job(self, job: str) -> str:
        assert not (self.out / SUMMARY).exists(), "it would be taken for the end of this job"
        self.submitted += 1
        self.out.mkdir(exist_ok=True)
        self.jobs.pop(0)(self.out)
        return "id"

    def get_job_meta(self, job: str) -> Mapping[str, str]:
        return {"status": "FINISHED:COMPLETED"}


def ends(**ended: bool) -> Callable[[Path], None]:
    def job(out: Path) -> None:
        files.write_json(
            out / MEMBERS, {name: {"step": 5, "ended": yes} for name, yes in ended.items()}
        )
        (out / SUMMARY).write_text("ended")

    return job


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Server]:
    (tmp_path / "coterie.toml").write_text('everyone = ["a", "b"]')

    def make(*jobs: Callable[[Path], None], here: str = "ab") -> Server:
        one = Server(tmp_path / RUN, list(jobs), list(here))
        monkeypatch.setattr(supervision, "session_of", one.session)
        return one

    return make


def test_a_job_is_submitted_again_for_a_site_that_was_lost(
    server: Callable[..., Server], tmp_path: Path
) -> None:
    one, said = server(ends(a=True, b=False), lambda out: None, ends(a=True, b=True)), list[str]()
    assert supervision.follow(tmp_path, wait=1.0, show_line=said.append) == "ended"
    assert one.submitted == 3
    assert "without the end of b;" in said[0]
    with pytest.raises(KnobError, match="already holds a run"):
        supervision.follow(tmp_path)


def test_a_site_that_does_not_come_back_is_named(
    server: Callable[..., Server], tmp_path: Path
) -> None:
    one = server(ends(a=True, b=False), here="ab")

    def job(out: Path) -> None:
        ends(a=True, b=False)(out)
        one.here = ["a"]

    one.jobs = [job]
    with pytest.raises(CoterieError, match=r"no end of b; .* --resume` goes on"):
        supervision.follow(tmp_path, wait=0.2)


def test_too_few_sites_or_a_refusal_are_told(server: Callable[..., Server], tmp_path: Path) -> None:
    server(here="a")
    with pytest.raises(CoterieError, match=r"1 of 2 sites are connected after 0\.2 s"):
        supervision.follow(tmp_path, wait=0.2)
    server(lambda out: (out / REFUSED).write_text("b gives 50 more gradients") and None)
    with pytest.raises(KnobError, match="b gives 50 more gradients"):
        supervision.follow(tmp_path, wait=0.2)


def test_a_site_that_trains_sees_both_its_run_and_what_it_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.federation.watching.SECONDS_BETWEEN_LINES", 0.0)
    said: list[str] = []
    (tmp_path / RUN).mkdir()
    (tmp_path / RUN / SUMMARY).write_text("of an earlier run")
    screen, ledger = Screen(said.append, terminal=False), Ledger(tmp_path / "requests.jsonl")
    watch = MemberWatch(
        tmp_path, NewLines(tmp_path / LOG), Caps(gradients=100), 0, screen, steps=50
    )
    watch()
    watch._follow(20, 0.5, 0.25, None)
    ledger.give(5, caller="b", step="9")
    watch()
    (tmp_path / RUN / SUMMARY).write_text("The model is better.\nSurely.\n")
    watch()
    mine = "own run: step 20 of 50, own loss 0.5 · peers' weight 0.25; for others: "
    assert [line.partition(" ")[2] for line in said] == [
        "waiting for the server",
        mine,
        f"{mine}step 9: 5 of 100 gradients given",
        "The model is better.",
        "Surely.",
    ]
