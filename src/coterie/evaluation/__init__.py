"""The loss and the metrics of a model on held-out examples."""

from coterie.evaluation.evaluate import Metric, evaluate

__all__ = ["Metric", "evaluate"]
