"""The account of adaptive averaging.

Who was listened to, when it stopped, and what may be said of it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coterie.choosing.adaptive.evaluations import HeldOutEvaluations
from coterie.choosing.adaptive.peer_weights import PeerWeights
from coterie.choosing.adaptive.stopping import Candidate, skewed_error, standard_error
from coterie.choosing.adaptive.weights import Array
from coterie.recording.configuration import counted

FEWEST = 6
"""With fewer own examples no loss by cross-validation is told.

The error of so few numbers says nothing.
"""


def account_of(
    looks: HeldOutEvaluations,
    weights: PeerWeights,
    judged: Sequence[int],
    unheard: int,
    cost: Mapping[str, float],
    *,
    overruled: bool = False,
) -> dict[str, Any]:
    """Return the account of a run, as plain data; nothing before its first look.

    Args:
        looks: all paths, and which is served.
        weights: of the peers.
        judged: the steps that judged every peer.
        unheard: in how many steps of the branch the peers sent too much to be followed.
        cost: what it took, by what is counted.
        overruled: whether a guard serves Alone, whichever path was chosen.
    """
    chosen, paths, names = looks.chosen, looks.paths, weights.engine.names
    if chosen is None:
        return {}
    kappa, path = weights.kappa(), "alone" if overruled else chosen.path
    account: dict[str, Any] = {
        "path": path,
        "trunk": weights.trunk,
        "folds": weights.n_folds,
        "nested": weights.nested,
        "chosen_by": looks.chosen_by,
        "tau": {name: weight for name, weight in weights.served(path).items() if weight},
        "looks": {
            name: {"steps": list(each.steps), "frequencies": chosen.frequencies[name].tolist()}
            for name, each in paths.items()
        },
        "stop": stop_of(paths[path], chosen.frequencies[path]),
        "steps": list(judged),
        "nobody": kappa[:, 0].tolist() if kappa.size else [],
        "weights": dict(zip(names, kappa[:, 1:].T.tolist(), strict=True)) if kappa.size else {},
        "unheard": unheard,
        "cost": dict(cost),
    }
    if not overruled:  # else what the looks tell is not of what is served
        account |= compared(*looks.told(), len(looks.folds), nested=weights.nested)
    return account | {"sentence": sentence(account, looks.held_out, overruled=overruled)}


def stop_of(
    path: Candidate, frequencies: np.ndarray[Any, np.dtype[np.float64]]
) -> dict[str, float]:
    """Return when the stop came.

    The mean step of what is served, and between which steps nine tenths of it lie.
    """
    steps, shares = np.array(path.steps), np.cumsum(frequencies)
    first, last = (int(steps[np.searchsorted(shares, level - 1e-9)]) for level in (0.05, 0.95))
    return {"mean": float(frequencies @ steps), "first": first, "last": last}


def compared(served: Array, alone: Array, n_own: int, *, nested: bool) -> dict[str, float]:
    """Return what may be said of the difference to Alone, from losses as `Resampled.told` gives them.

    With validation examples it is the paired difference on those. Without, the two losses by
    cross-validation; their difference overstates, since Alone suffers most from the examples that
    its blind copies lack. With one trunk, or fewer own examples than `FEWEST`, nothing.
    """
    if len(served) > n_own + 1:
        change = served[n_own:] - alone[n_own:]
        return {
            "validation_loss": float(served[n_own:].mean()),
            "difference": float(change.mean()),
            "error": standard_error(change),
        }
    if not nested or n_own < FEWEST:
        return {}
    return {
        "crossed_loss": float(served[:n_own].mean()),
        "crossed_error": skewed_error(served[:n_own]),
        "alone_crossed_loss": float(alone[:n_own].mean()),
    }


def sentence(account: Mapping[str, Any], examples: int, *, overruled: bool = False) -> str:
    """Say in a sentence what is served and what speaks for it, and no more than is known."""
    if account["path"] == "alone":
        return (
            "the model trained alone is served:"
            f" {_why_alone(account, examples, overruled=overruled)}"
        )
    first, last = (account.get("stop", {}).get(end) for end in ("first", "last"))
    when = f"step {first}" if first == last else f"steps {first} to {last}"
    what = {
        "branch": (
            f"followed the peers, then the own examples more and more; what is served is of {when}"
        ),
        "pooled": f"followed the peers by their numbers of examples; what is served is of {when}",
    }[account["path"]]
    if "difference" in account:
        return (
            f"{what}. On {examples} validation examples: loss {account['validation_loss']:.4g},"
            f" {account['difference']:+.3g} ± {account['error']:.2g} against Alone, corrected for"
            " having been chosen"
        )
    if "crossed_loss" not in account:
        return what
    ours, alone = account["crossed_loss"], account["alone_crossed_loss"]
    beside = f"Alone's, {alone:.4g}, looks worse than it is where examples are few"
    if alone < ours:  # it was chosen before the correction, or by another measure
        by = account["chosen_by"]
        beside = (
            f"Alone's is {alone:.4g}, but"
            f" {'before that correction' if by == 'loss' else f'in {by}'} it was behind"
        )
    return (
        f"{what}. By cross-validation, corrected for having been chosen: loss {ours:.4g} ± "
        f"{account['crossed_error']:.2g}; {beside}"
    )


def _why_alone(account: Mapping[str, Any], examples: int, *, overruled: bool) -> str:
    held_out = counted(examples, "validation example")
    if overruled:
        return f"its loss is lower on {held_out}"
    if account.get("trunk") == "none":
        return "no peer sent a gradient that could be followed while peers were judged"
    if "branch" not in account["looks"]:  # stopped in the first half
        return "the run ended before a model that follows peers was judged"
    and_those = f" and {held_out}" if examples else ""
    return f"following peers was not better on own examples that were held out{and_those}"
