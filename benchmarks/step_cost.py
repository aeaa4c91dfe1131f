"""The cost of one collaborative step over its floor, all sides timed in one run.

The floor is one forward and backward pass of the same examples, user 0's and all peers', in one batch that
lies ready, plus the optimizer's update. Beside it: the whole step of `coterie` (draw the batches, the
passes, the rule, the update) by the average path and by the rows path, and a plain loop over users.

    python benchmarks/step_cost.py [--device cuda] [--threads 1] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import coterie
from coterie.parameters import Parameters


def mlp() -> nn.Module:
    """Return a network of 159,010 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))


def cnn() -> nn.Module:
    """Return a network of 1,663,370 parameters, as is usual for handwritten characters by writer."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(3136, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def users(n_peers: int, examples: int) -> list[coterie.User]:
    """Return users with random images and labels."""
    generator = torch.Generator().manual_seed(0)
    return [
        coterie.User(
            f"user {k}",
            torch.randn(examples, 1, 28, 28, generator=generator),
            torch.randint(10, (examples,), generator=generator),
        )
        for k in range(n_peers + 1)
    ]


def ready_batch(everyone: list[coterie.User], batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return one batch of every user's examples."""
    drawn = [user.batch(batch, seed=0, step=0) for user in everyone]
    inputs, targets = (torch.cat(column).to(device) for column in zip(*drawn, strict=True))
    return inputs, targets


def sides(
    make: Callable[[], nn.Module], n_peers: int, batch: int, device: torch.device
) -> dict[str, Callable[[], None]]:
    """Return one step of each side, ready to be timed."""
    everyone = users(n_peers, 4 * batch)
    inputs, targets = ready_batch(everyone, batch, device)
    plain = make().to(device)
    sgd = torch.optim.SGD(plain.parameters(), lr=1e-3)

    def floor() -> None:
        sgd.zero_grad()
        torch.autograd.backward(cross_entropy(plain(inputs), targets))
        sgd.step()

    def loop() -> None:
        total: list[Tensor] | None = None
        for x, y in zip(torch.split(inputs, batch), torch.split(targets, batch), strict=True):
            found = torch.autograd.grad(cross_entropy(plain(x), y), list(plain.parameters()))
            total = list(found) if total is None else [t.add_(f) for t, f in zip(total, found, strict=True)]
        for p, gradient in zip(plain.parameters(), total or [], strict=True):
            p.grad = gradient / (n_peers + 1)
        sgd.step()

    def ours(rows: bool) -> Callable[[], None]:
        model = make().to(device)
        engine = coterie.InProcess(model, cross_entropy, everyone[0], everyone[1:], batch_size=batch)
        parameters = Parameters(model)
        x = parameters.share()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        rule = coterie.WeightedAveraging(alpha=0.5)
        state, weights, step = rule.init(x), rule.weights(engine.names), 0

        def one_step() -> None:
            nonlocal state, step
            direction, state = rule(engine.gradients(x, step, weights, rows), state)
            parameters.set_gradient(direction)
            optimizer.step()
            step += 1

        return one_step

    return {"floor": floor, "average": ours(rows=False), "rows": ours(rows=True), "loop": loop}


def medians(steps: dict[str, Callable[[], None]], device: torch.device, seconds: float) -> dict[str, float]:
    """Return each side's median time in milliseconds.

    The sides take turns, so that all see the same machine, some steps at a time, so that one side's use of
    the cache and the allocator is not charged to the next.
    """

    def timed(step: Callable[[], None]) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for step in steps.values():
        for _ in range(5):
            timed(step)
    times: dict[str, list[float]] = {name: [] for name in steps}
    turn = max(2, min(50, int(0.25 / timed(steps["floor"]))))
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times["floor"]) < 10:
        for name, step in steps.items():
            times[name] += [timed(step) for _ in range(turn)][turn // 5 :]
    return {name: 1e3 * statistics.median(found) for name, found in times.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--peers", type=int, nargs="+", default=[10])
    parser.add_argument("--batch", type=int, default=32, help="examples a user")
    parser.add_argument("--seconds", type=float, default=15, help="time to spend on each line")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    if not options.json:
        print(f"{'model':<6}{'peers':>6}{'floor ms':>10}{'average':>10}{'rows':>8}{'loop':>8}   (× the floor)")
    for name, make in {"mlp": mlp, "cnn": cnn}.items():
        for n_peers in options.peers:
            found = medians(sides(make, n_peers, options.batch, device), device, options.seconds)
            ratios = {side: found[side] / found["floor"] for side in ("average", "rows", "loop")}
            if options.json:
                line = {"model": name, "n_peers": n_peers, "device": options.device, "floor_ms": found["floor"]}
                print(json.dumps(line | {f"{side}_ratio": ratio for side, ratio in ratios.items()}), flush=True)
            else:
                shown = "".join(
                    f"{ratios[side]:>{w}.2f}" for side, w in (("average", 10), ("rows", 8), ("loop", 8))
                )
                print(f"{name:<6}{n_peers:>6}{found['floor']:>10.2f}{shown}", flush=True)


if __name__ == "__main__":
    main()
