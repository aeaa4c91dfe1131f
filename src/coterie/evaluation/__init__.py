"""Evaluation of a model on held-out examples: its loss and its metrics."""

from coterie.evaluation.evaluate import evaluate
from coterie.evaluation.metrics import Metric

__all__ = ["Metric", "evaluate"]
