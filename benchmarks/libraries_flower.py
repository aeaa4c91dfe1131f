"""The rounds of `peers.py` through Flower's simulation.

A module of its own since Ray's actor imports it: what is kept here is kept there from one message
to the next.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from libraries import EXAMPLES, LOCAL_STEPS, LR, USERS, Watch, examples, network
from torch import nn

user_examples = functools.cache(examples)
kept_network = functools.cache(network)


def train(message: Any, context: Any) -> Any:
    """Take one user's local steps from the parameters that came."""
    torch.set_num_threads(1)
    model = kept_network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    inputs, targets = user_examples(int(context.node_config["partition-id"]))
    sgd = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(int(message.content["config"]["local-steps"])):
        sgd.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(inputs), targets))
        sgd.step()
    arrays, metrics = ArrayRecord(model.state_dict()), MetricRecord({"num-examples": EXAMPLES})
    return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


client = ClientApp()
client.train()(train)


def play(regime: str, rounds: int) -> Watch:
    """Take the rounds by `FedAvg.start` in a simulation."""
    watch, server = Watch(), ServerApp()

    def after_round(number: int, arrays: Any) -> None:
        if number:
            watch.round(arrays.to_torch_state_dict().values)

    def main(grid: Any, context: Any) -> None:
        FedAvg(fraction_evaluate=0.0, min_train_nodes=USERS, min_available_nodes=USERS).start(
            grid,
            ArrayRecord(network().state_dict()),
            num_rounds=rounds,
            train_config=ConfigRecord({"local-steps": LOCAL_STEPS[regime]}),
            evaluate_fn=after_round,
        )

    server.main()(main)
    one_actor: Any = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": 1},
    }
    run_simulation(server, client, num_supernodes=USERS, backend_config=one_actor)
    return watch
