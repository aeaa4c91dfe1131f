"""Evaluation: the loss and the metrics of a model on held-out examples, against other libraries and plain sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor, nn
from torch.nn import functional as f
from torch.utils.data import Dataset

import coterie
from coterie.evaluation.evaluate import evaluate, example_errors, example_losses, scores
from coterie.users.examples import InMemory


def examples(size: int = 50) -> InMemory:
    generator = torch.Generator().manual_seed(0)
    return InMemory(
        torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator)
    )


@pytest.mark.parametrize("chunk", [1, 7, 50, 1000])
def test_chunks_do_not_matter(chunk: int) -> None:
    torch.manual_seed(0)
    model, data = nn.Linear(4, 3), examples()
    with torch.no_grad():
        logits = model(data.inputs).double().numpy()
    rows = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    values = evaluate(model, f.cross_entropy, data, chunk=chunk)
    assert values["loss"] == pytest.approx(
        -rows[np.arange(50), data.targets.numpy()].mean(), rel=1e-5
    )
    assert values["accuracy"] == pytest.approx((logits.argmax(1) == data.targets.numpy()).mean())


def test_the_mode_is_put_back_and_statistics_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 3))
    model[2].eval()
    modes = [module.training for module in model.modules()]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    first = evaluate(model, f.cross_entropy, examples())
    assert first == evaluate(model, f.cross_entropy, examples())  # no dropout
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())


def test_the_mode_is_put_back_after_an_error() -> None:
    def failing(output: Tensor, targets: Tensor) -> Tensor:
        assert not model.training
        raise RuntimeError("stop")

    model = nn.Linear(4, 3)
    with pytest.raises(RuntimeError, match="stop"):
        evaluate(model, failing, examples())
    assert model.training


def test_binary_and_regression_end_to_end() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    data = InMemory(torch.tensor([[-1.0], [2.0], [3.0]]), torch.tensor([[0.0], [1.0], [0.0]]))
    assert evaluate(model, f.binary_cross_entropy_with_logits, data)["accuracy"] == pytest.approx(
        2 / 3
    )
    assert evaluate(model, f.mse_loss, data)["rmse"] == pytest.approx(np.sqrt((1 + 1 + 9) / 3))


class Noisy(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(4), index % 3


def test_random_transforms_are_the_same_every_time() -> None:
    user = coterie.User.from_dataset("me", Noisy(), validation=Noisy())
    assert user.validation is not None
    model, before = nn.Linear(4, 3), torch.get_rng_state()
    first = evaluate(model, f.cross_entropy, user.validation)
    torch.manual_seed(5)
    assert evaluate(model, f.cross_entropy, user.validation) == first
    torch.set_rng_state(before)


def test_any_metric() -> None:
    def macro_f1(outputs: Tensor, targets: Tensor) -> Any:
        return sk.f1_score(targets, outputs.argmax(1), average="macro")

    model, data = nn.Linear(4, 3), examples()
    with torch.no_grad():
        wanted = macro_f1(model(data.inputs), data.targets)
    any_number: Any = lambda _, targets: torch.tensor(len(targets))  # noqa: E731  # of another type than declared
    values = evaluate(model, f.cross_entropy, data, {"f1": macro_f1, "size": any_number}, chunk=9)
    assert values["f1"] == pytest.approx(wanted)
    assert type(values["size"]) is float
    assert values["size"] == 50


def test_the_loss_is_over_the_whole_set_whatever_the_chunks() -> None:
    generator = torch.Generator().manual_seed(0)
    data = InMemory(
        torch.randn(50, 3, generator=generator), torch.randint(4, (50,), generator=generator)
    )
    model = nn.Linear(3, 4)
    # a mean with weights: no mean of means
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 3.0, 9.0]))
    with torch.no_grad():
        whole = float(loss(model(data.inputs), data.targets))
    assert evaluate(model, loss, data, chunk=7)["loss"] == pytest.approx(whole, rel=1e-6)


def test_each_example_by_itself_and_all_together() -> None:
    data = InMemory(torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [0.0]]))
    assert example_losses(nn.Identity(), f.mse_loss, data).tolist() == [1, 4]
    assert example_errors(nn.Identity(), data, scale=10.0).tolist() == [100, 400]
    together = scores(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [4.0]]), f.mse_loss)
    assert together == {"loss": 2.0, "rmse": 2**0.5}
