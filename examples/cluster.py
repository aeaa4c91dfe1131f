"""Four users in four processes: user 0 trains, the others answer with gradients of digits that only they use.

    python examples/cluster.py          # is: torchrun --standalone --nproc-per-node 4
    examples/cluster.py

Every process runs this script, and torchrun tells each its rank. How to start them on several
machines is in docs/engines.md. For a trusted network only: nothing is encrypted.
"""

import os
import subprocess
import sys

import torch

import coterie
from coterie.engines import TorchDistributed, serve

PEERS = ("writer 0", "writer 5", "writer 8")


def main(rank: int) -> None:
    """Be user 0 or a peer, as the rank says."""
    torch.set_num_threads(1)  # small models only wait for each other's threads
    # scikit-learn carries everybody's digits
    task = coterie.data.digits_by_writer(me=3, own_examples=30)
    peers = {peer.name: peer for peer in task.peers}
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    )
    loss = torch.nn.functional.cross_entropy
    if rank:
        mine = peers[PEERS[rank - 1]]
        print(f"{mine.name} gave {serve(model, loss, mine)} gradients")
        return
    run = coterie.train(
        model,
        loss,
        task.me,
        [],  # the peers are elsewhere, and introduce themselves
        rule=coterie.WeightedAveraging(alpha=0.5),
        optimizer=torch.optim.Adam,
        lr=1e-2,
        steps=200,
        out="cluster-run",
        resume=True,
        engine=TorchDistributed,
    )
    print(run.summary())


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(int(os.environ["RANK"]))
    else:
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "4",
        ]
        sys.exit(subprocess.call([*torchrun, __file__]))  # this very file
