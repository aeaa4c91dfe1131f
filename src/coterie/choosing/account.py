"""The account of adaptive averaging: who was listened to, when it stopped, and what may be said of it."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from coterie.choosing.when import Path, standard_error
from coterie.choosing.whom import Array


def stop_of(path: Path, frequencies: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float]:
    """Return when the stop came: the mean step of what is served, and between which steps nine tenths of it lie."""
    steps, shares = np.array(path.steps), np.cumsum(frequencies)
    first, last = (int(steps[np.searchsorted(shares, level - 1e-9)]) for level in (0.05, 0.95))
    return {"mean": float(frequencies @ steps), "first": first, "last": last}


def compared(served: Array, alone: Array, n_own: int, *, nested: bool) -> dict[str, float]:
    """Return what may be said of the difference to Alone, from losses as `Resampled.told` gives them.

    With validation examples it is the paired difference on those. Without, the two losses by cross-validation;
    their difference overstates, since Alone suffers most from the examples that its blind copies lack. With one
    trunk nothing.
    """
    if len(served) > n_own + 1:
        change = served[n_own:] - alone[n_own:]
        return {
            "validation_loss": float(served[n_own:].mean()),
            "difference": float(change.mean()),
            "error": standard_error(change),
        }
    if not nested:
        return {}
    return {
        "crossed_loss": float(served[:n_own].mean()),
        "crossed_error": standard_error(served[:n_own]),
        "alone_crossed_loss": float(alone[:n_own].mean()),
    }


def sentence(account: Mapping[str, Any], examples: int) -> str:
    """Say in a sentence what is served and what speaks for it, and no more than is known."""
    held_out = "validation examples" if examples > 1 else "own examples that were held out"
    first, last = (account.get("stop", {}).get(end) for end in ("first", "last"))
    when = f"step {first}" if first == last else f"steps {first} to {last}"
    what = {
        "alone": f"the model trained alone is served: following peers was not better on {held_out}",
        "branch": f"followed the peers, then the own examples more and more; what is served is of {when}",
        "pooled": f"followed the peers by their numbers of examples; what is served is of {when}",
    }[account["path"]]
    if "difference" in account:
        return (
            f"{what}. On {examples} validation examples: loss {account['validation_loss']:.4g}, "
            f"{account['difference']:+.3g} ± {account['error']:.2g} against Alone, corrected for having "
            "been chosen"
        )
    if account["path"] == "alone" or "crossed_loss" not in account:
        return what
    return (
        f"{what}. By cross-validation, corrected for having been chosen: loss {account['crossed_loss']:.4g} ± "
        f"{account['crossed_error']:.2g}; Alone's, {account['alone_crossed_loss']:.4g}, looks worse than it is "
        "where examples are few"
    )
