"""A CUDA stream beside the current one, so that independent work runs at the same time."""

import contextlib
from collections.abc import Callable, Iterator

import torch


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[Callable[[], None]]:
    """Run the body in a stream of its own; calling the function that is yielded waits for it.

    On a CPU there is one stream, and nothing to wait for.
    """
    if device.type != "cuda":
        yield lambda: None
        return
    here = torch.cuda.current_stream(device)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    if side == here:  # torch has so many streams, and gives them out in turn
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(here)
    with torch.cuda.stream(side):
        yield lambda: torch.cuda.current_stream(device).wait_stream(side)
