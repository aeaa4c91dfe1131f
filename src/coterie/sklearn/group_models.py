"""The models of all groups, and the way of each row to its group's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from coterie.data import Preparation
from coterie.evaluation.evaluate import evaluation_mode
from coterie.tables import models
from coterie.users.sampling import one_thread

Module: TypeAlias = str | models.Factory
"""A model by its name, as on the command line, or a function of the numbers of inputs and outputs."""


@dataclass
class GroupModels:
    """What `fit` leaves.

    Args:
        module: what builds a model.
        preparation: how rows become inputs, the same for all groups.
        models: the model of each group, by name.
        pooled: the model of all rows alike, for rows of any other group.
        weights: who listens to whom: in a group's row the shares of the others.
    """

    module: Module
    preparation: Preparation
    models: Mapping[str, nn.Module]
    pooled: nn.Module
    weights: pd.DataFrame

    def outputs(self, rows: pd.DataFrame, groups: Sequence[str | None]) -> Tensor:
        """Return for each row the outputs of its group's model, in double precision; None is no group."""
        inputs, names = self.preparation.inputs(rows), np.asarray(groups, dtype=object)
        outputs = torch.empty(len(rows), self.preparation.n_outputs, dtype=torch.double)
        for name in dict.fromkeys(groups):
            model = self.pooled if name is None else self.models.get(name, self.pooled)
            places = torch.from_numpy(names == name)
            with torch.no_grad(), evaluation_mode(model):
                outputs[places] = model(inputs[places]).double()
        return outputs

    def __getstate__(self) -> dict[str, Any]:
        """Return plain data and arrays: pickle and skops get nothing of torch, and load no code of it."""
        return {
            "module": self.module,
            "preparation": self.preparation.to_plain(),
            "models": {name: _arrays(model) for name, model in self.models.items()},
            "pooled": _arrays(self.pooled),
            "weights": self.weights.to_dict(),
        }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Build the models anew, and give them their parameters."""
        self.module = state["module"]
        self.preparation = Preparation.from_plain(state["preparation"])
        self.models = {name: self._model(arrays) for name, arrays in state["models"].items()}
        self.pooled = self._model(state["pooled"])
        self.weights = pd.DataFrame(state["weights"])

    def _model(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> nn.Module:
        made = built(self.module, self.preparation, seed=0)
        made.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})
        return made


def built(module: Module, preparation: Preparation, seed: int) -> nn.Module:
    """Return a model with the initial parameters of a seed; nobody else's draws are changed."""
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return models.build(module, preparation.n_inputs, preparation.n_outputs)


def _arrays(model: nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    return {name: value.cpu().numpy() for name, value in model.state_dict().items()}
