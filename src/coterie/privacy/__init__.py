"""Differential privacy of examples: clipping, noise and sampling by secret randomness, and the accountant.

A peer with a `Privacy` gives sums of clipped gradients with noise, over examples that it draws in secret. What that
tells about any one example is bounded by (ε, δ), which the accountant adds up over everything that was given.
"""

from coterie.privacy.privacy import Privacy

__all__ = ["Privacy"]
