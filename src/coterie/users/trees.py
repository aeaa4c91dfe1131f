"""Nestings of tensors.

A tensor, or dicts, tuples and lists of them, with one row an example in each.

Every function takes the short way where there is no nesting.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

Tree: TypeAlias = Any
"""A tensor, or any nesting of dicts, tuples and lists of tensors."""

NOTHING: Tree = ()
"""The targets of examples that have none, since the model computes its loss from its inputs."""


def mapped(function: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """Return what a function makes of every tensor, nested in the same way."""
    return function(tree) if isinstance(tree, Tensor) else tree_map(function, tree)


def leaves(tree: Tree) -> list[Any]:
    """Return all tensors of a nesting."""
    return [tree] if isinstance(tree, Tensor) else tree_leaves(tree)


def n_rows(tree: Tree) -> int:
    """Return how many examples there are: the rows of the first tensor.

    Example:
        >>> n_rows({"ids": torch.zeros(3, 5), "mask": torch.ones(3, 5)})
        3
    """
    return len(tree) if isinstance(tree, Tensor) else len(tree_leaves(tree)[0])


def has_rows(tree: Tree, n: int) -> bool:
    """Say whether everything in a nesting is a tensor of n rows, so that it can be cut and joined."""
    return all(
        isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == n for leaf in leaves(tree)
    )


def device_of(tree: Tree) -> torch.device:
    """Return where the tensors are."""
    device: torch.device = leaves(tree)[0].device
    return device


def joined(trees: Sequence[Tree]) -> Tree:
    """Return the rows of several nestings that are alike, one after the other."""
    if len(trees) == 1:
        return trees[0]
    return together(torch.cat, trees)


def together(function: Callable[[list[Tensor]], Tensor], trees: Sequence[Tree]) -> Tree:
    """Return what a function makes of the tensors in each place of several nestings that are alike."""
    if isinstance(trees[0], Tensor):
        return function(list(trees))
    spec = tree_flatten(trees[0])[1]
    columns = zip(*map(tree_leaves, trees), strict=True)
    return tree_unflatten([function(list(column)) for column in columns], spec)


def split(tree: Tree, lengths: Sequence[int]) -> list[Tree]:
    """Return the rows in parts of these lengths."""
    if isinstance(tree, Tensor):
        return list(torch.split(tree, list(lengths)))
    flat, spec = tree_flatten(tree)
    columns = [torch.split(leaf, list(lengths)) for leaf in flat]
    return [
        tree_unflatten([column[part] for column in columns], spec) for part in range(len(lengths))
    ]


def each_row(tree: Tree, n: int) -> list[Tree]:
    """Return what is in each of the n rows, nested in the same way."""
    if isinstance(tree, Tensor):
        return list(tree)
    flat, spec = tree_flatten(tree)
    return [tree_unflatten([leaf[row] for leaf in flat], spec) for row in range(n)]


def called(model: Callable[..., Any], inputs: Tree) -> Any:
    """Return what a model makes of inputs: a dict is its keyword arguments, a tuple its arguments.

    Example:
        >>> called(lambda a, b: a - b, {"b": torch.ones(1), "a": torch.zeros(1)})
        tensor([-1.])
    """
    arguments, named = as_arguments(inputs)
    return model(*arguments, **named)


def as_arguments(inputs: Tree) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what a model is called with."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if type(inputs) is tuple else (inputs,)), {}


def form(tree: Tree) -> tuple[Any, ...]:
    """Return what nestings that can be joined have in common.

    Their nesting, and shape and dtype of a row.
    """
    if isinstance(tree, Tensor):
        return tree.shape[1:], tree.dtype
    flat, spec = tree_flatten(tree)
    return str(spec), *((leaf.shape[1:], leaf.dtype) for leaf in flat)


def described(tree: Tree) -> str:
    """Return the shapes, for a message.

    Example:
        >>> described((torch.zeros(2, 3), {"mask": torch.zeros(2)}))
        "((2, 3), {'mask': (2,)})"
    """
    return str(
        mapped(
            lambda leaf: tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__,
            tree,
        )
    )
