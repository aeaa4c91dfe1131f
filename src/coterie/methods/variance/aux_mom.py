"""AuxMom and AuxMVR: steps by the peers alone, corrected by a bias that is estimated where a round starts."""

from dataclasses import dataclass

from torch import Tensor

from coterie.arguments import SHARE, checked
from coterie.methods.clients import Clients, LocalSteps
from coterie.rules import State


@dataclass(frozen=True)
@checked(rate=SHARE)
class AuxMom(LocalSteps):
    """Take K steps by the peers' mean gradient, plus what it lacks to the own one, estimated once a round.

        h = mean_{j≥1} g_j,   m ← (1 − a) m + a (g_0(x) − h(x))
        y ← x, then K times  y ← y − η (h(y) + m);      x ← y

    from m = the first g_0(x) − h(x). Bias correction (`BiasCorrection`) with α = 1 whose bias is
    held for K steps, and updated before them. Only one own gradient a round enters: for users whose
    own batches are rare. The engine computes one with each step of the peers all the same, and it
    is counted. It converges to the own optimum.

    Args:
        local_steps: K.
        rate: a, in (0, 1]; 1 forgets all former rounds.

    Reference: Chayti and Karimireddy, Optimization with access to auxiliary information,
    arXiv:2206.00395, AuxMOM. Its text was not at hand: this form follows the abstract and a
    summary.

    Example:
        >>> AuxMom(local_steps=5).gradients_a_round
        6
    """

    local_steps: int = 5
    rate: float = 0.1

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round, of which those of the K steps are not used."""
        return self.local_steps + 1

    def init(self, users: Clients, x: Tensor) -> State:
        """Return the state before the first round: x, and nothing known of the bias."""
        return {"step": 0, "x": x, "m": x.new_zeros(x.shape), "before": x}

    def round(self, users: Clients, state: State, lr: float) -> State:
        """Return the state after a round."""
        x, step = state["x"], state["step"]
        m = self.carried(users, state)
        y = x
        for k in range(step + 1, step + 1 + self.local_steps):
            y = y - lr * (_of_peers(users, _asked_at(users, y, k)) + m)
        return {"step": step + 1 + self.local_steps, "x": y, "m": m, "before": x}

    def carried(self, users: Clients, state: State) -> Tensor:
        """Return the next m."""
        seen, m = _lacking(users, state["x"], state["step"]), state["m"]
        return seen if state["step"] == 0 else m + self.rate * (seen - m)


@dataclass(frozen=True)
class AuxMVR(AuxMom):
    """The same with a recursive estimate, whose noise at the last point is taken out.

        m ← b(x) + (1 − a) (m − b(x⁻)),   b = g_0 − h on one batch,   x⁻ where the last round
        started

    Where the noise of b hardly depends on x, m is the running mean of the noise about the bias at x
    itself: what the bias has moved since is known. It costs two gradients of everybody a round more
    than K.

    Args:
        local_steps: K.
        rate: a, in (0, 1].

    Reference: as `AuxMom`, AuxMVR; its estimate is MVR's (STORM), for g_0 − h.

    Example:
        >>> AuxMVR(local_steps=5).gradients_a_round
        7
    """

    @property
    def gradients_a_round(self) -> int:
        """How many gradients user 0 computes in a round, of which those of the K steps are not used."""
        return self.local_steps + 2

    def carried(self, users: Clients, state: State) -> Tensor:
        """Return the next m."""
        seen = _lacking(users, state["x"], state["step"])
        before = _lacking(users, state["before"], state["step"])
        return seen if state["step"] == 0 else seen + (1 - self.rate) * (state["m"] - before)


def _asked_at(users: Clients, x: Tensor, step: int) -> Tensor:
    """Return everybody's gradient at one point."""
    rows = users.gradients(x.expand(len(users.names), -1), step)
    users.exchange(down=x.numel(), up=x.numel())
    return rows


def _of_peers(users: Clients, rows: Tensor) -> Tensor:
    """Return the mean of the peers that take part."""
    peers = users.taking_part(rows)[1:]
    return peers.sum(0) / max(1, len(peers))


def _lacking(users: Clients, x: Tensor, step: int) -> Tensor:
    """Return g_0 − h at a point."""
    rows = _asked_at(users, x, step)
    return rows[0] - _of_peers(users, rows)
