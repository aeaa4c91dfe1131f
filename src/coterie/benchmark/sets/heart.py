"""Heart disease: 920 patients of four hospitals, ill or not, from 13 findings of which many are missing."""

from pathlib import Path

import numpy as np

from coterie.benchmark.population import Population
from coterie.benchmark.sets.user_set import register_set

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
FILES = tuple(f"processed.{hospital}.data" for hospital in HOSPITALS)
COLUMNS = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg"),
    *("thalach", "exang", "oldpeak", "slope", "ca", "thal", "num"),
)


@register_set(
    "heart",
    models=("linear", "mlp"),
    own_examples=30,
    most_peers=3,
    folder="heart_disease",
    files=FILES,
    source="the UCI Machine Learning Repository, Heart Disease, its processed files",
)
def read(folder: Path) -> Population:
    """Read the four `processed.*.data` files: 13 findings and `num`, above 0 for the ill.

    `?`, -9 and a cholesterol of 0 stand for missing.
    """
    import pandas as pd

    parts = [
        pd.read_csv(folder / file, header=None, names=COLUMNS, na_values=["?", "-9", "-9.0"])
        for file in FILES
    ]
    table = pd.concat(parts, ignore_index=True)
    table["chol"] = table["chol"].where(table["chol"] != 0)
    owners = np.repeat(HOSPITALS, [len(part) for part in parts])
    ill = (table["num"] > 0).to_numpy(dtype=np.int64)
    categorical = ("cp", "restecg", "slope", "thal")
    return Population(table.drop(columns="num"), ill, owners, n_classes=2, categorical=categorical)
