"""Sets that are tables: schools, speakers of vowels, hospitals, and people with a phone."""

from pathlib import Path

import numpy as np
import pandas as pd

from coterie.benchmark.sets.user_set import register_set
from coterie.benchmark.tasks import Population


@register_set(
    "school",
    models=("linear", "mlp"),
    own_examples=20,
    most_peers=19,
    folder="school_exam",
    files=("school.mat",),
    source="github.com/jiayuzhou/MALSAR (data/school.mat)",
)
def school(folder: Path) -> Population:
    """Read `school.mat`: a cell a school of 28 columns, the last a constant, and one of scores."""
    from scipy.io import loadmat

    cells = loadmat(folder / "school.mat")
    inputs, scores = cells["X"].ravel(), cells["Y"].ravel()
    table = pd.DataFrame(np.concatenate(inputs)[:, :-1].astype(float)).rename(
        columns=lambda i: f"x{i}"
    )
    owners = np.repeat([f"school {k}" for k in range(len(inputs))], [len(cell) for cell in inputs])
    return Population(table, np.concatenate(scores).astype(float).ravel(), owners)


@register_set(
    "vowels",
    models=("mlp", "linear"),
    own_examples=33,
    most_peers=14,
    folder="vowel_deterding",
    files=("vowel-context.data",),
    source=(
        "the UCI Machine Learning Repository, Connectionist Bench (Vowel Recognition, Deterding)"
    ),
)
def vowels(folder: Path) -> Population:
    """Read `vowel-context.data`.

    A flag, the speaker, the sex, ten features and the class, between blanks.
    """
    features = [f"x{i}" for i in range(10)]
    columns = ["flag", "speaker", "sex", *features, "vowel"]
    table = pd.read_csv(folder / "vowel-context.data", sep=r"\s+", header=None, names=columns)
    table = table.sort_values("speaker", kind="stable", ignore_index=True)
    owners = ("speaker " + table["speaker"].astype(str)).to_numpy(dtype=str)
    return Population(table[features], table["vowel"].to_numpy(), owners, n_classes=11)


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
def heart(folder: Path) -> Population:
    """Read the four `processed.*.data` files: 13 findings and `num`, above 0 for the ill.

    `?`, -9 and a cholesterol of 0 stand for missing.
    """
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
def wisdm(folder: Path) -> Population:
    """Read `WISDM_ar_v1.1_transformed.arff`.

    Number, user, 43 features and the activity; `?` is missing.

    Its header leaves the values of two columns out, so that readers of ARFF refuse it; what follows
    `@data` is plain CSV.
    """
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
