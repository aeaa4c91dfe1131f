"""What can be promised of what a peer gives.

Noise with an accountant, and sums that hide their parts.

A peer with a `Privacy` gives sums of clipped gradients with noise, over examples that it draws in
secret. What that tells about any one example is bounded by (ε, δ), which the accountant adds up
over everything that was given. A peer with `SumsOnly` gives its gradients under masks, which cancel
in the sum over several peers.
"""

from coterie.privacy.privacy import Privacy

__all__ = ["Privacy"]
