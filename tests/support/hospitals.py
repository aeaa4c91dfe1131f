"""Made-up visits to three hospitals whose patients follow similar but different rules."""

from __future__ import annotations

import numpy as np
import pandas as pd


def visits(n: int = 150, seed: int = 0) -> pd.DataFrame:
    """Return visits with a missing value now and then and a category; `ill` and `days` are to be predicted."""
    rng = np.random.default_rng(seed)
    hospital = rng.choice(["Geneva", "Bern", "Basel"], n, p=[0.2, 0.4, 0.4])
    age, pressure = rng.normal(50, 15, n), rng.normal(130, 20, n)
    smoker = rng.choice(["yes", "no"], n)
    opposite = np.where(hospital == "Basel", -1.0, 1.0)
    score = opposite * ((age - 50) / 15 + (pressure - 130) / 20) + np.where(
        smoker == "yes", 0.5, -0.5
    )
    ill = np.where(rng.random(n) < 1 / (1 + np.exp(-3 * score)), "ill", "well")
    days = 6 + 2 * score + rng.normal(0, 0.5, n)
    pressure[rng.random(n) < 0.1] = np.nan
    columns = {
        "hospital": hospital,
        "age": age,
        "pressure": pressure,
        "smoker": smoker,
        "ill": ill,
        "days": days,
    }
    return pd.DataFrame(columns)
