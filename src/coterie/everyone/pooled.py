"""The pooled model: trained on everybody's examples alike, for users who have no model of their own."""

import copy
from collections.abc import Sequence
from dataclasses import replace

from coterie.choosing import Mixture
from coterie.learners.spec import RunSpec
from coterie.rules import Alone
from coterie.users.examples import Examples, InMemory
from coterie.users.trees import joined


def pooled_spec(specs: Sequence[RunSpec]) -> RunSpec | None:
    """Return the run that trains on everybody's examples; None where these are not all in memory.

    Its batches are as large as those of all users together, so that a step costs what a step of one
    user does.
    """
    users = [spec.me for spec in specs]
    examples = _joined([user.examples for user in users])
    if examples is None:
        return None
    all_of = copy.copy(users[0])
    all_of.name, all_of.examples = "everyone", examples
    all_of.validation, all_of.test = (
        _joined([part for part in parts if part is not None])
        for parts in zip(*((user.validation, user.test) for user in users), strict=True)
    )
    size, closed = specs[0].batch_size * len(users), isinstance(specs[0].rule, Mixture)
    rule = Mixture() if closed else Alone()
    return replace(specs[0], me=all_of, peers=(), rule=rule, batch_size=size, exchange_every=1)


def _joined(parts: Sequence[Examples]) -> InMemory | None:
    """Return several sets as one; None where one of them is not in memory, or there is none."""
    held = [part for part in parts if isinstance(part, InMemory)]
    if not held or len(held) < len(parts):
        return None
    return InMemory(joined([part.inputs for part in held]), joined([part.targets for part in held]))
