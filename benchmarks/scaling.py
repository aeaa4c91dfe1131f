"""How the cost of a collaborative step grows with the peers and with the parameters, over its floor.

    python benchmarks/scaling.py [--device cuda] [--threads 1] [--json] [--plot scaling.png]

Two sweeps, with the sides of `step_cost.py`: time a step and, on a GPU, peak of memory by the
average path and the rows path, against one pass of the same examples in one batch.

- peers: 1 to 1,000 of them share the same number of examples, with a network of
  `--fixed-parameters`;
- parameters: 10⁴ to 10⁸ of them, with 10 peers and 32 examples a user.

Rows are measured only where they fit into `--rows-gb`, and models only where eight copies fit into
half of the memory that is free. At the end all numbers of peers are timed in turns with each other
on the average path, since between two points of a sweep the machine may have changed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from measured import Steps, milliseconds, ratio
from step_cost import SIDES, Setting, costs
from torch import nn

SHAPE = (784,)
FEW = 10
"""How many peers there are in the sweep over parameters."""


def network(parameters: int) -> nn.Module:
    """Return a network 784-h-h-10 of about so many parameters: h² + 796 h + 10."""
    h = max(1, round(math.sqrt(398**2 + parameters) - 398))
    return nn.Sequential(nn.Linear(784, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 10))


def shared(examples: int, n_peers: int) -> int:
    """Return how many examples each user has where all of them together have so many."""
    return max(1, round(examples / (n_peers + 1)))


def free_bytes(device: torch.device) -> int:
    """Return how much memory is free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def line(
    options: argparse.Namespace, sweep: str, n_peers: int, parameters: int, batch: int
) -> dict[str, Any]:
    """Return what is measured at one point of a sweep."""
    device = torch.device(options.device)
    setting = Setting.of(partial(network, parameters), SHAPE, n_peers, batch, device)
    d = sum(p.numel() for p in setting.make().parameters())
    names = ["floor", "average"]
    if 4 * d * n_peers <= options.rows_gb * 1e9:
        names.append("rows")
    measured = costs(setting, options.seconds, {name: SIDES[name] for name in names})
    where = {"sweep": sweep, "n_peers": n_peers, "parameters": d, "examples": (n_peers + 1) * batch}
    return where | {"device": options.device, **measured}


def sweeps(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure every point of both sweeps."""
    for n_peers in options.peers:
        batch = shared(options.examples, n_peers)
        yield line(options, "peers", n_peers, int(options.fixed_parameters), batch)
    for parameters in map(int, options.parameters):
        if 8 * 4 * parameters <= free_bytes(torch.device(options.device)) / 2:
            yield line(options, "parameters", FEW, parameters, 32)


def shown(one: dict[str, Any]) -> str:
    """Return a line of the table: the floor, and each side's ratios to it in time and, on a GPU, memory."""
    (floor, ms), *_ = one["ms"].items()
    memory = {name: f" ({x:.2f})" for name, x in one.get("memory_ratio", {}).items()}
    ratios = [f"{name} {x:.2f}{memory.get(name, '')}" for name, x in one["time_ratio"].items()]
    sizes = f"{one['n_peers']:>5} peers {one['parameters']:>11,} parameters {one['examples']:>6,} examples"
    held = f", {one['MB'][floor]:.1f} MB" if memory else ""
    return f"{sizes}   {floor} {ms:.2f} ms{held}   × " + "   ".join(ratios[1:])


def growth(options: argparse.Namespace) -> dict[str, Any]:
    """Return the time of the average path at each number of peers over that at the first, all in turns."""
    device, make = torch.device(options.device), partial(network, int(options.fixed_parameters))
    steps: dict[str, Steps] = {}
    for n_peers in options.peers:
        setting = Setting.of(make, SHAPE, n_peers, shared(options.examples, n_peers), device)
        steps[str(n_peers)] = SIDES["average"](setting)
    times = milliseconds(steps, device, options.seconds * len(steps))
    first = times[str(FEW if FEW in options.peers else options.peers[0])]
    return {
        "sweep": "growth",
        "time_ratio": {name: ratio(each, first) for name, each in times.items()},
    }


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    """Draw ratios to the floor against peers and against parameters, in time and, on a GPU, in memory."""
    measures = [ratios for ratios in ("time_ratio", "memory_ratio") if ratios in lines[0]]
    figure = Figure(figsize=(9, 3 * len(measures)), layout="constrained")
    panels = figure.subplots(len(measures), 2, sharey="row", squeeze=False)
    for column, (sweep, key) in enumerate((("peers", "n_peers"), ("parameters", "parameters"))):
        points = [one for one in lines if one["sweep"] == sweep]
        for row, ratios in enumerate(measures):
            panel = panels[row][column]
            for name in ("average", "rows"):
                at = [(p[key], p[ratios][name]) for p in points if name in p[ratios]]
                if at:
                    panel.plot(*zip(*at, strict=True), marker="o", label=name)
            panel.axhline(1, color="0.6", linewidth=1)
            panel.set(
                xscale="log",
                yscale="log",
                xlabel=sweep,
                ylabel=f"{ratios.removesuffix('_ratio')}, × the floor" if not column else "",
            )
    panels[0][0].legend(frameon=False)
    figure.savefig(path)


def main() -> None:
    """Measure, print, plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--peers", type=int, nargs="*", default=[1, 10, 90, 1000])
    parser.add_argument(
        "--examples", type=int, default=2002, help="of all users together, in the sweep over peers"
    )
    parser.add_argument(
        "--fixed-parameters", type=float, default=1e5, help="in the sweep over peers"
    )
    parser.add_argument("--parameters", type=float, nargs="*", default=[1e4, 1e5, 1e6, 1e7, 1e8])
    parser.add_argument(
        "--rows-gb", type=float, default=2.0, help="the most that all peers' gradients may take"
    )
    parser.add_argument("--seconds", type=float, default=15, help="time to spend on each point")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--plot", type=Path, default=None, help="a picture, .png or .svg")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lines = []
    for one in sweeps(options):
        lines.append(one)
        print(json.dumps(one) if options.json else shown(one), flush=True)
    if len(options.peers) > 1:
        one = growth(options)
        grown = ", ".join(
            f"{n_peers} {100 * (x - 1):+.1f} %" for n_peers, x in one["time_ratio"].items()
        )
        print(
            json.dumps(one)
            if options.json
            else f"average path at equal examples, by peers: {grown}"
        )
    if options.plot:
        plot(lines, options.plot)


if __name__ == "__main__":
    main()
