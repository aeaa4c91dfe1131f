"""Random models draw from (seed, user, step): no global generator is read or moved, and threads do not meet."""

from __future__ import annotations

import copy
import functools
import random
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as f

import coterie
from coterie import methods
from coterie.engines.in_process.model_support import warnings_as_errors
from coterie.engines.in_process.passes import Passes
from coterie.engines.peer import Peer
from coterie.engines.remote.engine import PrivatePeers, Remote
from coterie.engines.remote.sites import LocalSites
from coterie.privacy.privacy import Privacy
from coterie.users.sampling import seeded

INPUTS = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS.sum(1, keepdim=True)


def users() -> list[coterie.User]:
    held_out = INPUTS[50:], TARGETS[50:]
    me = coterie.User("me", INPUTS[:12], TARGETS[:12], validation=held_out, test=held_out)
    return [
        me,
        *(
            coterie.User(name, INPUTS[k : 20 + k], TARGETS[k : 20 + k])
            for k, name in ((12, "a"), (30, "b"))
        ),
    ]


def made(make: Callable[[], nn.Module]) -> nn.Module:
    with seeded(0, "model", 0):
        return make()


class Noisy(nn.Module):
    """A model that adds what one global generator draws."""

    def __init__(self, draw: Callable[[], float], *, evaluating: bool = False) -> None:
        super().__init__()
        self.linear, self.draw, self.evaluating = nn.Linear(4, 1), draw, evaluating

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.linear(inputs)
        return output if self.evaluating and self.training else output + 0.1 * self.draw()


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout": dropout,
    "batch norm and dropout": lambda: nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)
    ),
    "torch": lambda: Noisy(lambda: float(torch.rand(()))),
    "NumPy": lambda: Noisy(lambda: float(np.random.rand())),
    "Python": lambda: Noisy(random.random),
    "evaluation only": lambda: Noisy(lambda: float(torch.rand(())), evaluating=True),
}
RULES: dict[str, Any] = {
    "adaptive": None,
    "averaging": coterie.WeightedAveraging(0.5),
    "auto": coterie.WeightedAveraging("auto"),
    "rounds": methods.FedAvg(2),
}


def numbers(run: coterie.Run) -> Tensor:
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


def global_state() -> tuple[object, ...]:
    state: Any = np.random.get_state()
    return torch.get_rng_state().tolist(), state[1].tolist(), state[2], random.getstate()


def trained(
    model: nn.Module, rule: Any = None, loss: Any = f.mse_loss, **settings: Any
) -> coterie.Run:
    me, *peers = users()
    return coterie.train(
        model, loss, me, peers, rule, **{"steps": 6, "lr": 0.01, "norm_bound": None} | settings
    )


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_global_generators_are_neither_read_nor_moved(
    make: Callable[[], nn.Module], rule: Any
) -> None:
    results = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        model, before = made(make), global_state()
        results.append(numbers(trained(model, rule)))
        assert global_state() == before
    assert torch.equal(*results)


def test_a_method_with_peers_elsewhere_moves_no_global_generator() -> None:
    """What it will ask is found out beforehand, with a model of its own."""
    me, *peers = users()
    model = made(dropout)
    sites = LocalSites(
        {peer.name: Peer(peer, Passes(copy.deepcopy(model), f.mse_loss)) for peer in peers}
    )
    engine = functools.partial(Remote, sites=sites, names=[peer.name for peer in peers])
    before = global_state()
    coterie.train(model, f.mse_loss, me, (), methods.FedAvg(2), steps=3, engine=engine)
    assert global_state() == before


def test_private_peers_move_no_global_generator() -> None:
    pytest.importorskip("dp_accounting")
    engine = functools.partial(PrivatePeers, privacy=Privacy(9.0, 1e-3, 1.0, 2.0), gradients=9)
    model, before = made(dropout), global_state()
    trained(model, coterie.WeightedAveraging(0.5), engine=engine)
    assert global_state() == before


def test_a_random_loss_and_a_random_stream_draw_from_the_seed_too() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return f.mse_loss(f.dropout(output, 0.3), target)

    def draw(size: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(size, 4)  # by a generator that is not its own
        return inputs, inputs.sum(1, keepdim=True)

    results = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model, before = made(lambda: nn.Linear(4, 1)), global_state()
        first = numbers(trained(model, coterie.WeightedAveraging(0.5), loss))
        me, *peers = coterie.User.stream("me", draw), *users()[1:]
        second = numbers(
            coterie.train(model, f.mse_loss, me, peers, coterie.WeightedAveraging(0.5), steps=5)
        )
        assert global_state() == before
        results.append(torch.cat([first, second]))
    assert torch.equal(*results)


def test_trainings_in_threads_do_not_meet() -> None:
    """Dropout's draws, the filters of warnings and the number of threads are as by one training after the other."""
    model, rules = made(dropout), [coterie.WeightedAveraging(0.1 * k) for k in range(1, 7)]
    alone = [numbers(trained(model, rule, steps=12)) for rule in rules]
    filters, threads, state = list(warnings.filters), torch.get_num_threads(), global_state()
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda rule: numbers(trained(model, rule, steps=12)), rules))
    assert all(map(torch.equal, alone, together))
    assert list(warnings.filters) == filters
    assert torch.get_num_threads() == threads
    assert global_state() == state


def test_only_this_threads_warnings_are_errors() -> None:
    seen: list[str] = []

    def warn() -> None:
        try:
            warnings.warn("from elsewhere", stacklevel=1)
        except UserWarning:
            seen.append("an error")

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with warnings_as_errors():
            thread = threading.Thread(target=warn)
            thread.start()
            thread.join()
            with pytest.raises(UserWarning, match="from here"):
                warnings.warn("from here", stacklevel=1)
    assert not seen
    assert [str(each.message) for each in told] == ["from elsewhere"]
