"""Boosted trees with peers, from sums of histograms, and forests. See docs/trees.md."""
