"""From what users give to nestings of tensors: arrays, nested lists, items of data sets, batches of their own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.data import default_collate

from coterie.errors import DataError
from coterie.users.trees import NOTHING, Tree, leaves

Array: TypeAlias = Tensor | np.ndarray[Any, Any] | Sequence[Any] | Mapping[str, Any]
"""What one row an example can be had from: a tensor, an array, nested lists, or dicts and tuples of those."""

Collate: TypeAlias = Callable[[list[Any]], Any]
"""Makes a batch of a list of items: a pair (inputs, targets), or one dict."""


def as_tree_pair(data: Any, whose: str) -> tuple[Tree, Tree]:
    """Return inputs and targets as nestings of tensors."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        kind = f"{type(data).__name__} of {len(data)}" if isinstance(data, tuple | list) else type(data).__name__
        raise DataError(f"the examples of {whose} must be a pair (inputs, targets), got {kind}")
    inputs, targets = data
    made = as_tree(inputs, "inputs", whose)
    if not leaves(made):
        raise DataError(f"the inputs of {whose} hold no tensor; give one row an example")
    return made, NOTHING if targets is None else _as_classes(as_tree(targets, "targets", whose))


def as_tree(values: Any, what: str, whose: str) -> Tree:
    """Return a nesting of tensors: dicts and tuples as they are, and lists where they hold tensors."""
    if isinstance(values, Mapping):
        return {key: as_tree(value, what, whose) for key, value in values.items()}
    if isinstance(values, tuple | list) and any(_has_rows(value) for value in values):
        return type(values)(as_tree(value, what, whose) for value in values)
    return _as_tensor(values, what, whose)


def collated(items: list[Any], collate: Collate | None, target: str | None) -> tuple[Tree, Tree]:
    """Return the inputs and targets of several items, as `collate` makes them, or stacked when it is None."""
    if collate is not None:
        return as_tree_pair(pair_of(collate(items), target), "a batch made by `collate`")
    inputs, targets = zip(*(pair_of(item, target) for item in items), strict=True)
    return _stacked(inputs), NOTHING if targets[0] is None else _as_classes(_stacked(targets))


def pair_of(item: Any, target: str | None) -> tuple[Any, Any]:
    """Return input and target of an item: of a tuple the last is the target, of a dict that which `target` names.

    Example:
        >>> pair_of({"ids": 1, "label": 2}, "label"), pair_of((1, 2, 3), None), pair_of({"ids": 1}, None)
        (({'ids': 1}, 2), ((1, 2), 3), ({'ids': 1}, None))
    """
    if isinstance(item, Mapping):
        if target is None:
            return item, None
        if target not in item:
            raise DataError(f"an example has no {target!r}, its target; it has {', '.join(map(str, item))}")
        return {key: value for key, value in item.items() if key != target}, item[target]
    if isinstance(item, tuple | list):
        *inputs, last = item
        return (last, None) if not inputs else (inputs[0] if len(inputs) == 1 else tuple(inputs), last)
    return item, None


def _stacked(values: Sequence[Any]) -> Tree:
    """Return several examples as one nesting; floats of Python or NumPy take the default dtype."""
    plain, spec = tree_flatten(values[0], is_leaf=_is_numbers)
    columns = zip(*(tree_leaves(value, is_leaf=_is_numbers) for value in values), strict=True)
    try:
        made = [
            default_collate([np.asarray(v) if isinstance(v, list) else v for v in column]) for column in columns
        ]
    except (RuntimeError, TypeError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise DataError(
            f"examples cannot be stacked: {why}; where their sizes differ, give `collate`, which makes a batch "
            "of a list of examples"
        ) from error
    for leaf, value in zip(made, plain, strict=True):
        if not isinstance(leaf, Tensor):
            raise DataError(f"an example holds {value!r}, which is no number; encode it as numbers")
    return tree_unflatten([_default(leaf, value) for leaf, value in zip(made, plain, strict=True)], spec)


def _default(tensor: Tensor, value: Any) -> Tensor:
    if isinstance(value, Tensor) or not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.get_default_dtype())


def _as_classes(targets: Tree) -> Tree:
    """Return targets with classes as torch's losses take them: whole numbers of 64 bits."""
    short = (torch.uint8, torch.int8, torch.int16, torch.int32)
    return targets.long() if isinstance(targets, Tensor) and targets.dtype in short else targets


def _is_numbers(value: Any) -> bool:
    """Say whether a value is a list of numbers, which is one leaf."""
    return isinstance(value, list) and all(isinstance(each, int | float) for each in value)


def _has_rows(value: Any) -> bool:
    """Say whether a value is a part of a nesting: it holds a tensor or an array that has rows."""
    if isinstance(value, Mapping):
        return True
    if isinstance(value, tuple | list):
        return any(map(_has_rows, value))
    return isinstance(value, Tensor | np.ndarray) and value.ndim > 0


def _as_tensor(values: Any, what: str, whose: str) -> Tensor:
    """Return a tensor; floating-point arrays take torch's default dtype, as lists do in `torch.tensor`."""
    if isinstance(values, Tensor):
        if values.layout is not torch.strided or values.is_meta:
            kind = "on the meta device" if values.is_meta else f"{values.layout}"
            raise DataError(f"the {what} of {whose} are {kind}; make them dense numbers first: `tensor.to_dense()`")
        tensor = values.detach()
    else:
        try:
            tensor = torch.as_tensor(np.require(values, requirements=("C", "W")))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"the {what} of {whose} cannot be made a tensor: {error}; encode them as numbers, or give "
                "`collate` where examples have unequal sizes"
            ) from error
        if tensor.is_floating_point():
            tensor = tensor.to(torch.get_default_dtype())
    if not tensor.ndim:
        raise DataError(f"the {what} of {whose} must have one row an example, got a single number")
    return tensor
