"""Nestings of tensors as examples: from dicts and tuples, data sets of any item, and rows of unequal size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as f
from torch.utils.data import Dataset

import coterie
from coterie.errors import DataError


class Items(Dataset[Any]):
    """Items of any form, made from their index."""

    def __init__(self, make: Any, n: int = 9) -> None:
        self.make, self.n = make, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def test_parts_are_indexed_together() -> None:
    numbers = torch.arange(20)
    user = coterie.User(
        "a",
        {"ids": numbers[:, None], "more": (numbers.float(), [numbers])},
        {"y": numbers, "w": np.ones(20)},
    )
    plain = coterie.User("a", numbers[:, None], numbers).batch(5, seed=3, step=4)
    inputs, targets = user.batch(5, seed=3, step=4)  # the same draw: by seed, user and step
    assert torch.equal(inputs["ids"], plain[0])
    assert torch.equal(targets["y"], plain[1])
    assert torch.equal(inputs["more"][0], plain[1].float())
    assert torch.equal(inputs["more"][1][0], plain[1])
    assert targets["w"].dtype == torch.get_default_dtype()


@pytest.mark.parametrize(
    ("item", "target", "inputs"),
    [
        (lambda i: {"ids": torch.tensor([i]), "label": i}, "label", {"ids"}),
        (lambda i: {"ids": [i, i + 1], "label": i}, "label", {"ids"}),
        (lambda i: (torch.tensor([i]), np.float64(i), i), None, 2),
        (lambda i: {"ids": torch.tensor([i])}, None, {"ids"}),
    ],
)
def test_items_of_any_form(item: Any, target: str | None, inputs: Any) -> None:
    user = coterie.User.from_dataset("a", Items(item), target=target)
    taken, targets = user.batch(4, seed=0, step=1)
    drawn = coterie.User("a", torch.arange(9), torch.arange(9)).batch(4, seed=0, step=1)[1]
    assert (set(taken) if isinstance(inputs, set) else len(taken)) == inputs
    if isinstance(inputs, set):
        assert torch.equal(taken["ids"][:, 0], drawn)
    assert torch.equal(targets, drawn) if isinstance(targets, Tensor) else targets == ()


def pad(pairs: list[tuple[Tensor, int]]) -> tuple[dict[str, Tensor], Tensor]:
    rows = nn.utils.rnn.pad_sequence([row for row, _ in pairs], batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row, _ in pairs], batch_first=True)
    return {"rows": rows, "mask": mask}, torch.tensor([target for _, target in pairs])


class MeanOfRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(1, 2)

    def forward(self, rows: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.last(((rows * mask).sum(1) / mask.sum(1))[:, None])
        return out


def ragged(name: str, n: int, seed: int) -> coterie.User:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (n,), generator=generator).tolist()
    rows = [torch.randn(length, generator=generator) for length in lengths]
    targets = [int(row.mean() > 0) for row in rows]
    targets[:2] = [0, 1]
    held = (rows[: n // 2], targets[: n // 2])
    return coterie.User(name, rows, targets, collate=pad, validation=held if name == "me" else None)


@pytest.mark.parametrize("rule", [coterie.WeightedAveraging(0.5), None])
def test_examples_of_unequal_size_train(rule: Any) -> None:
    """Batches of several lengths: the same gradients as one user after the other, and a run to its end."""
    me, *peers = (ragged(name, 12, seed) for seed, name in enumerate(("me", "a", "b", "c")))
    model = MeanOfRows()
    x = torch.randn(4)
    together, apart = (
        coterie.InProcess(
            model, f.cross_entropy, me, peers, batch_size=4, one_by_one=one
        ).gradients(x, 2, {"a": 0.5, "b": 0.25, "c": 0.25})
        for one in (False, True)
    )
    assert together.peers is not None
    assert apart.peers is not None
    torch.testing.assert_close(together.peers, apart.peers)
    run = coterie.train(model, f.cross_entropy, me, peers, rule, steps=12, batch_size=4, lr=0.1)
    assert run.step == 12
    assert "accuracy" in run.record.points[-1].validation


def test_what_cannot_be_stacked_says_how_to() -> None:
    rows = Items(lambda i: (torch.zeros(i + 1), 0))
    with pytest.raises(DataError, match=r"examples cannot be stacked: .*give `collate`"):
        coterie.User.from_dataset("a", rows).batch(4, seed=0, step=0)
    with pytest.raises(DataError, match="an example holds 'text', which is no number"):
        coterie.User.from_dataset("a", Items(lambda _: ("text", 0))).batch(4, seed=0, step=0)
    with pytest.raises(DataError, match="an example has no 'label', its target; it has ids"):
        coterie.User.from_dataset("a", Items(lambda i: {"ids": i}), target="label").batch(
            4, seed=0, step=0
        )
    with pytest.raises(DataError, match=r"cannot be made a tensor: .*or give `collate`"):
        coterie.User("a", [[1.0], [1.0, 2.0]], [0, 1])
    with pytest.raises(DataError, match=r"the inputs of user 'a' have parts of 3 and 4 rows"):
        coterie.User("a", {"a": torch.zeros(3), "b": torch.zeros(4)}, [0, 1, 0])
    with pytest.raises(DataError, match=r"has 2 inputs but 3 targets"):
        coterie.User("a", [torch.zeros(3), torch.zeros(4)], [0, 1, 0], collate=pad)


def test_nestings_that_differ_are_refused() -> None:
    me = coterie.User("me", {"a": torch.zeros(4, 1)}, torch.tensor([0, 1, 0, 1]))
    other = coterie.User("other", {"b": torch.zeros(4, 1)}, torch.tensor([0, 1, 0, 1]))
    with pytest.raises(DataError, match=r"inputs of peer 'other' .* are not like those of 'me'"):
        coterie.InProcess(nn.Linear(1, 2), f.cross_entropy, me, [other])


def test_a_fingerprint_tells_data_sets_apart() -> None:
    def of(make: Any) -> str:
        return coterie.User.from_dataset("a", Items(make, 200)).fingerprint()

    assert of(lambda i: (torch.tensor([i]), 0)) == of(lambda i: (torch.tensor([i]), 0))
    assert of(lambda i: (torch.tensor([i]), 0)) != of(lambda i: (torch.tensor([i + 1]), 0))
    # its noise is seeded
    assert of(lambda _: (torch.randn(2), 0)) == of(lambda _: (torch.randn(2), 0))
    nested = {"a": torch.zeros(3), "b": torch.ones(3)}
    swapped = {"a": torch.ones(3), "b": torch.zeros(3)}
    assert coterie.User("a", nested).fingerprint() != coterie.User("a", swapped).fingerprint()
