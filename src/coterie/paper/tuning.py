"""The best knobs of a method on a problem that is solved exactly."""

from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import minimize

from coterie.errors import KnobError
from coterie.paper.series import Setting
from coterie.theory.linear_gaussian import FloatArray


def best(make: Callable[..., Setting], start: Sequence[float], steps: int) -> Setting:
    """Return the setting with the least expected loss after `steps` steps (simplex search of Nelder and Mead).

    The knobs of `make`, all positive, are searched on a logarithmic scale; it may refuse some with a `KnobError`.
    """

    def log_loss(logs: FloatArray) -> float:
        try:
            with np.errstate(all="ignore"):  # large steps diverge
                loss = make(*np.exp(logs).tolist()).final(steps)
        except KnobError:  # a knob out of its range
            return np.inf
        return float(np.log(loss)) if np.isfinite(loss) else np.inf

    optimum = minimize(log_loss, np.log(start), method="Nelder-Mead", options={"xatol": 0.1, "fatol": 1e-4})
    return make(*np.exp(optimum.x).tolist())
