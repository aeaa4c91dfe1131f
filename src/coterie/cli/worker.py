"""`coterie worker`: a peer in a process of its own."""

import typer

from coterie.cli.options.groups import grouped
from coterie.cli.options.worker import GivingOptions, PeerTableOptions, ProcessOptions
from coterie.engines.processes.processes import Processes
from coterie.engines.processes.rendezvous import Rendezvous
from coterie.tables import cluster


@grouped
def worker(table: PeerTableOptions, gives: GivingOptions, how: ProcessOptions) -> None:
    """Be a peer: give user 0 gradients of these rows, until its run ends. For a trusted network only.

    User 0 runs `coterie train --engine torch`. Every process is told by its environment who it is:
    RANK (0 is user 0), WORLD_SIZE, MASTER_ADDR and MASTER_PORT (of user 0's machine).
    On several machines COTERIE_SECRET_FILE names a file with a secret that all processes share, and
    that strangers lack.

    Example: RANK=2 WORLD_SIZE=4 MASTER_ADDR=node0 MASTER_PORT=29500 coterie worker --data basel.csv
        --name Basel
    """
    import torch

    torch.set_num_threads(how.threads)
    settings = gives.settings()  # what cannot be meant is told before user 0 is
    others = Processes(Rendezvous(how.timeout))
    answered = cluster.follow(others, table.rows, how.model, how.device, **settings)
    typer.echo(f"{table.name} gave {answered} gradients", err=True)
