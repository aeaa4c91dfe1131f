"""What a step costs: its time, taken in turns with the steps it is compared with, and its peak of memory."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch.autograd.profiler import profile

Step: TypeAlias = Callable[[], None]

TURN = 64
"""How many steps a side takes in its turn, where that stays under a second: as many as batches are drawn ahead."""


def milliseconds(steps: dict[str, Step], device: torch.device, seconds: float) -> dict[str, list[float]]:
    """Return each side's time a step in milliseconds, turn by turn.

    The sides take turns, so that all see the same machine, many steps at a time, so that one side's use of
    the cache and the allocator is not charged to the next, and so that what happens once in many steps counts.
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


def _seconds(step: Step, count: int, device: torch.device) -> float:
    """Return the seconds a step, over some steps that follow on each other as in training."""
    _wait(device)
    began = time.perf_counter()
    for _ in range(count):
        step()
    _wait(device)
    return (time.perf_counter() - began) / count


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(build: Callable[[], Step], device: torch.device) -> int:
    """Return the most bytes of tensors that a side holds at once in its steps, what it was built with included.

    On a GPU as its allocator counts them. On a CPU as torch's allocator tells its profiler, which leaves out what
    the libraries behind torch take for themselves; a process's resident memory would be too coarse.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        step = build()
        torch.cuda.reset_peak_memory_stats(device)
        for _ in range(3):
            step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would tell of its starts and stops
    with profile(use_kineto=True, profile_memory=True) as building:
        step = build()
    with profile(use_kineto=True, profile_memory=True) as stepping:
        for _ in range(3):
            step()
    return sum(_changes(building)) + max(accumulate(_changes(stepping), initial=0))


def _changes(profiled: profile) -> list[int]:
    """Return every allocation and, as a negative number, every release, in order."""
    events: list[Any] = profiled.kineto_results.events() if profiled.kineto_results else []
    found = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return [size for _, size in found]


def captured(step: Step) -> Step:
    """Return a step as a CUDA graph, warmed up and captured when it is first taken."""
    graph: torch.cuda.CUDAGraph | None = None

    def replay() -> None:
        nonlocal graph
        if graph is None:
            warm_up = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            warm_up.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(warm_up):
                for _ in range(3):
                    step()
            torch.cuda.current_stream().wait_stream(warm_up)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
        graph.replay()

    return replay
