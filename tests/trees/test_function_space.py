"""What docs/trees.md proves of a tree as a step in function space, on trees that were fitted to the noise too."""

import numpy as np
import pytest
from sklearn.tree import DecisionTreeRegressor

from coterie.mixture.families import LOGISTIC, SQUARED, Family


@pytest.mark.parametrize(("family", "smooth"), [(SQUARED, 1.0), (LOGISTIC, 0.25)])
@pytest.mark.parametrize("rate", [0.1, 0.9, 3.0])
def test_a_tree_as_a_step_descends_but_for_half_of_the_error_in_its_leaves(
    family: Family, smooth: float, rate: float
) -> None:
    for seed in range(40):
        random = np.random.default_rng(seed)
        x, at = random.normal(size=(80, 2)), random.normal(size=80)
        y = (random.random(80) < 0.5).astype(float)
        error = random.normal(size=80) * random.choice([0.0, 0.3, 3.0])
        g = family.predict(at) - y + error
        tree = DecisionTreeRegressor(max_depth=3, random_state=seed).fit(x, g)
        leaf = tree.apply(x)
        projected = np.array([error[leaf == one].mean() for one in leaf])
        step = tree.predict(x)

        before, after = (
            family.losses(outputs[:, None], y[:, None]).mean() for outputs in (at, at - rate * step)
        )
        bound = -(rate / 2) * (1 - smooth * rate) * np.square(step).mean()
        bound += rate / 2 * np.square(projected).mean()
        assert after <= before + bound + 1e-12
