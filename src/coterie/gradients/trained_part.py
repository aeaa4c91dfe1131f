"""The trained part of a model, which is copied, kept and saved; frozen parameters are shared, named by a digest."""

import copy
import hashlib
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


def copied(thing: T, model: nn.Module | None = None) -> T:
    """Return a deep copy of a model, or of what holds it, that shares the memory of the frozen parameters.

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
            # A parameter of its own, so that moving the copy to a device does not move the model it is of.
            shared = nn.Parameter(parameter.data, requires_grad=False)
            vars(shared).update(vars(parameter))
            memo[id(parameter)] = shared
    return copy.deepcopy(thing, memo)


def trained_state(model: nn.Module) -> dict[str, Any]:
    """Return the model's `state_dict` without the frozen parameters."""
    frozen = _frozen(model)
    return {name: value for name, value in model.state_dict().items() if name not in frozen}


def load_trained_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what `trained_state` gave; a `RuntimeError` where it is of another model."""
    told = model.load_state_dict(state, strict=False)
    wrong = [*(name for name in told.missing_keys if name not in _frozen(model)), *told.unexpected_keys]
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
