"""Models and losses of every kind, users for them, and a user's gradient by plain autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f

import coterie
from coterie.users.sampling import seeded
from coterie.users.trees import called

SEED, BATCH = 11, 8
SIZES = (20, 16, 7, 33, 5)  # two peers with fewer examples than a batch: three sizes of batches
TAU = {"peer 1": 0.4, "peer 2": 0.3, "peer 3": 0.1, "peer 4": 0.2}


# Models.


class LastOf(nn.Module):
    """A recurrent net's output at the last time step."""

    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.recurrent, self.last = recurrent, nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.last(self.recurrent(inputs.view(len(inputs), 3, 2))[0][:, -1])
        return out


class Tied(nn.Module):
    """Two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.back, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.back.weight = self.there.weight

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.back(torch.tanh(self.there(inputs)))))
        return out


class Scaled(nn.Module):
    """A buffer that stays."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("scale", torch.linspace(0.5, 2, 6))

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layer(inputs * self.scale)
        return out


class RunningMean(nn.Module):
    """A buffer that follows the inputs, changed in place or assigned anew."""

    mean: Tensor

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place, self.layer = in_place, nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layer(inputs - self.mean)
        if self.training and self.in_place:
            self.mean.lerp_(inputs.detach().mean(0), 0.1)
        elif self.training:
            self.mean = torch.lerp(self.mean, inputs.detach().mean(0), 0.1)
        return out


class Centred(nn.Module):
    """Examples that influence each other, without a layer that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layer(inputs - inputs.mean(0))
        return out


class Pair(nn.Module):
    """An output that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"logits": self.layer(inputs), "size": inputs.square().mean()}


class ClassFirst(nn.Module):
    """An output with the examples in its second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layer(inputs)
        return out.T


class Branching(nn.Module):
    """A forward pass that looks at its values, which `torch.func.vmap` cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layer(inputs)
        return out * 2 if bool(self.layer.weight.sum() > 1e6) or bool(inputs.isnan().all()) else out


class TwoInputs(nn.Module):
    """A model of two arguments, whose output is a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 3), nn.Linear(4, 3)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        return {"logits": torch.tanh(self.left(left)) + self.right(right), "left": left}


class Listed(TwoInputs):
    """A model of one argument, a list of two tensors."""

    def forward(self, both: list[Tensor]) -> dict[str, Tensor]:  # type: ignore[override]  # on purpose
        return super().forward(*both)


class WithOwnLoss(TwoInputs):
    """A model that computes its loss itself, as those of `transformers` do."""

    def forward(self, left: Tensor, right: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(left, right)["logits"]
        return {"loss": f.cross_entropy(logits, labels), "logits": logits}


def mlp(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, 3))


def cnn(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 2),
        *between,
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(requires_grad=False)
    return model


def batch_norm_off() -> nn.Module:
    model = mlp(nn.BatchNorm1d(8))
    f.batch_norm(torch.randn(9, 8), model[1].running_mean, model[1].running_var, training=True)  # type: ignore[arg-type]  # it has both
    model[1].eval()
    return model


# Losses.


@coterie.per_example
def by_example(output: Mapping[str, Tensor], targets: Mapping[str, Any]) -> Tensor:
    """A loss of nested outputs and targets, declared to be one for each example."""
    losses: Tensor = (
        f.cross_entropy(output["logits"], targets["class"], reduction="none") * targets["more"][0]
    )
    return losses


def nested_mean(output: Mapping[str, Tensor], targets: Mapping[str, Any]) -> Tensor:
    """The same, with nothing declared."""
    losses: Tensor = (
        f.cross_entropy(output["logits"], targets["class"], reduction="none") * targets["more"][0]
    )
    return losses.mean()


def nested(targets: Tensor) -> dict[str, Any]:
    return {"class": targets, "more": [0.5 + targets.double()]}


def of_logits(output: Mapping[str, Tensor], targets: Tensor) -> Tensor:
    return f.cross_entropy(output["logits"], targets) * (1 + output["size"])


def transposed(output: Tensor, targets: Tensor) -> Tensor:
    return f.cross_entropy(output.T, targets)


def with_item(output: Tensor, targets: Tensor) -> Tensor:
    loss = f.cross_entropy(output, targets)
    return loss * (1 + loss.item())


def focal(output: Tensor, targets: Tensor) -> Tensor:
    """A loss of one's own that is no mean of one term an example."""
    losses = f.cross_entropy(output, targets, reduction="none")
    return (losses * losses.softmax(0).detach()).sum()


class OwnLoss(nn.Module):
    """A module without a reduction, whose result is one number."""

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        return f.nll_loss(f.log_softmax(output, 1), targets) + 0.1 * output.square().mean()


class SubclassedLoss(nn.CrossEntropyLoss):
    """A subclass of torch's loss that is no longer a mean over examples."""

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        losses = f.cross_entropy(output, targets, reduction="none")
        return losses.logsumexp(0) if self.reduction == "mean" else losses


def one_hot(targets: Tensor) -> Tensor:
    return f.one_hot(targets, 3).double()


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    loss: Any = f.cross_entropy
    targets: Callable[[Tensor], Any] = lambda targets: targets
    inputs: Callable[[Tensor], Any] = lambda inputs: inputs
    average: str = "one pass"
    rows: str = "by layer"


def one_by_one(model: Callable[[], nn.Module], loss: Any = f.cross_entropy) -> Case:
    return Case(model, loss, average="user by user", rows="loop")


def way_of_rows(engine: coterie.InProcess) -> str:
    """Return how an engine computes every peer's gradient."""
    if engine.passes.by_layer is not None:
        return "by layer"
    return "loop" if engine.support.loop else "vmap"


CASES = {
    "mlp": Case(mlp),
    "cnn": Case(cnn),
    "lstm": Case(lambda: LastOf(nn.LSTM(2, 5, batch_first=True)), rows="loop"),
    "gru": Case(lambda: LastOf(nn.GRU(2, 5, batch_first=True)), rows="loop"),
    "layer norm": Case(lambda: mlp(nn.LayerNorm(8))),
    "batch norm": one_by_one(lambda: mlp(nn.BatchNorm1d(8))),
    "batch norm, cnn": one_by_one(lambda: cnn(nn.BatchNorm2d(4))),
    "batch norm, no statistics": one_by_one(
        lambda: mlp(nn.BatchNorm1d(8, track_running_stats=False))
    ),
    "batch norm, evaluating": Case(batch_norm_off, rows="vmap"),
    "dropout": one_by_one(lambda: mlp(nn.Dropout(0.5))),
    "dropout, evaluating": Case(lambda: mlp(nn.Dropout(0.5)).eval()),
    "dropout and batch norm": one_by_one(lambda: mlp(nn.Dropout(0.3), nn.BatchNorm1d(8))),
    "frozen": Case(frozen),
    "tied": Case(Tied),
    "buffer": Case(Scaled),
    "buffer in place": one_by_one(lambda: RunningMean(in_place=True)),
    "buffer anew": one_by_one(lambda: RunningMean(in_place=False)),
    "examples that mix": one_by_one(Centred),
    "output not a tensor": Case(Pair, of_logits, rows="vmap"),
    "examples not first": Case(ClassFirst, transposed, rows="vmap"),
    "not vmappable": Case(Branching),
    "loss with item": Case(mlp, with_item),
    "loss of one's own": Case(mlp, focal),
    "module of one's own": Case(mlp, OwnLoss()),
    "subclassed loss": Case(mlp, SubclassedLoss()),
    "class weights": Case(
        mlp, nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64))
    ),
    "label smoothing": Case(mlp, nn.CrossEntropyLoss(label_smoothing=0.1)),
    "sum": Case(mlp, nn.CrossEntropyLoss(reduction="sum")),
    "class probabilities": Case(mlp, f.cross_entropy, lambda t: 0.8 * one_hot(t) + 0.2 / 3),
    "mse": Case(mlp, f.mse_loss, one_hot),
    "huber": Case(mlp, nn.HuberLoss(delta=0.3), one_hot),
    "bce": Case(mlp, f.binary_cross_entropy_with_logits, one_hot),
    "bce, class weights": Case(
        mlp,
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0, 1.0, 0.5], dtype=torch.float64)),
        one_hot,
    ),
    "soft margin": Case(mlp, f.soft_margin_loss, lambda t: 2 * one_hot(t) - 1),
    "kl": Case(
        lambda: nn.Sequential(mlp(), nn.LogSoftmax(1)), nn.KLDivLoss(reduction="batchmean"), one_hot
    ),
    "class weights, some ignored": Case(
        mlp,
        nn.CrossEntropyLoss(
            torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64), label_smoothing=0.1
        ),
        lambda t: t.masked_fill(torch.arange(len(t)) % 3 == 1, -100),
    ),
    "reduction none": Case(mlp, nn.MSELoss(reduction="none"), one_hot),
    "a dict": Case(
        TwoInputs, nested_mean, nested, inputs=lambda i: {"right": i[:, 2:], "left": i[:, :2]}
    ),
    "a tuple, by example": Case(
        TwoInputs, by_example, nested, inputs=lambda i: (i[:, :2], i[:, 2:])
    ),
    "a list": Case(Listed, by_example, nested, inputs=lambda i: [i[:, :2], i[:, 2:]]),
    "the model's own loss": Case(
        WithOwnLoss,
        coterie.model_loss,
        lambda _: None,
        lambda i: {"left": i[:, :2], "right": i[:, 2:], "labels": (i[:, 0] > 0).long()},
        rows="vmap",
    ),
    "nll": Case(lambda: nn.Sequential(mlp(), nn.LogSoftmax(1)), f.nll_loss),
}


def make_users(case: Case, sizes: Sequence[int] = SIZES) -> list[coterie.User]:
    generator = torch.Generator().manual_seed(0)
    users = []
    for k, size in enumerate(sizes):
        inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64) + 0.2 * k
        targets = case.targets(torch.randint(3, (size,), generator=generator))
        users.append(coterie.User("me" if not k else f"peer {k}", case.inputs(inputs), targets))
    return users


def make_model(case: Case) -> nn.Module:
    torch.manual_seed(3)
    return case.model().double()


def some_point(model: nn.Module) -> Tensor:
    """Return a point that is not the model's own parameters."""
    own = torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
    return own + 0.1 * torch.randn(
        len(own), generator=torch.Generator().manual_seed(7), dtype=own.dtype
    )


def mean_loss(loss: Any) -> Any:
    """Return a loss of one number a batch; the mean of one that is by example."""
    if getattr(loss, "reduction", None) != "none":
        return loss
    return lambda output, targets: loss(output, targets).mean()


def plain_gradient(
    model: nn.Module, loss: Any, user: coterie.User, x: Tensor, step: int
) -> tuple[Tensor, float, nn.Module]:
    """Return a user's gradient and loss at x, and the model as its batch leaves it, by plain autograd."""
    model, done = copy.deepcopy(model), 0
    trainable = [p for p in model.parameters() if p.requires_grad]
    for p in trainable:
        p.data = x[done : done + p.numel()].view_as(p).clone()
        done += p.numel()
    inputs, targets = user.batch(BATCH, seed=SEED, step=step)
    with seeded(SEED, user.name, step):
        mean = mean_loss(loss)(called(model, inputs), targets)
    gradients = torch.autograd.grad(mean, trainable, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in gradients]), float(mean.detach()), model


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
