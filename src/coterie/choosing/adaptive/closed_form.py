"""What has a closed form, as candidates beside those of gradient steps.

Of a linear model all of it, with the peers, as `Mixture` finds it. Of a network its last linear
layer, behind the layers of the pooled model, and a linear model of the own rows' inputs.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from coterie.choosing.e_steps import ESteps
from coterie.choosing.mixture import fits, numbers_of, row_size
from coterie.engines.engine import Engine
from coterie.engines.peer.linear_rows import linear_of
from coterie.evaluation.evaluate import outputs_on, whole_of
from coterie.learners.spec import RunSpec
from coterie.mixture.candidates import Candidates, OwnRows
from coterie.mixture.families import Array, Family
from coterie.mixture.fit import driven, linear_candidates
from coterie.mixture.scaling import Scaling
from coterie.users.examples import Examples, InMemory

MOST = 20_000
"""Of how many parameters a linear model is found in closed form at most."""
MOST_NUMBERS = 20_000_000
"""In how many numbers of inputs, those of all users."""
CLOSED_FORM, LAST_LAYER = "{}, closed form", "{}, last layer"


class ClosedForms:
    """Closed forms for the own rows in these folds.

    Args:
        spec: of the run, prepared.
        engine: where the peers are.
        family: of the loss.
        targets: of the own rows, (n, K).
        folds: of each own row, (n,).
    """

    def __init__(
        self, spec: RunSpec, engine: Engine, family: Family, targets: Array, folds: Array
    ) -> None:
        self.spec, self.engine, self.family = spec, engine, family
        self.targets, self.folds = targets, folds
        self.tau = np.zeros(0)  # whom the prior over users listens to

    def of_inputs(self, e_steps: ESteps) -> list[Candidates]:
        """Return linear models of the inputs: of the own rows, and where the model is one, with the peers."""
        me, layer, outputs = self.spec.me, linear_of(self.spec.model), self.targets.shape[1]
        columns = row_size(me.examples)
        held = [me.examples] + ([] if me.validation is None else [me.validation])
        if not columns or not all(fits(each, columns, outputs, self.family) for each in held):
            return []
        own, *further = (numbers_of(each, self.family, outputs)[0] for each in held)
        intercept = layer is None or layer.bias is not None
        about = own, further, CLOSED_FORM, intercept
        return self._found(*about, e_steps, asks=layer is not None)

    def of_last_layer(
        self, model: nn.Module, e_steps: ESteps, behind: Callable[[Array], nn.Module]
    ) -> list[Candidates]:
        """Return last layers behind the other layers of a model, which has seen no own row.

        None where its outputs are not those of a linear layer. `behind` makes the model of such a
        layer's parameters.
        """
        name, me = last_layer(model), self.spec.me
        held = [me.examples] + ([] if me.validation is None else [me.validation])
        layer = model.get_submodule(name) if name else None
        if not isinstance(layer, nn.Linear) or layer.in_features * len(me) > MOST_NUMBERS:
            return []
        seen = [inputs_of(model, name, each) for each in held]
        found = [each for each in seen if each is not None]
        if len(found) < len(held):
            return []
        own, *further = found
        intercept = layer.bias is not None
        blocks = self._found(own, further, LAST_LAYER, intercept, e_steps, layer=name)
        return [replace(block, behind=behind, alone=False) for block in blocks]

    def _found(
        self,
        own: Array,
        further: list[Array],
        named: str,
        intercept: bool,
        e_steps: ESteps,
        *,
        layer: str = "",
        asks: bool = True,
    ) -> list[Candidates]:
        family, columns, outputs = self.family, own.shape[1], self.targets.shape[1]
        told = self.engine.capabilities.examples.values()
        finite = np.isfinite(own).all() and np.isfinite(self.targets).all()
        if columns * outputs > MOST or own.size > MOST_NUMBERS or not finite:
            return []
        asks = asks and not self.engine.capabilities.no_e_steps
        asks = asks and sum(many or 0 for many in told) * columns <= MOST_NUMBERS
        asks = asks and all(self._fits(peer.examples) for peer in self.spec.peers)
        scaling = Scaling.of(own, self.targets, family, intercept=intercept)
        rows = scaling.rows(own, self.targets)
        judged = OwnRows.of(rows, family, folds=self.folds)
        peers = len(self.engine.names) if asks else 0
        fitting = linear_candidates(judged, family, scaling, peers)
        found, blocks = driven(fitting, e_steps.asking(family, scaling, layer))
        if found is not None:
            self.tau = found.tau[0]
        for inputs in further:
            ones = np.ones((len(inputs), int(intercept)))
            blocks = [block.on(np.concatenate([inputs, ones], 1)) for block in blocks]
        return [replace(block, kind=named.format(block.kind)) for block in blocks]

    def _fits(self, examples: Examples) -> bool:
        """Say whether a peer in this process can answer E-steps."""
        targets = examples.targets if isinstance(examples, InMemory) else None
        return isinstance(targets, Tensor) and self.family.fits(targets, self.targets.shape[1])


def last_layer(model: nn.Module) -> str:
    """Return the name of the last linear layer that can be trained; empty where there is none.

    Example:
        >>> last_layer(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
        '2'
    """
    named = [
        name
        for name, each in model.named_modules()
        if type(each) is nn.Linear and all(p.requires_grad for p in each.parameters())
    ]
    return named[-1] if named else ""


def inputs_of(model: nn.Module, layer: str, examples: Examples) -> Array | None:
    """Return what goes into a layer for each example, (n, D); None where the layer is not the last.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> rows = InMemory(torch.ones(4, 2), torch.ones(4, 1))
        >>> inputs_of(model, "2", rows).shape, inputs_of(model, "0", rows)
        ((4, 3), None)
    """
    seen: list[tuple[Tensor, Tensor]] = []
    hook = model.get_submodule(layer).register_forward_hook(
        lambda _, given, output: seen.append((given[0], output))
    )
    try:
        parts = outputs_on(model, examples)
    finally:
        hook.remove()
    whole = whole_of(parts)
    if whole is None or len(seen) != len(parts) or not isinstance(whole[0], Tensor):
        return None
    if whole[0].ndim != 2 or not torch.equal(whole[0], torch.cat([output for _, output in seen])):
        return None
    return np.asarray(torch.cat([given for given, _ in seen]).double().cpu().numpy())
