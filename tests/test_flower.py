"""coterie over Flower's messages; that gradients are right is in the conformance suite of engines."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from tests.support.flower import DirectGrid
from tests.support.waiting import ENOUGH
from torch import nn

import coterie
from coterie.engines.peer import Caps
from coterie.errors import DataError, KnobError
from coterie.flower import FlowerGrid, client_app, from_record, to_record
from coterie.privacy.sums import SumsOnly

LOSS = nn.functional.mse_loss


def user(name: str, slope: float = 1.0) -> coterie.User:
    inputs = torch.eye(4).repeat(5, 1)
    return coterie.User(name, inputs, slope * inputs.sum(1, keepdim=True))


def model() -> nn.Module:
    linear = nn.Linear(4, 1)
    for parameter in linear.parameters():
        nn.init.zeros_(parameter)
    return linear


def trained(grid: DirectGrid, peers: int, steps: int = 20) -> coterie.Run:
    rule = coterie.WeightedAveraging(alpha=0.5)
    engine = FlowerGrid(grid, peers, patience=0.1, timeout=0.1)
    return coterie.train(
        model(), LOSS, user("me"), [], rule, engine=engine, lr=0.1, steps=steps, guard="off"
    )


def parameters(run: coterie.Run) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


def test_a_run_is_the_one_in_process() -> None:
    peers = [user("a", 2.0), user("b", 3.0)]
    here = coterie.train(
        model(),
        LOSS,
        user("me"),
        peers,
        coterie.WeightedAveraging(alpha=0.5),
        lr=0.1,
        steps=20,
        guard="off",
    )
    there = trained(DirectGrid(map(app_of, peers)), 2)
    assert torch.allclose(parameters(here), parameters(there), atol=1e-6)
    assert not torch.allclose(
        parameters(there), parameters(trained(DirectGrid([app_of(user("a", 2.0))]), 1)), atol=1e-3
    )


def app_of(peer: coterie.User) -> ClientApp:
    return client_app(lambda _: peer, lambda _: model(), LOSS)


def test_caps_count_over_processes_that_are_forgotten(tmp_path: Path) -> None:
    # Flower starts a process for each message
    def fresh(message: Message, context: Context) -> Message:
        app = client_app(
            lambda _: user("a"),
            lambda _: model(),
            LOSS,
            caps=Caps(gradients=3),
            log_of=lambda _: tmp_path / "log",
        )
        return app(message, context)

    run = trained(DirectGrid([fresh]), 1, steps=10)
    assert sum(run.record.end.left_out["a"].values()) == 7
    # with other draws for each message, gradients of blocks could be taken off each other
    for caps in (Caps(gradients=3), Caps(examples=5)):
        with pytest.raises(KnobError, match="`log_of` must name a file"):
            client_app(lambda _: user("a"), lambda _: model(), LOSS, caps=caps)


def test_a_peer_that_fails_or_lies_is_left_out() -> None:
    def broken(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "query.name":
            return Message(to_record({"name": "broken"}), reply_to=message)
        raise RuntimeError

    def liar(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "query.name":
            return Message(to_record({"name": "liar"}), reply_to=message)
        return Message(RecordDict({"tree": ConfigRecord({"json": "[" * 5000})}), reply_to=message)

    good = app_of(user("a"))
    run = trained(DirectGrid([broken, liar, good]), 3, steps=6)
    assert set(run.record.end.left_out) == {"broken", "liar"}


def test_who_is_started_again_is_asked_by_its_new_number() -> None:
    """Flower gives a SuperNode another one each time; nobody takes the name of one who is there."""
    grid = DirectGrid([app_of(user("a", 2.0)), app_of(user("b", 3.0))])

    def hook(step: coterie.Step) -> None:
        if step.step == 3:
            del grid.apps[1]
            grid.apps[55] = app_of(user("b", 9.0))
        if step.step == 6:
            grid.apps[77] = app_of(user("a", 2.0))

    engine = FlowerGrid(grid, 2, knobs={"misses": 1, "probe_every": 1})
    rule, how = coterie.WeightedAveraging(alpha=0.5), {"lr": 0.1, "guard": "off", "steps": 20}
    run = coterie.train(model(), LOSS, user("me"), [], rule, engine=engine, hooks=[hook], **how)  # type: ignore[arg-type]
    assert set(run.record.end.left_out) == {"a"}
    ((first, last),) = run.record.end.absent["a"]
    assert first == 3
    assert last < 10
    assert {what for node, what in grid.asked if node == 55} == {"query.name"}
    assert (77, "query.gradients") in grid.asked


def test_one_that_was_killed_and_is_still_listed_is_not_waited_for() -> None:
    """Flower lists it for a minute; a run with enough others began two minutes later."""
    over = threading.Event()

    def killed(message: Message, context: Context) -> Message:
        over.wait(ENOUGH)
        raise RuntimeError

    apps: list[Any] = [killed, *(app_of(user(name)) for name in "ab")]
    with ThreadPoolExecutor(8) as threads:
        engine = FlowerGrid(DirectGrid(apps, threads), 2, patience=ENOUGH)
        try:
            assert engine(model(), LOSS, user("me")).names == ("a", "b")
        finally:
            over.set()


def test_nonsense_is_refused_and_draws_are_the_same_in_every_process(tmp_path: Path) -> None:
    asked, seen = to_record({"request": "nonsense"}), []
    for content in (asked, to_record({"caller": "x"}), RecordDict({})):
        (reply,) = _asked(app_of(user("a")), "gradients", content)
        assert isinstance(reply["refused"], str)
    request = {"points": np.ones((1, 5), np.float32), "step": 3, "seed": 0, "batch_size": 5}
    request |= {"buffers": {}, "frozen": None}
    for _ in range(2):  # as Flower does in a deployment
        app = client_app(
            lambda _: user("a", 2.0),
            lambda _: model(),
            LOSS,
            caps=Caps(examples=5),
            log_of=lambda _: tmp_path / "log",
        )
        seen += _asked(app, "gradients", to_record({"request": request}))
    assert np.array_equal(seen[0]["gradients"], seen[1]["gradients"])


def _asked(app: ClientApp, method: str, content: RecordDict) -> list[Any]:
    grid = DirectGrid([app])
    (node,) = grid.get_node_ids()
    grid.push_messages([Message(content, node, f"query.{method}", ttl=10.0)])
    return [from_record(reply.result().content) for reply in grid.replies.values()]


def test_a_thousand_exchanges_of_a_deployment_are_refused_with_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which starts a process for every message: the first question shows how long that takes."""
    now = [0.0]
    monkeypatch.setattr("coterie.flower.time", SimpleNamespace(monotonic=lambda: now[0]))

    def slow(message: Message, context: Context) -> Message:
        now[0] += 20
        return app_of(user("a"))(message, context)

    def run(**how: Any) -> coterie.Run:
        engine = FlowerGrid(DirectGrid([slow]))
        rule = coterie.WeightedAveraging(alpha=0.5)
        return coterie.train(
            model(), LOSS, user("me"), [], rule, engine=engine, lr=0.1, guard="off", **how
        )

    with pytest.raises(KnobError, match=r"1000 exchanges of 20 s .* `local_steps=20`"):
        run(steps=1000)
    assert run(steps=1000, exchange_every=250).step == 1000
    assert run(steps=5, local_steps=20).step == 5


def _named(name: str, message: Message) -> Message:
    return Message(to_record({"name": name}), reply_to=message)


def test_bad_settings() -> None:
    grid = DirectGrid([app_of(user("a")), app_of(user("a"))])
    with pytest.raises(DataError, match="every peer must have a name of its own"):
        trained(grid, 2)
    for name in ("", "a\x1b[2J"):  # codes for a terminal
        with pytest.raises(DataError, match="of printable text"):
            trained(DirectGrid([lambda message, _: _named(name, message)]), 1)  # noqa: B023
    with pytest.raises(DataError, match="2 of 3 SuperNodes are connected"):
        trained(grid, 3)
    with pytest.raises(KnobError, match="`compress` must be left out over Flower"):
        FlowerGrid(grid, knobs={"compress": "bf16"})
    with pytest.raises(KnobError, match="`log_of` must name a file"):
        client_app(lambda _: user("a"), lambda _: model(), LOSS, sums=SumsOnly())


def test_records_give_back_what_they_were_made_of() -> None:
    value = {"a": [1, 2.5, None], "b": {"c": np.arange(6, dtype=np.int16).reshape(2, 3)}}
    back = from_record(to_record(value))
    assert back["a"] == value["a"]
    assert np.array_equal(back["b"]["c"], value["b"]["c"])  # type: ignore[index]
    assert back["b"]["c"].dtype == np.int16
    for data in (b"", b"[" * 5000, (10**12).to_bytes(8, "little") + b"{}", _text("[" * 5000)):
        array = Array(dtype="uint8", shape=(len(data),), stype="letter", data=data)
        held = RecordDict({"letter": ArrayRecord({"letter": array})})
        assert from_record(held) is None, "a peer's bytes end nobody's run"
    assert from_record(RecordDict({})) is None
    assert from_record(RecordDict({"letter": ConfigRecord({"letter": 3})})) is None


def _text(said: str) -> bytes:
    return len(said).to_bytes(8, "little") + said.encode()
