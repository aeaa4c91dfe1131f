"""The rounds of `peers.py` through `pfl`."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from libraries import EXAMPLES, LOCAL_STEPS, LR, USERS, Watch, examples, network
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn


class WithLoss(nn.Module):
    """The network with the loss and the metrics that `pfl` asks a model for."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def loss(self, inputs: Tensor, targets: Tensor, eval: bool = False) -> Tensor:  # noqa: A002
        """Return the mean loss of a batch."""
        return nn.functional.cross_entropy(self.network(inputs), targets)

    def metrics(self, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
        """Return the loss of a batch, which is asked for before the first round only."""
        with torch.no_grad():
            return {"loss": Weighted(float(self.loss(inputs, targets)) * len(inputs), len(inputs))}


class AfterRound(TrainingProcessCallback):  # type: ignore[misc]  # the package carries no types
    """Looks at the watch."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def after_central_iteration(
        self, aggregate_metrics: Any, model: Any, *, central_iteration: int
    ) -> tuple[bool, Any]:
        """Note the end of a round."""
        self.watch.round(model.pytorch_model.parameters)
        return False, Metrics()


def play(regime: str, rounds: int) -> Watch:
    """Take the rounds by `FederatedAveraging.run`."""
    asyncio.set_event_loop(asyncio.new_event_loop())  # it asks for one
    watch = Watch()
    data = {k: examples(k) for k in range(USERS)}
    users = FederatedDataset.from_slices(data, get_user_sampler("minimize_reuse", range(USERS)))
    module = WithLoss()
    central = torch.optim.SGD(module.parameters(), lr=1.0)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=2 * rounds,
            train_cohort_size=USERS,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=users, val_data=users),
        PyTorchModel(module, local_optimizer_create=torch.optim.SGD, central_optimizer=central),
        NNTrainHyperParams(
            local_num_epochs=LOCAL_STEPS[regime], local_learning_rate=LR, local_batch_size=EXAMPLES
        ),
        callbacks=[AfterRound(watch)],
        send_metrics_to_platform=False,
    )
    return watch
