"""The theory: constants, bounds, the best knobs and the speedup over training alone.

Everything is a formula, vectorised over arrays. Arguments are the same everywhere: `problem` is the
constants, with `pl` for a bound of the loss; `steps` is T, `alpha` is α in [0, 1], `beta` is β in
(0, 1], `lr` is η, `oracle_noise` is v, the oracle's noise about one peer, and `initial_error` is
E_0; see `correction_bound`.

`docs/theory.md` leads from the paper's symbols to the names here; `docs/errata.md` lists what is
printed in the paper and does not hold.
"""

from coterie.theory.affine import Affine, affine_bound
from coterie.theory.choices import (
    averaging_cost,
    averaging_speedup,
    best_alpha,
    best_tau,
    least_noise_alpha,
    mean_estimation,
    oracle_speedup,
)
from coterie.theory.constants import Constants, Numbers
from coterie.theory.correction import (
    Correction,
    auxiliary_bound,
    best_beta,
    best_correction,
    correction_bound,
    correction_max_lr,
    hessian_gap_limit,
)
from coterie.theory.descent import (
    Descent,
    alone,
    averaging,
    oracle,
    steps_alone,
    steps_alone_to_loss,
)
from coterie.theory.exchanges import (
    Exchanges,
    alone_in_time,
    best_exchanges,
    local_bound,
    stale_bound,
)
from coterie.theory.peers import (
    Averaging,
    CorrectedPeers,
    Peers,
    best_averaging,
    best_corrected_peers,
)
from coterie.theory.plan import (
    Choice,
    Promise,
    PromiseCost,
    peers_needed,
    plan,
    plan_for_peers,
    promise_cost,
    with_added_noise,
)

__all__ = [
    "Affine",
    "Averaging",
    "Choice",
    "Constants",
    "CorrectedPeers",
    "Correction",
    "Descent",
    "Exchanges",
    "Numbers",
    "Peers",
    "Promise",
    "PromiseCost",
    "affine_bound",
    "alone",
    "alone_in_time",
    "auxiliary_bound",
    "averaging",
    "averaging_cost",
    "averaging_speedup",
    "best_alpha",
    "best_averaging",
    "best_beta",
    "best_corrected_peers",
    "best_correction",
    "best_exchanges",
    "best_tau",
    "correction_bound",
    "correction_max_lr",
    "hessian_gap_limit",
    "least_noise_alpha",
    "local_bound",
    "mean_estimation",
    "oracle",
    "oracle_speedup",
    "peers_needed",
    "plan",
    "plan_for_peers",
    "promise_cost",
    "stale_bound",
    "steps_alone",
    "steps_alone_to_loss",
    "with_added_noise",
]
