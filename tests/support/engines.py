"""The engines that the conformance suite is run on.

An engine joins by a line in `ENGINES`: a context that gives a function which makes engines, and in
which their processes, if they have any, live.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from flwr.clientapp import ClientApp
from tests.support import processes
from tests.support.flower import DirectGrid
from torch import nn

import coterie
from coterie.engines.engine import MakeEngine
from coterie.engines.in_process.passes import Passes
from coterie.engines.peer import Peer
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.sites import LocalSites
from coterie.flower import FlowerGrid, client_app
from coterie.gradients.parameters import Parameters


def _flare(
    model: nn.Module, loss: Any, me: coterie.User, peers: Sequence[coterie.User], **how: Any
) -> Remote:
    """Return the engine with sites whose models are at other parameters and have other buffers."""
    held = {peer.name: Peer(peer, Passes(_elsewhere(model), loss)) for peer in peers}
    made: Remote = Remote(model, loss, me, sites=LocalSites(held), names=list(held), **how)
    return made


def _flower(
    model: nn.Module, loss: Any, me: coterie.User, peers: Sequence[coterie.User], **how: Any
) -> Remote:
    """Return the engine with a ClientApp for each peer; all messages are packed as Flower carries them."""

    def app_of(peer: coterie.User) -> ClientApp:
        return client_app(lambda _: peer, lambda _: _elsewhere(model), loss)

    grid = DirectGrid(map(app_of, peers))
    return FlowerGrid(grid, len(peers))(model, loss, me, **how)


def _elsewhere(model: nn.Module) -> nn.Module:
    there = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in (*Parameters(there).named.values(), *there.buffers()):
            tensor.zero_()
    return there


ENGINES: dict[str, Callable[[], AbstractContextManager[MakeEngine]]] = {
    "in process": lambda: nullcontext(coterie.InProcess),
    "in process, one by one": lambda: nullcontext(partial(coterie.InProcess, one_by_one=True)),
    "processes": processes.torch_distributed,
    "Flower's messages": lambda: nullcontext(_flower),
    "NVFLARE's, over sites in this process": lambda: nullcontext(_flare),
}
