"""How time and memory of a whole run grow with rows, peers, parameters and users.

    python benchmarks/growth.py [--grows rows,peers] [--by adaptive,averaging] [--largest 1e5]
    [--plot growth.png] [--json]
    python benchmarks/growth.py --smallest

What grows: *rows*, user 0's own, beside 5 peers of 100 each; *peers*, of 10 rows each, beside 100
own rows (both: 10 columns, a linear model, 200 steps); *columns* of a linear model, 10 peers of
32 rows; *parameters* of a network 784-h-h-10, 10 peers of 32 rows, 24 steps; *users* of
`train_everyone`, 20 rows each.

By whom: *closed form* (`Mixture`, linear models only), *adaptive* (`AdaptiveAveraging`), *averaging*
(`WeightedAveraging(0.5)`) and *fedavg*. Each cell has a process of its own and one thread. Time is
the processor's, of the call of `train`. Memory is how much more than before it the process holds at
most, data and model made; for parameters in copies of the model. The exponents are slopes of the
logarithms over the two largest sizes.

`--smallest` measures no time: it counts operations, the bytes that they write and what is exchanged
at two small sizes of each, which do not depend on the machine. A test bounds how they grow.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import coterie

SIZES = {
    "rows": [10**3, 10**4, 10**5, 10**6],
    "peers": [10, 10**2, 10**3, 10**4],
    "columns": [10, 10**2, 10**3, 10**4],
    "parameters": [10**5, 10**6, 10**7],
    "users": [31, 100, 250, 500],
}
SMALLEST = {
    "rows": [500, 2000],
    "peers": [20, 80],
    "columns": [20, 80],
    "parameters": [10_000, 40_000],
    "users": [5, 10],
}
STEPS_COUNTED = 20
RULES: dict[str, Callable[[], Any]] = {
    "closed form": coterie.Mixture,
    "adaptive": coterie.AdaptiveAveraging,
    "averaging": lambda: coterie.WeightedAveraging(0.5),
    "fedavg": coterie.methods.FedAvg,
}


class Cell(NamedTuple):
    """One thing to measure."""

    grows: str
    by: str
    size: int

    @property
    def is_network(self) -> bool:
        """Whether the model is one."""
        return self.grows == "parameters"


def cells(grows: list[str], by: list[str], sizes: dict[str, list[int]]) -> Iterator[Cell]:
    """Return all cells, the smallest first."""
    for one in grows:
        for size in sizes[one]:
            yield from (
                Cell(one, each, size) for each in by if one != "parameters" or each != "closed form"
            )


def problem(cell: Cell) -> tuple[nn.Module, Any, list[coterie.User], int]:
    """Return the model, the loss, all users, user 0 first, and the steps."""
    torch.manual_seed(0)
    columns, steps, peers, own, theirs = 10, 200, 5, 100, 100
    if cell.grows == "rows":
        own = cell.size
    elif cell.grows == "peers":
        peers, theirs = cell.size, 10
    elif cell.grows == "columns":
        columns, peers, own, theirs = cell.size, 10, 32, 32
    elif cell.is_network:
        columns, peers, own, theirs, steps = 784, 10, 32, 32, 24
    else:
        peers, own, theirs = cell.size - 1, 20, 20
    direction = torch.randn(columns) / math.sqrt(columns)

    def user(name: str, n: int) -> coterie.User:
        inputs = torch.randn(n, columns)
        outputs = inputs @ (direction + 0.3 / math.sqrt(columns) * torch.randn(columns))
        noisy = outputs + 0.5 * torch.randn(n)
        if cell.is_network:
            return coterie.User(name, inputs, (noisy.abs() * 5).long().clamp(max=9))
        return coterie.User(name, inputs, noisy[:, None])

    users = [user("me", own), *(user(f"peer {k}", theirs) for k in range(peers))]
    if not cell.is_network:
        return nn.Linear(columns, 1), nn.functional.mse_loss, users, steps
    h = max(1, round(math.sqrt(398**2 + cell.size) - 398))
    network = nn.Sequential(
        nn.Linear(784, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 10)
    )
    return network, nn.functional.cross_entropy, users, steps


def run(cell: Cell, made: tuple[nn.Module, Any, list[coterie.User], int]) -> list[coterie.Run]:
    """Train, and return the runs."""
    model, loss, users, steps = made
    rule = RULES[cell.by]()
    how: dict[str, Any] = {"progress": False, "measure": False, "guard": "off"}
    if cell.by != "closed form":
        how |= {"lr": 0.01, "steps": steps // 10 if cell.by == "fedavg" else steps}
    if cell.grows == "users":
        return list(coterie.train_everyone(model, loss, users, rule, **how).runs.values())
    return [coterie.train(model, loss, users[0], users[1:], rule, **how)]


def status(name: str) -> int:
    """Return a line of this process's status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def measured(cell: Cell) -> dict[str, float]:
    """Return processor seconds and how much more memory is held at most."""
    torch.set_num_threads(1)
    run(
        cell._replace(size=SMALLEST[cell.grows][0]),
        problem(cell._replace(size=SMALLEST[cell.grows][0])),
    )
    made = problem(cell)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, began = status("VmRSS"), time.process_time()
    run(cell, made)
    took, held = time.process_time() - began, status("VmHWM") - before
    copies = {"copies": held / (4 * sum(p.numel() for p in made[0].parameters()))}
    return {"seconds": took, "MB": held / 1e6, **(copies if cell.is_network else {})}


class Counting(TorchDispatchMode):
    """Counts torch's operations, and the bytes that they write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one operation."""
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        self.bytes += sum(t.nbytes for t in tree_leaves(out) if isinstance(t, Tensor))
        return out


def counted(cell: Cell) -> dict[str, int]:
    """Return what does not depend on the machine: operations, bytes, gradients and exchanges."""
    *made, _ = problem(cell)
    tracemalloc.start()
    with Counting() as counts:
        runs = run(cell, (*made, STEPS_COUNTED))
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    costs = [cost for each in runs for cost in each.record.end.costs.values()]
    return {
        "operations": counts.operations,
        "bytes": counts.bytes,
        "held": held,
        "gradients": sum(cost.gradients for cost in costs),
        "numbers sent": sum(cost.numbers_sent for cost in costs),
    }


def child(cell: Cell, limit: float) -> dict[str, float] | None:
    """Return what a process of its own measures; None where it took too long."""
    command = [sys.executable, __file__, "--cell", json.dumps(cell)]
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    try:
        done = subprocess.run(  # noqa: S603
            command,
            env=os.environ | one,
            capture_output=True,
            text=True,
            check=False,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        print(done.stderr[-1500:], file=sys.stderr)
        return None
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(found: dict[Cell, dict[str, float] | None]) -> str:
    """Return a line for each kind of growth and measure."""
    lines = []
    for grows in dict.fromkeys(cell.grows for cell in found):
        these = {cell: got for cell, got in found.items() if cell.grows == grows}
        sizes, by = (
            sorted({cell.size for cell in these}),
            list(dict.fromkeys(cell.by for cell in these)),
        )
        for what in next((list(got) for got in these.values() if got), []):
            lines.append(
                f"{grows + ', ' + what:24}" + "".join(f"{n:>12,}" for n in sizes) + "   exponent"
            )
            for each in by:
                values = [(these.get(Cell(grows, each, n)) or {}).get(what) for n in sizes]
                shown = "".join(f"{'-' if v is None else f'{v:.3g}':>12}" for v in values)
                lines.append(f"  {each:22}{shown}   {exponent(sizes, values)}")
    return "\n".join(lines)


def exponent(sizes: list[int], values: list[float | None]) -> str:
    """Return the slope of the logarithms over the two largest sizes that were measured."""
    known = [(n, v) for n, v in zip(sizes, values, strict=True) if v and v > 0][-2:]
    if len(known) < 2:
        return "-"
    (n, v), (m, w) = known
    return f"{math.log(w / v) / math.log(m / n):.2f}"


def plot(found: dict[Cell, dict[str, float] | None], path: Path) -> None:
    """Draw time and memory against each size, by logarithms."""
    grown = list(dict.fromkeys(cell.grows for cell in found))
    figure = Figure(figsize=(3 * len(grown), 5.5), layout="constrained")
    panels = figure.subplots(2, len(grown), squeeze=False)
    for column, grows in enumerate(grown):
        for row, what in enumerate(("seconds", "MB")):
            panel = panels[row][column]
            for by in RULES:
                points = [
                    (cell.size, got[what])
                    for cell, got in found.items()
                    if (cell.grows, cell.by) == (grows, by) and got
                ]
                if points:
                    panel.plot(*zip(*points, strict=True), marker="o", label=by)
            panel.set(xscale="log", yscale="log", xlabel=grows, ylabel="" if column else what)
    panels[0][0].legend(frameon=False)
    figure.savefig(path)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grows", default="rows,peers,columns,parameters,users")
    parser.add_argument("--by", default=",".join(RULES))
    parser.add_argument("--largest", type=float, default=math.inf, help="leave out larger sizes")
    parser.add_argument("--limit", type=float, default=120, help="seconds that a cell may take")
    parser.add_argument("--smallest", action="store_true", help="count, at two small sizes")
    parser.add_argument("--plot", type=Path, default=None, help="a picture, .png or .svg")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        print(json.dumps(measured(Cell(*json.loads(options.cell)))))
        return
    sizes = SMALLEST if options.smallest else SIZES
    found: dict[Cell, dict[str, float] | None] = {}
    slow = set[tuple[str, str]]()  # what took too long is not tried at a larger size
    for cell in cells(options.grows.split(","), options.by.split(","), sizes):
        if cell.size > options.largest or (cell.grows, cell.by) in slow:
            continue
        found[cell] = dict(counted(cell)) if options.smallest else child(cell, options.limit)
        if found[cell] is None:
            slow.add((cell.grows, cell.by))
        if options.json:
            print(json.dumps(cell._asdict() | (found[cell] or {})), flush=True)
        else:
            print(*cell, found[cell], file=sys.stderr, flush=True)
    if not options.json:
        print(table(found))
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
