"""Runs whose numbers are frozen: every rule, engine, method, model and way to train, each small.

`CASES` has them by name. What each gives is compared, bit by bit, with `tests/frozen.json`
(`support.frozen`). Names of the library may change and numbers may not: all that is known of its
names is in `library`.
"""

from __future__ import annotations

from tests.support.frozen_cases.cases import BITS, CASES, DRAWS, Parts
from tests.support.frozen_cases.data import the_rest
from tests.support.frozen_cases.engines import captured_and_guarded, left_out, other_engines
from tests.support.frozen_cases.methods import federated_methods
from tests.support.frozen_cases.rules import rules_in_process, streams, under_attack
from tests.support.frozen_cases.training import many, models_and_optimizers, resumed

__all__ = ["BITS", "CASES", "DRAWS", "Parts"]

for add in (
    rules_in_process,
    streams,
    other_engines,
    captured_and_guarded,
    left_out,
    models_and_optimizers,
    federated_methods,
    resumed,
    many,
    under_attack,
    the_rest,
):
    add()
