"""What user 0 can learn of a peer's examples from what it sees: inputs reconstructed, members found.

    python benchmarks/leakage.py --data DIR --out leakage [--jobs 2] [--images 32]   # minutes
    python benchmarks/leakage.py --quick                               # digits alone, seconds

User 0 sees the gradient of one peer (*row*), the sum over several (*sum of 3*, *sum of 10*), or
that of a private peer that spends all of its ε on what is attacked here, which is the most that
user 0 can get of it.

Reconstruction, of one gradient at the first step, over a batch of 1, 8 or 32 examples of each peer,
whose labels user 0 is taken to know: by algebra, where the first layer is linear, and by search,
for a network of convolutions. *An image counts as reconstructed where a candidate correlates with
it by .8 or more, and with no other image of the set (of 2,000, or 1,797 digits) more.* Membership,
of 64 examples of each peer beside 500 strangers, after 20 gradients of batches of 16: by the loss
of the last model and by products of gradients; *area* is the share of pairs in which the member has
the larger score (.5 by chance), *found* how many members are found where 1 % of the strangers are
taken for members, and *found at most* what (ε, δ) allows of it. Errors are standard errors over
batches (of one batch: over its images), or over repetitions with other examples.

OUT/table.md has the tables of docs/privacy.md, OUT/leakage.png its figure. Noise is secret: no two
runs are alike.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from inversion import alike, by_algebra, by_search
from matplotlib.figure import Figure
from membership import scores, told_apart
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import coterie
from coterie.benchmark.sets import SETS, load
from coterie.engines.in_process.passes import Passes
from coterie.engines.peer.private_gradients import PrivateGradients
from coterie.privacy import Privacy
from coterie.privacy.accountant import least_noise

BATCHES, POOL, DELTA, CLIP, LEAST = (1, 8, 32), 2000, 1e-5, 1.0, 0.8
MEMBERS, STRANGERS, STEPS, SIZE, RATE = 64, 500, 20, 16, 0.5


@dataclass(frozen=True)
class View:
    """What user 0 sees: the sum over so many peers, or a private peer's gradient."""

    name: str
    peers: int = 1
    epsilon: float | None = None


VIEWS = [View("row"), View("sum of 3", 3), View("sum of 10", 10)]
VIEWS += [View(f"ε = {epsilon:g}", epsilon=epsilon) for epsilon in (8.0, 2.0, 0.5)]


@cache
def images(name: str, folder: Path | None) -> tuple[Tensor, Tensor]:
    """Return images of a set in an order of their own, with values in [0, 1], and their classes."""
    population = load(SETS[name], folder)
    order = torch.randperm(len(population.inputs), generator=torch.Generator().manual_seed(0))[
        :POOL
    ]
    inputs = torch.as_tensor(np.asarray(population.inputs))[order].float()
    return inputs / inputs.max(), torch.as_tensor(np.asarray(population.targets))[order]


def network(kind: str, side: int) -> nn.Module:
    """Return a network whose first layer is linear, or one of convolutions."""
    torch.manual_seed(0)
    if kind == "algebra":
        return nn.Sequential(
            nn.Flatten(), nn.Linear(side * side, 200), nn.ReLU(), nn.Linear(200, 10)
        )
    if kind == "membership":
        return nn.Sequential(nn.Flatten(), nn.Linear(side * side, 16), nn.ReLU(), nn.Linear(16, 10))
    stride = 2 if side > 8 else 1
    first, second = nn.Conv2d(1, 16, 5, stride, padding=2), nn.Conv2d(16, 32, 5, 2, padding=2)
    return nn.Sequential(
        first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(8 * (side // stride) ** 2, 10)
    )


def seen(
    passes: Passes, peers: Sequence[coterie.User], view: View, size: int, count: int
) -> Callable[[Tensor, int], Tensor]:
    """Return what gives, at a point and a step, that which user 0 sees of these peers, in `count` steps."""
    if view.epsilon is not None:
        private = PrivateGradients(peers[0], passes, Privacy(view.epsilon, DELTA, CLIP), count)
        return lambda x, step: private.gradient(x, event=private.event(size))

    def mean(x: Tensor, step: int) -> Tensor:
        batches = [peer.batch(min(size, len(peer)), seed=0, step=step) for peer in peers]
        return torch.stack([passes.single(x, *batch)[0] for batch in batches]).mean(0)

    return mean


@dataclass(frozen=True)
class Job:
    """A cell of the table of reconstructions: a set, an attack, a size of batches, and how much is tried."""

    name: str
    folder: Path | None
    kind: str
    batch: int
    images: int
    iterations: int


def reconstructed(job: Job, view: View) -> dict[str, Any]:
    """Return by batch how many of its images are reconstructed, and of some the original and the best candidate."""
    inputs, targets = images(job.name, job.folder)
    n = job.batch * view.peers
    times = max(1, job.images // n)
    passes = Passes(network(job.kind, inputs.shape[-1]), cross_entropy)
    x = passes.parameters.vector()
    places = torch.arange(times * n).view(times, n)
    gradients = []
    for place in places:
        each = place.view(view.peers, job.batch)
        peers = [coterie.User(f"{k}", inputs[some], targets[some]) for k, some in enumerate(each)]
        gradients.append(seen(passes, peers, view, job.batch, count=1)(x, 0).detach())
    if job.kind == "algebra":
        first = [passes.parameters.unflatten(gradient) for gradient in gradients]
        candidates = [by_algebra(part["1.weight"], part["1.bias"], n) for part in first]
    else:
        seen_all, shape = torch.stack(gradients), tuple(inputs.shape[1:])
        candidates = list(by_search(passes.model, seen_all, targets[places], shape, job.iterations))
    rates, shown = [], []
    for place, some in zip(places, candidates, strict=True):
        likeness = alike(some, inputs)
        right = (likeness.argmax(1)[:, None] == place) & (likeness[:, place] >= LEAST)
        rates.append(float(right.any(0).double().mean()))
        best = some[likeness[:, place].argmax(0)].view(n, *inputs.shape[2:])
        shown += list(zip(inputs[place, 0], best, strict=True))
    return {"rates": rates, "shown": [(a.numpy(), b.numpy()) for a, b in shown[:4]]}


def membership(
    name: str, folder: Path | None, view: View, repetition: int
) -> dict[str, tuple[float, float]]:
    """Return by attack how well members are told from strangers."""
    inputs, targets = images(name, folder)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(repetition))
    members, strangers, known = (
        order[: view.peers * MEMBERS],
        order[-STRANGERS:],
        order[-2 * STRANGERS : -STRANGERS],
    )
    peers = [
        coterie.User(f"{k}", inputs[some], targets[some])
        for k, some in enumerate(torch.split(members, MEMBERS))
    ]
    passes = Passes(network("membership", inputs.shape[-1]), cross_entropy)
    asked = torch.cat([members, strangers])
    clip, spread = 1e9, 0.0  # nothing is clipped
    if view.epsilon is not None:
        clip, spread = (
            CLIP,
            (least_noise(SIZE / MEMBERS, STEPS, view.epsilon, DELTA) * CLIP) ** 2 / SIZE,
        )
    by_attack = scores(
        passes,
        (inputs[asked], targets[asked]),
        (inputs[known], targets[known]),
        seen=seen(passes, peers, view, SIZE, STEPS),
        steps=STEPS,
        lr=RATE,
        clip=clip,
        spread=spread,
    )
    n = len(members)
    return {attack: told_apart(score[:n], score[n:]) for attack, score in by_attack.items()}


Results: TypeAlias = dict[tuple[Any, ...], Any]
"""What was found: by `Job` and `View`, or by set, folder, view and repetition."""


def work(given: tuple[Any, ...]) -> Any:
    """Do one thing, in a process of its own."""
    torch.set_num_threads(1)
    return reconstructed(*given) if isinstance(given[0], Job) else membership(*given)


def with_error(values: Sequence[float], *, percent: bool = False, of: int = 0) -> str:
    """Return a mean and its standard error as text; of one share, `of` so many, that of a binomial distribution.

    Example:
        >>> with_error([0.4, 0.6]), with_error([0.25], percent=True), with_error([0.25], percent=True, of=12)
        ('.50 ± .10', '25 %', '25 ± 12 %')
    """
    if not values:
        return ""
    mean, error = float(np.mean(values)), None
    if len(values) > 1:
        error = float(np.std(values, ddof=1)) / len(values) ** 0.5
    elif of:
        error = (mean * (1 - mean) / of) ** 0.5
    if percent:
        return f"{100 * mean:.0f}{'' if error is None else f' ± {100 * error:.0f}'} %"
    return " ± ".join(f"{each:.2f}".removeprefix("0") for each in (mean, error) if each is not None)


def tables(results: Results, asked: Sequence[tuple[Any, ...]]) -> str:
    """Return what was found of what was asked for as tables in Markdown."""
    lines = [
        "| set | attack | user 0 sees | " + " | ".join(f"batch {b}" for b in BATCHES) + " |",
        "|---" * 6 + "|",
    ]
    cells: dict[tuple[str, ...], dict[int, str]] = {}
    several: dict[tuple[str, View], list[dict[str, tuple[float, float]]]] = {}
    for given in asked:
        if isinstance(given[0], Job):
            job, view = given
            rates = results[given]["rates"] if given in results else []
            told = with_error(rates, percent=True, of=job.batch * view.peers)
            cells.setdefault((job.name, job.kind, view.name), {})[job.batch] = told
        elif given in results:
            several.setdefault((given[0], given[2]), []).append(results[given])
    lines += [
        f"| {' | '.join(head)} | {' | '.join(row[b] for b in BATCHES)} |"
        for head, row in sorted(cells.items(), key=_place)
    ]
    lines += [
        "",
        "| set | user 0 sees | by loss: area | found | by products: area | found | found at most |",
    ]
    lines += ["|---" * 7 + "|"]
    for (name, view), each in sorted(several.items(), key=_place):
        areas = [
            with_error([one[attack][place] for one in each], percent=place == 1)
            for attack in ("loss", "products")
            for place in (0, 1)
        ]
        bound = (
            ""
            if view.epsilon is None
            else f"{100 * min(1.0, 0.01 * np.exp(view.epsilon) + DELTA):.1f} %"
        )
        lines.append(f"| {name} | {view.name} | {' | '.join(areas)} | {bound} |")
    return "\n".join(lines) + "\n"


def _place(item: tuple[tuple[Any, ...], Any]) -> tuple[Any, ...]:
    """Return where a line stands: by set and attack, then what user 0 sees as in `VIEWS`."""
    *head, view = item[0]
    names = [each.name for each in VIEWS]
    return *head, names.index(view.name if isinstance(view, View) else view)


def figure(results: Results) -> Figure:
    """Draw two originals beside what was reconstructed of them, by set, attack and batch, and what user 0 sees."""
    blocks: dict[tuple[str, str, int], dict[View, list[Any]]] = {}
    for given, result in results.items():
        if isinstance(given[0], Job) and given[0].batch in BATCHES[:2]:
            blocks.setdefault((given[0].name, given[0].kind, given[0].batch), {})[given[1]] = (
                result["shown"]
            )
    drawn = Figure(figsize=(1.1 * (len(VIEWS) + 1), 0.62 * len(blocks)), layout="constrained")
    axes = drawn.subplots(len(blocks), len(VIEWS) + 1, squeeze=False)
    for row, ((name, kind, batch), pairs) in zip(
        axes, sorted(blocks.items(), key=lambda item: item[0]), strict=True
    ):
        columns = [
            [original for original, _ in pairs[VIEWS[0]]],
            *([best for _, best in pairs.get(v, [])] for v in VIEWS),
        ]
        for axis, shown in zip(row, columns, strict=True):
            if shown:
                both = np.hstack([_stretched(image) for image in shown[:2]])
                axis.imshow(both, cmap="gray_r", interpolation="nearest")
            axis.set(xticks=[], yticks=[])
        row[0].set_ylabel(
            f"{name}, {kind},\nbatch {batch}", fontsize=6, rotation=0, ha="right", va="center"
        )
    for axis, title in zip(axes[0], ["original", *(view.name for view in VIEWS)], strict=True):
        axis.set_title(title, fontsize=8)
    return drawn


def _stretched(image: Any) -> Any:
    """Return an image with values in [0, 1], since a candidate has no scale of its own."""
    low, high = np.min(image), np.max(image)
    return (image - low) / max(high - low, 1e-12)


def jobs(names: Sequence[str], options: argparse.Namespace) -> list[tuple[Any, ...]]:
    """Return what there is to do, of reconstructions the quick ones first."""
    views = [VIEWS[0], VIEWS[1], VIEWS[-1]] if options.quick else VIEWS
    reconstructions: list[tuple[Any, ...]] = [
        (Job(name, options.data, kind, batch, options.images, options.iterations), view)
        for name in names
        for kind in ("algebra", "search")
        for view in views
        for batch in BATCHES
    ]
    repetitions = range(options.repetitions)
    return reconstructions + [
        (name, options.data, view, k) for name in names for view in views for k in repetitions
    ]


def main() -> None:
    """Do everything, and write tables and figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, help="the folder that `coterie bench` reads sets from; MNIST needs it"
    )
    parser.add_argument("--out", type=Path, default=Path("leakage"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--images", type=int, default=32, help="how many are attacked in a cell, at least one batch"
    )
    parser.add_argument("--iterations", type=int, default=300, help="of the search")
    parser.add_argument("--repetitions", type=int, default=5, help="of membership")
    parser.add_argument(
        "--quick", action="store_true", help="digits alone, fewer views, iterations and repetitions"
    )
    options = parser.parse_args()
    if options.quick:
        options.images, options.iterations, options.repetitions = 8, 60, 2
    names = ["digits"] if options.quick else ["digits", "mnist"]
    for missing in [SETS[name].missing(options.data) for name in names]:
        if missing:
            print(f"{missing}; it is left out", flush=True)
    todo = jobs([name for name in names if not SETS[name].missing(options.data)], options)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options.out.mkdir(parents=True, exist_ok=True)
    results: Results = {}
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(work, given): given for given in todo}
        try:
            for future in as_completed(waiting):
                results[waiting[future]] = future.result()
                (options.out / "table.md").write_text(tables(results, todo), encoding="utf-8")
        except KeyboardInterrupt:  # what was found so far is shown
            pool.shutdown(wait=False, cancel_futures=True)
    if not options.quick:
        figure(results).savefig(options.out / "leakage.png", dpi=130)
    print(tables(results, todo))


if __name__ == "__main__":
    main()
