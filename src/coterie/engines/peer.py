"""A peer at its own place: it gives gradients of its own examples, within its caps, and logs every request."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from coterie.engines.flare.engine import array_of, frozen_digest
from coterie.engines.in_process.passes import Passes
from coterie.errors import KnobError
from coterie.users.sampling import seeded
from coterie.users.user import Loss, User


@dataclass(frozen=True)
class Caps:
    """What a site gives at most.

    Args:
        gradients: how many gradients in all, over every run that its log knows of; no limit when None.
        norm: the norm that a gradient is clipped to; not clipped when None.
        examples: how many examples must be behind a gradient.

    Example:
        >>> Caps(gradients=1000, norm=1.0, examples=20)
        Caps(gradients=1000, norm=1.0, examples=20)
    """

    gradients: int | None = None
    norm: float | None = None
    examples: int = 1

    def __post_init__(self) -> None:
        if self.gradients is not None and self.gradients < 0:
            raise KnobError(f"`gradients` must not be negative, got {self.gradients}")
        if self.norm is not None and not self.norm > 0:
            raise KnobError(f"`norm` must be positive, got {self.norm}")
        if self.examples < 1:
            raise KnobError(f"`examples` must be at least 1, got {self.examples}")


class Collaborator:
    """One peer: its examples and its model stay with it, gradients leave.

    Args:
        user: the examples, under the name that batches are drawn from.
        model: of the same parameters as user 0's.
        loss: the mean loss of a batch from (output, target).
        caps: what it gives at most.
        log: a file to which every request is added, one JSON object a line; it counts against `caps.gradients`.

    Example:
        >>> user = User("a", torch.eye(2), torch.ones(2, 1))
        >>> peer = Collaborator(user, nn.Linear(2, 1), nn.functional.mse_loss, Caps(gradients=1))
        >>> request = {"x": np.zeros(3, np.float32), "step": 0, "seed": 0, "batch_size": 2}
        >>> peer.answer("user 0", request)["gradient"]
        array([-1., -1., -2.], dtype=float32)
        >>> peer.answer("user 0", request)
        {'refused': 'it has given all the gradients it gives, 1'}
    """

    def __init__(
        self, user: User, model: nn.Module, loss: Loss, caps: Caps | None = None, log: Path | None = None
    ) -> None:
        self.user, self.passes = user, Passes(model, loss)
        self.caps, self.log = caps or Caps(), log
        self.given = _count_given(log)
        self.frozen = frozen_digest(model)

    def ready(self) -> dict[str, bool]:
        """Say whether there is a gradient left to give."""
        return {"willing": self.caps.gradients is None or self.given < self.caps.gradients}

    def answer(self, caller: str, request: Any) -> dict[str, Any]:
        """Return the gradient at x on the batch of (seed, user, step), or why there is none.

        Nothing of an error but its kind leaves the site: a message may hold what is in the data.

        Args:
            caller: who asks, for the log.
            request: `x`, `step`, `seed`, `batch_size`; where the model has them, user 0's `buffers` by name and
                the digest of its `frozen` parameters.
        """
        began = time.perf_counter()
        step = request.get("step") if isinstance(request, dict) else None
        try:
            refused = self._malformed(request) or self._unwilling(request)
            reply = {"refused": refused} if refused else self._gradient(request)
        except Exception as error:  # whatever it is, user 0 is told that there is no gradient, and the log why
            self._note(caller, step, failed=f"{type(error).__name__}: {error}")
            return {"refused": f"it failed with {type(error).__name__}"}
        if refused:
            self._note(caller, step, refused=refused)
            return reply
        self.given += 1
        self._note(caller, step, examples=self._examples(request), norm=reply.pop("norm"))
        return reply | {"site": self.user.name, "step": step, "seconds": time.perf_counter() - began}

    def _examples(self, request: Mapping[str, Any]) -> int:
        return int(min(request["batch_size"], len(self.user)))

    def _malformed(self, request: Any) -> str | None:
        """Say what is wrong with a request, if anything is."""
        if not isinstance(request, dict):
            return "a request must have fields"
        x, size = request.get("x"), self.passes.parameters.size
        if not isinstance(x, np.ndarray) or x.shape != (size,) or x.dtype.kind != "f" or not np.isfinite(x).all():
            return f"the point must be {size} finite floating-point numbers"
        least = {"step": 0, "seed": -(2**63), "batch_size": 1}
        if any(not isinstance(request.get(name), int) or request[name] < low for name, low in least.items()):
            return "step, seed and batch size must be whole numbers"
        return None

    def _unwilling(self, request: Mapping[str, Any]) -> str | None:
        """Say why no gradient is given, where none is."""
        ours, sent = dict(self.passes.model.named_buffers()), request.get("buffers", {})
        if any(name not in ours or ours[name].shape != buffer.shape for name, buffer in sent.items()):
            return "its model has other buffers"
        if request.get("frozen", self.frozen) != self.frozen:
            return "its model has other frozen parameters"
        if self._examples(request) < self.caps.examples:
            return f"it gives no gradient of fewer than {self.caps.examples} examples"
        if not self.ready()["willing"]:
            return f"it has given all the gradients it gives, {self.caps.gradients}"
        return None

    def _gradient(self, request: Mapping[str, Any]) -> dict[str, Any]:
        parameters, buffers = self.passes.parameters, self.passes.buffers()
        for name, buffer in request.get("buffers", {}).items():
            buffers[name] = torch.from_numpy(np.array(buffer)).to(buffers[name])
        x = torch.from_numpy(np.array(request["x"])).to(parameters.device, parameters.dtype)
        seed, step = request["seed"], request["step"]
        batch = self.user.batch(request["batch_size"], seed=seed, step=step)
        with seeded(seed, self.user.name, step):
            gradient = self.passes.single(x, *batch, buffers)[0]
        gradient, norm = _clipped(gradient, self.caps.norm)
        return {"gradient": array_of(gradient), "norm": norm}

    def _note(self, caller: str, step: Any, **what: Any) -> None:
        if self.log is None:
            return
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": now, "caller": caller, "step": repr(step), **what}) + "\n")


class Collaborators:
    """Sites in this process: the peers of a consortium with no network between, or nobody.

    Args:
        peers: by name.

    Example:
        >>> Collaborators({}).ask(["a"], "ready", timeout=1.0).wait()
        {}
    """

    def __init__(self, peers: Mapping[str, Collaborator]) -> None:
        self.peers = peers

    def ask(self, names: Sequence[str], method: str, timeout: float, **arguments: Any) -> Answers:
        """Ask those who are here."""
        here = {name: self.peers[name] for name in names if name in self.peers}
        if method == "ready":
            return Answers({name: peer.ready() for name, peer in here.items()})
        return Answers({name: peer.answer("user 0", **arguments) for name, peer in here.items()})


@dataclass(frozen=True)
class Answers:
    """Answers that are all there."""

    answers: Mapping[str, Any]

    def done(self) -> bool:
        """Say that nothing more will come."""
        return True

    def wait(self) -> Mapping[str, Any]:
        """Return the answers."""
        return self.answers


def _clipped(gradient: Tensor, most: float | None) -> tuple[Tensor, float]:
    """Return a gradient of at most this norm, and the norm it had."""
    norm = float(gradient.norm())
    if most is None or not math.isfinite(norm) or norm <= most:
        return gradient, norm
    return gradient * (most / norm), norm


def _count_given(log: Path | None) -> int:
    if log is None or not log.exists():
        return 0
    with log.open(encoding="utf-8") as lines:
        return sum('"norm":' in line for line in lines)
