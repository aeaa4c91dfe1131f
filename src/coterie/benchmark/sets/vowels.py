"""Deterding's vowels: 15 speakers, each of 11 vowels six times, as ten numbers."""

from pathlib import Path

from coterie.benchmark.population import Population
from coterie.benchmark.sets.user_set import register_set


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
def read(folder: Path) -> Population:
    """Read `vowel-context.data`.

    A flag, the speaker, the sex, ten features and the class, between blanks.
    """
    import pandas as pd

    features = [f"x{i}" for i in range(10)]
    columns = ["flag", "speaker", "sex", *features, "vowel"]
    table = pd.read_csv(folder / "vowel-context.data", sep=r"\s+", header=None, names=columns)
    table = table.sort_values("speaker", kind="stable", ignore_index=True)
    owners = ("speaker " + table["speaker"].astype(str)).to_numpy(dtype=str)
    return Population(table[features], table["vowel"].to_numpy(), owners, n_classes=11)
