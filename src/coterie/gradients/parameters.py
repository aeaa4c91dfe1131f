"""A model's trainable parameters as one flat vector, the form that rules and engines use."""

from collections.abc import Iterable

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
            raise ModelError("the model has no trainable parameter; set `requires_grad` on those to train")
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise ModelError(f"the model is wrapped in {type(model).__name__}; give what is inside: `model.module`")
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            raise ModelError(
                "a scripted module (torch.jit.script) cannot be passed with other parameters; give the module that "
                "it was made from, and for speed `ForwardOptions(compile=True)`"
            )
        for name, p in self.named.items():
            if isinstance(p, UninitializedParameter):
                raise ModelError(f"the parameter {name!r} has no shape yet; pass one batch through the model first")
            if p.is_meta:
                raise ModelError(f"the parameter {name!r} has no numbers: it is on the meta device; load the model")
            if not p.is_floating_point():
                raise ModelError(
                    f"the parameter {name!r} is {p.dtype}; train floating-point numbers: `model.float()`"
                )
            if p._backward_hooks or p._post_accumulate_grad_hooks:
                raise ModelError(
                    f"the parameter {name!r} has a hook on its gradient, which would not be called: directions are "
                    "made of many users' gradients; remove the hook, and to clip give `clip_norm`"
                )
        kinds = {(p.dtype, p.device) for p in self.named.values()}
        if len(kinds) > 1:
            mixture = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            raise ModelError(f"trainable parameters must share one dtype and device, got {mixture}; use `model.to`")
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
        """Return views of a flat vector, by parameter name; of a stack of vectors, the stacks of their pieces."""
        pieces = zip(self.named, torch.split(x, self.lengths, dim=-1), self.shapes, strict=True)
        return {name: piece.reshape(x.shape[:-1] + shape) for name, piece, shape in pieces}

    def share(self, x: Tensor | None = None) -> Tensor:
        """Make the model's parameters views of one flat vector, and return it.

        A change of the parameters in place, such as an optimizer's, is then a change of the vector, and conversely.

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

        Call that with `tie_weights=False`: of a module that has two names, it would itself leave the values in the
        place of the module's own parameters.
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
