"""WISDM activities: ten-second windows of 36 people's phones in six activities, as 43 numbers."""

from pathlib import Path

from coterie.benchmark.population import Population
from coterie.benchmark.sets.user_set import register_set

ACTIVITIES = ("Walking", "Jogging", "Sitting", "Standing", "Upstairs", "Downstairs")


@register_set(
    "wisdm",
    models=("linear", "mlp"),
    own_examples=30,
    most_peers=19,
    folder="wisdm_activity",
    files=("WISDM_ar_v1.1_transformed.arff",),
    source="the WISDM Lab of Fordham University, Activity Prediction v1.1, transformed",
)
def read(folder: Path) -> Population:
    """Read `WISDM_ar_v1.1_transformed.arff`.

    Number, user, 43 features and the activity; `?` is missing.

    Its header leaves the values of two columns out, so that readers of ARFF refuse it; what follows
    `@data` is plain CSV.
    """
    import pandas as pd

    path = folder / "WISDM_ar_v1.1_transformed.arff"
    with path.open(encoding="utf-8") as file:
        names = []
        for line in file:
            if line.lower().startswith("@attribute"):
                names.append(line.split()[1].strip('"'))
            if line.lower().startswith("@data"):
                break
        table = pd.read_csv(file, header=None, names=names, na_values="?", skip_blank_lines=True)
    table = table.sort_values("user", kind="stable", ignore_index=True)
    targets = table["class"].map({activity: i for i, activity in enumerate(ACTIVITIES)}).to_numpy()
    owners = ("person " + table["user"].astype(str)).to_numpy(dtype=str)
    return Population(
        table.drop(columns=["UNIQUE_ID", "user", "class"]), targets, owners, len(ACTIVITIES)
    )
