"""Averaging: one model for all users, with fine-tuning, own examples that count more, and averages of means."""

from coterie.methods.averaging.data_interpolation import data_interpolation
from coterie.methods.averaging.fedavg import FedAvg
from coterie.methods.averaging.fine_tuning import FineTuning
from coterie.methods.averaging.model_averaging import averaging_error, averaging_weights

__all__ = ["FedAvg", "FineTuning", "averaging_error", "averaging_weights", "data_interpolation"]
