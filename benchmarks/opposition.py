"""How often peers are left out because they keep pointing against user 0 and most of the others: nobody attacks.

    python benchmarks/opposition.py [--data DIR] [--sets digits,wisdm,school,heart,vowels]
        [--users 4]

Users of a set are user 0 in turn, in the conditions of `coterie bench`, with
`WeightedAveraging(0.5)` and each gradient at hand, as over NVFLARE; to have that in one process the
first peer sends the mean of the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from users_in_turn import options, problem_of, users_of

import coterie
from coterie.benchmark.sets import SETS
from coterie.benchmark.tasks import CONDITIONS
from coterie.engines.attacks import Attacked, Scaled
from coterie.gradients.norm_bound import AGAINST


def left_out(name: str, condition: str, me: str, data: Path | None) -> tuple[int, int]:
    """Return how many gradients of peers were left out for that, of how many."""
    kind = SETS[name]
    task, model = problem_of(name, me, data, str(kind.models[0]), condition)

    def engine(*problem: Any, **settings: Any) -> coterie.Engine:
        return Attacked(coterie.InProcess(*problem, **settings), [task.peers[0].name], Scaled(1.0))

    run = coterie.train(
        model,
        torch.nn.functional.mse_loss if task.n_outputs == 1 else torch.nn.functional.cross_entropy,
        *(task.me, task.peers, coterie.WeightedAveraging(0.5)),
        lr=0.03,
        steps=150,
        batch_size=kind.batch_size,
        engine=engine,
        guard="off",
        measure=False,
        progress=False,
    )
    return sum(reasons.get(AGAINST, 0) for reasons in run.record.end.left_out.values()), 150 * len(
        task.peers
    )


def main() -> None:
    """Print a line for each set and condition."""
    settings = options(__doc__, users=4).parse_args()
    torch.set_num_threads(1)
    for name in settings.sets.split(","):
        users = users_of(name, settings)
        for condition in CONDITIONS:
            counts = [left_out(name, condition, me, settings.data) for me in users]
            some, all_of_them = (sum(each) for each in zip(*counts, strict=True))
            print(
                f"{name}, {condition}: {some} of {all_of_them} ({some / all_of_them:.1%})",
                flush=True,
            )


if __name__ == "__main__":
    main()
