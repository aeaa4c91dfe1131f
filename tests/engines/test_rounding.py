"""Messages in half precision: half the bytes, and what rounding loses is in the next message."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.support import processes
from tests.support.engines import ENGINES
from torch import nn
from torch.nn.functional import mse_loss

import coterie
from coterie.engines.compression import Rounding
from coterie.engines.in_process.passes import Passes
from coterie.engines.peer import Peer
from coterie.errors import KnobError

# which refuses it
WHERE = [name for name in ENGINES if not name.startswith(("in process", "Flower"))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_sum_of_messages_is_exact_but_for_the_last(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    rounding, sent, exact = Rounding(dtype), torch.zeros(50), torch.zeros(50)
    plain = torch.zeros(50)
    for _ in range(200):
        message = 1 + 0.001 * torch.randn(50, generator=generator)
        sent, exact, plain = (
            sent + rounding(message).float(),
            exact + message,
            plain + message.to(dtype).float(),
        )
    assert float((sent - exact).abs().max()) < 2 * torch.finfo(dtype).eps
    assert float((plain - exact).abs().max()) > 10 * float((sent - exact).abs().max())


def test_what_cannot_be_sent_is_not_added_later() -> None:
    rounding = Rounding(torch.float16)
    assert rounding(torch.tensor([1e6, 1.0])).isinf().tolist() == [True, False]
    assert rounding(torch.tensor([1.0, 1.0])).tolist() == [1.0, 1.0]
    assert rounding(torch.tensor([1.0])).tolist() == [1.0]


def users() -> list[coterie.User]:
    generator = torch.Generator().manual_seed(3)
    truth = torch.tensor([1.0, -2.0, 0.5, 3.0])[:, None]
    made = []
    for name in ("me", "a", "b"):
        inputs = torch.randn(40, 4, generator=generator)
        made.append(coterie.User(name, inputs, inputs @ truth))
    return made


def trained(where: str, compress: str | None, steps: int = 100) -> coterie.Run:
    """All examples in every batch, and one answer that fits all: what remains is what rounding leaves."""
    me, *peers = users()
    torch.manual_seed(0)
    sent: dict[str, Any] = {} if compress is None else {"compress": compress}
    over_processes = where == "processes"
    with processes.torch_distributed(**sent) if over_processes else ENGINES[where]() as make:
        made: Any = make
        engine = made if over_processes else partial(made, **sent)
        how: dict[str, Any] = {
            "optimizer": torch.optim.SGD,
            "lr": 0.1,
            "steps": steps,
            "batch_size": 40,
            "evaluate_every": 150,
        }
        rule = coterie.WeightedAveraging(0.9)
        return coterie.train(
            nn.Linear(4, 1), mse_loss, me, peers, rule, engine=engine, measure=False, **how
        )


def test_a_peer_adds_what_its_last_answer_lost_for_each_caller_by_itself() -> None:
    peer, exact = Peer(users()[1], Passes(nn.Linear(4, 1), mse_loss)), torch.full((1, 5), 1.001)
    sent = sum(peer.rounded(exact, torch.bfloat16).float() for _ in range(500))
    torch.testing.assert_close(sent, 500 * exact, rtol=2e-5, atol=0.0)
    assert torch.equal(peer.rounded(exact, torch.bfloat16, "another"), exact.to(torch.bfloat16))
    assert peer.rounded(exact, torch.float32) is exact


@pytest.mark.parametrize("where", WHERE)
def test_half_the_bytes_lead_to_the_same_model(where: str) -> None:
    exact, rounded = trained(where, None, steps=2), trained(where, "bf16")
    truth = torch.tensor([1.0, -2.0, 0.5, 3.0])
    weight: Any = rounded.model.weight
    assert float((weight.detach()[0] - truth).abs().max()) < 0.0015  # .0021 without what was lost
    whole, half = exact.record.end.traffic["a"], rounded.record.end.traffic["a"]
    assert half.bytes_sent / half.messages < 0.65 * whole.bytes_sent / whole.messages
    assert 0 < rounded.record.end.traffic["me"].rounding < 0.01
    assert whole.rounding == 0


def test_what_it_cannot_be_rounded_to_is_refused() -> None:
    with pytest.raises(KnobError, match='`compress` must be "bf16", "fp16" or None'):
        trained("here", "int8")
