"""Evaluation of a model on held-out examples: its loss and its metrics."""

from coterie.evaluation.evaluate import evaluate
from coterie.evaluation.losses import model_loss, per_example
from coterie.evaluation.metrics import METRICS, Metric, register_metric

__all__ = ["METRICS", "Metric", "evaluate", "model_loss", "per_example", "register_metric"]
