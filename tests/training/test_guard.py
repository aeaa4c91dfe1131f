"""The guard: whatever peers do, what is served is not worse than Alone on the held-out examples."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import coterie
from coterie.errors import GradientError, KnobError
from coterie.evaluation.evaluate import example_losses
from coterie.training.guard import BY_CHANCE, worse_by_chance
from coterie.users.examples import InMemory

N_HELD_OUT = 150


def examples(n: int, seed: int, flip: bool = False, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 4, generator=generator)
    noisy = inputs[:, 0] - inputs[:, 1] + 0.5 * torch.randn(n, generator=generator)
    return scale * inputs, ((noisy > 0) != flip).long()


@pytest.fixture
def me() -> coterie.User:
    return coterie.User(
        "me", *examples(12, 0), validation=examples(N_HELD_OUT, 1), test=examples(50, 2)
    )


def peers(kind: str) -> list[coterie.User]:
    flip, scale = kind == "wrong", 1e30 if kind == "astray" else 1.0
    return [coterie.User(f"peer {k}", *examples(60, 10 + k, flip, scale)) for k in range(3)]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def run(me: coterie.User, kind: str, rule: Any = None, **settings: Any) -> coterie.Run:
    rule = rule or coterie.WeightedAveraging(0.9)
    settings = {"lr": 0.1, "steps": 120, "batch_size": 8, "evaluate_every": 5} | settings
    return coterie.train(model(), cross_entropy, me, peers(kind), rule, **settings)


def held_out_loss(trained: coterie.Run, me: coterie.User) -> float:
    assert me.validation is not None
    return coterie.evaluate(trained.model, cross_entropy, me.validation)["loss"]


def served(run: coterie.Run) -> str:
    decision = run.record.end.guard
    assert decision is not None
    return decision.served


def test_the_shadow_is_alone_to_the_bit(me: coterie.User) -> None:
    guarded, alone = run(me, "wrong"), run(me, "wrong", coterie.Alone())
    shadow, curve = (
        guarded.record.curve("alone_validation_loss"),
        alone.record.curve("validation_loss"),
    )
    assert shadow[0] == curve[0]
    # summed in another order, of the same model
    np.testing.assert_allclose(shadow[1], curve[1], rtol=1e-6)
    assert served(guarded) == "alone"
    assert guarded.best_step == alone.best_step
    for ours, theirs in zip(guarded.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["wrong", "honest", "astray"])
def test_never_worse_than_alone_on_the_held_out_examples(me: coterie.User, kind: str) -> None:
    guarded, alone = run(me, kind), run(me, kind, coterie.Alone())
    assert held_out_loss(guarded, me) <= held_out_loss(alone, me) + 1e-6
    if kind != "honest":
        assert held_out_loss(run(me, "wrong", guard="off"), me) > held_out_loss(alone, me) + 0.01


def test_helpful_peers_are_left_to_help(me: coterie.User) -> None:
    guarded, free = run(me, "honest"), run(me, "honest", guard="off")
    assert guarded.record.curve("guard_restarts")[1][-1] == 0
    assert served(guarded) == "collaborative"
    assert guarded.record.curve("validation_loss") == free.record.curve("validation_loss")
    comparison = guarded.record.end.comparison
    assert comparison is not None
    assert comparison.on == "50 test examples that neither was chosen by"
    assert comparison.measures["loss"].difference < 0


def test_harmful_peers_are_listened_to_less_and_less(me: coterie.User) -> None:
    guarded = run(me, "wrong", steps=400)
    restarts = guarded.record.curve("guard_restarts")[1]
    at = [5 * i for i in range(1, len(restarts)) if restarts[i] > restarts[i - 1]]
    assert len(at) >= 3
    assert all(
        later - earlier >= 5 * 2**i for i, (earlier, later) in enumerate(itertools.pairwise(at))
    )
    weights = dict(zip(*guarded.record.curve("weight"), strict=True))
    assert all(weights[step + 5] == 0 for step in at if step + 5 <= 400)
    assert guarded.verdict.finding == "alone"


def test_peers_that_lead_to_infinity_do_not_end_the_run(me: coterie.User) -> None:
    overflowing: dict[str, Any] = {"optimizer": torch.optim.SGD, "lr": 1e10, "norm_bound": None}
    with pytest.raises(GradientError):
        run(me, "astray", guard="off", **overflowing)
    guarded, alone = (
        run(me, "astray", **overflowing),
        run(me, "astray", coterie.Alone(), **overflowing),
    )
    assert guarded.step == 120
    assert guarded.record.curve("guard_restarts")[1][-1] >= 1
    assert held_out_loss(guarded, me) <= held_out_loss(alone, me) * (1 + 1e-6)


@pytest.mark.parametrize("kind", ["wrong", "honest"])
def test_a_guarded_run_resumes_to_the_same_bits(
    me: coterie.User, tmp_path: Path, kind: str
) -> None:
    rule = coterie.BiasCorrection(0.9, 0.05, correction=0.3)
    whole = run(me, kind, rule)
    stop = [lambda step: step.step == 53]
    run(me, kind, rule, out=tmp_path, hooks=stop)
    resumed = run(me, kind, rule, out=tmp_path, resume=True)
    assert resumed.record.points == whole.record.points
    assert resumed.test == whole.test
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_it_is_on_with_any_validation_examples_and_says_so(me: coterie.User) -> None:
    few, none = (
        coterie.User("me", *examples(12, 0), validation=held) for held in (examples(1, 1), None)
    )

    def said(user: coterie.User, **settings: Any) -> str:
        return str(run(user, "honest", steps=5, **settings).record.configuration.guard)

    assert said(few) == "held-out: 1 validation examples"
    assert said(me) == "held-out: 150 validation examples"
    assert said(none) == "off: no validation examples"
    assert said(none, rule=coterie.AdaptiveAveraging()).endswith("own examples held out in turn")
    assert said(me, guard="off") == said(me, rule=coterie.Alone()) == "off"


@pytest.mark.parametrize("n", [1, 4, 12])
def test_with_few_examples_the_better_of_the_two_is_served_too(n: int) -> None:
    few = coterie.User("me", *examples(12, 0), validation=examples(n, 1))
    # a mixture has half of its prior on Alone, and may lose a little to it
    slack = {coterie.WeightedAveraging(0.9): 1e-6, coterie.AdaptiveAveraging(): 0.01}
    for rule, more in slack.items():
        guarded = run(few, "wrong", rule)
        assert guarded.alone is not None
        alone = coterie.evaluate(guarded.alone, cross_entropy, few.validation)["loss"]  # type: ignore[arg-type]
        assert held_out_loss(guarded, few) <= alone + more


def differences(kind: str, n: int, random: np.random.Generator, looks: int) -> np.ndarray[Any, Any]:
    """Return how much worse each of n examples is at each look, of mean 0: at every look anew, or drifting."""
    shape = looks, n
    if kind == "heavy":
        return random.standard_t(4, shape)
    if kind == "lopsided":
        return random.exponential(size=shape) - 1
    normal = random.normal(size=shape)
    if (
        kind == "lopsided otherwise"
    ):  # the same examples at all looks: with fresh ones Student's t would be too bold
        return (1 - random.exponential(size=n)) * np.linspace(0.5, 1.5, looks)[
            :, None
        ] + normal.cumsum(0) / 20
    return normal if kind == "normal" else normal.cumsum(0) / 3


@pytest.mark.parametrize("kind", ["normal", "heavy", "lopsided", "lopsided otherwise", "drifting"])
@pytest.mark.parametrize("n", [3, 10, 40, 200])
def test_how_often_chance_restarts_a_run(kind: str, n: int) -> None:
    """Of 400 runs of 51 comparisons whose peers do no harm no more than the stated share is restarted."""
    random, looks, restarted = np.random.default_rng(n), 51, 0
    for _ in range(400):
        change = differences(kind, n, random, looks)
        errors = change.std(1, ddof=1) / np.sqrt(n)
        chances = [
            worse_by_chance(d, e, n)
            for d, e in zip(change.mean(1).tolist(), errors.tolist(), strict=True)
        ]
        restarted += min(chances) < BY_CHANCE / looks
    assert restarted <= 400 * BY_CHANCE + 3 * np.sqrt(400 * BY_CHANCE)


def test_what_is_worse_is_seen() -> None:
    random = np.random.default_rng(0)
    seen = 0
    for _ in range(100):
        change = random.normal(0.5, 1.0, 100)  # five standard errors
        seen += worse_by_chance(change.mean(), change.std(ddof=1) / 10, 100) < BY_CHANCE / 51
    assert seen > 90
    assert worse_by_chance(np.nan, np.nan, 50) == worse_by_chance(np.inf, np.nan, 50) == 0
    assert worse_by_chance(1.0, np.inf, 1) == worse_by_chance(-1.0, 0.1, 50) == 1


def test_errors(me: coterie.User) -> None:
    with pytest.raises(
        KnobError, match='`guard` must be "auto", "held-out" or "off", got \'maybe\''
    ):
        run(me, "honest", guard="maybe")
    with pytest.raises(KnobError, match="'me' has no validation examples"):
        run(coterie.User("me", *examples(12, 0)), "honest", guard="held-out")


def test_losses_where_the_output_is_not_a_tensor() -> None:
    class Twice(nn.Module):
        def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
            return inputs, 2 * inputs

    inputs, targets = examples(9, 3)
    losses = example_losses(
        Twice(), lambda output, _: (output[0] + output[1]).sum(), InMemory(inputs, targets), chunk=4
    )
    torch.testing.assert_close(losses, 3 * inputs.sum(1).double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mappable", [True, False])
def test_losses_of_each_example(mappable: bool) -> None:
    inputs, targets = examples(30, 3)
    net = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        scale = 1.0 if mappable else float(output.sum()) * 0 + 1
        return scale * cross_entropy(output, target)

    losses = example_losses(net, loss, InMemory(inputs, targets), chunk=7)
    with torch.no_grad():
        wanted = cross_entropy(net[0](inputs), targets, reduction="none")
    torch.testing.assert_close(losses, wanted.double(), rtol=1e-6, atol=1e-7)
