"""What travels under torch.distributed: a request as bytes, the error of rounding, what an error says."""

import pytest
import torch

from coterie.engines.engine import Question
from coterie.engines.rounding import relative_error
from coterie.engines.torch_distributed.group import in_short
from coterie.engines.torch_distributed.request import Ask, PackedRequest, laid_out

CPU = torch.device("cpu")


def test_a_request_arrives_as_it_was_packed() -> None:
    buffers = {"count": torch.tensor(0), "mean": torch.zeros(2, dtype=torch.float64)}
    sent, received = (PackedRequest(2, 3, torch.zeros(3), buffers, CPU) for _ in range(2))
    weights, points = torch.arange(6.0).view(3, 2), torch.arange(9.0).view(3, 3)
    moved = {"count": torch.arange(3), "mean": torch.ones(3, 2, dtype=torch.float64)}
    sent.fill(Ask.SUM, Question(points, 7, weights, sketched=2, buffers=moved))
    received.bytes.copy_(sent.bytes)
    assert received.read() == (Ask.SUM, 7, 2)
    assert received.weights.tolist() == weights.tolist()
    assert torch.equal(received.points, points)
    assert received.buffers["count"].tolist() == [0, 1, 2]
    assert received.buffers["mean"].tolist() == [[1.0, 1.0]] * 3


def test_a_request_of_one_point_is_not_longer_than_its_parts() -> None:
    assert PackedRequest(2, 1, torch.zeros(3), {}, CPU).bytes.numel() == 2 * 64 + 3 * 4


def test_parts_begin_at_multiples_of_64_bytes() -> None:
    memory, views = laid_out([torch.zeros(2, 2), torch.zeros(3, dtype=torch.bool)], CPU)
    assert len(memory) == 64 + 3
    assert [tuple(view.shape) for view in views] == [(2, 2), (3,)]
    assert views[1].data_ptr() - memory.data_ptr() == 64


def test_the_error_of_rounding_is_relative() -> None:
    exact = torch.tensor([1.0, 1.01])
    assert relative_error(exact, exact.bfloat16()) == pytest.approx(0.00154, abs=5e-6)
    assert relative_error(exact, exact.clone()) == 0


def test_an_error_of_torch_is_told_without_its_place_in_the_source() -> None:
    said = (
        "[/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:16260. This is typically caused …"
    )
    assert in_short(said) == "Connection closed by peer [127.0.0.1]:16260"
