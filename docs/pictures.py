"""The picture of a rule: where it leads user 0 on one small problem, the same for all rules.

The model has two numbers. User 0 has twenty noisy examples; four peers have nearly its optimum, two
another one. All is repeated with other examples: a path is of the first time, a dot where each time
ends.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from docutils import nodes
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import coterie
from coterie.methods import AffPCL, AuxMom, AuxMVR, FedALA, FedAMP, data_interpolation
from coterie.reporting.page import svg
from coterie.rules.similarity import (
    CosineSimilarity,
    FirstOrder,
    MirrorDescent,
    SimilarityGate,
    WeightErosion,
)
from coterie.rules.streams import StreamAveraging

OPTIMUM = torch.tensor([[1.0, 1.0]])
START = torch.tensor([[-1.0, -0.6]])
PEERS = {
    "a": (1.15, 0.85),
    "b": (0.9, 1.2),
    "c": (0.8, 0.9),
    "d": (1.2, 1.15),
    "e": (-0.9, 1.5),
    "f": (-0.7, 1.1),
}
STEPS, RATE, NOISE, TIMES = 120, 0.05, 1.0, 6
SPREAD = torch.tensor([1.0, 0.7])  # of the inputs: how curved the loss is in each direction


def true_bias(x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the peers' mean loss less that of the own, as nobody could know it."""
    return 2 * SPREAD.square() * (OPTIMUM[0] - torch.tensor(list(PEERS.values())).mean(0))


RULES: dict[str, Callable[[Any, Any], Any]] = {
    "alone": lambda me, peers: coterie.Alone(),
    "adaptive": lambda me, peers: coterie.AdaptiveAveraging(),
    "mixture": lambda me, peers: coterie.Mixture(),
    "wga": lambda me, peers: coterie.WeightedAveraging(alpha=0.5),
    "pooled": coterie.WeightedAveraging.pooled,
    "bc": lambda me, peers: coterie.BiasCorrection(alpha=6 / 7, beta=0.05),
    "oracle": lambda me, peers: coterie.OracleCorrection(alpha=6 / 7, bias=true_bias),
    "stream": lambda me, peers: StreamAveraging(horizon=STEPS),
    "cosine": lambda me, peers: CosineSimilarity(alpha=0.5),
    "gate": lambda me, peers: SimilarityGate(alpha=0.5),
    "first-order": lambda me, peers: FirstOrder(),
    "weight-erosion": lambda me, peers: WeightErosion(),
    "meritfed": lambda me, peers: MirrorDescent(),
    "data-interpolation": lambda me, peers: data_interpolation(me, peers, mixing=0.5),
    "affpcl": lambda me, peers: AffPCL(beta=0.05),
    "auxmom": lambda me, peers: AuxMom(local_steps=3),
    "fedala": lambda me, peers: FedALA(local_steps=1),
    "fedamp": lambda me, peers: FedAMP(local_steps=1, penalty=0.3),
    "auxmvr": lambda me, peers: AuxMVR(local_steps=3),
}


def draw(optimum: torch.Tensor, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy examples of a linear function."""
    generator = torch.Generator().manual_seed(seed)
    inputs = SPREAD * torch.randn(size, 2, generator=generator)
    return inputs, inputs @ optimum.reshape(2, 1) + NOISE * torch.randn(
        size, 1, generator=generator
    )


def users(fresh: bool, time: int) -> tuple[coterie.User, list[coterie.User]]:
    """Return user 0 and its peers, with examples to keep, or fresh ones for every batch."""
    optima = {"me": OPTIMUM} | {name: torch.tensor(optimum) for name, optimum in PEERS.items()}
    found = []
    for number, (name, optimum) in enumerate(optima.items()):
        if fresh:

            def batch(size: int, seed: int, step: int, optimum: torch.Tensor = optimum) -> Any:
                return draw(optimum, size, (seed + 7919 * (step + STEPS * time)) % 2**31)

            found.append(coterie.User.stream(name, batch))
        else:
            found.append(
                coterie.User(name, *draw(optimum, 60 if number else 20, number + 100 * time))
            )
    return found[0], found[1:]


def numbers(model: torch.nn.Module) -> list[float]:
    """Return the two numbers of a model."""
    return [
        number
        for parameter in model.parameters()
        for number in parameter.detach().flatten().tolist()
    ]


@functools.cache
def walk(name: str, fresh: bool, time: int) -> tuple[np.ndarray[Any, Any], dict[str, float]]:
    """Return the points that user 0's model goes through, and each peer's weight at the end."""
    me, peers = users(fresh, time)
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.data = START.clone()
    points = [START[0].tolist()]
    run = coterie.train(
        model,
        torch.nn.functional.mse_loss,
        me,
        peers,
        RULES[name](me, peers),
        optimizer=torch.optim.SGD,
        lr=RATE,
        steps=STEPS,
        batch_size=4,
        seed=time,
        evaluate_every=STEPS,
        hooks=[lambda step: points.append(numbers(step.model))],
        measure=False,
        progress=False,
    )
    points.append(numbers(run.model))
    return np.array(points), dict(run.record.end.tau)


def excess(point: Any) -> float:
    """Return the expected loss of user 0 at a point, less the least that there is."""
    return float((SPREAD.square() * (torch.as_tensor(point) - OPTIMUM[0]).square()).sum())


def picture(name: str) -> Figure:
    """Draw where a rule leads, beside training alone."""
    fresh = name == "stream"
    figure = Figure(figsize=(6.4, 3.9), layout="constrained")
    axes = figure.add_subplot()
    for level in (0.02, 0.15, 0.5, 1.1, 2.0, 3.2):  # where the loss is so far above the least
        width, height = (2 * np.sqrt(level) / SPREAD).tolist()
        axes.add_patch(Ellipse((1, 1), width, height, fill=False, edgecolor="#dddddd", linewidth=1))
    if name != "alone":
        _paths(axes, "alone", fresh, "#444444", "--")
    _paths(axes, name, fresh, "#0072b2", "-")
    weights = {} if name == "alone" else walk(name, fresh, 0)[1]
    for peer, (x, y) in PEERS.items():
        axes.scatter(
            x,
            y,
            s=30 + 500 * weights.get(peer, 0.0),
            facecolors="none",
            edgecolors="#d55e00",
            zorder=4,
        )
    axes.scatter(
        [],
        [],
        s=60,
        facecolors="none",
        edgecolors="#d55e00",
        label="peers' optima, larger with more weight",
    )
    axes.plot(
        1,
        1,
        "*",
        color="#009e73",
        markersize=14,
        zorder=5,
        linestyle="none",
        label="user 0's optimum",
    )
    axes.set(xlim=(-1.5, 1.9), ylim=(-0.9, 1.9), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def _paths(axes: Axes, name: str, fresh: bool, colour: str, dashes: str) -> None:
    """Draw the first path, and where all end."""
    paths = [walk(name, fresh, time)[0] for time in range(TIMES)]
    above = [excess(points[-1]) for points in paths]
    error = np.std(above, ddof=1) / np.sqrt(TIMES)
    label = f"{name}: {np.mean(above):.2f} ± {error:.2f} above the least loss"
    axes.plot(
        paths[0][:, 0],
        paths[0][:, 1],
        color=colour,
        linewidth=1.2,
        linestyle=dashes,
        label=label,
        alpha=0.9,
    )
    axes.plot(
        *np.array([points[-1] for points in paths]).T, "o", color=colour, markersize=4, zorder=6
    )


class RulePicture(SphinxDirective):  # type: ignore[misc]  # of a package that is not read
    """`{rule-picture} NAME`: the picture, drawn into the page."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the picture."""
        name = self.arguments[0]
        title = f"Where {name} leads user 0, beside training alone"
        drawn = svg(picture(name)).replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
        return [nodes.raw("", f'<div class="drawn">{drawn}</div>', format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("rule-picture", RulePicture)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
