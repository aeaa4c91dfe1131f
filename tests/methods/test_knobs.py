"""Methods refuse knobs that are out of range."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.support.least_squares import PROBLEM

from coterie import methods
from coterie.aggregators import CoordinateMedian
from coterie.errors import KnobError


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: methods.FineTuning(0), "`rounds`"),
        (lambda: methods.FedAvg(shares="half"), "`shares`"),  # type: ignore[arg-type]
        (lambda: methods.PerFedAvg(inner_lr=0.0), "`inner_lr`"),
        (lambda: methods.PerFedAvg(difference=-1.0), "`difference`"),
        (lambda: methods.Ditto(penalty=-0.1), "`penalty`"),
        (lambda: methods.Ditto(personal_steps=0), "`personal_steps`"),
        (lambda: methods.APFL(mixing=1.2), r"`mixing` must lie in \[0, 1\], got 1.2"),
        (lambda: methods.L2GD(probability=1.0), "`probability`"),
        (lambda: methods.Mapper(mixings=()), "`mixings`"),
        (lambda: methods.Mapper(mixings=(0.5, 2.0)), "`mixings`"),
        (lambda: methods.HypCluster(clusters=0), "`clusters`"),
        (lambda: methods.HypCluster(spread=float("inf")), "`spread`"),
        (lambda: methods.data_interpolation(PROBLEM.users[0], PROBLEM.users[1:], -0.1), "`mixing`"),
        (lambda: methods.averaging_weights([3], 1.0, 1.0), "`sizes`"),
        (lambda: methods.averaging_weights([3, 3], 0.0, 1.0), "`noise`"),
        (lambda: methods.averaging_weights([3, 3], 1.0, 1.0, "medium"), "`grain`"),  # type: ignore[arg-type]
        (lambda: methods.averaging_error([0.5, 0.6], [3, 3], 1.0, 1.0), "`weights`"),
        (lambda: methods.FedAvg(0), "`local_steps`"),
        (lambda: methods.FedAvg(aggregator="median"), "`aggregator`.*command line"),  # type: ignore[arg-type]
        (lambda: methods.FedAvg(aggregator=CoordinateMedian), "`aggregator`.*knobs"),  # type: ignore[arg-type]
        (
            lambda: PROBLEM.train(methods.FedAvg(aggregator=lambda rows: rows), rounds=1, lr=0.1),
            r"`aggregator` must make one move .* of shape \(4, 3\), not \(3,\)",
        ),
        (lambda: methods.Mime(3, momentum=1.0), "`momentum`"),
        (lambda: methods.MVR(3, rate=0.0), "`rate`"),
        (lambda: methods.SVRG(0), "`local_steps`"),
        (lambda: methods.SAGA(0), "`local_steps`"),
        (lambda: methods.FedFomo(3, "`theirs`"), "`start`"),  # type: ignore[arg-type]
        (lambda: methods.Waffle(0), "`rounds`"),
        (lambda: methods.UserCentric(3, clusters=0), "`clusters`"),
        (lambda: methods.UserCentric(3, blocks=1), "`blocks`"),
        (lambda: methods.Selfish(3, alpha=1.5), "`alpha`"),
        (lambda: methods.Selfish(3, internal="user 2"), "`internal` must be a list.*write"),  # type: ignore[arg-type]
        (lambda: PROBLEM.train(methods.Selfish(3, ("nobody",)), rounds=1, lr=0.1), "nobody"),
        (lambda: methods.FedProx(3, penalty=-0.1), "`penalty`"),
        (lambda: methods.AFL(weight_lr=0.0), "`weight_lr`"),
        (lambda: methods.QFFL(q=-1.0), "`q` must be a finite number, at least 0, got -1.0"),
        (lambda: methods.PFedMe(inner_steps=0), "`inner_steps`"),
        (lambda: methods.PFedMe(inner_lr=0.0), "`inner_lr`"),
        (lambda: methods.FedRep(head_steps=0), "`head_steps`"),
        (lambda: methods.FedPer(head="classifier"), "`head`.*write"),
        (
            lambda: PROBLEM.train(methods.FedPer(head=["nowhere"]), rounds=1, lr=0.1),
            "'nowhere'.*it has weight",
        ),
        (lambda: PROBLEM.train(methods.FedPer(), rounds=1, lr=0.1), "nothing would be shared"),
        (lambda: PROBLEM.train(methods.FedBN(), rounds=1, lr=0.1), "BatchNorm.*FedAvg"),
        (lambda: methods.Sampled(methods.FedAvg(), peers=0), "`peers`"),
    ],
)
def test_knobs_out_of_range_are_refused(make: Callable[[], object], match: str) -> None:
    with pytest.raises(KnobError, match=match):
        make()
