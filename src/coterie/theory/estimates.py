"""The theory's constants as they were measured, with standard errors; see `coterie.choosing.measuring`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from coterie.theory.peers import Peers


class Measured(NamedTuple):
    """A number and its standard error over the batches."""

    value: float
    error: float


@dataclass(frozen=True)
class PeerEstimates:
    """What was measured of a peer.

    Args:
        noise: σ_k of one batch, as a sample of all examples there could be.
        bias_floor: ζ_k.
        bias_growth: m_k; 0 where it is not clear of its error.
        hessian_gap: δ_k along the path.
        share: how much of the peer's examples a batch is; 0 for fresh samples.
    """

    noise: Measured
    bias_floor: Measured
    bias_growth: Measured
    hessian_gap: Measured
    share: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """The constants of a problem, measured.

    Args:
        loss: of user 0 at the start, which stands for F_0: the least loss is taken to be 0.
        gradient: ‖∇f_0‖ at the start.
        noise: σ_0 of one batch, as a sample of all examples there could be.
        smoothness: L along the path, no more than the true one.
        pl: μ, the least ‖∇f_0‖²/(2f_0) at the two points, no less than the true one if the least loss is 0; L where
            the gradient is not clear of the noise.
        peers: by name.
        left_out: the peers that could not be measured, each with the reason.
        share: how much of user 0's examples a batch is; 0 for fresh samples.
        batches: how many batches were drawn.
    """

    loss: float
    gradient: Measured
    noise: Measured
    smoothness: Measured
    pl: float
    peers: Mapping[str, PeerEstimates]
    left_out: Mapping[str, str] = field(default_factory=dict)
    share: float = 0.0
    batches: int = 4

    def constants(self, steps: int) -> Peers:
        """Return the constants for a run of so many steps.

        Noise averages out over a run only as far as samples are new. Where a user's n examples are gone through
        several times, its noise is counted up to what leaves, after T steps, the noise of n samples:
        σ² max(1, T·share).

        Weights that follow small numbers closely would follow their errors. So ζ_k² of standard error e enters as
        ζ_k²(1 − (2e/ζ_k²)²), as nothing below 2e; and δ_k, a lower estimate, with its error added.
        """

        def noise(one: Measured, share: float) -> float:
            return one.value * math.sqrt(max(1.0, steps * share))

        peers = list(self.peers.values())
        return Peers(
            smoothness=self.smoothness.value,
            pl=self.pl,
            initial_gap=self.loss,
            noise=noise(self.noise, self.share),
            peer_noise=[noise(peer.noise, peer.share) for peer in peers],
            bias_floor=[_clear(peer.bias_floor) for peer in peers],
            bias_growth=[peer.bias_growth.value for peer in peers],
            hessian_gap=[sum(peer.hessian_gap) for peer in peers],
        )

    def sentence(self) -> str:
        """Say what was measured, in one line."""

        def range_of(values: list[float]) -> str:
            low, high = f"{min(values):.2g}", f"{max(values):.2g}"
            return low if low == high else f"{low} to {high}"

        peers = list(self.peers.values())
        bias = [_clear(p.bias_floor) for p in peers]
        return (
            f"measured at the start: noise {self.noise.value:.2g}, "
            f"peers' noise {range_of([p.noise.value for p in peers])}, "
            f"{'bias ' + range_of(bias) if any(bias) else 'no bias clear of the noise'}, "
            f"Hessian gap {range_of([p.hessian_gap.value for p in peers])}, "
            f"smoothness {self.smoothness.value:.2g}, PL {self.pl:.2g}"
        )

    def to_plain(self) -> dict[str, Any]:
        """Return everything as a record and a checkpoint can hold it."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Estimates:
        """Return the estimates that `to_plain` gave."""

        def measured(values: Mapping[str, Any]) -> dict[str, Any]:
            return {k: Measured(*v) if isinstance(v, list) else v for k, v in values.items()}

        peers = {name: PeerEstimates(**measured(peer)) for name, peer in plain["peers"].items()}
        return cls(**(measured(plain) | {"peers": peers}))


def _clear(root: Measured) -> float:
    """Return what of a root is clear of twice the error of its square."""
    square, error = root.value**2, sum(root) ** 2 - root.value**2
    return root.value * math.sqrt(1 - (2 * error / square) ** 2) if square > 2 * error else 0.0
