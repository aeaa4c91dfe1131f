"""A table like that of the four hospitals: findings of which some are missing, and one hospital that is small."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd


def hospitals(path: Path, n: int = 240) -> pd.DataFrame:
    """Write a table of four hospitals to a file, and return it."""
    rng = np.random.default_rng(7)
    who = rng.choice(["Basel", "Bern", "Chur", "St. Gallen"], n, p=[0.4, 0.3, 0.2, 0.1])
    age, pressure = rng.normal(55, 9, n), rng.normal(130, 15, n)
    pain = rng.choice(["none", "mild", "strong"], n)
    ill = age / 9 + (pressure - 130) / 15 + 2 * (pain == "strong") + rng.normal(0, 1, n) > 6.8
    pressure[who == "Chur"] = np.nan
    age[::13] = np.nan
    table = pd.DataFrame(
        {"hospital": who, "age": age, "pressure": pressure, "pain": pain, "ill": ill.astype(int)}
    )
    table.to_csv(path, index=False)
    return pd.read_csv(path)
