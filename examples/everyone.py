"""Four users in four processes, each of which trains a model of its own with the others' gradients.

    python examples/everyone.py         # is: torchrun --standalone --nproc-per-node 4
    examples/everyone.py

Every process runs this script with the digits of one writer, and torchrun tells each its rank. How
to start them on several machines is in docs/everyone.md. For a trusted network only: nothing is
encrypted.
"""

import os
import subprocess
import sys

import torch

import coterie
from coterie.engines import Mutual

WRITERS = (0, 3, 5, 8)


def main(rank: int) -> None:
    """Train the model of one writer."""
    torch.set_num_threads(1)  # small models only wait for each other's threads
    me = coterie.data.digits_by_writer(me=WRITERS[rank], own_examples=30).me
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    run = coterie.train(
        model,
        torch.nn.functional.cross_entropy,
        me,
        [],  # the others are elsewhere, and introduce themselves
        lr=1e-2,
        steps=100,
        out=f"everyone-run/{me.name}",
        resume=True,
        engine=Mutual,
    )
    print(f"{me.name}: {run.verdict.sentence}")


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
