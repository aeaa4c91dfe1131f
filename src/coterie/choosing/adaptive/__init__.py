"""Adaptive averaging.

Whom to listen to, and until when, found while the run goes. See docs/adaptive.md.
"""

from coterie.choosing.adaptive.adaptive_averaging import AdaptiveAveraging

__all__ = ["AdaptiveAveraging"]
