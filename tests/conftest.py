"""What all tests share: one thread, and small users."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import settings

import coterie

torch.set_num_threads(1)
settings.register_profile("coterie", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("coterie")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need a GPU where there is none; `make test-cuda` runs these alone."""
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


Users = Callable[..., list[coterie.User]]


@pytest.fixture
def make_users() -> Users:
    """Give a function that makes user 0, with validation and test sets, and its peers, by their sizes."""

    def make(
        sizes: Sequence[int] = (12, 16, 9, 5),
        *,
        n_inputs: int = 3,
        n_classes: int | None = 3,
        dtype: torch.dtype = torch.float64,
        held_out: int = 6,
    ) -> list[coterie.User]:
        generator = torch.Generator().manual_seed(sum(sizes))

        def examples(size: int) -> tuple[torch.Tensor, torch.Tensor]:
            inputs = torch.randn(size, n_inputs, generator=generator, dtype=dtype)
            if n_classes is None:
                return inputs, torch.randn(size, 1, generator=generator, dtype=dtype)
            targets = torch.arange(size) % n_classes
            return inputs, targets[torch.randperm(size, generator=generator)]

        me = coterie.User(
            "me", *examples(sizes[0]), validation=examples(held_out), test=examples(held_out)
        )
        return [me, *(coterie.User(f"peer {k}", *examples(n)) for k, n in enumerate(sizes[1:], 1))]

    return make


@pytest.fixture(scope="session")
def byzfl() -> Callable[[str], Any]:
    """Give a function that imports a part of byzfl without its `__init__`, which wants torchvision and seaborn."""
    spec = importlib.util.find_spec("byzfl")
    if spec is None:
        pytest.skip("compares with byzfl: pip install --no-deps byzfl")
    sys.modules["byzfl"] = importlib.util.module_from_spec(spec)
    return lambda part: importlib.import_module(f"byzfl.{part}")
