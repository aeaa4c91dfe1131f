"""One model for all by averaging, and what users make of it: fine-tuning, own examples weighed more."""

from coterie.methods.averaging.data_interpolation import data_interpolation
from coterie.methods.averaging.fedavg import FedAvg
from coterie.methods.averaging.fine_tuning import FineTuning
from coterie.methods.averaging.model_averaging import averaging_error, averaging_weights

__all__ = ["FedAvg", "FineTuning", "averaging_error", "averaging_weights", "data_interpolation"]
