"""The cost of one collaborative step over its floor, all sides timed in one run.

The floor is one forward and backward pass of the same examples, user 0's and all peers', in one batch that
lies ready, plus the optimizer's update; on a GPU also captured as a CUDA graph, and then that is what ratios are
to. Beside it: the whole step of `coterie` (draw the batches, the passes, the rule, the update) by the average path,
as `WeightedAveraging` and as `BiasCorrection`, and by the rows path, and a plain loop over users.

    python benchmarks/step_cost.py [--device cuda] [--threads 1] [--models mlp,cnn,resnet] [--peers 10 50] [--json]

Memory is the peak of each side's tensors, the users' examples left out, each side on its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from measured import Step, captured, milliseconds, peak_bytes, ratio
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


class Block(nn.Module):
    """Two convolutions beside a short cut, with GroupNorm in the place of BatchNorm."""

    def __init__(self, wide: int, wider: int, stride: int) -> None:
        super().__init__()
        self.long = nn.Sequential(
            nn.Conv2d(wide, wider, 3, stride, padding=1, bias=False),
            nn.GroupNorm(32, wider),
            nn.ReLU(),
            nn.Conv2d(wider, wider, 3, padding=1, bias=False),
            nn.GroupNorm(32, wider),
        )
        changes = nn.Sequential(nn.Conv2d(wide, wider, 1, stride, bias=False), nn.GroupNorm(32, wider))
        self.short = nn.Identity() if (wide, stride) == (wider, 1) else changes

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the block's output."""
        return torch.relu(self.long(inputs) + self.short(inputs))


def resnet() -> nn.Module:
    """Return ResNet-18 for images of 32 × 32, with GroupNorm: 11,173,962 parameters."""
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    blocks = [Block(a, b, 1 if a == b else 2) for a, b in pairwise(widths)]
    stem = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.GroupNorm(32, 64), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (1, 28, 28)),
    "cnn": (cnn, (1, 28, 28)),
    "resnet": (resnet, (3, 32, 32)),
}
"""By name: what makes a model, and the shape of its inputs."""


@dataclass(frozen=True)
class Setting:
    """A model, the users it is trained with, examples a user and step, and where."""

    make: Callable[[], nn.Module]
    everyone: Sequence[coterie.User]
    batch: int
    device: torch.device

    @classmethod
    def of(
        cls, make: Callable[[], nn.Module], shape: Sequence[int], n_peers: int, batch: int, device: torch.device
    ) -> Setting:
        """Return a setting whose users have random images and labels, four batches each."""
        generator, examples = torch.Generator().manual_seed(0), 4 * batch
        everyone = [
            coterie.User(
                f"user {k}",
                torch.randn(examples, *shape, generator=generator),
                torch.randint(10, (examples,), generator=generator),
            )
            for k in range(n_peers + 1)
        ]
        return cls(make, everyone, batch, device)

    def model(self) -> nn.Module:
        """Return the model where it is wanted."""
        return self.make().to(self.device)

    def ready_batch(self) -> tuple[Tensor, Tensor]:
        """Return one batch of every user's examples."""
        drawn = [user.batch(self.batch, seed=0, step=0) for user in self.everyone]
        inputs, targets = (torch.cat(column).to(self.device) for column in zip(*drawn, strict=True))
        return inputs, targets

    def example_bytes(self) -> int:
        """Return how much memory the users' examples take, once."""
        held = [user.examples for user in self.everyone if isinstance(user.examples, coterie.examples.InMemory)]
        return sum(tensor.nbytes for e in held for tensor in (e.inputs, e.targets))


def floor(setting: Setting) -> Step:
    """Return one pass of all examples in one batch that lies ready, and the update."""
    model, (inputs, targets) = setting.model(), setting.ready_batch()
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        sgd.zero_grad()
        torch.autograd.backward(cross_entropy(model(inputs), targets))
        sgd.step()

    return step


def loop(setting: Setting) -> Step:
    """Return a plain loop over users, whose batches lie ready, and the update."""
    model, ready = setting.model(), setting.ready_batch()
    batches = list(zip(*(torch.split(column, setting.batch) for column in ready), strict=True))
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        sgd.zero_grad()
        for inputs, targets in batches:
            torch.autograd.backward(cross_entropy(model(inputs), targets) / len(batches))
        sgd.step()

    return step


def ours(setting: Setting, rule: coterie.Rule, rows: bool = False) -> Step:
    """Return the whole step of `coterie`: batches, gradients, rule, update."""
    model, (me, *peers) = setting.model(), setting.everyone
    engine = coterie.InProcess(model, cross_entropy, me, peers, batch_size=setting.batch)
    parameters = Parameters(model)
    x = parameters.share()
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    state, weights, taken = rule.init(x), rule.weights(engine.names), 0

    def step() -> None:
        nonlocal state, taken
        direction, state = rule(engine.gradients(x, taken, weights, rows), state)
        parameters.set_gradient(direction)
        sgd.step()
        taken += 1

    return step


SIDES: dict[str, Callable[[Setting], Step]] = {
    "captured floor": lambda setting: captured(floor(setting)),
    "floor": floor,
    "average": partial(ours, rule=coterie.WeightedAveraging(alpha=0.5)),
    "corrected": partial(ours, rule=coterie.BiasCorrection(alpha=0.5, beta=0.1)),
    "rows": partial(ours, rule=coterie.WeightedAveraging(alpha=0.5), rows=True),
    "loop": loop,
}
"""By name, what builds one step of each side; those called captured need a GPU. Ratios are to the first."""


def sides(setting: Setting, names: Sequence[str] | None = None) -> dict[str, Step]:
    """Return one step of each side, ready to be timed: of all that the device allows when no names are given."""
    possible = [name for name in SIDES if setting.device.type == "cuda" or "captured" not in name]
    return {name: SIDES[name](setting) for name in names or possible}


def costs(setting: Setting, seconds: float, names: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Return the milliseconds a step and the megabytes of each side, and its ratios to the first side's."""
    steps = sides(setting, names)
    chosen, times = list(steps), milliseconds(steps, setting.device, seconds)
    del steps  # so that each side's memory is its own
    memory = {name: float(peak_bytes(partial(SIDES[name], setting), setting.device)) for name in chosen}
    for name in chosen:
        memory[name] -= 0 if "floor" in name or name == "loop" else setting.example_bytes()
    return {
        "ms": {name: statistics.median(times[name]) for name in chosen},
        "time_ratio": {name: ratio(times[name], times[chosen[0]]) for name in chosen},
        "MB": {name: memory[name] / 1e6 for name in chosen},
        "memory_ratio": {name: memory[name] / memory[chosen[0]] for name in chosen},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--models", default=None, help="all on a GPU, mlp,cnn on a CPU when not given")
    parser.add_argument("--peers", type=int, nargs="+", default=[10])
    parser.add_argument("--batch", type=int, default=32, help="examples a user")
    parser.add_argument("--seconds", type=float, default=20, help="time to spend on each model and number of peers")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    names = options.models.split(",") if options.models else list(MODELS)[: 3 if device.type == "cuda" else 2]
    for name in names:
        for n_peers in options.peers:
            setting = Setting.of(*MODELS[name], n_peers, options.batch, device)
            found = costs(setting, options.seconds)
            if options.json:
                line = {"model": name, "n_peers": n_peers, "batch": options.batch, "device": options.device}
                print(json.dumps(line | found), flush=True)
            else:
                print(f"{name}, {n_peers} peers × {options.batch} examples\n{table(found)}\n", flush=True)


def table(found: dict[str, dict[str, float]]) -> str:
    """Return a line for each measure."""
    lines = [" " * 10 + "".join(f"{name:>16}" for name in found["ms"])]
    lines += [
        f"{what:>10}" + "".join(f"{value:>16.2f}" for value in values.values()) for what, values in found.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
