"""The engines and the transports that the conformance suite is run on.

An engine joins by a line in `ENGINES`: a context that gives a function which makes engines, and in
which their processes, if they have any, live. What carries messages to sites joins by a line in
`SITES`: a context that gives the `Sites` over some peers.
"""

from __future__ import annotations

import copy
import functools
import re
import socket
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tests.support import processes
from tests.support.over_nvflare import OverNvflare
from tests.support.waiting import ENOUGH
from torch import nn

import coterie
from coterie.engines.engine import MakeEngine
from coterie.engines.in_process.passes import Passes
from coterie.engines.peer import Peer
from coterie.engines.processes.engine import _answer_mate
from coterie.engines.processes.processes import Processes
from coterie.engines.processes.rendezvous import Address, Rendezvous
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.responder import Responder
from coterie.engines.remote.sites import LocalSites
from coterie.gradients.parameters import Parameters
from coterie.privacy.sums import SumsOnly

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"

MakeSites = Callable[[Mapping[str, Peer], SumsOnly | None], AbstractContextManager[Any]]
"""Gives `Sites` over peers, by name, of which `lose` makes one unreachable and `bring` reachable."""


class Here(LocalSites):
    """Sites in this process, which can be lost."""

    def __init__(self, peers: Mapping[str, Peer], sums: SumsOnly | None) -> None:
        super().__init__(peers, sums)
        self.lost: dict[str, Responder] = {}

    def lose(self, name: str) -> None:
        self.lost[name] = self.responders.pop(name)

    def bring(self, name: str) -> None:
        self.responders[name] = self.lost.pop(name)


class Linked:
    """Sites over the links of processes, all of which are in this one."""

    def __init__(self, peers: Mapping[str, Peer], sums: SumsOnly | None) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            at = "127.0.0.1", free.getsockname()[1]
        self.rendezvous = [
            functools.partial(Rendezvous, processes.PATIENCE, Address(*at, rank, 1 + len(peers)))
            for rank in range(1 + len(peers))
        ]
        self.responders = {name: Responder(peer, sums) for name, peer in peers.items()}
        self.lead = Processes(self.rendezvous[0]())
        self.lead.are(dict(enumerate(peers, 1)))
        self.members: dict[str, Processes] = {}
        for name in peers:
            self.bring(name)
        self.lead.connect()

    def ask(self, names: Sequence[str], method: str, timeout: float, **arguments: Any) -> Any:
        return self.lead.ask(names, method, timeout, **arguments)

    def bring(self, name: str) -> None:
        from coterie.engines.processes import rendezvous  # another process would not know

        rendezvous._met.clear()
        rank = 1 + list(self.responders).index(name)
        member = self.members[name] = Processes(self.rendezvous[rank]())
        member.are({0: "user 0"})
        answer = functools.partial(_answer_mate, {"user 0": self.responders[name]}, None)
        member.answer(answer)

    def lose(self, name: str) -> None:
        self.members.pop(name).leave()

    def close(self) -> None:
        for member in [self.lead, *self.members.values()]:
            member.leave()


class OverHttp:
    """Sites by the code of docs/extending.md."""

    def __init__(self, peers: Mapping[str, Peer], sums: SumsOnly | None) -> None:
        own = types.ModuleType("own_sites")
        (code,) = re.findall(
            r"```python\n(# own_sites\.py\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
        )
        exec(code, vars(own))  # noqa: S102  # our own page
        self.made, self.peers, self.sums = own.HttpSite, peers, sums
        self.sites = {name: own.HttpSite(peer, sums) for name, peer in peers.items()}
        self.http = own.HttpSites({name: site.address for name, site in self.sites.items()})

    def ask(self, names: Sequence[str], method: str, timeout: float, **arguments: Any) -> Any:
        return self.http.ask(names, method, timeout, **arguments)

    def lose(self, name: str) -> None:
        self.sites.pop(name).close()

    def bring(self, name: str) -> None:
        site = self.sites[name] = self.made(self.peers[name], self.sums)
        self.http.addresses[name] = site.address

    def close(self) -> None:
        for site in self.sites.values():
            site.close()
        self.http.threads.shutdown()


@contextmanager
def _closing(make: Any, peers: Mapping[str, Peer], sums: SumsOnly | None = None) -> Iterator[Any]:
    sites = make(peers, sums)
    try:
        yield sites
    finally:
        sites.close()


@contextmanager
def _over(make: MakeSites) -> Iterator[MakeEngine]:
    """Give a function that makes engines with sites at other parameters and with other buffers."""
    with ExitStack() as life:

        def made(
            model: nn.Module, loss: Any, me: coterie.User, peers: Any, **how: Any
        ) -> coterie.Engine:
            held = {peer.name: Peer(peer, Passes(_elsewhere(model), loss)) for peer in peers}
            sites = life.enter_context(make(held, None))
            how = {"timeout": ENOUGH} | how
            return Remote(model, loss, me, sites=sites, names=list(held), **how)

        yield made


def _elsewhere(model: nn.Module) -> nn.Module:
    there = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in (*Parameters(there).named.values(), *there.buffers()):
            tensor.zero_()
    return there


SITES: dict[str, MakeSites] = {
    "here": lambda peers, sums: nullcontext(Here(peers, sums)),
    "links of processes": partial(_closing, Linked),
    "NVFLARE's Collab": partial(_closing, OverNvflare),
    "HTTP": partial(_closing, OverHttp),
}
if find_spec("flwr") is not None:
    from tests.support.flower import OverFlower

    SITES["Flower's grid"] = partial(_closing, OverFlower)

ENGINES: dict[str, Callable[[], AbstractContextManager[MakeEngine]]] = {
    "in process": lambda: nullcontext(coterie.InProcess),
    "in process, one by one": lambda: nullcontext(partial(coterie.InProcess, one_by_one=True)),
    "processes": processes.torch_distributed,
    **{name: partial(_over, make) for name, make in SITES.items()},
}
