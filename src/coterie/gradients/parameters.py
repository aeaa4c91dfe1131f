"""A model's trainable parameters as one flat vector, the form that rules and engines use; whether one is finite."""

import copy
import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from coterie.errors import ModelError


class Parameters:
    """The layout of a model's trainable parameters in a flat vector x.

    Frozen parameters are not in it; tied ones are in it once.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> parameters = Parameters(model)
        >>> parameters.size, list(parameters.unflatten(torch.arange(3.0)))
        (3, ['weight', 'bias'])
    """

    def __init__(self, model: nn.Module) -> None:
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.named:
            raise ModelError(
                "the model has no trainable parameter; set `requires_grad` on those to train"
            )
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise ModelError(
                f"the model is wrapped in {type(model).__name__}; give what is inside:"
                " `model.module`"
            )
        if hasattr(model, "_orig_mod"):  # each of coterie's passes would be compiled anew
            raise ModelError(
                "the model is compiled; give what it was compiled from, `model._orig_mod`, and for"
                " speed `ForwardOptions(compile=True)`"
            )
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            raise ModelError(
                "a scripted module (torch.jit.script) cannot be passed with other parameters; give"
                " the module that it was made from, and for speed `ForwardOptions(compile=True)`"
            )
        for name, p in self.named.items():
            if isinstance(p, UninitializedParameter):
                raise ModelError(
                    f"the parameter {name!r} has no shape yet; pass one batch through the model"
                    " first"
                )
            if p.is_meta:
                raise ModelError(
                    f"the parameter {name!r} has no numbers: it is on the meta device; load the"
                    " model"
                )
            if not p.is_floating_point():
                raise ModelError(
                    f"the parameter {name!r} is {p.dtype}; train floating-point numbers:"
                    " `model.float()`"
                )
            if p._backward_hooks or p._post_accumulate_grad_hooks:
                raise ModelError(
                    f"the parameter {name!r} has a hook on its gradient, which would not be called:"
                    " directions are made of many users' gradients; remove the hook, and to clip"
                    " give `clip_norm`"
                )
        kinds = {(p.dtype, p.device) for p in self.named.values()}
        if len(kinds) > 1:
            mixture = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            raise ModelError(
                f"trainable parameters must share one dtype and device, got {mixture}; use"
                " `model.to`"
            )
        ((self.dtype, self.device),) = kinds
        self.tied = _tied(model)
        self.owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in self.named}
        self.shapes = [p.shape for p in self.named.values()]
        self.lengths = [p.numel() for p in self.named.values()]
        self.size = sum(self.lengths)

    def vector(self) -> Tensor:
        """Return a copy of the parameters as a flat vector."""
        return self.flatten(p.detach() for p in self.named.values())

    @staticmethod
    def flatten(tensors: Iterable[Tensor]) -> Tensor:
        """Return tensors laid out as the parameters are, as one flat vector."""
        return torch.cat([tensor.reshape(-1) for tensor in tensors])

    def unflatten(self, x: Tensor) -> dict[str, Tensor]:
        """Return views of a flat vector, by parameter name.

        Of a stack of vectors, the stacks of their pieces.
        """
        pieces = zip(self.named, torch.split(x, self.lengths, dim=-1), self.shapes, strict=True)
        return {name: piece.reshape(x.shape[:-1] + shape) for name, piece, shape in pieces}

    def share(self, x: Tensor | None = None) -> Tensor:
        """Make the model's parameters views of one flat vector, and return it.

        A change of the parameters in place, such as an optimizer's, is then a change of the vector,
        and conversely.

        Args:
            x: the vector; a new one of the parameters as they are when None.
        """
        x = self.vector() if x is None else x
        for p, view in zip(self.named.values(), self.unflatten(x).values(), strict=True):
            p.data = view
        return x

    def load(self, x: Tensor) -> None:
        """Give the model's parameters the values of a flat vector."""
        with torch.no_grad():
            for p, view in zip(self.named.values(), self.unflatten(x).values(), strict=True):
                p.copy_(view)

    def are_views_of(self, x: Tensor) -> bool:
        """Say whether the model's parameters are views of this vector, as after `share`."""
        first, *_, last = (*self.named.values(), *self.named.values())
        end = x.data_ptr() + (x.numel() - self.lengths[-1]) * x.element_size()
        return x.numel() == self.size and (first.data_ptr(), last.data_ptr()) == (x.data_ptr(), end)

    def with_tied(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add to parameters and buffers by name those that are tied to them, for `functional_call`.

        Call that with `tie_weights=False`: of a module that has two names, it would itself leave
        the values in the place of the module's own parameters.
        """
        values.update({other: values[name] for other, name in self.tied.items() if name in values})
        return values

    def set_gradient(self, direction: Tensor) -> None:
        """Make the parameters' `.grad` views of a flat direction, which the optimizer may change."""
        for p, view in zip(self.named.values(), self.unflatten(direction).values(), strict=True):
            p.grad = view


def _tied(model: nn.Module) -> dict[str, str]:
    """Return the other names of tied parameters and buffers, and by what name each comes first.

    What has two names because its module has is in one place, and has no other name here.
    """
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    places: set[tuple[int, str]] = set()
    for names in (model.named_parameters, model.named_buffers):
        for name, tensor in names(remove_duplicate=False):
            owner, _, kind = name.rpartition(".")
            place = id(model.get_submodule(owner)), kind
            if place not in places and id(tensor) in first:
                tied[name] = first[id(tensor)]
            first.setdefault(id(tensor), name)
            places.add(place)
    return tied


T = TypeVar("T")


def copied(thing: T, model: nn.Module | None = None, x: Tensor | None = None) -> T:
    """Return a deep copy of a model, or of what holds it, that shares the memory of the frozen parameters.

    The others are views of the flat vector `x`, where given.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1))
        >>> other = copied(model)
        >>> [a.data_ptr() == b.data_ptr() for a, b in zip(model.parameters(), other.parameters())]
        [True, True, False, False]
    """
    model = thing if isinstance(thing, nn.Module) else model
    memo: dict[int, Any] = {}
    for parameter in model.parameters() if model is not None else ():
        if not parameter.requires_grad and type(parameter) is nn.Parameter:
            # A parameter of its own, so that moving the copy to a device does not move the model it
            # is of.
            shared = nn.Parameter(parameter.data, requires_grad=False)
            vars(shared).update(vars(parameter))
            memo[id(parameter)] = shared
    if x is not None and model is not None:
        parameters = Parameters(model)
        for name, view in parameters.unflatten(x).items():
            held = memo[id(parameters.named[name])] = nn.Parameter(view)
            vars(held).update(vars(parameters.named[name]))
    return copy.deepcopy(thing, memo)


def trained_state(model: nn.Module) -> dict[str, Any]:
    """Return the model's `state_dict` without the frozen parameters."""
    frozen = _frozen(model)
    return {name: value for name, value in model.state_dict().items() if name not in frozen}


def load_trained_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what `trained_state` gave; a `RuntimeError` where it is of another model."""
    told = model.load_state_dict(state, strict=False)
    wrong = [
        *(name for name in told.missing_keys if name not in _frozen(model)),
        *told.unexpected_keys,
    ]
    if wrong:
        raise RuntimeError(f"these do not fit: {', '.join(wrong)}")


def frozen_digest(model: nn.Module) -> str:
    """Return a digest of the parameters that are not trained, which do not travel and must be alike everywhere."""
    digest = hashlib.blake2b(digest_size=8)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            digest.update(name.encode())
            digest.update(_bytes(parameter))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> Any:
    """Return the bytes of a tensor, of bfloat16 as those of float32."""
    plain = tensor.detach().cpu().contiguous()
    plain = plain.float() if plain.dtype == torch.bfloat16 else plain  # NumPy has no bfloat16
    return plain.flatten().view(torch.uint8).numpy()


def _frozen(model: nn.Module) -> set[str]:
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if not parameter.requires_grad}


def is_finite(vector: Tensor) -> bool:
    """Say whether every entry is finite, in one pass over the vector."""
    # a finite sum has finite terms; overflow too can make it infinite, and only then each is checked
    return math.isfinite(vector.sum().item()) or bool(vector.isfinite().all())


class FiniteLater:
    """Whether a vector is finite.

    The check starts now and is read later, so the host need not wait for a GPU.
    """

    def __init__(self, vector: Tensor) -> None:
        self._vector, self._total = vector, vector.sum()
        self._copied: torch.Event | None = None
        if vector.is_cuda:
            host = torch.empty_like(self._total, device="cpu", pin_memory=True)
            self._total = host.copy_(self._total, non_blocking=True)
            self._copied = torch.cuda.current_stream().record_event()

    def read(self) -> bool:
        """Return the answer; see `is_finite`."""
        if self._copied is not None:
            self._copied.synchronize()
        # A finite sum has finite terms. Overflow too can make the sum infinite; only then is each
        # term checked.
        return math.isfinite(self._total.item()) or bool(self._vector.isfinite().all())


def finite_rows(rows: Tensor) -> Tensor:
    """Say of every row, in the last dimension, whether all its entries are finite, in one pass over them.

    Example:
        >>> finite_rows(torch.tensor([[1.0, 2.0], [3e38, 3e38], [torch.inf, -torch.inf]]))
        tensor([ True,  True, False])
    """
    finite = rows.sum(-1).isfinite()
    if not finite.all():  # overflow too can make a sum infinite; only then is each term checked
        finite = rows.isfinite().all(-1)
    return finite
