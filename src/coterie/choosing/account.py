"""The account of adaptive averaging: who was listened to, when it stopped, and what may be said of it."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from coterie.choosing.when import Chosen, Path, standard_error

_SHARES = {2: "half", 3: "two thirds", 4: "three quarters", 5: "four fifths"}


def stop_of(path: Path, frequencies: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float]:
    """Return when the stop came: the mean step of what is served, and between which steps nine tenths of it lie."""
    steps, shares = np.array(path.steps), np.cumsum(frequencies)
    first, last = (int(steps[np.searchsorted(shares, level - 1e-9)]) for level in (0.05, 0.95))
    return {"mean": float(frequencies @ steps), "first": first, "last": last}


def compared(chosen: Chosen, n_own: int, *, nested: bool) -> dict[str, float]:
    """Return what may be said of the difference to Alone, in losses of examples that no copy judged has seen.

    With validation examples it is the paired difference on those, looks and path chosen without the examples that
    judge. Without, the two losses by cross-validation, whose difference overstates; with one trunk nothing.
    """
    served, alone = chosen.served[n_own:], chosen.alone[n_own:]
    if len(served) > 1:
        change = served - alone
        return {
            "validation_loss": float(served.mean()),
            "difference": float(change.mean()),
            "error": standard_error(change),
        }
    if not nested:
        return {}
    return {
        "crossed_loss": float(chosen.served[:n_own].mean()),
        "crossed_error": standard_error(chosen.served[:n_own]),
        "alone_crossed_loss": float(chosen.alone[:n_own].mean()),
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
            f"{account['difference']:+.3g} ± {account['error']:.2g} against Alone (looks and path chosen without "
            "the examples that judge)"
        )
    if account["path"] == "alone" or "crossed_loss" not in account:
        return what
    return (
        f"{what}. Copies that had {_SHARES[account['folds']]} of the own examples: loss "
        f"{account['crossed_loss']:.4g}, Alone's {account['alone_crossed_loss']:.4g}; with all of them the "
        "difference is smaller"
    )
