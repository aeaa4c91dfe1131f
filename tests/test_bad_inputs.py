"""No bad input ends in a raw error: each is refused in words, before a step is taken or a file written."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.bad_inputs import BAD_INPUTS, Attempt, train

from coterie.errors import CoterieError


@pytest.mark.parametrize("attempt", BAD_INPUTS.values(), ids=BAD_INPUTS)
def test_a_bad_input_is_refused_and_leaves_nothing(tmp_path: Path, attempt: Attempt) -> None:
    with pytest.raises(CoterieError) as caught:
        attempt(tmp_path)
    assert len(str(caught.value)) > 20
    assert not any(path.is_dir() for path in tmp_path.iterdir())


def test_there_are_enough_of_them() -> None:
    assert len(BAD_INPUTS) >= 250


def test_what_is_around_a_bad_input_is_good(tmp_path: Path) -> None:
    with pytest.raises(
        CoterieError, match="the hook _stepped raised AssertionError: a step was taken"
    ):
        train(tmp_path)
