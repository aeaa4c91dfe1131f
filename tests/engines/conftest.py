"""Every engine in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.engines import ENGINES

from coterie.engines.engine import MakeEngine


@pytest.fixture(params=list(ENGINES))
def make_engine(request: pytest.FixtureRequest) -> Iterator[MakeEngine]:
    with ENGINES[request.param]() as make:
        yield make
