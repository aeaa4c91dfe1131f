"""The theory's constants as they were measured, with standard errors.

See `coterie.choosing.measuring`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Self

from coterie.theory.peers import Peers


class Measured(NamedTuple):
    """A number and its standard error.

    Two of them cover the truth in nine of ten cases, with thirty examples.
    """

    value: float
    error: float


@dataclass(frozen=True)
class PeerEstimates:
    """What was measured of a peer."""

    noise: Measured  # σ_k of one batch, as a sample of all examples there could be
    bias_floor: Measured  # ζ_k
    bias_growth: Measured  # m_k; 0 where it is not clear of its error
    hessian_gap: Measured  # δ_k along the path
    share: float = 0.0  # how much of the peer's examples a batch is; 0 for fresh samples
    added: float = 0.0  # s, what a private peer adds to each gradient; it is not in `noise`


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """The constants of a problem, measured."""

    loss: float  # of user 0 at the start, which stands for F_0: the least loss is taken to be 0
    gradient: Measured  # ‖∇f_0‖ at the start
    noise: Measured  # σ_0 of one batch, as a sample of all examples there could be
    smoothness: Measured  # L along the path, no more than the true one
    pl: float
    """μ, the least ‖∇f_0‖²/(2f_0) at the two points, no less than the true one if the least loss is 0; L where the
    gradient is not clear of the noise."""
    peers: Mapping[str, PeerEstimates]
    # the peers not measured, each with the reason
    left_out: Mapping[str, str] = field(default_factory=dict)
    share: float = 0.0  # how much of user 0's examples a batch is; 0 for fresh samples
    batches: int = 4  # how many were drawn

    def constants(self, steps: int, *, bias_errors: float | None = None) -> Peers:
        """Return the constants for a run of so many steps.

        Noise averages out over a run only as far as samples are new. Where a user's n examples are
        gone through several times, its noise is counted up to what leaves, after T steps, the noise
        of n samples: σ² max(1, T·share). The noise of a private peer is new at every step: s² is
        added to that as it is.

        Weights that follow small numbers closely would follow their errors. So ζ_k² of standard
        error e enters as ζ_k²(1 − (2e/ζ_k²)²), as nothing below 2e; and δ_k, a lower estimate, with
        its error added. What is small is not nothing, though: for how much weight peers may have,
        and for what is claimed, ζ_k² enters with some `bias_errors` added.
        """

        def noise(one: Measured, share: float) -> float:
            return one.value * math.sqrt(max(1.0, steps * share))

        peers = list(self.peers.values())
        return Peers(
            smoothness=self.smoothness.value,
            pl=self.pl,
            initial_gap=self.loss,
            noise=noise(self.noise, self.share),
            peer_noise=[math.hypot(noise(peer.noise, peer.share), peer.added) for peer in peers],
            bias_floor=[
                _clear(p.bias_floor) if bias_errors is None else _more(p.bias_floor, bias_errors)
                for p in peers
            ],
            bias_growth=[peer.bias_growth.value for peer in peers],
            hessian_gap=[sum(peer.hessian_gap) for peer in peers],
        )

    def bias_at_start(self, name: str) -> float:
        """Return ‖∇f_k − ∇f_0‖² of a peer at the start."""
        peer = self.peers[name]
        return peer.bias_floor.value**2 + peer.bias_growth.value * self.gradient.value**2

    def sentence(self) -> str:
        """Say what was measured, in one line."""

        def range_of(values: list[float]) -> str:
            low, high = f"{min(values):.2g}", f"{max(values):.2g}"
            return low if low == high else f"{low} to {high}"

        peers = list(self.peers.values())
        bias = [_clear(p.bias_floor) for p in peers]
        return (
            f"measured at the start: noise {self.noise.value:.2g}, peers' noise"
            f" {range_of([math.hypot(p.noise.value, p.added) for p in peers])},"
            f" {'bias clear of its error ' + range_of(bias) if any(bias) else 'no bias clear of its error'},"
            f" Hessian gap {range_of([p.hessian_gap.value for p in peers])}, smoothness"
            f" {self.smoothness.value:.2g}, PL {self.pl:.2g}"
        )

    def to_plain(self) -> dict[str, Any]:
        """Return everything as a record and a checkpoint can hold it."""
        plain = dict(json.loads(json.dumps(asdict(self))))
        for peer in plain["peers"].values():
            if not peer["added"]:  # as of all peers but private ones
                del peer["added"]
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Return the estimates that `to_plain` gave."""

        def measured(values: Mapping[str, Any]) -> dict[str, Any]:
            return {k: Measured(*v) if isinstance(v, list) else v for k, v in values.items()}

        peers = {name: PeerEstimates(**measured(peer)) for name, peer in plain["peers"].items()}
        return cls(**(measured(plain) | {"peers": peers}))


def _more(root: Measured, errors: float) -> float:
    """Return a root whose square is some standard errors larger."""
    return math.sqrt(root.value**2 + errors * (sum(root) ** 2 - root.value**2))


def _clear(root: Measured) -> float:
    """Return what of a root is clear of twice the error of its square."""
    square, error = root.value**2, sum(root) ** 2 - root.value**2
    return root.value * math.sqrt(1 - (2 * error / square) ** 2) if square > 2 * error else 0.0
