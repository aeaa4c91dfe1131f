"""What a peer gives at most, whatever is asked and by however many processes; and whose its secret is."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.processes import ended, forked
from torch import nn

import coterie
from coterie.engines.in_process.passes import Passes
from coterie.engines.messages import Request
from coterie.engines.peer import Caps, Peer
from coterie.engines.peer.ledger import Ledger, kept_secret, read_secret
from coterie.engines.peer.peer import OwnDraws
from coterie.errors import FileError, KnobError

N, WIDTH = 100, 40


def site(caps: Caps | None, log: Path | None = None) -> tuple[Peer, torch.Tensor]:
    """Return a peer with a linear model, at whose point 0 a batch's gradient is the mean of rows, and the rows."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(N, WIDTH, generator=generator, dtype=torch.float64)
    user = coterie.User("a", rows, torch.ones(N, 1, dtype=torch.float64))
    model = nn.Linear(WIDTH, 1, dtype=torch.float64)
    return Peer(
        user, Passes(model, lambda output, target: (output * target).mean()), caps, log
    ), rows


def answers(peer: Peer) -> tuple[torch.Tensor, list[tuple[int, int, int]]]:
    """Ask for batches of chosen seeds, steps and sizes, and return all gradients at one point."""
    asked = [
        (seed, step, size)
        for seed in range(10)
        for step in (0, 7, 10**9)
        for size in (50, 51, 67, 99, 100)
    ]
    point = torch.zeros(1, WIDTH + 1, dtype=torch.float64)
    replies = [
        peer.answer(Request(point, step, seed, size)).gradients for seed, step, size in asked
    ]
    return torch.stack([reply[0, :WIDTH] for reply in replies if reply is not None]), asked


def test_chosen_batches_give_no_row_away() -> None:
    """Without caps the batches that user 0 knows are a system of full rank, whose solution is the rows."""
    peer, rows = site(None)
    gradients, asked = answers(peer)
    system = torch.zeros(len(asked), N, dtype=torch.float64)
    for equation, (seed, step, size) in zip(system, asked, strict=True):
        index = coterie.User("a", torch.arange(N), torch.zeros(N)).batch(
            size, seed=seed, step=step
        )[0]
        equation.index_add_(0, index, torch.full((size,), 1 / size, dtype=torch.float64))
    assert torch.linalg.matrix_rank(system) == N
    torch.testing.assert_close(torch.linalg.lstsq(system, gradients).solution, rows)

    peer, rows = site(Caps(examples=50))
    gradients, asked = answers(peer)
    assert len(gradients) == len(asked)
    assert torch.linalg.matrix_rank(gradients) == 2, (
        "two blocks of 50 rows are all there is to learn at one point"
    )
    mixed = torch.linalg.lstsq(gradients.T, rows.T)
    assert float((gradients.T @ mixed.solution - rows.T).norm(dim=0).min()) > 1, (
        "no row is a mixture of answers"
    )


def test_what_caps_do_not_prevent() -> None:
    """SECURITY.md says so: parameters that a single row wakes up give that row away, whatever the batch."""
    _, rows = site(None)
    user = coterie.User("a", rows, torch.zeros(N, 1, dtype=torch.float64))
    model = nn.Sequential(nn.Linear(WIDTH, 1), nn.ReLU(), nn.Linear(1, 1)).double()
    peer = Peer(
        user, Passes(model, nn.functional.mse_loss), Caps(gradients=1, norm=1.0, examples=N)
    )
    largest, second = rows[:, 0].argmax(), rows[:, 0].topk(2).values.mean()
    point = torch.zeros(WIDTH + 3, dtype=torch.float64)
    # of the first column the largest passes alone
    point[0], point[WIDTH], point[WIDTH + 1] = 1.0, -second, 1.0
    given = peer.answer(Request(point[None], 0, 0, N)).gradients
    assert given is not None
    torch.testing.assert_close(given[0, :WIDTH] / given[0, WIDTH], rows[largest])


def test_every_batch_is_whole_blocks_of_the_least_size() -> None:
    draws = OwnDraws(b"secret", 103, least=10)
    blocks = draws._blocks
    assert sorted(np.concatenate(blocks).tolist()) == list(range(103))
    assert min(map(len, blocks)) == 10
    for size in (10, 32, 50, 103):
        batch = set(draws.indices(size, seed=3, step=5).tolist())
        inside = [set(block.tolist()) <= batch for block in blocks]
        assert len(batch) == sum(
            len(block) for block, is_in in zip(blocks, inside, strict=True) if is_in
        )
        assert abs(len(batch) - size) <= 6
    counts = np.zeros(103)
    for step in range(2000):
        counts[draws.indices(32, seed=0, step=step).numpy()] += 1
    assert counts.min() > 0.8 * counts.mean(), "every row takes part alike"


def test_a_peer_started_anew_draws_the_same_batches_and_another_draws_others(
    tmp_path: Path,
) -> None:
    caps = Caps(examples=20)
    first, again, other = (
        answers(site(caps, tmp_path / name)[0])[0] for name in ("log", "log", "other")
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, answers(site(caps)[0])[0])


def test_a_stream_draws_no_more_than_it_can_hold() -> None:
    user = coterie.User.stream(
        "a", lambda size, seed, step: (torch.ones(size, 2), torch.ones(size, 1))
    )
    peer = Peer(user, Passes(nn.Linear(2, 1), nn.functional.mse_loss), Caps())
    assert (
        peer.answer(Request(torch.zeros(1, 3), 0, 0, 2**40)).refused
        == "it draws 1048576 examples at most"
    )


def test_streams_and_dropout_do_not_draw_from_user_0s_seed(tmp_path: Path) -> None:
    seen = []

    def draw(size: int, seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(seed)
        return torch.ones(size, 2), torch.ones(size, 1)

    user = coterie.User.stream("a", draw)
    for log in (tmp_path / "log", tmp_path / "log", tmp_path / "other"):
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1))
        Peer(user, Passes(model, nn.functional.mse_loss), Caps(), log).answer(
            Request(torch.zeros(1, 3), 0, 0, 4)
        )
    assert seen[0] == seen[1] != seen[2]


def test_processes_on_one_log_give_no_more_than_the_cap(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"

    def ask() -> None:
        peer, _ = site(Caps(gradients=10), log)
        request = Request(torch.zeros(1, WIDTH + 1, dtype=torch.float64), 0, 0, 50)
        given = sum(peer.answer(request).gradients is not None for _ in range(10))
        (tmp_path / f"gave {given} {os.getpid()}").touch()

    children = [forked(ask) for _ in range(3)]
    assert [ended(child) for child in children] == [0, 0, 0]
    assert sum(int(path.name.split()[1]) for path in tmp_path.glob("gave *")) == 10
    assert Ledger(log).given == 10


def test_peers_that_share_a_log_see_what_the_other_gave(tmp_path: Path) -> None:
    """Both were there before anything was given: neither has read the log to its end."""
    one, other = (site(Caps(gradients=3), tmp_path / "log")[0] for _ in range(2))
    request = Request(torch.zeros(1, WIDTH + 1, dtype=torch.float64), 0, 0, 50)
    assert [peer.answer(request).refused is None for peer in (one, other, one, other, one)] == [
        True
    ] * 3 + [False] * 2


def test_an_altered_or_lost_line_is_told_and_one_cut_by_a_kill_is_not(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for _ in range(4):
        Ledger(path).give(caller="user 0")
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(whole + whole[: len(lines[0]) // 2])
    assert Ledger(path).given == 4
    Ledger(path).give(caller="user 0")
    assert Ledger(path).given == 5
    damaged = [
        whole.replace(b'"gradients": 1', b'"gradients": 0', 1),
        b"".join(lines[1:]),
        b"\n" + whole,
    ]
    damaged += [lines[0] + lines[2], whole[:40] + b"\xff" + whole[41:], b"".join(lines[:3]), b""]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(FileError, match=r"log .* put it back as it was"):
            Ledger(path).give(caller="user 0")
    path.write_bytes(whole)
    ledger = Ledger(path)
    with pytest.raises(FileError, match=r"log.count tells of 5 lines, and 4 are there"):
        _ = ledger.given
    (tmp_path / "log.count").write_text(
        f"000000000004 {json.loads(lines[3])['chain']}\n", encoding="utf-8"
    )
    assert ledger.given == 4
    path.write_bytes(lines[0])
    with pytest.raises(FileError, match="has become shorter"):
        ledger.give(caller="user 0")


def test_log_and_secret_are_their_owners_alone(tmp_path: Path) -> None:
    peer, _ = site(Caps(), tmp_path / "log")
    peer.refuse("no")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "log.count", "log.secret"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    (tmp_path / "log.secret").chmod(0o644)
    with pytest.raises(KnobError, match=r"others may read the secret .* `chmod 600"):
        kept_secret(tmp_path / "log.secret")
    (tmp_path / "short").touch(0o600)
    with pytest.raises(KnobError, match="at least 16 bytes, got 0"):
        read_secret(tmp_path / "short")
    with pytest.raises(KnobError, match="cannot be read: No such file"):
        read_secret(tmp_path / "none")


@pytest.mark.parametrize(
    "text", ["a\nb", "\x1b[2J\x1b]0;title\x07", "\r{}", "\u2028\u2029\x85", "[/blue]"]
)
def test_a_line_of_the_log_stays_one_line_of_plain_text(text: str, tmp_path: Path) -> None:
    peer, _ = site(Caps(), tmp_path / "log")
    peer.refuse(text, caller=text, step=text)
    written = (tmp_path / "log").read_text(encoding="utf-8")
    assert written.count("\n") == 1
    assert written.strip().isprintable()
    assert written.isascii()
    assert json.loads(written)["refused"] == text
