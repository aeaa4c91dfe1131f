"""Methods refuse knobs that are out of range."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.support.least_squares import PROBLEM

from coterie.errors import KnobError
from coterie.methods import (
    AFL,
    APFL,
    L2GD,
    MVR,
    QFFL,
    SAGA,
    SVRG,
    Ditto,
    FedAvg,
    FedBN,
    FedFomo,
    FedPer,
    FedProx,
    FedRep,
    FineTuning,
    HypCluster,
    Mapper,
    Mime,
    PerFedAvg,
    PFedMe,
    Sampled,
    Selfish,
    UserCentric,
    Waffle,
    averaging_error,
    averaging_weights,
    data_interpolation,
)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: FineTuning(0), "`rounds`"),
        (lambda: FedAvg(shares="half"), "`shares`"),  # type: ignore[arg-type]
        (lambda: PerFedAvg(inner_lr=0.0), "`inner_lr`"),
        (lambda: PerFedAvg(difference=-1.0), "`difference`"),
        (lambda: Ditto(penalty=-0.1), "`penalty`"),
        (lambda: Ditto(personal_steps=0), "`personal_steps`"),
        (lambda: APFL(mixing=1.2), r"`mixing` must lie in \[0, 1\], got 1.2"),
        (lambda: L2GD(probability=1.0), "`probability`"),
        (lambda: Mapper(mixings=()), "`mixings`"),
        (lambda: Mapper(mixings=(0.5, 2.0)), "`mixings`"),
        (lambda: HypCluster(clusters=0), "`clusters`"),
        (lambda: HypCluster(spread=float("inf")), "`spread`"),
        (lambda: data_interpolation(PROBLEM.users[0], PROBLEM.users[1:], -0.1), "`mixing`"),
        (lambda: averaging_weights([3], 1.0, 1.0), "`sizes`"),
        (lambda: averaging_weights([3, 3], 0.0, 1.0), "`noise`"),
        (lambda: averaging_weights([3, 3], 1.0, 1.0, "medium"), "`grain`"),  # type: ignore[arg-type]
        (lambda: averaging_error([0.5, 0.6], [3, 3], 1.0, 1.0), "`weights`"),
        (lambda: FedAvg(0), "`local_steps`"),
        (lambda: Mime(3, momentum=1.0), "`momentum`"),
        (lambda: MVR(3, rate=0.0), "`rate`"),
        (lambda: SVRG(0), "`local_steps`"),
        (lambda: SAGA(0), "`local_steps`"),
        (lambda: FedFomo(3, "`theirs`"), "`start`"),  # type: ignore[arg-type]
        (lambda: Waffle(0), "`rounds`"),
        (lambda: UserCentric(3, clusters=0), "`clusters`"),
        (lambda: UserCentric(3, blocks=1), "`blocks`"),
        (lambda: Selfish(3, alpha=1.5), "`alpha`"),
        (lambda: PROBLEM.train(Selfish(3, ("nobody",)), rounds=1, lr=0.1), "nobody"),
        (lambda: FedProx(3, penalty=-0.1), "`penalty`"),
        (lambda: AFL(weight_lr=0.0), "`weight_lr`"),
        (lambda: QFFL(q=-1.0), "`q` must be a finite number, at least 0, got -1.0"),
        (lambda: PFedMe(inner_steps=0), "`inner_steps`"),
        (lambda: PFedMe(inner_lr=0.0), "`inner_lr`"),
        (lambda: FedRep(head_steps=0), "`head_steps`"),
        (lambda: FedPer(head="classifier"), "`head`.*write"),
        (lambda: PROBLEM.train(FedPer(head=["nowhere"]), rounds=1, lr=0.1), "'nowhere'.*it has weight"),
        (lambda: PROBLEM.train(FedPer(), rounds=1, lr=0.1), "nothing would be shared"),
        (lambda: PROBLEM.train(FedBN(), rounds=1, lr=0.1), "BatchNorm.*FedAvg"),
        (lambda: Sampled(FedAvg(), peers=0), "`peers`"),
    ],
)
def test_knobs_out_of_range_are_refused(make: Callable[[], object], match: str) -> None:
    with pytest.raises(KnobError, match=match):
        make()
