"""The cost of one collaborative step over its floor, all sides timed in one run.

The floor is one forward and backward pass of the same examples, user 0's and all peers', in one
batch that lies ready, plus the optimizer's update. Beside it the whole step of `coterie` (draw the
batches, the passes, the rule, the update): by the average path, as `WeightedAveraging` and as
`BiasCorrection`; by the rows path, with their mean for a rule and as `CosineSimilarity`; and a
plain loop over users. On a GPU the floor and ours are captured as CUDA graphs, as `train` does by
default, and the floor and averaging are also measured without.

    python benchmarks/step_cost.py [--device cuda] [--threads 1] [--models mlp,cnn,resnet]
        [--peers 10 50] [--json]
    python benchmarks/step_cost.py --device cuda --models cnn,resnet --forward-options

`--forward-options` compares averaging in full precision with `ForwardOptions`: bfloat16, channels
last, compiled. On a GPU memory is measured too: the peak of each side on its own, the users'
examples left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from measured import Steps, captured, milliseconds, peak_bytes, ratio, repeated
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import coterie
from coterie import ForwardOptions
from coterie.engines.in_process.forward_options import DEFAULT_FORWARD
from coterie.learners.captured import Captured, StackBlock
from coterie.learners.learner import RuleLearner
from coterie.recording.costs import Costs
from coterie.rules.similarity import CosineSimilarity
from coterie.users.examples import InMemory


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
        changes = nn.Sequential(
            nn.Conv2d(wide, wider, 1, stride, bias=False), nn.GroupNorm(32, wider)
        )
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


AVERAGING = coterie.WeightedAveraging(alpha=0.5)

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
        cls,
        make: Callable[[], nn.Module],
        shape: Sequence[int],
        n_peers: int,
        batch: int,
        device: torch.device,
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
        held = [user.examples for user in self.everyone if isinstance(user.examples, InMemory)]
        return sum(tensor.nbytes for e in held for tensor in (e.inputs, e.targets))


class MeanOfRows(coterie.WeightedAveraging):
    """Averaging of every peer's gradient: the least that a rule which needs rows can do."""

    needs_rows = True

    def __call__(self, g: coterie.Gradients, state: coterie.State) -> tuple[Tensor, coterie.State]:
        """Return (1 − α) g_0 + α mean g_k."""
        if g.rows is None:
            raise AssertionError("rows were asked for")
        return torch.lerp(g.own, g.rows.mean(0), self.alpha), {**state, "step": state["step"] + 1}  # type: ignore[arg-type]  # no function here


def floor(setting: Setting) -> Callable[[], None]:
    """Return one pass of all examples in one batch that lies ready, and the update."""
    model, (inputs, targets) = setting.model(), setting.ready_batch()
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        sgd.zero_grad()
        torch.autograd.backward(cross_entropy(model(inputs), targets))
        sgd.step()

    return step


def loop(setting: Setting) -> Steps:
    """Return a plain loop over users, whose batches lie ready, and the update."""
    model, ready = setting.model(), setting.ready_batch()
    batches = list(zip(*(torch.split(column, setting.batch) for column in ready), strict=True))
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        sgd.zero_grad()
        for inputs, targets in batches:
            torch.autograd.backward(cross_entropy(model(inputs), targets) / len(batches))
        sgd.step()

    return repeated(step)


def ours(
    setting: Setting,
    rule: coterie.Rule = AVERAGING,
    capture: bool | None = None,
    forward_options: ForwardOptions = DEFAULT_FORWARD,
) -> Steps:
    """Return the steps of `coterie`: batches, gradients, rule, update; captured on a GPU where nothing is said."""
    model, (me, *peers) = setting.model(), setting.everyone
    engine = coterie.InProcess(
        model, cross_entropy, me, peers, batch_size=setting.batch, forward_options=forward_options
    )
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    costs = Costs({user.name: setting.batch for user in setting.everyone})
    spec = coterie.RunSpec(
        model, cross_entropy, me, peers, rule, optimizer=sgd, batch_size=setting.batch
    )
    learner = RuleLearner(spec, rule, engine, costs)
    wanted = capture or (capture is None and setting.device.type == "cuda")
    block = learner.block() if wanted else None
    whole = Captured(block) if isinstance(block, StackBlock) else None

    def steps(count: int) -> None:
        end = learner.step + count
        while learner.step < end:
            if whole is None or whole.advance(end - learner.step) is None:
                learner.take_step()

    return steps


SIDES: dict[str, Callable[[Setting], Steps]] = {
    "floor": lambda setting: (captured if setting.device.type == "cuda" else repeated)(
        floor(setting)
    ),
    "average": ours,
    "corrected": partial(ours, rule=coterie.BiasCorrection(alpha=0.5, beta=0.1)),
    "rows": partial(ours, rule=MeanOfRows(alpha=0.5)),
    "similarity": partial(ours, rule=CosineSimilarity(alpha=0.5)),
    "loop": loop,
}
"""By name, what builds the steps of each side. Ratios are to the first."""

UNCAPTURED: dict[str, Callable[[Setting], Steps]] = {
    "eager floor": lambda setting: repeated(floor(setting)),
    "eager average": partial(ours, capture=False),
}
"""What is measured on a GPU besides."""

PASSING: dict[str, Callable[[Setting], Steps]] = {
    "full precision": ours,
    "channels last": partial(ours, forward_options=ForwardOptions(channels_last=True)),
    "bfloat16": partial(ours, forward_options=ForwardOptions(torch.bfloat16)),
    "both": partial(ours, forward_options=ForwardOptions(torch.bfloat16, channels_last=True)),
    "compiled": partial(ours, forward_options=ForwardOptions(compile=True)),
    "all three": partial(
        ours, forward_options=ForwardOptions(torch.bfloat16, channels_last=True, compile=True)
    ),
}
"""By name, averaging with the options of `ForwardOptions`."""


def costs(
    setting: Setting, seconds: float, sides: Mapping[str, Callable[[Setting], Steps]]
) -> dict[str, dict[str, float]]:
    """Return each side's milliseconds a step, on a GPU also megabytes, and the ratios to the first side's."""
    steps = {name: build(setting) for name, build in sides.items()}
    times = milliseconds(steps, setting.device, seconds)
    del steps  # so that each side's memory is its own
    first = next(iter(sides))
    measured = {
        "ms": {name: statistics.median(turns) for name, turns in times.items()},
        "time_ratio": {name: ratio(turns, times[first]) for name, turns in times.items()},
    }
    if setting.device.type != "cuda":
        return measured
    memory = {
        name: float(peak_bytes(partial(build, setting), setting.device))
        for name, build in sides.items()
    }
    for name in sides:
        memory[name] -= 0 if "floor" in name or name == "loop" else setting.example_bytes()
    return measured | {
        "MB": {name: peak / 1e6 for name, peak in memory.items()},
        "memory_ratio": {name: peak / memory[first] for name, peak in memory.items()},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument(
        "--models", default=None, help="all on a GPU, mlp,cnn on a CPU when not given"
    )
    parser.add_argument("--peers", type=int, nargs="+", default=[10])
    parser.add_argument("--batch", type=int, default=32, help="examples a user")
    parser.add_argument(
        "--seconds", type=float, default=20, help="time to spend on each model and number of peers"
    )
    parser.add_argument(
        "--forward-options", action="store_true", help="compare `ForwardOptions` instead"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    sides = (
        PASSING
        if options.forward_options
        else SIDES | (UNCAPTURED if device.type == "cuda" else {})
    )
    names = (
        options.models.split(",")
        if options.models
        else list(MODELS)[: 3 if device.type == "cuda" else 2]
    )
    for name in names:
        for n_peers in options.peers:
            setting = Setting.of(*MODELS[name], n_peers, options.batch, device)
            measured = costs(setting, options.seconds, sides)
            if options.json:
                line = {
                    "model": name,
                    "n_peers": n_peers,
                    "batch": options.batch,
                    "device": options.device,
                }
                print(json.dumps(line | measured), flush=True)
            else:
                print(
                    f"{name}, {n_peers} peers × {options.batch} examples\n{table(measured)}\n",
                    flush=True,
                )


def table(measured: dict[str, dict[str, float]]) -> str:
    """Return a line for each measure."""
    lines = [" " * 14 + "".join(f"{name:>16}" for name in measured["ms"])]
    lines += [
        f"{what:>14}" + "".join(f"{value:>16.2f}" for value in values.values())
        for what, values in measured.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
