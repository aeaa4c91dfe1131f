"""A peer under torch.distributed: it answers user 0 with gradients of its own examples."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from coterie.engines.in_process.engine import InProcess
from coterie.engines.torch_distributed.group import Group, in_short, join, noting_sigterm
from coterie.engines.torch_distributed.request import Ask
from coterie.engines.torch_distributed.wire import Wire
from coterie.errors import CoterieError, PeerLost
from coterie.gradients.parameters import Parameters
from coterie.users.user import Loss, User


def serve(
    model: nn.Module,
    loss: Loss,
    user: User,
    *,
    sums_only: bool = False,
    timeout: float = 120.0,
    group: Group | None = None,
) -> int:
    """Answer user 0's requests with gradients of this user's examples, until the run ends; return how many.

    Batches are drawn as user 0 says (batch size, seed, step); the examples stay here. `PeerLost` where user 0 or
    another peer is gone.

    Args:
        model: like user 0's, whose frozen parameters and buffers are taken over. It is not changed.
        loss: user 0's.
        user: whose examples are used; its name is the peer's name.
        sums_only: give gradients as part of a weighted sum only, never on their own.
        timeout: seconds after which user 0 is taken for lost when nothing comes.
        group: the processes, where they have already been joined.
    """
    group = group or join(timeout)
    with contextlib.ExitStack() as life:
        told_to_end = life.enter_context(noting_sigterm())
        life.callback(group.disconnect)
        try:
            peer = _Peer(group, copy.deepcopy(model), loss, user, sums_only)
            while peer.answer(told_to_end.is_set()):
                pass
        except _CutOffError as error:
            group.answer_roll_call()
            raise PeerLost(
                f"{user.name!r} (rank {group.rank}) lost user 0 or another peer, and ends ({error})"
            ) from error
        except Exception as error:
            group.answer_roll_call(str(error) if isinstance(error, CoterieError) else f"{error!r}")
            raise
        return peer.answered


class _CutOffError(Exception):
    """A message to or from the others failed."""


class _Peer:
    """One peer in a run: its model at user 0's point, and the messages."""

    def __init__(self, group: Group, model: nn.Module, loss: Loss, user: User, sums_only: bool) -> None:
        self.group, self.position, self.sums_only = group, group.rank - 1, sums_only
        run = group.told("run", "user 0")
        parameters = Parameters(model)
        hello = {
            "name": user.name,
            "examples": "a stream" if user.is_stream else len(user),
            "data": user.fingerprint(),
            "size": parameters.size,
            "dtype": str(parameters.dtype),
            "sums_only": sums_only,
        }
        self.engine = self._engine(run, hello, model, loss, user)
        self.wire = Wire(model, group.size - 1, run["compress"], run["moves_buffers"], run["backend"])
        group.connect(run["backend"])
        self._over(self.wire.share_what_stays)
        point = self.wire.frame.x
        self.x = (
            point if (point.dtype, point.device) == (parameters.dtype, parameters.device) else parameters.vector()
        )
        for p, view in zip(parameters.named.values(), parameters.unflatten(self.x).values(), strict=True):
            p.data = view
        self.answered, self.since = 0, time.perf_counter()

    def answer(self, told_to_end: bool) -> bool:
        """Wait for a request and answer it; say whether the run goes on."""
        if told_to_end:
            raise PeerLost("told to end (SIGTERM) before the run was over")
        self._over(lambda: self.wire.send_frame().wait())
        began = time.perf_counter()
        frame = self.wire.frame
        ask, step = frame.read()
        if ask in (Ask.END, Ask.NOTHING):
            return ask is Ask.NOTHING
        if ask is Ask.ROWS and self.sums_only:
            raise PeerLost("asked for a gradient on its own, but gives sums only")
        weight, gradient = float(frame.weights[self.position]), None
        if not math.isnan(weight):
            gradient = self._gradient(step)
            self.answered += 1
        ended = time.perf_counter()
        sent = self.wire.answer(ask, self.position, gradient, weight, (ended - began, began - self.since))
        self._over(lambda: self.wire.collect(ask, sent)[0].wait())  # noqa: PLW0108  # to begin may fail too
        self.since = ended
        return True

    def _gradient(self, step: int) -> torch.Tensor:
        frame = self.wire.frame
        if self.x is not frame.x:
            self.x.copy_(frame.x)
        for name, buffer in frame.buffers.items():  # what this user's last batch made of them does not count
            self.engine.passes.model.get_buffer(name).copy_(buffer)
        return self.engine.gradients(self.x, step, {}).own

    def _engine(
        self, run: dict[str, Any], hello: dict[str, Any], model: nn.Module, loss: Loss, user: User
    ) -> InProcess:
        """Introduce this user, and return what computes its gradients once user 0 has agreed."""
        rank = self.group.rank
        try:
            engine = InProcess(model, loss, user, batch_size=run["batch_size"], seed=run["seed"], one_by_one=True)
        except CoterieError as error:
            self.group.tell(f"hello/{rank}", hello | {"refused": str(error)})
            raise
        self.group.tell(f"hello/{rank}", hello | {"refused": None})
        if refused := self.group.told("go", "user 0")["refused"]:
            raise PeerLost(f"user 0 began no run: {refused}")
        return engine

    def _over(self, message: Any) -> None:
        try:
            message()
        except (RuntimeError, dist.DistError) as error:
            raise _CutOffError(in_short(str(error))) from error
