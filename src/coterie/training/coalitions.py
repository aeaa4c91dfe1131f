"""What peers contributed to a run, by what it would have been with any coalition of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from coterie.choosing.mixture import linear_losses, why_not_linear
from coterie.engines.asking import part_of
from coterie.engines.in_process.engine import InProcess
from coterie.errors import KnobError
from coterie.evaluation.evaluate import example_losses
from coterie.learners.spec import RunSpec
from coterie.mixture.candidates import FOLDS, folds_of
from coterie.mixture.contributions import Contribution, contributions
from coterie.mixture.families import Array
from coterie.rules import Alone
from coterie.training.many import train_many


def contributions_to(
    spec: RunSpec, groups: Mapping[str, Sequence[str]] | None, permutations: int
) -> dict[str, Contribution]:
    """Return what peers contribute to user 0; see `Run.contributions`."""
    names = [peer.name for peer in spec.peers]
    if not names:
        raise KnobError(
            "there is nobody to contribute, or the peers' rows are elsewhere: give"
            " `coterie.mixture.contributions.contributions` the losses of each coalition"
        )
    if unknown := {name for group in (groups or {}).values() for name in group} - set(names):
        raise KnobError(f"`groups` names {min(unknown)!r}, and the peers are {', '.join(names)}")
    losses = trained_losses(spec) if why_not_linear(spec) else linear_losses(spec)
    return contributions(losses, groups or names, permutations=permutations)


def trained_losses(spec: RunSpec) -> Callable[[frozenset[str]], Array]:
    """Return what gives the out-of-fold losses of the own examples with a coalition of peers, by training anew.

    The runs of all folds are one program (`train_many`). Nobody is `Alone`.
    """
    n = len(spec.me)
    if spec.me.is_stream or n < 2:
        raise KnobError(f"contributions need some examples of {spec.me.name!r}, not a stream")
    folds = folds_of(np.zeros((n, 1)), min(FOLDS, n), spec.seed, classes=False)
    apart = {"out": None, "hooks": (), "trackers": (), "engine": InProcess, "guard": "off"}
    plain = replace(spec, **apart, measure=False, progress=False, resume=False)  # type: ignore[arg-type]

    def losses(who: frozenset[str]) -> Array:
        peers = tuple(peer for peer in spec.peers if peer.name in who)
        seen = [torch.from_numpy(folds != fold) for fold in range(folds.max() + 1)]
        rule = spec.rule if peers else Alone()
        parts = [part_of(spec.me, one) for one in seen]
        specs = [replace(plain, me=me, peers=peers, rule=rule) for me in parts]
        runs = train_many(specs, progress=False)
        found = np.empty(n)
        for fold, run in enumerate(runs):
            held = part_of(spec.me, ~seen[fold]).examples
            found[folds == fold] = example_losses(run.model, spec.loss, held).numpy()
        return found

    return losses
