"""A user's rows as a linear layer sees them: its inputs, and the targets; for E-steps and trees."""

import hashlib
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from coterie.engines.engine import AllRows
from coterie.engines.in_process.passes import Passes
from coterie.evaluation.evaluate import evaluation_mode
from coterie.evaluation.losses import value_and_weight
from coterie.mixture.answers import EStep
from coterie.mixture.families import FAMILIES
from coterie.mixture.posterior import Rows, believed
from coterie.trees.histograms import Histograms
from coterie.users.examples import InMemory
from coterie.users.trees import Tree, joined
from coterie.users.user import User

AT_ONCE = 4096
"""How many examples go through a network at a time."""

_WITHOUT_NUMBERS = (nn.Sequential, nn.Flatten, nn.Identity)


def linear_of(model: nn.Module) -> nn.Linear | None:
    """Return the linear layer that a model is, behind nothing but a change of shape.

    None for any other model.

    Example:
        >>> linear_of(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
        Linear(in_features=4, out_features=2, bias=True)
        >>> linear_of(nn.Sequential(nn.Linear(4, 2), nn.ReLU())) is None
        True
    """
    leaves = [each for each in model.modules() if not isinstance(each, _WITHOUT_NUMBERS)]
    if len(leaves) != 1 or type(leaves[0]) is not nn.Linear:
        return None
    layer = leaves[0]
    if all(p.requires_grad and p.is_floating_point() for p in layer.parameters()):
        return layer
    return None


def rows_key(work: AllRows, x: Tensor) -> Hashable:
    """Return what rows that are scaled, or in bins, depend on beside the user."""
    # a digest: each user's rows would hold a copy of the model
    through = hashlib.blake2b(x.cpu().numpy().data).digest() if work.layer else b""
    return work.about(), work.layer, through


class LinearRows:
    """What a user answers to an `EStep` or `Histograms`.

    Its rows go through the model up to the layer, and are kept.

    Example:
        >>> import numpy as np
        >>> from coterie.mixture.answers import EStep
        >>> from coterie.mixture.posterior import Priors
        >>> from coterie.mixture.scaling import Scaling
        >>> user = User("a", torch.ones(3, 1), torch.full((3, 1), 4.0))
        >>> held = LinearRows(user, Passes(nn.Linear(1, 1, bias=False), nn.functional.mse_loss))
        >>> one = np.ones((1, 1, 1))
        >>> work = EStep("squared", Scaling.none(1, 1), Priors(0 * one, one, one[0, 0]))
        >>> work.read(held.answer(work, torch.zeros(1)).numpy().reshape(1, -1)).first.item()
        3.0
    """

    def __init__(self, user: User, passes: Passes) -> None:
        self.user, self.passes = user, passes
        self._kept: tuple[Hashable, Any] | None = None
        self._numbers_kept: tuple[str, Rows] | None = None

    def misfit(self, work: AllRows) -> str | None:
        """Return why this user answers no such question, if it does not."""
        if self.user.is_stream:
            return "it has a stream, not examples"
        layer = self._layer(work)
        if layer is None:
            return "its model has no such linear layer"
        if isinstance(work, Histograms):
            fits = work.sizes == (layer.in_features, layer.out_features)
            return None if fits else "its linear layer has another size"
        d, _, k = work.priors.mean.shape
        if (d, k) != (layer.in_features + (layer.bias is not None), layer.out_features):
            return "its linear layer has another size"
        if work.scaling.intercept != (layer.bias is not None):
            return "its linear layer has another intercept"
        return None

    def answer(
        self,
        work: AllRows,
        x: Tensor,
        size: int | None = None,
        norm: float | None = None,
        fewest: int = 1,
    ) -> Tensor:
        """Return the numbers of an answer, one after the other.

        See `EStep.answer` and `Histograms.answer`.

        Args:
            work: the question, which fits.
            x: the model's parameters, by which rows go through it up to the layer.
            size: as for `EStep.answer`.
            norm: as for both.
            fewest: as for `Histograms.answer`.
        """
        rows = self.rows(work, x)
        if isinstance(work, Histograms):
            return torch.from_numpy(work.answer(rows, norm, fewest).ravel())
        return torch.from_numpy(work.answer(rows, size, norm).ravel())

    def _layer(self, work: AllRows) -> nn.Linear | None:
        if not work.layer:
            return linear_of(self.passes.model)
        layer = dict(self.passes.model.named_modules()).get(work.layer)
        return layer if isinstance(layer, nn.Linear) else None

    def rows(self, work: AllRows, x: Tensor) -> Any:
        """Return the rows scaled, or in bins.

        Those of the last question where nothing about them has changed.
        """
        key = rows_key(work, x)
        if self._kept is None or self._kept[0] != key:
            self._kept = key, work.rows(self._numbers(work, x))
        return self._kept[1]

    def numbers(self, work: EStep) -> Rows:
        """Return the user's own rows of finite numbers, in its own units, for a layer of inputs."""
        if self._numbers_kept is None or self._numbers_kept[0] != work.family:
            found = self._numbers(work, torch.zeros(0))
            self._numbers_kept = work.family, found.finite()
        return self._numbers_kept[1]

    @torch.no_grad()
    def _numbers(self, work: AllRows, x: Tensor) -> Rows:
        """Return what goes into the layer, (n, D), the targets as numbers, (n, K), and what rows count."""
        held = self.user.examples
        if not work.layer and isinstance(held, InMemory) and isinstance(held.inputs, Tensor):
            return self._as_rows(work, held.inputs, held.targets)
        inputs, targets = [], []
        for indices in torch.split(torch.arange(len(self.user)), AT_ONCE):
            batch, answers = self.user.take(indices, seed=0, step=0)
            inputs.append(batch if not work.layer else self._seen(work.layer, x, batch))
            targets.append(answers)
        return self._as_rows(work, torch.cat(inputs), joined(targets))

    def _as_rows(self, work: AllRows, inputs: Tensor, targets: Tree) -> Rows:
        values, weights = value_and_weight(targets)
        layer = self._layer(work)
        outputs = 1 if layer is None else layer.out_features
        numbers = FAMILIES[work.family].targets(values.detach().cpu().numpy(), outputs)
        counts = None if weights is None else believed(weights.detach().cpu().double().numpy())
        return Rows(inputs.detach().cpu().double().flatten(1).numpy(), numbers, counts)

    def _seen(self, name: str, x: Tensor, batch: Any) -> Tensor:
        """Return what goes into a layer at x."""
        seen: list[Tensor] = []
        layer = self.passes.model.get_submodule(name)
        hook = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        try:
            with evaluation_mode(self.passes.model):
                self.passes.output(x, batch, self.passes.buffers())
        finally:
            hook.remove()
        return seen[0]
