"""What a step costs: its time, taken in turns with what it is compared with, and on a GPU its peak of memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import TypeAlias

import torch

Steps: TypeAlias = Callable[[int], None]
"""Takes so many steps."""

TURN = 64
"""How many steps a side takes in its turn, where that stays under a second: as many as batches are drawn ahead."""


def milliseconds(
    steps: dict[str, Steps], device: torch.device, seconds: float
) -> dict[str, list[float]]:
    """Return each side's time a step in milliseconds, turn by turn.

    The sides take turns, so that all see the same machine, many steps at a time, so that one side's
    use of the cache and the allocator is not charged to the next, and so that what happens once in
    many steps counts.
    """
    turn = max(2, min(TURN, int(1 / max(_seconds(step, 2, device) for step in steps.values()))))
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(next(iter(times.values()))) < 5:
        for name, step in steps.items():
            _seconds(step, max(1, turn // 8), device)
            times[name].append(1e3 * _seconds(step, turn, device))
    return times


def ratio(times: list[float], to: list[float]) -> float:
    """Return the median over rounds of turns of one side's time over another's, since a machine's load drifts."""
    return statistics.median(a / b for a, b in zip(times, to, strict=True))


def _seconds(steps: Steps, count: int, device: torch.device) -> float:
    """Return the seconds a step, over some steps that follow on each other as in training."""
    _wait(device)
    began = time.perf_counter()
    steps(count)
    _wait(device)
    return (time.perf_counter() - began) / count


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(build: Callable[[], Steps], device: torch.device) -> int:
    """Return the most bytes that a side holds at once on a GPU in its steps, what it was built with included.

    There is no such number for a CPU: torch's allocator does not see what NumPy holds, and a
    process's resident memory is too coarse.
    """
    gc.collect()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    steps = build()
    torch.cuda.reset_peak_memory_stats(device)
    steps(8)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def repeated(step: Callable[[], None]) -> Steps:
    """Return what takes a step again and again."""

    def steps(count: int) -> None:
        for _ in range(count):
            step()

    return steps


def captured(step: Callable[[], None]) -> Steps:
    """Return a step as a CUDA graph, warmed up and captured when it is first taken."""
    graph: torch.cuda.CUDAGraph | None = None

    def steps(count: int) -> None:
        nonlocal graph
        if graph is None:
            warm_up = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            warm_up.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(warm_up):
                repeated(step)(3)
            torch.cuda.current_stream().wait_stream(warm_up)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
        for _ in range(count):
            graph.replay()

    return steps
