"""Losses: which are means over examples, what each example counts in them, and the model's own."""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast, overload

import torch
from torch import Tensor, nn

from coterie.errors import ModelError
from coterie.users.trees import Tree
from coterie.users.user import Loss

Each: TypeAlias = Callable[[Any, Any], Tensor]
"""The loss of each example, of shape (n,), or of each part of a target, of shape (n, …)."""

IGNORED = -100
"""The class that torch's losses ignore unless they are told another."""


@dataclass(frozen=True, eq=False)
class PerExample:
    """A loss that is a mean over examples, by the loss of each.

    Users' batches can then share a pass.

    Args:
        each: a function of (output, targets) that returns the loss of each example, of shape (n,)
            or (n, …).
        weights: what each of those counts in the mean, a function of the targets; all the same when
            None. The loss of a batch is the sum of what `each` returns over the sum of these, so
            that `each` has the weight in it.
        plain: the loss of torch that it is, where targets are a dict of "value" and "weight", and
            the weight is all that it adds. It may then be fitted in closed form.

    Example:
        >>> each = lambda output, targets: (output - targets["value"]).square() * targets["weight"]
        >>> loss = PerExample(each, weights=lambda targets: targets["weight"])
        >>> loss(torch.tensor([1.0, 2.0]), {"value": torch.zeros(2), "weight": torch.tensor([3.0, 1.0])})
        tensor(1.7500)
    """

    each: Each
    weights: Callable[[Any], Tensor] | None = None
    # several models' outputs may be passed as one's
    of_torch: bool = field(default=False, repr=False)
    plain: Loss | None = field(default=None, repr=False)

    def __call__(self, output: Any, targets: Tree) -> Tensor:
        """Return the mean loss of a batch.

        Not a number where nothing counts in it, with a gradient of zero.
        """
        sums, counts = self.parts(output, targets)
        if counts is None:
            return sums.mean()
        total = counts.sum()
        return torch.where(total == 0, torch.nan, sums.sum() / _or_one(total))

    def parts(self, output: Any, targets: Tree) -> tuple[Tensor, Tensor | None]:
        """Return for each example the loss that it adds, and what it counts.

        None where all count the same.
        """
        losses = self.each(output, targets)
        if not isinstance(losses, Tensor) or not losses.ndim:
            raise ModelError("a loss per example must return one number for each, got one for all")
        if self.weights is None:
            return (losses if losses.ndim == 1 else losses.flatten(1).mean(1)), None
        return losses.flatten(1).sum(1) if losses.ndim > 1 else losses, self.counts(targets)

    def counts(self, targets: Tree) -> Tensor | None:
        """Return what each example counts; None where all count the same."""
        if self.weights is None:
            return None
        weights = self.weights(targets)
        return weights.flatten(1).sum(1) if weights.ndim > 1 else weights

    def by_example(self, output: Any, targets: Tree) -> Tensor:
        """Return the loss of each example as a batch of its own; 0 where nothing counts in it."""
        sums, counts = self.parts(output, targets)
        return sums if counts is None else sums / _or_one(counts)


@overload
def per_example(each: Each, *, weights: Callable[[Any], Tensor] | None = ...) -> PerExample: ...
@overload
def per_example(
    each: None = ..., *, weights: Callable[[Any], Tensor] | None = ...
) -> Callable[[Each], PerExample]: ...
def per_example(
    each: Each | None = None, *, weights: Callable[[Any], Tensor] | None = None
) -> PerExample | Callable[[Each], PerExample]:
    """Declare a function to be a loss per example, which coterie then weighs; also as a decorator.

    Example:
        >>> @per_example
        ... def loss(output, targets):
        ...     return (output - targets).abs()
        >>> loss(torch.tensor([1.0, 3.0]), torch.zeros(2))
        tensor(2.)
    """
    if each is None:
        return functools.partial(PerExample, weights=weights)
    return PerExample(each, weights)


def model_loss(output: Any, targets: Tree = None) -> Tensor:  # a loss takes both
    """Return the loss that a model computes itself.

    `output.loss`, as models of `transformers` do given `labels`.

    Example:
        >>> model_loss({"loss": torch.tensor(2.0)})
        tensor(2.)
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        raise ModelError(
            "the model's output has no `loss`; give the model what it computes it from, as `labels`"
        )
    return cast("Tensor", loss)


def value_and_weight(targets: Tree) -> tuple[Tree, Tensor | None]:
    """Return targets, and the weight of each where it is beside them.

    Example:
        >>> value_and_weight({"value": torch.zeros(1), "weight": torch.ones(1)})
        (tensor([0.]), tensor([1.]))
        >>> value_and_weight(torch.zeros(1))
        (tensor([0.]), None)
    """
    if isinstance(targets, dict) and set(targets) == {"value", "weight"}:
        return targets["value"], targets["weight"]
    return targets, None


def as_loss(loss: Loss) -> Loss:
    """Return a loss of one number a batch.

    One of `reduction="none"` is the mean over its examples.
    """
    if not isinstance(loss, nn.Module) or getattr(loss, "reduction", None) != "none":
        return loss
    over_targets = type(loss) in _OVER_TARGETS
    weights = functools.partial(_counted, None, ignored_class(loss)) if over_targets else None
    return PerExample(loss, weights, of_torch=type(loss) in (*_OVER_TARGETS, *_OVER_ELEMENTS))


def on_device(loss: Loss, device: torch.device) -> Loss:
    """Return a loss with its tensors, such as weights of classes, on a device.

    Itself where they are there.

    Example:
        >>> on_device(nn.CrossEntropyLoss(weight=torch.ones(2)), torch.device("meta")).weight.device
        device(type='meta')
    """
    module = loss.each if isinstance(loss, PerExample) else loss
    if not isinstance(module, nn.Module):
        return loss
    if all(tensor.device == device for tensor in (*module.parameters(), *module.buffers())):
        return loss
    moved = copy.deepcopy(module).to(device)
    return replace(loss, each=moved) if isinstance(loss, PerExample) else moved


def is_over_classes(loss: Loss) -> bool:
    """Say whether a loss of torch takes an output for each class."""
    loss = loss.each if isinstance(loss, PerExample) else loss
    functions = (nn.functional.cross_entropy, nn.functional.nll_loss)
    return loss in functions or isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)


def ignored_class(loss: Loss) -> int:
    """Return the class that a loss ignores."""
    return int(
        getattr(loss.each if isinstance(loss, PerExample) else loss, "ignore_index", IGNORED)
    )


def known_per_example(loss: Loss) -> PerExample | None:
    """Return a loss by example, where it is declared so or is a mean of torch; None for any other.

    The class of the loss decides. A test on one batch would not do: in the next, a target may be
    ignored or a class may have another weight.
    """
    if isinstance(loss, PerExample):
        return loss
    kind = type(loss) if isinstance(loss, nn.Module) else loss
    over_targets = kind in _OVER_TARGETS
    if not over_targets and kind not in _OVER_ELEMENTS:
        return None
    if not isinstance(loss, nn.Module):
        plain = functools.partial(cast("Callable[..., Tensor]", loss), reduction="none")
        return PerExample(
            plain,
            functools.partial(_counted, None, IGNORED) if over_targets else None,
            of_torch=True,
        )
    if loss.reduction != "mean":
        return None  # a sum
    if not over_targets and getattr(loss, "weight", None) is not None:
        return None  # of the places in one batch
    each = copy.copy(loss)
    each.reduction = "none"  # type: ignore[assignment]  # a string, as it was
    weight = getattr(loss, "weight", None)
    counted = functools.partial(_counted, weight, ignored_class(loss)) if over_targets else None
    return PerExample(each, counted, of_torch=True)


def _counted(weight: Tensor | None, ignored: int, targets: Tensor) -> Tensor:
    """Return what each target counts in torch's mean over classes.

    Its class's weight, 0 where it is ignored.
    """
    if targets.is_floating_point():  # probabilities of classes: torch divides by their number
        return torch.ones_like(targets[:, 0], dtype=torch.long)
    kept = targets != ignored
    if weight is None:
        return kept.long()
    return torch.where(kept, weight.to(targets.device)[targets * kept], 0.0)


def _or_one(counts: Tensor) -> Tensor:
    return counts + (counts == 0)


def simplest(loss: PerExample, targets: Sequence[Tree]) -> PerExample:
    """Return the same loss, as a plain mean where every part of these targets counts 1, none being ignored."""
    if loss.weights is None or not loss.of_torch:
        return loss
    plain = all(bool((loss.weights(each) == 1).all()) for each in targets)
    return replace(loss, weights=None) if plain else loss


_OVER_TARGETS = (
    nn.functional.cross_entropy,
    nn.functional.nll_loss,
    nn.CrossEntropyLoss,
    nn.NLLLoss,
)
_OVER_ELEMENTS = (
    *(
        nn.functional.mse_loss,
        nn.functional.l1_loss,
        nn.functional.smooth_l1_loss,
        nn.functional.huber_loss,
    ),
    *(nn.functional.binary_cross_entropy, nn.functional.binary_cross_entropy_with_logits),
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss),
)
