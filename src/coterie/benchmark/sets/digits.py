"""Handwritten digits by writer segment, from the copy that scikit-learn carries.

14 users, 1,797 digits.
"""

from pathlib import Path

import numpy as np
import torch

from coterie.benchmark.population import Population
from coterie.benchmark.sets.user_set import register_set
from coterie.data.handwriting import BOUNDS


@register_set("digits", models=("linear", "mlp", "cnn"), own_examples=30, most_peers=13)
def read(_: Path) -> Population:
    """Return the digits; nothing is read from the folder."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    owners = np.repeat([f"writer {k}" for k in range(len(BOUNDS) - 1)], np.diff(BOUNDS))
    return Population(
        torch.tensor(bunch.images / 16, dtype=torch.float32)[:, None], bunch.target, owners, 10
    )
