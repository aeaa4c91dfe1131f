"""The rounds of `peers.py` through `coterie`."""

from __future__ import annotations

import torch
from libraries import EXAMPLES, LOCAL_STEPS, LR, USERS, Watch, examples, network
from torch import nn

import coterie
from coterie.methods import FedAvg


def play(regime: str, rounds: int) -> Watch:
    """Take the rounds by `coterie.train`."""
    watch = Watch()
    me, *peers = (coterie.User(f"user {k}", *examples(k)) for k in range(USERS))
    mean = coterie.WeightedAveraging(alpha=(USERS - 1) / USERS)
    rule = mean if regime == "paper" else FedAvg(local_steps=LOCAL_STEPS[regime])
    coterie.train(
        network(),
        nn.functional.cross_entropy,
        me,
        peers,
        rule,
        optimizer=torch.optim.SGD,
        lr=LR,
        steps=rounds,
        batch_size=EXAMPLES,
        hooks=[lambda step: watch.round(step.model.parameters)],
        progress=False,
    )
    return watch
