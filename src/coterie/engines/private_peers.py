"""Private peers that are simulated.

All users are in this process, and peers answer as private sites do.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from coterie.arguments import either, mapped
from coterie.engines.in_process.passes import Passes
from coterie.engines.peer import Caps, Peer
from coterie.engines.peer.ledger import Ledger
from coterie.engines.remote.engine import Remote
from coterie.engines.remote.sites import LocalSites
from coterie.errors import KnobError, did_you_mean
from coterie.privacy.privacy import PROMISE, Privacy
from coterie.recording.costs import Traffic
from coterie.users.user import PEERS, Loss, User

PROMISES = either(
    PROMISE, mapped(PROMISE, "a `coterie.privacy.Privacy`, or one by the name of each private peer")
)
"""What peers may promise."""


class PrivatePeers(Remote):
    """Gradients of users in this process whose peers promise (ε, δ).

    To find out what a promise costs.

    Peers answer and refuse as they would between organisations; what they spend is counted in
    memory, and is forgotten with the engine.

    Args:
        model, loss, me, peers, batch_size, seed: as for `InProcess`.
        privacy: what every peer promises, or by name what some do; the others' gradients are plain.
        gradients: how many gradients each private peer gives in all; `AdaptiveAveraging` asks for
            4.5 a step. The noise follows from it where `privacy` does not say it.

    Example:
        >>> import functools, torch, coterie
        >>> users = [User(name, torch.randn(40, 2), torch.randn(40, 1)) for name in ("me", "a", "b")]
        >>> promise = Privacy(epsilon=4.0, delta=1e-3, clip=1.0)
        >>> private = functools.partial(PrivatePeers, privacy=promise, gradients=90)
        >>> loss = nn.functional.mse_loss
        >>> run = coterie.train(nn.Linear(2, 1), loss, users[0], users[1:], steps=20, engine=private)
        >>> run.step
        20
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        me: User,
        peers: Sequence[User],
        *,
        privacy: Privacy | Mapping[str, Privacy],
        gradients: int | None = None,
        batch_size: int = 32,
        seed: int = 0,
    ) -> None:
        names = [peer.name for peer in PEERS("peers", peers)]
        PROMISES("privacy", privacy)
        self.privacy = (
            dict.fromkeys(names, privacy) if isinstance(privacy, Privacy) else dict(privacy)
        )
        if unknown := [name for name in self.privacy if name not in names]:
            raise KnobError(
                f"`privacy` names an unknown peer {unknown[0]!r}; the peers are {', '.join(names)}"
                f"{did_you_mean(unknown[0], names)}"
            )
        for promise in self.privacy.values():
            if promise.batch_size not in (None, batch_size):
                raise KnobError(
                    f"`batch_size` of `privacy`, {promise.batch_size}, must be that of the run,"
                    f" {batch_size}, or be left out: peers would refuse every gradient"
                )
        passes = Passes(model, loss)
        self.peers = {peer.name: self._peer(peer, passes, gradients) for peer in peers}
        sites = LocalSites(self.peers)
        super().__init__(
            model, loss, me, sites=sites, names=names, batch_size=batch_size, seed=seed
        )

    def describe(self) -> dict[str, Any]:
        """Return what the record should say of how gradients are computed."""
        promises = {name: privacy.in_words() for name, privacy in self.privacy.items()}
        return self.own.describe() | {"engine": "in process, private peers", "promises": promises}

    def traffic(self) -> Mapping[str, Traffic]:
        """Return nothing: nothing travels."""
        return {}

    def _peer(self, user: User, passes: Passes, gradients: int | None) -> Peer:
        privacy = self.privacy.get(user.name)
        if privacy is None:
            return Peer(user, passes)
        return Peer(user, passes, Caps(gradients=gradients), Ledger(), privacy=privacy)
