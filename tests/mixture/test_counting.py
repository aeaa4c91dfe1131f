"""Users who count under the first prior alone are asked no more than that."""

import numpy as np
import pytest

from coterie.mixture.answers import MANY_USERS, EStep, StackedUsers
from coterie.mixture.posterior import Priors, Rows
from coterie.mixture.scaling import Scaling


@pytest.mark.parametrize("family", ["squared", "softmax"])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_what_counts_is_the_same_and_the_rest_is_zero(family: str, share: float) -> None:
    random, n = np.random.default_rng(0), MANY_USERS + 3
    k = 3 if family == "softmax" else 1
    labels = random.integers(0, 3, (n, 5))
    targets = np.eye(3)[labels] if k > 1 else labels[..., None].astype(float)
    rows = [Rows(random.normal(size=(5, 4)), each) for each in targets]
    priors = Priors(random.normal(size=(4, 3, k)), random.uniform(1, 2, (4, 3, k)), np.ones(3))
    asked = EStep(family, Scaling.none(4, k), priors, "posterior", 5.0)
    users = StackedUsers.of(rows)
    counting = np.ones((n, 3), dtype=bool)
    counting[:, 1:] = (random.random(n) < share)[:, None]
    told, whole = asked.answers_that_count(users, counting), asked.answers(users)
    assert np.allclose(told, whole * counting[..., None], rtol=1e-9, atol=1e-12)
