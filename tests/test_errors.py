"""What errors say where coterie runs from a clone that nobody installed."""

from importlib import metadata

import pytest

from coterie.errors import not_installed


def test_a_missing_package_is_told_without_metadata_of_coterie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    said = not_installed("cryptography", "privacy")
    assert said == (
        "cryptography is not installed; `pip install '.[privacy]'` in a clone of coterie"
    )
