"""How users may share a pass through a model, learned by trying it once on real batches before training."""

import contextlib
import random
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from coterie.engines.in_process.by_layer import ByLayer
from coterie.engines.in_process.copies import Copies
from coterie.engines.in_process.passes import Passes, Weights
from coterie.engines.in_process.sampler import Batches
from coterie.errors import ModelError
from coterie.evaluation.evaluate import evaluation_mode
from coterie.evaluation.losses import (
    PerExample,
    ignored_class,
    is_over_classes,
    known_per_example,
    simplest,
)
from coterie.users.examples import InMemory, plain_targets
from coterie.users.sampling import one_thread
from coterie.users.trees import Tree, described, has_rows, joined, leaves, mapped, n_rows
from coterie.users.user import Loss, User

NOT_BY_ROW = "the model's output is not a tensor of one row an example"
AS_ASKED = "as asked"


@dataclass(frozen=True)
class ModelSupport:
    """How the users' batches may be passed through a model."""

    # why users must be taken one by one; None where their batches may share a pass
    one_by_one: str | None = None
    # why rows need a loop over users; None where `torch.func.vmap` can do it
    loop: str | None = None
    # why the model cannot be passed in many copies; None where `vmap` can do it
    not_stacked: str | None = None
    moved: frozenset[str] = frozenset()  # the model's buffers that the forward pass changes
    random: bool = False  # whether the forward pass or the loss draws random numbers

    @property
    def moves_buffers(self) -> bool:
        """Whether the forward pass changes any of the model's buffers."""
        return bool(self.moved)

    @property
    def batch_dependent(self) -> bool:
        """Whether another size of batches may mean another objective, as with BatchNorm."""
        return bool(self.moved) or (self.one_by_one not in (None, AS_ASKED) and not self.random)


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Switch TensorFloat32 off.

    With it, two ways to compute the same numbers differ by hundredths.
    """
    places: tuple[Any, Any] = (torch.backends.cudnn, torch.backends.cuda.matmul)
    with one_thread():
        before = [place.allow_tf32 for place in places]
        for place in places:
            place.allow_tf32 = False
        try:
            yield
        finally:
            for place, allowed in zip(places, before, strict=True):
                place.allow_tf32 = allowed


@contextlib.contextmanager
def warnings_as_errors() -> Iterator[None]:
    """Let what this thread is warned of be an error inside; other threads are warned as ever."""
    mine, otherwise = threading.get_ident(), warnings.showwarning

    def show(message: Warning | str, *about: Any, **more: Any) -> None:
        if threading.get_ident() == mine and isinstance(message, Warning):
            raise message
        otherwise(message, *about, **more)

    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        yield


@full_precision()
def probe(
    passes: Passes,
    x: Tensor,
    batch: tuple[Tree, Tree],
    users: Sequence[User],
    *,
    together: bool = True,
) -> tuple[Any, ModelSupport]:
    """Return the output on user 0's batch and how batches may be passed.

    A misfit is a `ModelError`.
    """
    inputs, targets = batch
    before, random_before = passes.buffers(), _random_state(x.device)
    buffers = passes.buffers()
    output = _check_fit(passes, x, inputs, targets, buffers)
    # in evaluation mode some models draw random numbers, and not in training; what fails is told
    # where the model is evaluated
    with contextlib.suppress(Exception), torch.no_grad(), evaluation_mode(passes.model):
        passes.output(x, inputs, passes.buffers())
    draws = random_before != _random_state(x.device)
    moved = frozenset(name for name in before if not torch.equal(before[name], buffers[name]))
    if draws:
        one_by_one: str | None = (
            "the model draws random numbers, which belong to (seed, user, step)"
        )
    elif moved:
        one_by_one = "the model moves its buffers, which only user 0 may"
    else:
        passes.per_example = _per_example(passes.loss, users) if together else None
        one_by_one = _why_one_by_one(passes, x, inputs, output, targets) if together else AS_ASKED
    loop = one_by_one
    if one_by_one in (None, NOT_BY_ROW):
        passes.whole = one_by_one is not None
        loop = _why_loop(passes, x, inputs, targets)
        one_by_one = loop and one_by_one
        passes.whole = passes.whole and loop is None
    if one_by_one is not None or passes.whole:
        passes.per_example = None
    not_stacked = loop
    if None not in (loop, passes.per_example):
        not_stacked = _why_not_stacked(passes, x, inputs, targets, str(loop))
    return output, ModelSupport(one_by_one, loop, not_stacked, moved, draws)


def check_classes(loss: Loss, output: Any, users: Sequence[User]) -> None:
    """Check that every class of every user has an output.

    On a GPU a stray one would end the process.
    """
    if not is_over_classes(loss) or not isinstance(output, Tensor):
        return
    ignored = ignored_class(loss)
    parts = [
        (user.name, part) for user in users for part in (user.examples, user.validation, user.test)
    ]
    for name, examples in parts:
        targets = plain_targets(examples)
        if targets is None or targets.is_floating_point():
            continue
        stray = targets[(targets != ignored) & ((targets < 0) | (targets >= output.shape[1]))]
        if stray.numel():
            raise ModelError(
                f"user {name!r} has the class {int(stray[0])}, but the model has outputs for"
                f" classes 0 to {output.shape[1] - 1}; number the classes from 0 and widen the last"
                " layer"
            )


def _check_fit(
    passes: Passes, x: Tensor, inputs: Tree, targets: Tree, buffers: dict[str, Tensor]
) -> Any:
    """Return the output on a batch once the model takes the inputs and the loss takes the output."""
    try:
        with torch.no_grad():
            output = passes.output(x, inputs, buffers)
    except Exception as error:
        raise ModelError(
            f"the model does not take user 0's inputs of shape {described(inputs)}: {error}; change"
            " the inputs or the model"
        ) from error

    def misfit(why: str) -> ModelError:
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        about = f"the model's output ({got}) does not fit the loss with targets"
        return ModelError(f"{about} {described(targets)}: {why}")

    try:
        # torch only warns where mse_loss would broadcast wrongly
        with torch.no_grad(), warnings_as_errors():
            loss = passes.loss(output, targets)
    except Exception as error:
        part = ", such as `lambda output, y: loss(output.logits, y)`"
        if isinstance(output, Tensor):
            part = ""
        raise misfit(f"{error}; change the last layer, the targets or the loss{part}") from error
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        got = (
            f"{tuple(loss.shape)} numbers"
            if isinstance(loss, Tensor) and loss.numel() > 1
            else repr(loss)
        )
        raise misfit(
            f"the loss must return one number, the mean over the batch, got {got}; declare a loss"
            " per example by `coterie.per_example`"
        )
    if isinstance(passes.loss, PerExample) and len(passes.loss.parts(output, targets)[0]) != n_rows(
        inputs
    ):
        raise misfit(
            f"a loss per example must return one number for each of {n_rows(inputs)} examples"
        )
    try:
        passes.single(x, inputs, targets, passes.buffers())
    except Exception as error:
        if not torch.is_grad_enabled():
            raise ModelError(
                "gradients are off: call it outside of `torch.no_grad` and the like"
            ) from error
        raise ModelError(f"the loss of the model's output has no gradient: {error}") from error
    return output


def _why_one_by_one(
    passes: Passes, x: Tensor, inputs: Tree, output: Any, targets: Tree
) -> str | None:
    """Return why users' batches may not share a pass, as far as the output shows, or the loss of each example."""
    norms = [module for module in passes.model.modules() if isinstance(module, _BatchNorm)]
    if any(norm.training or norm.running_mean is None for norm in norms):
        return "the model normalises over the batch"
    n = n_rows(inputs)
    loss = passes.loss if isinstance(passes.loss, PerExample) and not has_rows(output, n) else None
    if loss is None and not has_rows(output, n):
        return NOT_BY_ROW
    kept = max(1, n // 2)
    some = mapped(lambda leaf: leaf[:kept], inputs) if n > 1 else _with_zeros(inputs)
    with torch.no_grad():
        half = passes.output(x, some)
        if loss is not None:
            theirs = (
                mapped(lambda leaf: leaf[:kept], targets) if n > 1 else joined([targets, targets])
            )
            half, output = loss.parts(half, theirs)[0], loss.parts(output, targets)[0]
    for ours, whole in zip(leaves(half), leaves(output), strict=True):
        if not torch.allclose(ours[:kept], whole[:kept], rtol=1e-2, atol=1e-4, equal_nan=True):
            return "the model's output for one example depends on the others"
    return None


def _with_zeros(inputs: Tree) -> Tree:
    return mapped(lambda leaf: torch.cat([leaf, torch.zeros_like(leaf)]), inputs)


def _why_loop(passes: Passes, x: Tensor, inputs: Tree, targets: Tree) -> str | None:
    """Return why `vmap` cannot compute rows; note on `passes` whether it can map the loss alone."""
    twice = Batches([0, 1], joined([inputs, inputs]), joined([targets, targets]))
    why = None
    with warnings_as_errors():  # vmap warns where it would fall back to a slow loop of its own
        try:
            passes.average(x, [twice], Weights.of([0.5, 0.5], [twice], x))
        except Exception:  # a loss may fail under vmap in any way; the loop then serves
            passes.vmap_loss = False
        for plain in (False, True):  # attention in one kernel cannot be mapped, its products can
            passes.plain_attention = plain
            try:
                passes.mapped(x, twice, x.new_empty(2, len(x)))
            except Exception as error:  # so may a model
                why = (
                    why or f"torch.func.vmap does not take this model: {str(error).splitlines()[0]}"
                )
            else:
                return None
    passes.plain_attention = False
    return why


def _why_not_stacked(
    passes: Passes, x: Tensor, inputs: Tree, targets: Tree, loop: str
) -> str | None:
    """Return why the model cannot be passed in copies, where it cannot be mapped over batches.

    A model that looks at its inputs, as for a mask that masks nothing, can be mapped over
    parameters: its batches then go one after the other.
    """
    points = torch.stack([x, 1.01 * x])
    n = n_rows(inputs)
    passes.batches_apart = True
    with warnings_as_errors():
        for plain in (False, True):
            passes.plain_attention = plain
            try:
                copies = Copies(passes)
                batch = [mapped(lambda leaf: leaf[None], tree) for tree in (inputs, targets)]
                counts = copies.counts(batch[1])
                mean = 1 / n if counts is None else 1 / counts.sum()
                shares = (points.new_zeros(1, 2, n) + mean).to(x)
                gradients = copies.gradients(points[None], shares, *batch)[0][0]
            except Exception:  # noqa: S112  # a model may fail under vmap in any way
                continue
            alone = torch.stack([passes.single(point, inputs, targets)[0] for point in points])
            if bool((gradients - alone).norm() <= 1e-2 * alone.norm()):
                return None
    passes.batches_apart = passes.plain_attention = False
    return loop


@full_precision()
def layers_of(passes: Passes, inputs: Tree, targets: Tree) -> ByLayer | None:
    """Return what gives rows by layer, where it gives two users' gradients as a plain loop does.

    Whatever a model does with its parameters outside its layers, or with the order of examples,
    changes the gradients. They are compared at a point where no parameter is zero by chance, on
    examples that differ.
    """
    layers = ByLayer(passes.model, passes.parameters)
    if layers.unknown_layer:
        return None
    if n_rows(inputs) == 1:
        inputs, targets = _with_zeros(inputs), joined([targets, targets])
    even = n_rows(inputs) // 2 * 2
    batch = Batches([0, 1], *(mapped(lambda leaf: leaf[:even], tree) for tree in (inputs, targets)))
    x = passes.parameters.vector()
    noise = torch.randn(len(x), generator=torch.Generator().manual_seed(0), dtype=x.dtype).to(
        x.device
    )
    x = x + 0.1 * x.square().mean().sqrt().clamp(min=0.1) * noise
    try:
        alone = torch.stack([passes.single(x, *one)[0] for one in batch.each()])
        rows = torch.full_like(alone, torch.nan)
        layers.bytes_an_example = passes.write_by_layer(x, layers, [batch], rows)
    except (
        Exception
    ):  # a layer may be called in a way that is not foreseen; then mapping serves, or a loop
        return None
    lengths = zip(
        *(passes.parameters.unflatten(each).values() for each in (rows - alone, alone)), strict=True
    )
    slight = 1e-4 * alone.norm()
    same = all(bool(error.norm() <= 1e-2 * size.norm() + slight) for error, size in lengths)
    return layers if same else None


def _per_example(loss: Loss, users: Sequence[User]) -> PerExample | None:
    """Return the loss of each example, where the loss is known to be a mean over them."""
    known = known_per_example(loss)
    if known is None or isinstance(loss, PerExample) or known.weights is None:
        return known
    held = [user.examples.targets for user in users if isinstance(user.examples, InMemory)]
    plain = simplest(known, held)
    if len(held) < len(users) and plain.weights is None:
        return None  # what is not in memory may have targets that are ignored
    return plain


def _random_state(device: torch.device) -> tuple[object, ...]:
    """Return where all global generators are."""
    on_gpu = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    tensors = [state.numpy().tobytes() for state in (torch.get_rng_state(), *on_gpu)]
    numpy: Any = np.random.get_state()
    return (*tensors, numpy[1].tobytes(), *numpy[2:], random.getstate())
