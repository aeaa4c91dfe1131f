"""Evaluation of a model on held-out examples: its loss and its metrics."""

from coterie.evaluation.evaluate import evaluate
from coterie.evaluation.metrics import METRICS, Metric, register_metric

__all__ = ["METRICS", "Metric", "evaluate", "register_metric"]
