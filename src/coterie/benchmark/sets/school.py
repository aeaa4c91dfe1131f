"""School exams: the scores of 15,362 pupils of 139 schools, from 27 facts about pupil and school."""

from pathlib import Path

import numpy as np

from coterie.benchmark.population import Population
from coterie.benchmark.sets.user_set import register_set


@register_set(
    "school",
    models=("linear", "mlp"),
    own_examples=20,
    most_peers=19,
    folder="school_exam",
    files=("school.mat",),
    source="github.com/jiayuzhou/MALSAR (data/school.mat)",
)
def read(folder: Path) -> Population:
    """Read `school.mat`: a cell a school of 28 columns, the last a constant, and one of scores."""
    import pandas as pd
    from scipy.io import loadmat

    cells = loadmat(folder / "school.mat")
    inputs, scores = cells["X"].ravel(), cells["Y"].ravel()
    table = pd.DataFrame(np.concatenate(inputs)[:, :-1].astype(float)).rename(
        columns=lambda i: f"x{i}"
    )
    owners = np.repeat([f"school {k}" for k in range(len(inputs))], [len(cell) for cell in inputs])
    return Population(table, np.concatenate(scores).astype(float).ravel(), owners)
