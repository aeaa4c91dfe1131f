"""Private peers in process: they answer, spend and refuse as sites do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.accountants import by_prv
from torch import nn

import coterie
from coterie.engines import PrivatePeers
from coterie.engines.in_process.passes import Passes
from coterie.engines.peer import Peer
from coterie.engines.peer.ledger import Ledger
from coterie.engines.peer.private_gradients import PrivateGradients
from coterie.errors import KnobError
from coterie.methods import AFL, FedAvg
from coterie.privacy import Privacy
from coterie.privacy.accountant import Event, epsilon_of

dp_accounting = pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
PLDAccountant = pytest.importorskip("dp_accounting.pld").PLDAccountant
N, WIDTH, DELTA = 40, 3, 1e-3
LOSS = nn.functional.mse_loss


def users() -> list[coterie.User]:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(N, WIDTH, generator=generator) for _ in range(3)]
    return [
        coterie.User(name, x, x.sum(1, keepdim=True))
        for name, x in zip(("me", "a", "b"), inputs, strict=True)
    ]


def engine(privacy: Privacy | dict[str, Privacy], gradients: int | None = None) -> PrivatePeers:
    torch.manual_seed(0)
    me, *peers = users()
    made = PrivatePeers(
        nn.Linear(WIDTH, 1), LOSS, me, peers, privacy=privacy, gradients=gradients, batch_size=N
    )
    assert made.capabilities.many_points
    return made


def test_the_record_has_what_was_promised_and_spent_by_every_accountant(tmp_path: Path) -> None:
    """ε in the record is dp-accounting's for the same events, and a second accountant's to 1 %."""
    me, *peers = users()
    made: list[PrivatePeers] = []

    def private(*args: object, **options: object) -> PrivatePeers:
        made.append(PrivatePeers(*args, privacy=Privacy(4.0, DELTA, 1.0, 5.0), **options))  # type: ignore[arg-type]
        return made[0]

    how: dict[str, Any] = {"steps": 10, "batch_size": N // 2, "engine": private, "out": tmp_path}
    run = coterie.train(nn.Linear(WIDTH, 1), LOSS, me, peers, **how)
    assert run.record.end.account["cost"]["runs"] == 3.0
    assert "2 peers promise ε = 4 at δ = 0.001" in run.summary()
    promises = coterie.Record.load(tmp_path).end.promises
    assert sorted(promises) == ["a", "b"]
    for name, told in promises.items():
        ((event, count),) = made[0].peers[name].ledger.spent.items()
        assert event.rate == 0.5
        theirs = PLDAccountant()
        theirs.compose(
            dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(event.noise)),
            count,
        )
        assert told["spent"] == epsilon_of({event: count}, DELTA)
        assert told["spent"] == pytest.approx(theirs.get_epsilon(DELTA), rel=2e-3)  # which is finer
        assert told["spent"] == pytest.approx(by_prv(0.5, event.noise, count, DELTA), rel=1e-2)
        assert (told["epsilon"], told["delta"], told["clip"]) == (4.0, DELTA, 1.0)
        assert told["noise"] == pytest.approx(event.noise / (N // 2)), (
            "on each number of a gradient"
        )


@pytest.mark.parametrize(
    "privacy", [3.0, (4.0, DELTA, 1.0), {"a": 4.0}, {1: Privacy(4.0, DELTA, 1.0)}]
)
def test_what_is_no_promise_is_refused(privacy: Any) -> None:
    with pytest.raises(
        KnobError, match=r"`privacy` must be a `coterie\.privacy\.Privacy`, or one by the name"
    ):
        engine(privacy, gradients=2)
    with pytest.raises(KnobError, match=r"`privacy` must be a `coterie\.privacy\.Privacy`, got"):
        Peer(users()[0], Passes(nn.Linear(WIDTH, 1), LOSS), log=Ledger(), privacy=privacy)


def test_a_promise_of_another_batch_size_is_refused_before_the_run() -> None:
    with pytest.raises(
        KnobError, match=f"`batch_size` of `privacy`, 8, must be that of the run, {N}"
    ):
        engine({"b": Privacy(4.0, DELTA, 1.0, batch_size=8)}, gradients=2)
    promised = engine(Privacy(4.0, DELTA, 1.0, batch_size=N), gradients=2)
    assert promised.gradients(torch.zeros(WIDTH + 1), 0, {"a": 0.5, "b": 0.5}).answered == 1.0


def test_who_has_spent_all_is_left_out_and_has_promised_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    once = engine(Privacy(0.5, DELTA, 1.0), gradients=2)
    x, weights = torch.zeros(WIDTH + 1), {"a": 0.5, "b": 0.5}
    answered = [once.gradients(x, step, weights) for step in range(6)]
    assert [g.answered for g in answered] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert "2" in answered[2].left_out["a"]
    assert once.dropped == ("a", "b")
    assert (
        "step 4: a gave nothing 3 times (refused: it has given all the gradients it gives, 2)"
        in caplog.text
    )
    assert {name: told["spent"] for name, told in once.promises().items()} == {
        name: peer.epsilon for name, peer in once.peers.items()
    }


def test_what_was_promised_is_told_where_no_gradient_was_left_to_ask_for() -> None:
    """As after a run that was taken up again at its last step."""
    fresh = engine({"a": Privacy(9.0, DELTA, 1.0, 4.0)})
    assert fresh.promises() == {"a": {"epsilon": 9.0, "delta": DELTA, "clip": 1.0, "spent": 0.0}}


def test_peers_without_a_promise_answer_as_in_process() -> None:
    mixed = engine({"a": Privacy(9.0, DELTA, 1.0, 4.0)})
    x = torch.zeros(WIDTH + 1)
    mine = mixed.gradients(x, 0, {"a": 0.5, "b": 0.5}, rows=True)
    me, *peers = users()
    plain = coterie.InProcess(nn.Linear(WIDTH, 1), LOSS, me, peers, batch_size=N, one_by_one=True)
    theirs = plain.gradients(x, 0, {"a": 0.5, "b": 0.5}, rows=True)
    assert mine.rows is not None
    assert theirs.rows is not None
    assert torch.equal(mine.rows[1], theirs.rows[1])
    assert not torch.equal(mine.rows[0], theirs.rows[0])
    assert (mixed.peers["a"].ledger.spent, mixed.peers["b"].epsilon) == ({Event(1.0, 4.0): 1}, None)


def test_a_promise_for_nobody_is_refused() -> None:
    with pytest.raises(KnobError, match="unknown peer 'c'"):
        engine({"c": Privacy(1.0, DELTA, 1.0, 1.0)})


def test_the_record_says_who_promises_what() -> None:
    me, *peers = users()
    private = functools.partial(PrivatePeers, privacy={"a": Privacy(9.0, DELTA, 1.0, 8.0)})
    run = coterie.train(
        nn.Linear(WIDTH, 1),
        LOSS,
        me,
        peers,
        coterie.WeightedAveraging(0.5),
        steps=2,
        engine=private,
    )
    assert run.record.configuration.engine["promises"] == {
        "a": "ε = 9 at δ = 0.001 for every example, clipped to norm 1, with noise of 8 times that"
    }


@pytest.mark.parametrize(
    ("rule", "gradients"),
    [
        (coterie.WeightedAveraging(0.5), 4),
        (coterie.WeightedAveraging("auto"), 4 + 2 * 8),
        (None, 12),
        (FedAvg(local_steps=2), 8),
    ],
)
def test_whatever_touches_examples_is_counted(
    rule: Any, gradients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a peer is there, its examples are taken for private gradients only, each of which is in its ledger."""
    made: list[PrivatePeers] = []
    given = {"a": 0, "b": 0}
    at_work: list[str] = []
    compute = PrivateGradients.gradient

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def called(user: coterie.User, *args: Any, **options: Any) -> Any:
            assert not made or user.name in ("me", *at_work)
            return method(user, *args, **options)

        return called

    def counted(private: PrivateGradients, *args: Any, **options: Any) -> torch.Tensor:
        at_work.append(private.user.name)
        given[private.user.name] += 1
        found = compute(private, *args, **options)
        at_work.pop()
        return found

    def engine(*args: Any, **options: Any) -> PrivatePeers:
        made.append(PrivatePeers(*args, privacy=Privacy(1e3, DELTA, 1.0, 4.0), **options))
        return made[0]

    for name in ("take", "batch"):
        monkeypatch.setattr(coterie.User, name, watched(getattr(coterie.User, name)))
    monkeypatch.setattr(PrivateGradients, "gradient", counted)
    me, *peers = users()
    how: dict[str, Any] = (
        {} if isinstance(rule, FedAvg) else {"optimizer": torch.optim.SGD, "lr": 0.01}
    )
    coterie.train(
        nn.Linear(WIDTH, 1), LOSS, me, peers, rule, steps=4, batch_size=N, engine=engine, **how
    )
    assert {name: peer.ledger.given for name, peer in made[0].peers.items()} == given
    assert max(given.values()) == gradients


def test_methods_that_look_at_losses_are_refused() -> None:
    me, *peers = users()
    private = functools.partial(PrivatePeers, privacy=Privacy(9.0, DELTA, 1.0, 8.0))
    with pytest.raises(KnobError, match="needs all users in one process"):
        coterie.train(nn.Linear(WIDTH, 1), LOSS, me, peers, AFL(), steps=2, engine=private)
