"""From a table with a user column to a personal model, without writing a model or a loop.

The table is made up here: five clinics whose patients follow similar but different rules. The same
from the command line:

    coterie train --data visits.csv --user-column clinic --target ill --me "clinic 0" --own-examples
    25 --out run coterie predict run visits.csv
"""

import numpy as np
import pandas as pd
import torch

import coterie


def visits(seed: int = 0) -> pd.DataFrame:
    """Return made-up visits to five clinics, with missing values and a category."""
    rng = np.random.default_rng(seed)
    clinics = []
    for k in range(5):
        age, pressure = rng.normal(50, 15, 150), rng.normal(130, 20, 150)
        smoker = rng.choice(["yes", "no"], 150)
        score = (
            0.05 * (age - 50)
            + (0.04 + 0.005 * k) * (pressure - 130)
            + np.where(smoker == "yes", 1.0, -0.5)
        )
        ill = rng.random(150) < 1 / (1 + np.exp(-2 * score))
        pressure[rng.random(150) < 0.1] = np.nan
        columns = {
            "clinic": f"clinic {k}",
            "age": age,
            "pressure": pressure,
            "smoker": smoker,
            "ill": ill,
        }
        clinics.append(pd.DataFrame(columns))
    return pd.concat(clinics, ignore_index=True)


task = coterie.data.from_table(
    visits(), user_column="clinic", target="ill", me="clinic 0", own_examples=25
)
torch.manual_seed(0)
model = torch.nn.Linear(task.n_inputs, task.n_outputs)
for rule in (coterie.Alone(), coterie.WeightedAveraging(alpha=0.5)):
    run = coterie.train(
        model, torch.nn.functional.cross_entropy, task.me, task.peers, rule, lr=0.03, steps=300
    )
    print(run.summary(), end="\n\n")
