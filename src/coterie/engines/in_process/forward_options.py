"""How a batch passes through a model: options that PyTorch's users know by these names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.arguments import FLAG, check_fields
from coterie.errors import KnobError
from coterie.users.trees import Tree, device_of, mapped


@dataclass(frozen=True)
class ForwardOptions:
    """How batches pass through a model in training.

    The model is probed and evaluated in full precision.

    Args:
        autocast: `torch.bfloat16`, for `torch.autocast`; outputs come back as float32, as are the
            loss, gradients and all that follows.
        channels_last: images are laid out channels last, which GPUs are faster with in low
            precision.
        compile: the passes that all peers share and user 0's own go through `torch.compile`.

    Example:
        >>> ForwardOptions(autocast=torch.bfloat16).through(torch.nn.Linear(2, 1), torch.ones(3, 2)).dtype
        torch.float32
    """

    autocast: torch.dtype | None = None
    channels_last: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        if self.autocast not in (None, torch.bfloat16):
            raise KnobError(f"`autocast` must be None or torch.bfloat16, got {self.autocast!r}")
        check_fields(self, {"channels_last": FLAG, "compile": FLAG})

    def through(self, forward: Callable[[Tree], Any], inputs: Tree) -> Any:
        """Return what a forward pass makes of inputs."""
        if self.channels_last:
            inputs = mapped(_channels_last, inputs)
        if self.autocast is None:
            return forward(inputs)
        # no weight is used twice
        with torch.autocast(device_of(inputs).type, self.autocast, cache_enabled=False):
            output = forward(inputs)
        return mapped(_full, output)


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def _full(output: Any) -> Any:
    return output.float() if isinstance(output, Tensor) and output.is_floating_point() else output


DEFAULT_FORWARD = ForwardOptions()
"""In full precision, in the layout that the examples have, as the model is written."""
