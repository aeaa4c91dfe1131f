"""Honest candidates and one mixture of them, for linear models. See docs/mixture.md."""
