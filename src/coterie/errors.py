"""What can go wrong, by kind. Every message names the value at fault and the remedy."""


class CoterieError(Exception):
    """Any error that coterie raises on purpose."""


class KnobError(CoterieError, ValueError):
    """A setting outside its range: `alpha`, `beta`, `tau`, a peer's name, a number of steps."""


class DataError(CoterieError, ValueError):
    """Examples that cannot be learned from: empty, of one class, of unequal lengths, without a target."""


class ModelError(CoterieError, ValueError):
    """A model that does not fit the data, the loss or the optimizer."""


class CheckpointError(CoterieError):
    """A checkpoint that is truncated, altered, or of another run."""


class GradientError(CoterieError, ArithmeticError):
    """User 0's own gradient is NaN or infinite: nothing sensible can follow."""
