"""The page on how a run with sites goes."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import coterie
from coterie.engines.in_process.passes import Passes
from coterie.engines.peer import Caps, Peer
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.sites import LocalReplies, LocalSites
from coterie.errors import FileError
from coterie.federation import live
from coterie.federation.live import LIVE, LivePage

NAMES, LOSS = ("basel", "bern", "<b>chur"), nn.functional.mse_loss


def user(name: str) -> coterie.User:
    inputs = torch.eye(4).repeat(10, 1)
    return coterie.User(name, inputs, inputs.sum(1, keepdim=True))


def test_the_page_says_who_answers_by_what_weight_and_what_each_still_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "SECONDS_BETWEEN_PAGES", 0.0)
    monkeypatch.setattr(live, "SECONDS_BETWEEN_QUESTIONS", 0.0)
    peers = {
        name: Peer(user(name), Passes(nn.Linear(4, 1), LOSS), Caps(gradients=50 + k))
        for k, name in enumerate(NAMES[:2])  # the last one never answers
    }
    sites, news = LocalSites(peers), tmp_path / "news.log"
    news.write_text("10:00:00 step 3: <b>chur gave nothing\n")
    page, seen = LivePage(tmp_path, sites, NAMES, 1.0, news), list[str]()

    def engine(*args: Any, **how: Any) -> Remote:
        page.engine = Remote(*args, sites=sites, names=NAMES, misses=2, **how)
        return page.engine

    def read(step: Any) -> None:
        seen.append((tmp_path / LIVE).read_text(encoding="utf-8"))

    coterie.train(
        nn.Linear(4, 1),
        LOSS,
        user("me"),
        [],
        coterie.WeightedAveraging(0.6),
        engine=engine,
        lr=0.1,
        steps=6,
        hooks=[page, read],
        guard="off",
    )
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in seen[4].split("<tr>")]
    told = {cells[0]: cells[1:] for cells in rows if cells}
    assert told == {
        "basel": ["answered", "0.20", "47 gradients", "5"],
        "bern": ["answered", "0.20", "48 gradients", "5"],
        "&lt;b&gt;chur": ["not waited for", "0.00", "not known yet", "0"],
    }
    assert "step 5 of 6: own loss" in seen[4]
    assert "peers&#39; weight 0.40" in seen[4]
    assert "&lt;b&gt;chur gave nothing" in seen[4]
    assert "location.reload()" in seen[4]
    ended = (tmp_path / LIVE).read_text(encoding="utf-8")
    assert "The run has ended, after 6 steps." in ended
    assert "reload" not in ended


class Untrue(LocalSites):
    """Sites that say what no site can."""

    def ask(self, names: Any, method: str, timeout: float, **arguments: Any) -> Any:
        replies = super().ask(names, method, timeout, **arguments).wait()
        wrong = {"left": 10**5000, "promise": {"spent": 10**5000}}
        told = wrong if method == "ready" else {}
        return LocalReplies({name: reply | told for name, reply in replies.items()})


def test_neither_a_site_nor_a_full_disk_nor_half_a_line_of_news_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "SECONDS_BETWEEN_PAGES", 0.0)
    monkeypatch.setattr(live, "SECONDS_BETWEEN_QUESTIONS", 0.0)
    sites, news = Untrue({"a": Peer(user("a"), Passes(nn.Linear(4, 1), LOSS))}), tmp_path / "news"
    news.write_bytes("Zürich gave nothing\nZü".encode()[:-1])
    page = LivePage(tmp_path, sites, ["a"], 1.0, news)

    def full(step: Any) -> None:
        assert "still gives" in (tmp_path / LIVE).read_text(encoding="utf-8") or step.step > 3
        if step.step == 3:
            monkeypatch.setattr(live, "write_page", mock.Mock(side_effect=FileError("no room")))

    run = coterie.train(
        nn.Linear(4, 1),
        LOSS,
        user("me"),
        [],
        coterie.WeightedAveraging(0.6),
        engine=partial(Remote, sites=sites, names=["a"]),
        steps=6,
        hooks=[page, full],
        guard="off",
    )
    assert run.step == 6
    text = (tmp_path / LIVE).read_text(encoding="utf-8")
    assert "Zürich gave nothing" in text
    assert "no limit" in text, "what no site can have is not told"
