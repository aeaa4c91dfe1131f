"""`coterie worker`: a peer in a process of its own."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from coterie.cli.options.groups import check_effect, grouped
from coterie.data.reading import FileForm, read_rows
from coterie.engines.peer import Caps
from coterie.engines.processes.processes import Processes
from coterie.engines.processes.rendezvous import Rendezvous
from coterie.errors import KnobError
from coterie.privacy.sums import SumsOnly
from coterie.tables import cluster


@dataclass(frozen=True, kw_only=True)
class PeerTableOptions(FileForm):
    """The table.

    Args:
        data: A CSV or Parquet file with this peer's examples, one a row.
        name: This peer's name, by which user 0 knows it.
        user_column: The column that says whose row it is; all rows are this peer's if left out.
    """

    data: Path
    name: str
    user_column: str | None = None

    def rows(self) -> tuple[str, Any]:
        """Return this peer's name and rows."""
        return self.name, read_rows(self.data, self.user_column, self.name, self)


@dataclass(frozen=True, kw_only=True)
class GivingOptions:
    """What is given at most.

    Args:
        max_gradients: How many gradients to give in all; with --log over every run.
        max_norm: The norm that a gradient is clipped to.
        min_examples: Give no gradient of fewer rows than this.
        log: A file to which every request is added.
        sums_only: Give gradients as part of a sum only, never on their own.
        secure_sums: Give gradients under masks only, as part of such a sum.
        key: With --secure-sums: NAME=FINGERPRINT of every other peer's key, told by telephone.
        min_peers: With --sums-only or --secure-sums: how many peers a sum must be of.
        max_share: With --sums-only or --secure-sums: how much of the weight one peer may have.
    """

    max_gradients: Annotated[int | None, Option(min=0)] = None
    max_norm: float | None = None
    min_examples: Annotated[int, Option(min=1)] = 1
    log: Path | None = None
    sums_only: bool = False
    secure_sums: bool = False
    key: list[str] = field(default_factory=list)
    min_peers: Annotated[int, Option(min=1)] = 3
    max_share: float = 0.5

    def settings(self) -> dict[str, Any]:
        """Return the arguments of `coterie.engines.processes.engine.serve` that say so."""
        caps, sums = Caps(self.max_gradients, self.max_norm, self.min_examples), None
        if not self.secure_sums:  # whoever names limits must not give more than these allow
            check_effect(self, ("key",), "--secure-sums")
        if not self.sums_only and not self.secure_sums:
            check_effect(self, ("min_peers", "max_share"), "--sums-only")
        if self.sums_only or self.secure_sums:
            sums = SumsOnly(self.min_peers, self.max_share, _known(self.key))
        capped = None if caps == Caps() else caps
        return {
            "sums_only": sums or False,
            "secure_sums": self.secure_sums,
            "caps": capped,
            "log": self.log,
        }


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """The process.

    Args:
        model: module.path:factory, where user 0 uses a model of its own; must be the same.
        device: Where to compute: cpu, cuda, …; as user 0's.
        threads: CPU threads; more help large models only.
        timeout: Seconds after which a silent user 0 is lost.
    """

    model: str | None = None
    device: str = "cpu"
    threads: Annotated[int, Option(min=1)] = 1
    timeout: float = 120.0


def _known(keys: list[str]) -> dict[str, str]:
    """Return the fingerprint of each peer's key."""
    pairs = dict(pair.rpartition("=")[::2] for pair in keys)
    if "" in pairs or len(pairs) < len(keys):
        raise KnobError(
            f"`--key` must be NAME=FINGERPRINT, once for each peer, got {', '.join(keys)}"
        )
    return pairs


@grouped
def worker(table: PeerTableOptions, gives: GivingOptions, process: ProcessOptions) -> None:
    """Be a peer: give user 0 gradients of these rows, until its run ends. For a trusted network only.

    User 0 runs `coterie train --engine torch`. Every process is told by its environment who it is:
    RANK (0 is user 0), WORLD_SIZE, MASTER_ADDR and MASTER_PORT (of user 0's machine).
    On several machines COTERIE_SECRET_FILE names a file with a secret that all processes share, and
    that strangers lack.

    Example: RANK=2 WORLD_SIZE=4 MASTER_ADDR=node0 MASTER_PORT=29500 coterie worker --data basel.csv
        --name Basel
    """
    import torch

    torch.set_num_threads(process.threads)
    settings = gives.settings()  # what cannot be meant is told before user 0 is
    others = Processes(Rendezvous(process.timeout))
    answered = cluster.follow(others, table.rows, process.model, process.device, **settings)
    typer.echo(f"{table.name} gave {answered} gradients", err=True)
